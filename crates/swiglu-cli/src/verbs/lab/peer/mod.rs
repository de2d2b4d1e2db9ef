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

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::ValueEnum;
use swiglu::{CoreError, Device, ErrorKind, with_dtype};
use swiglu_cuda::CudaError;
use swiglu_lab::peer::protocol::{MAX_VERIFIED, PROTOCOL, ProfileRef, Reply, Request};
use swiglu_lab::{Case, CaseOp, DeviceKind};

use crate::terminal::{Verdict, describe};
use job::{Job, Order, Prepared};
use options::{Devices, Options};

/// The peers that this program is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum OwnPeer {
    /// What this project computes
    #[default]
    Swiglu,
    /// Reading alone: a ceiling
    Read,
}

/// Answers requests until `quit` or the end of the input.
pub(super) fn serve(who: OwnPeer) -> anyhow::Result<Verdict> {
    let mut peer = Peer { who, devices: Devices::default(), jobs: BTreeMap::new() };
    swiglu_lab::peer::serve(|request| peer.answer(request))?;
    Ok(Verdict::Passed)
}

struct Peer {
    who: OwnPeer,
    devices: Devices,
    jobs: BTreeMap<u64, (Case, Box<dyn Job>)>,
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
        let unavailable = |reason| Reply::Unavailable { reason };
        let name = match self.who {
            _ if protocol != PROTOCOL => {
                return unavailable(format!("protocol {protocol}; this program speaks {PROTOCOL}"));
            }
            OwnPeer::Read if device != DeviceKind::Cpu => {
                return unavailable(
                    "it reads the memory of a CPU; expected device = \"cpu\"".into(),
                );
            }
            OwnPeer::Read => "read",
            OwnPeer::Swiglu => "swiglu",
        };
        match self.devices.open(device, &Options::default()) {
            Ok(device) => Reply::Hello {
                name: name.into(),
                versions: versions(&device),
                device: Some(self::name(&device)),
            },
            Err(error) => unavailable(describe(&error)),
        }
    }

    fn prepare(
        &mut self,
        id: u64,
        case: &Case,
        profile: &ProfileRef,
        seed: u64,
        rotations: &str,
    ) -> anyhow::Result<Reply> {
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
        let copies = match rotations {
            "auto" => None,
            count => Some(count.parse::<usize>().context("rotations: `auto` or a number")?.max(1)),
        };
        let device = self.devices.open(case.device, &options)?;
        let mut asked = case.clone();
        asked.numerics.batch_invariant |= options.batch_invariant;
        let order = Order { case: &asked, options, seed, copies };
        let prepared = match &device {
            _ if reads => cpu::read(&device, &order),
            Device::Cuda(cuda) => {
                with_dtype!(case.dtype, T => cuda::prepare::<T>(&device, cuda, &order))
            }
            _ => with_dtype!(case.dtype, T => cpu::prepare::<T>(&device, &order)),
        };
        let Prepared { job, plan, variants, notes } = prepared?;
        self.jobs.insert(id, (case.clone(), job));
        let (bytes, flops) = (Some(case.compulsory_bytes()), Some(case.flops()));
        let flops = flops.filter(|_| !reads);
        Ok(Reply::Prepared { id, bytes, flops, plan, variants, notes })
    }

    fn job(&mut self, id: u64) -> anyhow::Result<&mut (Case, Box<dyn Job>)> {
        self.jobs.get_mut(&id).with_context(|| format!("no case is prepared as id {id}"))
    }

    fn verify(&mut self, id: u64, rows: &[usize]) -> anyhow::Result<Reply> {
        let (case, job) = self.job(id)?;
        let shape = case.output_shape();
        if rows.iter().any(|&r| r >= shape[0]) || rows.len() * shape[1] > MAX_VERIFIED.max(shape[1])
        {
            bail!("rows {rows:?} of {shape:?}: at most {MAX_VERIFIED} elements of it can be shown");
        }
        let data = STANDARD.encode(job.verify(rows)?);
        Ok(Reply::Verified { id, shape, dtype: case.dtype, rows: rows.to_vec(), data })
    }

    fn sample(&mut self, id: u64, turns: u32, budget_us: u64) -> anyhow::Result<Reply> {
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
    let own = [("swiglu", env!("CARGO_PKG_VERSION")), ("rustc", env!("RUSTC_VERSION"))];
    let mut versions = BTreeMap::from(own.map(|(name, version)| (name.into(), version.into())));
    match device {
        Device::Cuda(cuda) => {
            let (major, minor) = cuda.facts().driver_version;
            versions.insert("cuda driver".into(), format!("{major}.{minor}"));
            if let Ok((major, minor)) = swiglu_cuda::jit::version() {
                versions.insert("nvrtc".into(), format!("{major}.{minor}"));
            }
            if let Ok((major, minor, patch)) = swiglu_cuda::cublaslt_version() {
                versions.insert("cublaslt".into(), format!("{major}.{minor}.{patch}"));
            }
        }
        Device::Cpu(cpu) => {
            versions.insert("instruction set".into(), cpu.isa().to_string());
        }
        _ => {}
    }
    versions
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
