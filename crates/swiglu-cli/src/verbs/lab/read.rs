//! `swiglu lab peer read`: memory that is read, and nothing done with it. What an operation with weights cannot beat
//! where they come from memory.
//!
//! It is timed as the others are, in turns with them: bandwidth that was measured before or after a run says little
//! about a machine that gives half of it a second later.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::Value;
use swiglu::{CpuOptions, Device, Isa};
use swiglu_cpu::ceilings::Reading;
use swiglu_lab::peer::protocol::{PROTOCOL, ProfileRef, Reply, Request};
use swiglu_lab::peer::serve;
use swiglu_lab::{Case, DeviceKind, Heat};

use crate::Verdict;

/// Copies together have at least this many bytes: far more than any cache.
const COLD_BYTES: f64 = 400e6;
/// More samples of one turn than this add nothing to a median.
const MAX_PER_TURN: usize = 64;

/// The options of a profile.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    /// Ask the processor for what comes later, as our kernels do; else leave it to the processor.
    asks: bool,
    /// Threads of one call [default: all].
    threads: Option<usize>,
    /// An instruction set [default: the best].
    isa: Option<String>,
}

/// A case: memory of as many bytes as its weights have, several times over.
struct Job {
    copies: Vec<Reading>,
    asks: bool,
    next: usize,
}

impl Job {
    fn new(case: &Case, profile: &ProfileRef, rotations: &str) -> anyhow::Result<Self> {
        let options: Options = serde_json::from_value(Value::Object(profile.options.clone()))
            .with_context(|| format!("the options of profile `{}`", profile.id))?;
        let isa = options.isa.map(|name| name.parse::<Isa>()).transpose()?;
        let device = Device::cpu_with(CpuOptions { isa, threads: options.threads })?;
        let Device::Cpu(cpu) = &device else { bail!("{device} is no CPU") };
        let bytes = case.compulsory_bytes();
        let copies = match rotations {
            "auto" if case.heat == Heat::Hot => 1,
            "auto" => (COLD_BYTES / bytes.max(1.0)).ceil().clamp(1.0, 1000.0) as usize,
            count => count.parse::<usize>().context("rotations: `auto` or a number")?.max(1),
        };
        let read = |_| Reading::new(cpu, bytes as usize);
        let copies = (0..copies).map(read).collect::<swiglu_core::Result<Vec<_>>>()?;
        let mut job = Self { copies, asks: options.asks, next: 0 };
        // Threads of first calls.
        (0..3).for_each(|_| job.step());
        Ok(job)
    }

    fn notes(&self) -> Vec<String> {
        let way = if self.asks { "asked for as kernels do" } else { "left to the processor" };
        let copies = self.copies.len();
        vec![format!("what comes later is {way}"), format!("{copies} copies in rotation")]
    }

    fn step(&mut self) {
        self.copies[self.next].pass(self.asks);
        self.next = (self.next + 1) % self.copies.len();
    }

    /// One turn: microseconds per call.
    fn sample(&mut self, budget_us: u64) -> Vec<f64> {
        // Wakes the threads.
        self.step();
        let (mut samples, mut spent) = (Vec::new(), 0.0);
        while samples.is_empty() || (spent < budget_us as f64 && samples.len() < MAX_PER_TURN) {
            let start = Instant::now();
            self.step();
            let us = start.elapsed().as_secs_f64() * 1e6;
            samples.push(us);
            spent += us;
        }
        samples
    }
}

#[derive(Default)]
struct Peer(BTreeMap<u64, Job>);

/// Answers requests until `quit` or the end of the input.
pub(super) fn read() -> anyhow::Result<Verdict> {
    let mut peer = Peer::default();
    serve(|request| peer.answer(request))?;
    Ok(Verdict::Passed)
}

impl Peer {
    /// The reply; none to `quit`.
    fn answer(&mut self, request: &Request) -> Option<Reply> {
        Some(match request {
            Request::Hello { protocol, device } => hello(*protocol, *device),
            Request::Clocks => Reply::Clocks { sm_mhz: None, power_w: None },
            Request::Quit => return None,
            Request::Prepare { id, case, profile, rotations, .. } => {
                self.prepare(*id, case, profile, rotations)
            }
            Request::Verify { id, .. } => {
                let reason = "it computes nothing that could be compared".into();
                Reply::Failed { id: *id, reason }
            }
            Request::Sample { id, turns, budget_us } => match self.0.get_mut(id) {
                Some(job) => {
                    let us = (0..*turns).flat_map(|_| job.sample(*budget_us)).collect();
                    Reply::Samples { id: *id, us }
                }
                None => {
                    Reply::Failed { id: *id, reason: format!("no case is prepared as id {id}") }
                }
            },
            Request::Release { id } => {
                self.0.remove(id);
                Reply::Released { id: *id }
            }
        })
    }

    fn prepare(&mut self, id: u64, case: &Case, profile: &ProfileRef, rotations: &str) -> Reply {
        // What an earlier case of this id held makes room first.
        self.0.remove(&id);
        if !case.op.has_weights() {
            let reason = format!("{} has no weights: a copy is its limit, peer `copy`", case.op);
            return Reply::Unsupported { id, reason };
        }
        match Job::new(case, profile, rotations) {
            Ok(job) => {
                let notes = job.notes();
                self.0.insert(id, job);
                Reply::Prepared {
                    id,
                    bytes: Some(case.compulsory_bytes()),
                    flops: None,
                    plan: None,
                    variants: BTreeMap::new(),
                    notes,
                }
            }
            Err(error) => Reply::Failed { id, reason: crate::describe(&error) },
        }
    }
}

fn hello(protocol: u32, device: DeviceKind) -> Reply {
    if protocol != PROTOCOL {
        let reason = format!("protocol {protocol}; this program speaks {PROTOCOL}");
        return Reply::Unavailable { reason };
    }
    if device != DeviceKind::Cpu {
        let reason = "it reads the memory of a CPU; expected device = \"cpu\"".into();
        return Reply::Unavailable { reason };
    }
    let versions = BTreeMap::from([("swiglu".into(), env!("CARGO_PKG_VERSION").into())]);
    Reply::Hello { name: "read".into(), versions, device: None }
}
