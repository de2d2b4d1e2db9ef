//! What the host spends: on the first call of a process, with an empty and with a filled kernel
//! cache, and on enqueuing each later one.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;
use swiglu::{DType, bf16};
use swiglu_cuda::jit::cache::CacheOptions;
use swiglu_cuda::{Cuda, CudaOptions};
use swiglu_lab::{Case, CaseOp, DeviceKind};

use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict};
use crate::timing::{Enqueue, Summary};
use crate::verbs::lab::peer::cuda::Setting;
use crate::verbs::lab::peer::job::Order;

/// A small layer, so that the host is what is measured: M, K, H.
const SHAPE: [usize; 3] = [1, 256, 512];
/// Calls between two waits: fewer than a stream takes before it makes the host wait.
const CALLS: usize = 100;
/// Turns of so many calls, or as many as there is time for, and one.
const TURNS: usize = 15;

#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    #[serde(flatten)]
    us: Summary,
}

/// Measures and prints. The device is there already: the context it made is not part of a first call.
pub(super) fn bench(cuda: &Cuda, seconds: f64, terminal: &mut Terminal) -> Result<Verdict> {
    let case = |op| Case::new(DeviceKind::Cuda, op, SHAPE, DType::Bf16);
    let cache = tempfile::tempdir()?;
    let first = |case: &Case| Ok::<_, anyhow::Error>(vec![first_call(cuda, case, cache.path())?]);
    let mlp = case(CaseOp::Mlp);
    let samples = [
        ("first call, empty kernel cache", first(&mlp)?),
        ("first call, filled kernel cache", first(&mlp)?),
        ("enqueue the activation", later_calls(cuda, &case(CaseOp::Activation), seconds)?),
        ("enqueue a gated linear layer", later_calls(cuda, &case(CaseOp::GatedLinear), seconds)?),
        ("enqueue a feed-forward block", later_calls(cuda, &mlp, seconds)?),
    ];
    let rows = samples.map(|(what, us)| Row { what, us: Summary::of(us) });
    terminal.print(&rows, |rows, terminal| {
        Table::of(rows)
            .text("host time", |r| r.what)
            .number("median", |r| table::time(r.us.median))
            .number("p10", |r| table::time(r.us.p10))
            .number("p90", |r| table::time(r.us.p90))
            .number("samples", |r| r.us.samples)
            .print(terminal)
    })
}

/// A call of the case on a device, to be enqueued on a stream.
fn call(cuda: &Cuda, case: &Case) -> Result<Enqueue<'static>> {
    let (stream, order) = (&cuda.stream(), &Order::plain(case, Some(1)));
    Ok(Setting { cuda, stream, order }.work::<bf16>()?.enqueue)
}

fn microseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

/// Until the first result is there, as a process with this cache sees it: compiling or loading kernels,
/// cuBLASLt's choice of an algorithm, the call. Not: packing weights.
fn first_call(cuda: &Cuda, case: &Case, cache: &Path) -> Result<f64> {
    let cache = CacheOptions { dir: Some(cache.to_owned()), ..CacheOptions::default() };
    // Nothing is loaded in this one yet, whatever others have.
    let (device, tf32) = (cuda.ordinal(), cuda.tf32());
    let fresh = CudaOptions::new(device).with_tf32(tf32).with_cache(cache);
    let fresh = Cuda::with_options(&fresh)?;
    let (mut call, stream) = (call(&fresh, case)?, fresh.stream());
    stream.synchronize()?;
    let start = Instant::now();
    call(&stream, 0)?;
    stream.synchronize()?;
    Ok(microseconds(start))
}

/// Microseconds that the host spends on a call that is enqueued behind others.
fn later_calls(cuda: &Cuda, case: &Case, seconds: f64) -> Result<Vec<f64>> {
    let (mut call, stream) = (call(cuda, case)?, cuda.stream());
    // The first call compiles and grows workspaces.
    call(&stream, 0)?;
    stream.synchronize()?;
    let begun = Instant::now();
    let mut samples = Vec::with_capacity(TURNS);
    while samples.is_empty() || samples.len() < TURNS && begun.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        for _ in 0..CALLS {
            call(&stream, 0)?;
        }
        samples.push(microseconds(start) / CALLS as f64);
        stream.synchronize()?;
    }
    Ok(samples)
}
