//! `swiglu lab peer`: this project as the lab sees it, a process that computes cases and times them.
//!
//! It is timed as the others are, see METHODOLOGY.md: copies of the data take turns, a turn begins
//! with work that is not timed, results are verified in memory that held NaN.

mod cpu;
mod cuda;
mod inputs;
mod options;

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::process::Command;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use swiglu::cuda::CudaError;
use swiglu::{CoreError, DType, Device, Element, MatrixRef, Numerics, Plan, bf16, f16, with_dtype};
use swiglu_lab::peer::protocol::{MAX_VERIFIED, PROTOCOL, ProfileRef, Reply, Request};
use swiglu_lab::{Case, CaseOp, DeviceKind};

use crate::Verdict;
use cpu::CpuJob;
use cuda::CudaJob;
use options::{Devices, Options};

/// More samples of one turn than this add nothing to a median.
const MAX_PER_TURN: usize = 64;

/// Answers requests until `quit` or the end of the input.
pub(crate) fn serve() -> anyhow::Result<Verdict> {
    let mut peer = Peer::default();
    let mut replies = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading a request")?;
        let request = serde_json::from_str(&line).with_context(|| format!("request `{line}`"))?;
        let Some(reply) = peer.answer(&request) else { break };
        serde_json::to_writer(&mut replies, &reply)?;
        writeln!(replies)?;
        replies.flush()?;
    }
    Ok(Verdict::Passed)
}

/// A prepared case: data in place and kernels compiled.
trait Job {
    /// How it is computed, for people.
    fn notes(&self) -> Vec<String>;
    /// Those rows of a result of the calls that are timed, little-endian.
    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>>;
    /// One turn: microseconds per call.
    fn sample(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>>;
}

/// What a job is made from.
struct Order<'a> {
    case: &'a Case,
    options: Options,
    seed: u64,
    /// Copies of the data; by default as many as exceed the caches.
    copies: Option<usize>,
}

#[derive(Default)]
struct Peer {
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
            let reason = crate::describe(&error);
            let preparing = matches!(request, Request::Prepare { .. });
            match preparing && is_lacking(&error) {
                true => Reply::Unsupported { id, reason },
                false => Reply::Failed { id, reason },
            }
        }))
    }

    fn hello(&mut self, protocol: u32, device: DeviceKind) -> Reply {
        if protocol != PROTOCOL {
            let reason = format!("protocol {protocol}; this program speaks {PROTOCOL}");
            return Reply::Unavailable { reason };
        }
        match self.devices.open(device, &Options::default()) {
            Ok(device) => Reply::Hello {
                name: "swiglu".into(),
                versions: versions(&device),
                device: Some(name(&device)),
            },
            Err(error) => Reply::Unavailable { reason: crate::describe(&error) },
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
        let options = Options::read(profile)?;
        let copies = match rotations {
            "auto" => None,
            count => Some(count.parse::<usize>().context("rotations: `auto` or a number")?.max(1)),
        };
        if case.op == CaseOp::Copy {
            return Ok(Reply::Unsupported {
                id,
                reason: "a copy is not an operation of it".into(),
            });
        }
        if case.weights.is_some() && case.device == DeviceKind::Cuda {
            let reason = "quantised weights on CUDA devices: its kernels compute with decoded ones";
            return Ok(Reply::Unsupported { id, reason: reason.into() });
        }
        let device = self.devices.open(case.device, &options)?;
        let order = Order { case, options, seed, copies };
        let job: Box<dyn Job> = with_dtype!(case.dtype, T => match &device {
            Device::Cuda(cuda) => Ok::<_, anyhow::Error>(Box::new(CudaJob::<T>::new(
                &device, cuda, &order,
            )?) as Box<dyn Job>),
            _ => Ok(Box::new(CpuJob::<T>::new(&device, &order)?) as Box<dyn Job>),
        })?;
        let notes = job.notes();
        self.jobs.insert(id, (case.clone(), job));
        let (bytes, flops) = (Some(case.compulsory_bytes()), Some(case.flops()));
        Ok(Reply::Prepared { id, bytes, flops, plan: None, variants: BTreeMap::new(), notes })
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
            us.extend(job.sample(budget_us)?);
        }
        Ok(Reply::Samples { id, us })
    }
}

/// Whether an error says that a case cannot be computed here, not that computing it went wrong.
fn is_lacking(error: &anyhow::Error) -> bool {
    let of_core = |e: &CoreError| matches!(e, CoreError::Unsupported { .. });
    let of_cuda = |e: &CudaError| match e {
        CudaError::Core(e) => of_core(e),
        e => matches!(e, CudaError::Unsupported { .. } | CudaError::OutOfMemory { .. }),
    };
    error.chain().any(|cause| match cause.downcast_ref::<swiglu::Error>() {
        Some(swiglu::Error::Core(e)) => of_core(e),
        Some(swiglu::Error::Cuda(e)) => of_cuda(e),
        _ => cause.downcast_ref().is_some_and(of_core) || cause.downcast_ref().is_some_and(of_cuda),
    })
}

fn versions(device: &Device) -> BTreeMap<String, String> {
    let mut versions = BTreeMap::from([("swiglu".into(), env!("CARGO_PKG_VERSION").into())]);
    match device {
        Device::Cuda(cuda) => {
            let (major, minor) = cuda.facts().driver_version;
            versions.insert("cuda driver".into(), format!("{major}.{minor}"));
            if let Ok((major, minor)) = swiglu::cuda::jit::version() {
                versions.insert("nvrtc".into(), format!("{major}.{minor}"));
            }
            if let Ok((major, minor, patch)) = swiglu::cuda::cublaslt_version() {
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

/// What a record says about how a case is computed.
fn notes(plan: Option<&Plan>, numerics: Numerics, copies: usize) -> Vec<String> {
    let plan = plan.map(Plan::to_string);
    [Some(format!("rounds as {numerics}")), plan, Some(format!("{copies} copies in rotation"))]
        .into_iter()
        .flatten()
        .collect()
}

/// The elements of one row, little-endian.
fn push_row<T: Element>(bytes: &mut Vec<u8>, row: &[T]) {
    for value in row {
        // Exact: these are values of T.
        let value = value.to_f32();
        match T::DTYPE {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            _ => bytes.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// Chosen rows, little-endian.
fn rows_of<T: Element>(out: MatrixRef<'_, T>, rows: &[usize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    rows.iter().for_each(|&r| push_row(&mut bytes, out.row(r)));
    bytes
}
