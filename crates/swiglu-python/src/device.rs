//! The devices of this process: opened once, and again in a forked child, where their threads are not.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use pyo3::prelude::*;
use swiglu::cuda::{BorrowedStream, Cuda};
use swiglu::{CpuOptions, Device, ForkJoin};

use crate::error::Failure;
use crate::openmp::OpenMp;

/// The devices that are open.
#[derive(Default)]
struct Devices {
    named: HashMap<String, Device>,
    /// The CPU whose threads are PyTorch's, where others can use them.
    of_pytorch: Option<Device>,
}

static DEVICES: Mutex<Option<Devices>> = Mutex::new(None);
/// PyTorch's threads, in the process that asked for them.
static OPENMP: OnceLock<Option<Arc<OpenMp>>> = OnceLock::new();

fn devices() -> MutexGuard<'static, Option<Devices>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device of a name: `best`, `cpu`, `cuda`, `cuda:N`.
pub(crate) fn named(name: &str) -> swiglu::Result<Device> {
    let mut devices = devices();
    let devices = devices.get_or_insert_default();
    if let Some(device) = devices.named.get(name) {
        return Ok(device.clone());
    }
    let device: Device = match name {
        // One of the others, so that they share threads and kernels.
        "best" => Device::best()?,
        "cuda" => "cuda:0".parse()?,
        _ => name.parse()?,
    };
    devices.named.insert(name.to_owned(), device.clone());
    Ok(device)
}

/// The CPU for tensors of PyTorch's, between whose operations its threads go on spinning.
pub(crate) fn cpu_of_pytorch() -> swiglu::Result<Device> {
    if let Some(device) = &devices().get_or_insert_default().of_pytorch {
        return Ok(device.clone());
    }
    let device = match openmp() {
        Some(openmp) => {
            Device::cpu_with(CpuOptions::default().with_fork_join(openmp as Arc<dyn ForkJoin>))?
        }
        None => named("cpu")?,
    };
    Ok(devices().get_or_insert_default().of_pytorch.get_or_insert(device).clone())
}

fn openmp() -> Option<Arc<OpenMp>> {
    OPENMP.get().cloned().flatten().filter(|openmp| openmp.is_here())
}

/// Computes with PyTorch's tensors on its threads from now on, where PyTorch is loaded and others can use them. Not in a
/// process that was forked with this module in it: whether the runtime would wait there for the parent's threads is unknown.
#[pyfunction]
pub(crate) fn share_threads() {
    OPENMP.get_or_init(|| OpenMp::of_pytorch().map(Arc::new));
}

/// How many threads compute on the CPU at the moment: ours, and PyTorch's where its tensors have them.
pub(crate) fn cpu_threads() -> serde_json::Value {
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    let of_pytorch = openmp().map(|openmp| openmp.threads().min(own));
    serde_json::json!({ "own": own, "of_pytorch": of_pytorch })
}

/// The CUDA device of a number.
pub(crate) fn cuda(ordinal: usize) -> swiglu::Result<Cuda> {
    match named(&format!("cuda:{ordinal}"))? {
        Device::Cuda(cuda) => Ok(cuda),
        Device::Cpu(_) | _ => Err(swiglu::CoreError::Unavailable {
            what: format!("device cuda:{ordinal}"),
            why: "the name is of another device".into(),
        }
        .into()),
    }
}

static KEPT: RwLock<Vec<(usize, u64, Arc<BorrowedStream>)>> = RwLock::new(Vec::new());

/// Keeps a stream that lives as long as the process, as PyTorch's own do, so that calls need not borrow it.
#[pyfunction]
pub(crate) fn keep_stream(ordinal: usize, raw: u64) -> Result<(), Failure> {
    let mut kept = KEPT.write().unwrap_or_else(PoisonError::into_inner);
    if !kept.iter().any(|(known, handle, _)| (*known, *handle) == (ordinal, raw)) {
        // SAFETY: the caller's: the handle is of a stream of this device that is never destroyed, and means the same
        // stream on every thread. The guard is never dropped.
        let stream = unsafe { cuda(ordinal)?.borrow_stream(raw) }?;
        kept.push((ordinal, raw, Arc::new(stream)));
    }
    Ok(())
}

/// A kept stream.
pub(crate) fn kept(ordinal: usize, raw: u64) -> Option<Arc<BorrowedStream>> {
    let kept = KEPT.read().unwrap_or_else(PoisonError::into_inner);
    let (_, _, stream) =
        kept.iter().find(|(known, handle, _)| (*known, *handle) == (ordinal, raw))?;
    Some(stream.clone())
}

thread_local! {
    /// The table of devices, while this thread forks.
    static HELD: RefCell<Option<MutexGuard<'static, Option<Devices>>>> = const { RefCell::new(None) };
}

/// Takes the table of devices, which another thread may hold while it opens one: in a child nobody would give it back.
#[pyfunction]
pub(crate) fn before_fork() {
    HELD.set(Some(devices()));
}

/// Gives the table back.
#[pyfunction]
pub(crate) fn after_fork_in_parent() {
    HELD.take();
}

/// Forgets the devices of the parent: called in a forked child, which has one thread.
#[pyfunction]
pub(crate) fn after_fork() {
    let held = HELD.take();
    let mut devices = held.unwrap_or_else(devices);
    OPENMP.get_or_init(|| None);
    // Their threads are the parent's: nothing of them may be waited for, so they are not dropped.
    std::mem::forget(devices.take());
    crate::lent::forget_lent();
    let mut kept = KEPT.write().unwrap_or_else(PoisonError::into_inner);
    std::mem::forget(std::mem::take(&mut *kept));
}
