//! Cases on a CUDA device: resident data, passes over all copies between events, call by call or as
//! a captured graph.

use anyhow::{Context, bail};
use swiglu::cuda::{
    Cuda, CudaError, DeviceGateUp, DeviceGateUpMut, DeviceMatrix, Graph, Mlp, Stream,
};
use swiglu::{Activation, Arrangement, CoreError, Device, Element, Half, Numerics};
use swiglu_lab::{CaseOp, Heat};

use super::inputs::{self, ActivationInputs, LayerInputs};
use super::options::DesignChoice;
use super::{Job, MAX_PER_TURN, Order, notes, push_row};
use crate::gpu;
use crate::layer::{Packed, Params};

/// A timed batch is long compared with the resolution of events and the start of a turn.
const BATCH_US: f64 = 2_000.0;
/// A pass has at least this many calls, so that starting a graph is a small part of each.
const MIN_CALLS: usize = 8;

/// A case on a CUDA device, with its copies of the data.
pub(super) struct CudaJob<T> {
    // Dropped before what its nodes point to.
    graph: Option<Graph>,
    calls: Calls<T>,
    stream: Stream,
    /// What one pass takes.
    pass_us: f64,
    notes: Vec<String>,
}

/// The work of one pass: every copy, several times over where there are few.
struct Calls<T> {
    work: Work<T>,
    /// The result of each copy: one tensor, or one per gradient.
    outs: Vec<Vec<DeviceMatrix<T>>>,
    per_pass: usize,
}

/// What a call does with copy i.
enum Work<T> {
    Layer { layers: Vec<Packed>, inputs: Vec<DeviceMatrix<T>> },
    Block { layers: Vec<Mlp<T>>, inputs: Vec<DeviceMatrix<T>> },
    Activation(Box<ActivationWork<T>>),
}

struct ActivationWork<T> {
    cuda: Cuda,
    activation: Activation,
    numerics: Numerics,
    arrangement: Arrangement,
    /// One tensor per copy where gate and up share it, else two.
    inputs: Vec<Vec<DeviceMatrix<T>>>,
    /// What the gradients of gate and up are computed from, one per copy; empty in a forward pass.
    out_grads: Vec<DeviceMatrix<T>>,
}

impl<T: Element> CudaJob<T> {
    pub(super) fn new(device: &Device, cuda: &Cuda, order: &Order<'_>) -> anyhow::Result<Self> {
        let (case, stream) = (order.case, cuda.new_stream()?);
        let count = order.copies.unwrap_or(match case.heat {
            Heat::Hot => 1,
            Heat::Cold => gpu::copies(cuda, case.compulsory_bytes() as usize),
        });
        let (work, notes) = match case.op {
            CaseOp::Activation | CaseOp::ActivationBackward | CaseOp::Copy => {
                activation(cuda, &stream, order, count)?
            }
            CaseOp::GatedLinear | CaseOp::Mlp => match order.options.design {
                Some(choice) => block(cuda, &stream, order, choice, count)?,
                None => layer(device, &stream, order, count)?,
            },
        };
        let [rows, cols] = case.output_shape();
        // Gradients are arranged as gate and up are.
        let apart = case.op == CaseOp::ActivationBackward && !case.arrangement.is_packed();
        let tensors = if apart { 2 } else { 1 };
        let out = |_| -> Result<Vec<_>, CudaError> {
            (0..tensors).map(|_| DeviceMatrix::new(&stream, rows, cols / tensors)).collect()
        };
        let outs = (0..count).map(out).collect::<Result<Vec<_>, CudaError>>()?;
        let calls = Calls { work, outs, per_pass: MIN_CALLS.div_ceil(count) * count };
        let mut job = Self { graph: None, calls, stream, pass_us: 0.0, notes };
        // Compiles, loads and allocates what a capture cannot.
        job.pass()?;
        job.stream.synchronize()?;
        if order.options.graph {
            job.capture()?;
        }
        job.pass_us = job.batches(1, 1)?[0] * job.calls.per_pass as f64;
        Ok(job)
    }

    fn capture(&mut self) -> anyhow::Result<()> {
        let mut failed = None;
        let (calls, stream) = (&mut self.calls, &self.stream);
        let graph = stream.capture(|| {
            calls.enqueue(stream).or_else(|error| {
                failed = Some(error);
                Ok(())
            })
        });
        if let Some(error) = failed {
            return Err(error);
        }
        self.graph = Some(graph?);
        Ok(())
    }

    fn pass(&mut self) -> anyhow::Result<()> {
        match &self.graph {
            // SAFETY: the data and layers behind the nodes live in `self`, as the graph does, and it
            // runs in the order of the stream that it was captured on.
            Some(graph) => Ok(unsafe { graph.launch(&self.stream) }?),
            None => self.calls.enqueue(&self.stream),
        }
    }

    /// Microseconds per call of each batch. One pass before them is not timed: it keeps the device
    /// busy while the host enqueues the others, and displaces the other peers' data.
    fn batches(&mut self, batches: usize, passes: usize) -> anyhow::Result<Vec<f64>> {
        self.pass()?;
        let mut events = vec![self.stream.record()?];
        for _ in 0..batches {
            for _ in 0..passes {
                self.pass()?;
            }
            events.push(self.stream.record()?);
        }
        let calls = (passes * self.calls.per_pass) as f64;
        let per_call = |pair: &[swiglu::cuda::Event]| -> anyhow::Result<f64> {
            Ok(f64::from(pair[1].elapsed_ms(&pair[0])?) * 1e3 / calls)
        };
        events.windows(2).map(per_call).collect()
    }
}

impl<T: Element> Calls<T> {
    fn enqueue(&mut self, stream: &Stream) -> anyhow::Result<()> {
        let count = self.outs.len();
        for call in 0..self.per_pass {
            let (at, outs) = (call % count, self.outs[call % count].as_mut_slice());
            match &self.work {
                Work::Layer { layers, inputs } => {
                    layers[at].forward_on(stream, inputs[at].view(), outs[0].view_mut())?;
                }
                Work::Block { layers, inputs } => {
                    layers[at].forward(stream, inputs[at].view(), outs[0].view_mut())?;
                }
                Work::Activation(work) => work.enqueue(stream, at, outs)?,
            }
        }
        Ok(())
    }
}

impl<T: Element> ActivationWork<T> {
    fn enqueue(
        &self,
        stream: &Stream,
        at: usize,
        outs: &mut [DeviceMatrix<T>],
    ) -> Result<(), CudaError> {
        let (activation, numerics, arrangement) =
            (&self.activation, self.numerics, self.arrangement);
        let inputs = match self.inputs[at].as_slice() {
            [gate, up] => DeviceGateUp::separate(gate.view(), up.view())?,
            tensors => DeviceGateUp::packed(tensors[0].view(), arrangement)?,
        };
        let Some(out_grad) = self.out_grads.get(at) else {
            return self.cuda.activation(stream, activation, numerics, inputs, outs[0].view_mut());
        };
        let grads = match outs {
            [gate, up] => DeviceGateUpMut::separate(gate.view_mut(), up.view_mut())?,
            tensors => DeviceGateUpMut::packed(tensors[0].view_mut(), arrangement)?,
        };
        let out_grad = out_grad.view();
        self.cuda.activation_backward(stream, activation, numerics, out_grad, inputs, grads)
    }
}

fn layer<T: Element>(
    device: &Device,
    stream: &Stream,
    order: &Order<'_>,
    count: usize,
) -> anyhow::Result<(Work<T>, Vec<String>)> {
    let case = order.case;
    let weights = LayerInputs::<T>::derive(case, order.seed)?;
    let params = weights.params();
    let pack = |_| params.pack(device, order.options.path.path());
    let layers = (0..count).map(pack).collect::<swiglu::Result<Vec<_>>>()?;
    let plan = layers.first().map(|layer| layer.plan(case.m));
    let numerics = plan.as_ref().map_or(case.numerics, |p| p.problem.numerics);
    let x = inputs::x(case, order.seed)?;
    let upload = |_| DeviceMatrix::from_host(stream, x.view());
    let inputs = (0..count).map(upload).collect::<Result<_, CudaError>>()?;
    Ok((Work::Layer { layers, inputs }, notes(plan.as_ref(), numerics, count)))
}

/// A feed-forward block by a design that was asked for.
fn block<T: Element>(
    cuda: &Cuda,
    stream: &Stream,
    order: &Order<'_>,
    choice: DesignChoice,
    count: usize,
) -> anyhow::Result<(Work<T>, Vec<String>)> {
    let case = order.case;
    let weights = LayerInputs::<T>::derive(case, order.seed)?;
    let Params::Mlp(params) = weights.params() else {
        bail!("option design: it is one of feed-forward blocks, and the case is {}", case.op);
    };
    if order.options.path.path().is_some() {
        bail!("options design and path: each says how a block is computed; give one");
    }
    let design = choice.design();
    let name = design.map_or("step by step".into(), |design| design.to_string());
    let mut layers = Vec::new();
    for _ in 0..count {
        let layer = Mlp::with_design(cuda, &params, design)?;
        if layer.design(case.m) != design {
            let why = format!("a layer computes {} such tokens in another way", case.m);
            return Err(CoreError::Unsupported { what: name, why }.into());
        }
        layers.push(layer);
    }
    let x = inputs::x(case, order.seed)?;
    let upload = |_| DeviceMatrix::from_host(stream, x.view());
    let inputs = (0..count).map(upload).collect::<Result<_, CudaError>>()?;
    let mut said = notes(None, case.numerics, count);
    said.push(name);
    Ok((Work::Block { layers, inputs }, said))
}

fn activation<T: Element>(
    cuda: &Cuda,
    stream: &Stream,
    order: &Order<'_>,
    count: usize,
) -> anyhow::Result<(Work<T>, Vec<String>)> {
    let case = order.case;
    let host = ActivationInputs::<T>::derive(case, order.seed)?;
    let upload = |_| -> Result<Vec<_>, CudaError> {
        host.tensors().iter().map(|t| DeviceMatrix::from_host(stream, t.view())).collect()
    };
    let out_grads = match case.op {
        CaseOp::ActivationBackward => {
            let host = inputs::out_grad::<T>(case, order.seed)?;
            let upload = |_| DeviceMatrix::from_host(stream, host.view());
            (0..count).map(upload).collect::<Result<_, CudaError>>()?
        }
        _ => Vec::new(),
    };
    let work = ActivationWork {
        cuda: cuda.clone(),
        activation: case.activation,
        numerics: case.numerics,
        arrangement: case.arrangement,
        inputs: (0..count).map(upload).collect::<Result<_, CudaError>>()?,
        out_grads,
    };
    Ok((Work::Activation(Box::new(work)), notes(None, case.numerics, count)))
}

impl<T: Element> Job for CudaJob<T> {
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        for out in self.calls.outs.iter_mut().flatten() {
            out.buffer_mut().poison(0xFF)?;
        }
        self.stream.synchronize()?;
        self.pass()?;
        let outs = self.calls.outs.last().context("a job has at least one copy")?;
        let mut bytes = Vec::new();
        for &r in rows {
            let row =
                |out: &DeviceMatrix<T>| out.view().rows_range(r..r + 1)?.to_host(&self.stream);
            let tensors = outs.iter().map(row).collect::<Result<Vec<_>, CudaError>>()?;
            match &self.calls.work {
                // Gradients are shown beside each other, however they are arranged.
                Work::Activation(work) if !work.out_grads.is_empty() => {
                    let grads = inputs::gate_up(&tensors, work.arrangement)?;
                    for half in [Half::Gate, Half::Up] {
                        let of = |i| grads.at(half, 0, i);
                        let row: Vec<T> = (0..grads.intermediate()).map(of).collect();
                        push_row(&mut bytes, &row);
                    }
                }
                _ => tensors.iter().for_each(|row| push_row(&mut bytes, row.as_slice())),
            }
        }
        Ok(bytes)
    }

    fn sample(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        let passes = (BATCH_US / self.pass_us.max(1.0)).round().max(1.0);
        let batch_us = (passes * self.pass_us).max(1.0);
        let batches = (budget_us as f64 / batch_us).clamp(1.0, MAX_PER_TURN as f64);
        self.batches(batches as usize, passes as usize)
    }
}
