//! `swiglu lab peer`: this project as the lab sees it, a process that computes cases and times them; and,
//! as the peer `read`, one that reads as many bytes, which is the limit of what has weights.
//!
//! It is timed as the others are, see METHODOLOGY.md: copies of the data take turns, a turn begins
//! with work that is not timed, results are verified in memory that held NaN.

mod cpu;
pub(crate) mod cuda;
pub(crate) mod job;
mod options;

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::ValueEnum;
use swiglu::{CoreError, Device, ErrorKind, with_dtype};
use swiglu_cuda::CudaError;
use swiglu_lab::peer::protocol::{
    MAX_VERIFIED, MIN_VERIFIED_ROWS, PROTOCOL, ProfileRef, Reply, Request,
};
use swiglu_lab::{Case, CaseOp, DeviceKind};

use crate::terminal::{Terminal, Verdict, describe};
use job::{Job, Order, Prepared, Shared};
use options::{Devices, Options};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum OwnPeer {
    /// What this project computes
    #[default]
    Swiglu,
    /// Reading alone: a ceiling
    Read,
}

/// Answers requests until `quit` or the end of the input.
pub(super) fn serve(who: OwnPeer, terminal: &mut Terminal) -> Result<Verdict> {
    let mut peer =
        Peer { who, devices: Devices::default(), jobs: BTreeMap::new(), shared: Shared::default() };
    swiglu_lab::peer::serve(terminal, |request| peer.answer(request))?;
    Ok(Verdict::Passed)
}

struct Peer {
    who: OwnPeer,
    devices: Devices,
    jobs: BTreeMap<u64, (Case, Box<dyn Job>)>,
    shared: Shared,
}

impl Peer {
    /// The reply; none to `quit`.
    fn answer(&mut self, request: &Request) -> Option<Reply> {
        let (id, answer) = match request {
            Request::Hello { protocol, device } => return Some(self.hello(*protocol, *device)),
            Request::Clocks => return Some(clocks(self.devices.first())),
            Request::Quit => return None,
            Request::Prepare { id, case, profile, seed, rotations } => {
                (*id, self.prepare(*id, case, profile, *seed, rotations))
            }
            Request::Verify { id, rows } => (*id, self.verify(*id, rows)),
            Request::Sample { id, turns, budget_us } => (*id, self.sample(*id, *turns, *budget_us)),
            Request::Release { id } => {
                self.jobs.remove(id);
                (*id, Ok(Reply::Released { id: *id }))
            }
        };
        Some(answer.unwrap_or_else(|error| {
            self.jobs.remove(&id);
            let reason = describe(&error);
            let preparing = matches!(request, Request::Prepare { .. });
            match preparing && is_lacking(&error) {
                true => Reply::Unsupported { id, reason },
                false => Reply::Failed { id, reason },
            }
        }))
    }

    fn hello(&mut self, protocol: u32, device: DeviceKind) -> Reply {
        let opened = match (self.who, device) {
            _ if protocol != PROTOCOL => {
                Err(anyhow!("protocol {protocol}; this program speaks {PROTOCOL}"))
            }
            (OwnPeer::Read, DeviceKind::Cuda) => {
                Err(anyhow!("it reads the memory of a CPU; expected device = \"cpu\""))
            }
            _ => self.devices.open(device, &Options::default()),
        };
        let name = if self.who == OwnPeer::Read { "read" } else { "swiglu" };
        match opened {
            Ok(device) => {
                let (versions, device) = (versions(&device), Some(self::name(&device)));
                Reply::Hello { name: name.into(), versions, device }
            }
            Err(error) => Reply::Unavailable { reason: describe(&error) },
        }
    }

    fn prepare(
        &mut self,
        id: u64,
        case: &Case,
        profile: &ProfileRef,
        seed: u64,
        rotations: &str,
    ) -> Result<Reply> {
        // What an earlier case of this id held makes room first.
        self.jobs.remove(&id);
        let reads = self.who == OwnPeer::Read;
        let unsupported = |reason: String| Ok(Reply::Unsupported { id, reason });
        if reads && !case.op.has_weights() {
            let op = case.op;
            return unsupported(format!("{op} has no weights: a copy is its limit, peer `copy`"));
        }
        if case.op == CaseOp::Copy {
            return unsupported("a copy is not an operation of it".into());
        }
        let options = Options::read(profile, reads)?;
        options.expect_op(case.op)?;
        let copies = match rotations {
            "auto" => None,
            count => Some(count.parse::<usize>().context("rotations: `auto` or a number")?.max(1)),
        };
        let device = self.devices.open(case.device, &options)?;
        let mut asked = case.clone();
        asked.numerics.batch_invariant |= options.batch_invariant;
        self.shared.make_room(&asked, seed);
        let order = Order { case: &asked, options, seed, copies, shared: self.shared.clone() };
        let prepared = match &device {
            _ if reads => cpu::read(&device, &order),
            Device::Cuda(cuda) => with_dtype!(case.dtype, T => cuda::prepare::<T>(cuda, &order)),
            _ => with_dtype!(case.dtype, T => cpu::prepare::<T>(&device, &order)),
        };
        let Prepared { job, plan, variants, notes } = prepared?;
        self.jobs.insert(id, (case.clone(), job));
        let (bytes, flops) = (Some(case.compulsory_bytes()), (!reads).then(|| case.flops()));
        Ok(Reply::Prepared { id, bytes, flops, plan, variants, notes })
    }

    fn job(&mut self, id: u64) -> Result<&mut (Case, Box<dyn Job>)> {
        self.jobs.get_mut(&id).with_context(|| format!("no case is prepared as id {id}"))
    }

    fn verify(&mut self, id: u64, rows: &[usize]) -> Result<Reply> {
        let (case, job) = self.job(id)?;
        let shape = case.output_shape();
        let most = MAX_VERIFIED.max(MIN_VERIFIED_ROWS * shape[1]);
        if rows.iter().any(|&r| r >= shape[0]) || rows.len() * shape[1] > most {
            bail!("rows {rows:?} of {shape:?}: at most {MAX_VERIFIED} elements of it can be shown");
        }
        let data = STANDARD.encode(job.verify(case, rows)?);
        Ok(Reply::Verified { id, shape, dtype: case.dtype, rows: rows.to_vec(), data })
    }

    fn sample(&mut self, id: u64, turns: u32, budget_us: u64) -> Result<Reply> {
        let (_, job) = self.job(id)?;
        let mut us = Vec::new();
        for _ in 0..turns {
            us.extend(job.turn(budget_us)?);
        }
        Ok(Reply::Samples { id, us })
    }
}

/// Whether an error says that a case cannot be computed here, not that computing it went wrong.
fn is_lacking(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let error = cause.downcast_ref::<swiglu::Error>().cloned();
        let error = error.or_else(|| Some(cause.downcast_ref::<CoreError>()?.clone().into()));
        let error = error.or_else(|| Some(cause.downcast_ref::<CudaError>()?.clone().into()));
        // Where the host has no memory, nobody else's case is computed either.
        error.is_some_and(|e| match e.kind() {
            ErrorKind::Unsupported => true,
            ErrorKind::OutOfMemory => e.cuda().is_some(),
            _ => false,
        })
    })
}

fn versions(device: &Device) -> BTreeMap<String, String> {
    let two = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    let three = |(major, minor, patch)| format!("{major}.{minor}.{patch}");
    let (swiglu, rustc) = (env!("CARGO_PKG_VERSION").into(), env!("RUSTC_VERSION").into());
    let mut all = vec![("swiglu", Some(swiglu)), ("rustc", Some(rustc))];
    match device {
        Device::Cuda(cuda) => all.extend([
            ("cuda driver", Some(two(cuda.facts().driver_version))),
            ("nvrtc", swiglu_cuda::jit::version().ok().map(two)),
            ("cublaslt", swiglu_cuda::cublaslt_version().ok().map(three)),
        ]),
        Device::Cpu(cpu) => all.push(("instruction set", Some(cpu.isa().to_string()))),
        _ => {}
    }
    all.into_iter().filter_map(|(name, version)| Some((name.to_owned(), version?))).collect()
}

fn name(device: &Device) -> String {
    match device {
        Device::Cuda(cuda) => cuda.facts().name.clone(),
        other => other.to_string(),
    }
}

/// Clock and power of a CUDA device, as nvidia-smi tells them.
fn clocks(device: Option<&Device>) -> Reply {
    let unknown = Reply::Clocks { sm_mhz: None, power_w: None };
    let Some(Device::Cuda(cuda)) = device else { return unknown };
    // Its own numbers are of all devices, in another order than CUDA's where a program sees only some.
    let id = match cuda.facts().uuid.as_str() {
        "" => cuda.ordinal().to_string(),
        uuid => uuid.to_owned(),
    };
    let asked = Command::new("nvidia-smi")
        .arg(format!("--id={id}"))
        .args(["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"])
        .output();
    let Ok(output) = asked else { return unknown };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.trim().split(',').map(|n| n.trim().parse().ok());
    let mut next = || numbers.next().flatten();
    Reply::Clocks { sm_mhz: next(), power_w: next() }
}
