//! `swiglu lab peer blocks`: feed-forward blocks with quantised weights on a CUDA device, as they are or decoded once.
//!
//! A peer of its own: code that it consists of counts for the experiments that have it, and for no others. It is timed
//! as the other peers on a device are, see METHODOLOGY.md.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;
use swiglu::cuda::{Cuda, CudaError, Graph, Stream};
use swiglu::{BlockType, CoreError, DType, Device, Element, bf16, f16, with_dtype};
use swiglu_lab::peer::protocol::{
    MAX_VERIFIED, PROTOCOL, ProfileRef, Reply, Request, STREAM_DOWN, STREAM_GATE, STREAM_UP,
    STREAM_X,
};
use swiglu_lab::peer::serve;
use swiglu_lab::{Case, CaseOp, DeviceKind, Heat};

use crate::Verdict;
use crate::args::LayerOp;
use crate::gpu::{self, Rotation};
use crate::layer::Packed;
use crate::quantized::SyntheticBlocks;
use crate::random;

/// A timed batch is long compared with the resolution of events and the start of a turn.
const BATCH_US: f64 = 2_000.0;
/// A pass has at least this many calls, so that starting a graph is a small part of each.
const MIN_CALLS: usize = 8;
/// More samples of one turn than this add nothing to a median.
const MAX_PER_TURN: f64 = 64.0;

/// The options of a profile.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    /// Replay a captured graph.
    graph: bool,
    /// Decode the weights to the element type, once.
    decode: bool,
}

/// A prepared case.
trait Timed {
    fn notes(&self) -> Vec<String>;
    /// Those rows of a result of the calls that are timed, little-endian.
    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>>;
    /// One turn: microseconds per call.
    fn sample(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>>;
}

/// Copies of a block and its data, and how calls with them are enqueued.
struct Job<T> {
    // Dropped before what its nodes point to.
    graph: Option<Graph>,
    layers: Vec<Packed>,
    data: Rotation<T>,
    stream: Stream,
    /// Calls of one pass: every copy, several times over where there are few.
    calls: usize,
    pass_us: f64,
    notes: Vec<String>,
}

impl<T: Element> Job<T> {
    fn new(
        cuda: &Cuda,
        case: &Case,
        block: BlockType,
        options: &Options,
        (seed, copies): (u64, Option<usize>),
    ) -> anyhow::Result<Self> {
        let device = Device::Cuda(cuda.clone());
        let stream = cuda.new_stream()?;
        let decoded = Case { weights: None, ..case.clone() };
        let held = if options.decode { &decoded } else { case };
        let count = copies.unwrap_or(match case.heat {
            Heat::Hot => 1,
            Heat::Cold => gpu::copies(cuda, held.compulsory_bytes() as usize),
        });
        let seeds = [STREAM_GATE, STREAM_UP, STREAM_DOWN].map(|of| seed ^ of);
        let sizes = [case.hidden, case.intermediate];
        let blocks = SyntheticBlocks::random(seeds, LayerOp::Mlp, block.into(), sizes)?;
        let layers = if options.decode {
            let weights = blocks.decode::<T>()?;
            let params = weights.params(case.activation, case.numerics)?;
            (0..count).map(|_| params.pack(&device, None)).collect::<swiglu::Result<Vec<_>>>()?
        } else {
            let params = blocks.params(case.activation, case.numerics, None);
            (0..count).map(|_| params.pack::<T>(&device)).collect::<swiglu::Result<Vec<_>>>()?
        };
        let plan = layers.first().context("a job has at least one copy")?.plan(case.m);
        let x = random::normal::<T>(seed ^ STREAM_X, case.m, case.hidden, 1.0)?;
        let data = Rotation::new(&stream, count, x.view(), case.hidden)?;
        let notes = vec![
            format!("rounds as {}", plan.problem.numerics),
            plan.to_string(),
            format!("{count} copies in rotation"),
        ];
        let calls = MIN_CALLS.div_ceil(count) * count;
        let mut job = Self { graph: None, layers, data, stream, calls, pass_us: 0.0, notes };
        // Compiles, loads and allocates what a capture cannot.
        job.pass()?;
        job.stream.synchronize()?;
        if options.graph {
            job.capture()?;
        }
        job.pass_us = job.batches(1, 1)?[0] * job.calls as f64;
        Ok(job)
    }

    fn capture(&mut self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let Self { layers, data, stream, calls, .. } = self;
        let graph = stream.capture(|| {
            // The capture ends in any case; what went wrong in it is told after that.
            outcome = enqueue(stream, layers, data, *calls);
            Ok(())
        })?;
        outcome?;
        self.graph = Some(graph);
        Ok(())
    }

    fn pass(&mut self) -> anyhow::Result<()> {
        match &self.graph {
            // SAFETY: the data and layers behind the nodes live in `self`, as the graph does, and it runs in the
            // order of the stream that it was captured on.
            Some(graph) => Ok(unsafe { graph.launch(&self.stream) }?),
            None => enqueue(&self.stream, &self.layers, &mut self.data, self.calls),
        }
    }

    /// Microseconds per call of each batch. One pass before them is not timed: it keeps the device busy while the
    /// host enqueues the others, and displaces the other peers' data.
    fn batches(&mut self, batches: usize, passes: usize) -> anyhow::Result<Vec<f64>> {
        self.pass()?;
        let mut events = vec![self.stream.record()?];
        for _ in 0..batches {
            for _ in 0..passes {
                self.pass()?;
            }
            events.push(self.stream.record()?);
        }
        let calls = (passes * self.calls) as f64;
        let per_call = |pair: &[swiglu::cuda::Event]| -> Result<f64, CudaError> {
            Ok(f64::from(pair[1].elapsed_ms(&pair[0])?) * 1e3 / calls)
        };
        Ok(events.windows(2).map(per_call).collect::<Result<_, _>>()?)
    }
}

/// `calls` calls, each with the next copy, from the first on.
fn enqueue<T: Element>(
    stream: &Stream,
    layers: &[Packed],
    data: &mut Rotation<T>,
    calls: usize,
) -> anyhow::Result<()> {
    for call in 0..calls {
        let at = call % layers.len();
        layers[at].forward_on(stream, data.inputs[at].view(), data.outs[at].view_mut())?;
    }
    Ok(())
}

impl<T: Element> Timed for Job<T> {
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        for out in &mut self.data.outs {
            out.buffer_mut().poison(0xFF)?;
        }
        self.stream.synchronize()?;
        self.pass()?;
        let out = self.data.outs.last().context("a job has at least one copy")?;
        let mut bytes = Vec::new();
        for &r in rows {
            let row = out.view().rows_range(r..r + 1)?.to_host(&self.stream)?;
            for value in row.as_slice() {
                // Exact: these are values of T.
                let value = value.to_f32();
                match T::DTYPE {
                    DType::F32 => bytes.extend(value.to_le_bytes()),
                    DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                    _ => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                }
            }
        }
        Ok(bytes)
    }

    fn sample(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        let passes = (BATCH_US / self.pass_us.max(1.0)).round().max(1.0);
        let batch_us = (passes * self.pass_us).max(1.0);
        let batches = (budget_us as f64 / batch_us).clamp(1.0, MAX_PER_TURN);
        self.batches(batches as usize, passes as usize)
    }
}

#[derive(Default)]
struct Peer {
    cuda: Option<Cuda>,
    jobs: BTreeMap<u64, (Case, Box<dyn Timed>)>,
}

/// Answers requests until `quit` or the end of the input.
pub(super) fn blocks() -> anyhow::Result<Verdict> {
    let mut peer = Peer::default();
    serve(|request| peer.answer(request))?;
    Ok(Verdict::Passed)
}

impl Peer {
    /// The reply; none to `quit`.
    fn answer(&mut self, request: &Request) -> Option<Reply> {
        let (id, answer) = match request {
            Request::Hello { protocol, device } => return Some(self.hello(*protocol, *device)),
            // Python's peers of a run tell them.
            Request::Clocks => return Some(Reply::Clocks { sm_mhz: None, power_w: None }),
            Request::Quit => return None,
            Request::Prepare { id, case, profile, seed, rotations } => {
                // What an earlier case of this id held makes room first.
                self.jobs.remove(id);
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
        if device != DeviceKind::Cuda {
            let reason = "it computes on CUDA devices; expected device = \"cuda\"".into();
            return Reply::Unavailable { reason };
        }
        match self.open() {
            Ok(cuda) => Reply::Hello {
                name: "blocks".into(),
                versions: BTreeMap::from([("swiglu".into(), env!("CARGO_PKG_VERSION").into())]),
                device: Some(cuda.facts().name.clone()),
            },
            Err(error) => Reply::Unavailable { reason: crate::describe(&error) },
        }
    }

    fn open(&mut self) -> anyhow::Result<Cuda> {
        if let Some(cuda) = &self.cuda {
            return Ok(cuda.clone());
        }
        Ok(self.cuda.insert(Cuda::new(0)?).clone())
    }

    fn prepare(
        &mut self,
        id: u64,
        case: &Case,
        profile: &ProfileRef,
        seed: u64,
        rotations: &str,
    ) -> anyhow::Result<Reply> {
        let options: Options = serde_json::from_value(Value::Object(profile.options.clone()))
            .with_context(|| format!("the options of profile `{}`", profile.id))?;
        let copies = match rotations {
            "auto" => None,
            count => Some(count.parse::<usize>().context("rotations: `auto` or a number")?.max(1)),
        };
        let block = match (case.op, case.weights) {
            (CaseOp::Mlp, Some(block)) if !case.bias => block,
            _ => {
                let why =
                    "this peer computes feed-forward blocks with quantised weights, without biases";
                return Ok(Reply::Unsupported { id, reason: why.into() });
            }
        };
        let (cuda, data) = (self.open()?, (seed, copies));
        let job: Box<dyn Timed> = with_dtype!(case.dtype, T => {
            let job = Job::<T>::new(&cuda, case, block, &options, data)?;
            Ok::<_, anyhow::Error>(Box::new(job) as Box<dyn Timed>)
        })?;
        let notes = job.notes();
        self.jobs.insert(id, (case.clone(), job));
        let (bytes, flops) = (Some(case.compulsory_bytes()), Some(case.flops()));
        Ok(Reply::Prepared { id, bytes, flops, plan: None, variants: BTreeMap::new(), notes })
    }

    fn job(&mut self, id: u64) -> anyhow::Result<&mut (Case, Box<dyn Timed>)> {
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
    error.chain().any(|cause| {
        let core = |e: &CoreError| matches!(e, CoreError::Unsupported { .. });
        let cuda = |e: &CudaError| match e {
            CudaError::Core(e) => core(e),
            e => matches!(e, CudaError::Unsupported { .. } | CudaError::OutOfMemory { .. }),
        };
        match cause.downcast_ref::<swiglu::Error>() {
            Some(swiglu::Error::Core(e)) => core(e),
            Some(swiglu::Error::Cuda(e)) => cuda(e),
            _ => cause.downcast_ref().is_some_and(core) || cause.downcast_ref().is_some_and(cuda),
        }
    })
}
