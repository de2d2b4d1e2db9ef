//! What the host spends: on the first call of a process, with an empty and with a filled kernel
//! cache, and on enqueuing each later one.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use comfy_table::Cell;
use serde::Serialize;
use swiglu::cuda::jit::cache::CacheOptions;
use swiglu::cuda::{Cuda, CudaOptions, DeviceGateUp, DeviceMatrix, GatedLinear, Mlp};
use swiglu::{Activation, MlpParams, Numerics, bf16};

use crate::args::LayerOp;
use crate::layer::Params;
use crate::random::SyntheticLayer;
use crate::stats::Summary;
use crate::table::{self, Column::Number, Column::Text};
use crate::terminal::Terminal;

/// A small layer, so that the host is what is measured: M, K, H.
const SHAPE: [usize; 3] = [1, 256, 512];
/// Calls between two waits: fewer than a stream takes before it makes the host wait.
const CALLS: usize = 100;
const TURNS: usize = 15;

#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    median_us: f64,
    p10_us: f64,
    p90_us: f64,
    samples: usize,
}

impl Row {
    fn new(what: &'static str, mut samples: Vec<f64>) -> Self {
        let Summary { median, p10, p90, samples } = Summary::of(&mut samples);
        Self { what, median_us: median, p10_us: p10, p90_us: p90, samples }
    }
}

fn microseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

/// Measures and prints. The device is there already: the context it made is not part of a first call.
pub(super) fn bench(cuda: &Cuda, terminal: &mut Terminal) -> anyhow::Result<()> {
    let layer = SyntheticLayer::<bf16>::normal(1, LayerOp::Mlp, SHAPE[1], SHAPE[2])?;
    let cache = tempfile::tempdir()?;
    let mut rows = vec![
        Row::new("first call, empty kernel cache", vec![first_call(cuda, &layer, cache.path())?]),
        Row::new("first call, filled kernel cache", vec![first_call(cuda, &layer, cache.path())?]),
    ];
    rows.extend(later_calls(cuda, &layer)?);
    if terminal.json() {
        return terminal.print_json(&rows);
    }
    let columns =
        [Text("host time"), Number("median"), Number("p10"), Number("p90"), Number("samples")];
    let mut table = table::table(terminal, &columns);
    for row in &rows {
        table.add_row([
            Cell::new(row.what),
            Cell::new(table::time(row.median_us)),
            Cell::new(table::time(row.p10_us)),
            Cell::new(table::time(row.p90_us)),
            Cell::new(row.samples),
        ]);
    }
    writeln!(terminal, "{}", table::lines(&table))?;
    Ok(())
}

fn block<'a, 'b>(params: &'b Params<'a, bf16>) -> anyhow::Result<&'b MlpParams<'a, bf16>> {
    match params {
        Params::Mlp(params) => Ok(params),
        Params::GatedLinear(_) => anyhow::bail!("a feed-forward block has a down projection"),
    }
}

/// Until the result of the first feed-forward block is there, as a process with this cache sees it:
/// compiling or loading kernels, cuBLASLt's choice of an algorithm, the call. Not: packing weights.
fn first_call(cuda: &Cuda, layer: &SyntheticLayer<bf16>, cache: &Path) -> anyhow::Result<f64> {
    let cache = CacheOptions { dir: Some(cache.to_owned()), ..CacheOptions::default() };
    // Nothing is loaded in this one yet, whatever others have.
    let (device, tf32) = (cuda.ordinal(), cuda.tf32());
    let fresh = CudaOptions { device, tf32, cache, ..CudaOptions::default() };
    let fresh = Cuda::with_options(&fresh)?;
    let params = layer.params(Activation::SWIGLU, Numerics::default())?;
    let mlp = Mlp::new(&fresh, block(&params)?)?;
    let stream = fresh.stream();
    let x = DeviceMatrix::<bf16>::zeros(&stream, SHAPE[0], SHAPE[1])?;
    let mut y = DeviceMatrix::<bf16>::zeros(&stream, SHAPE[0], SHAPE[1])?;
    stream.synchronize()?;
    let start = Instant::now();
    mlp.forward(&stream, x.view(), y.view_mut())?;
    stream.synchronize()?;
    Ok(microseconds(start))
}

/// Microseconds that the host spends on a call that is enqueued behind others.
fn enqueue(
    synchronize: impl Fn() -> anyhow::Result<()>,
    mut call: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(TURNS);
    for turn in 0..=TURNS {
        synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        let spent = microseconds(start) / CALLS as f64;
        // The first turn compiles and grows workspaces.
        if turn > 0 {
            samples.push(spent);
        }
    }
    synchronize()?;
    Ok(samples)
}

fn later_calls(cuda: &Cuda, layer: &SyntheticLayer<bf16>) -> anyhow::Result<Vec<Row>> {
    let [m, k, h] = SHAPE;
    let stream = cuda.stream();
    let synchronize = || Ok(stream.synchronize()?);
    let params = layer.params(Activation::SWIGLU, Numerics::default())?;
    let zeros = |cols| DeviceMatrix::<bf16>::zeros(&stream, m, cols);
    let (x, mut hidden, mut y) = (zeros(k)?, zeros(h)?, zeros(k)?);
    let (gate, up) = (zeros(h)?, zeros(h)?);
    let gated = GatedLinear::new(cuda, params.gated())?;
    let mlp = Mlp::new(cuda, block(&params)?)?;
    let inputs = DeviceGateUp::separate(gate.view(), up.view())?;
    let act = enqueue(synchronize, || {
        let out = hidden.view_mut();
        Ok(cuda.activation(&stream, &Activation::SWIGLU, Numerics::default(), inputs, out)?)
    })?;
    let linear =
        enqueue(synchronize, || Ok(gated.forward(&stream, x.view(), hidden.view_mut())?))?;
    let block = enqueue(synchronize, || Ok(mlp.forward(&stream, x.view(), y.view_mut())?))?;
    Ok(vec![
        Row::new("enqueue the activation", act),
        Row::new("enqueue a gated linear layer", linear),
        Row::new("enqueue a feed-forward block", block),
    ])
}
