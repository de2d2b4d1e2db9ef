//! Cases on a CUDA device: resident data, passes over all copies, call by call or as a captured graph.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context, bail};
use swiglu::{Arrangement, CoreError, Device, Element, Half, Matrix, Plan};
use swiglu_core::Numerics;
use swiglu_cuda::{
    Cuda, CudaError, DeviceGateUp, DeviceGateUpMut, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef,
    Mlp, Stream,
};
use swiglu_lab::{Case, CaseOp, Heat};

use super::job::{Job, Order, Prepared, notes, push_row};
use super::options::DesignChoice;
use crate::inputs::{self, Dense};
use crate::layer::{Packed, Params};
use crate::timing::{self, Enqueue, Passes, Timed};

/// The results of each copy: one tensor, or one per gradient.
type Outs<T> = Rc<RefCell<Vec<Vec<DeviceMatrix<T>>>>>;

/// A case on a CUDA device, with its copies of the data.
struct CudaJob<T> {
    passes: Passes<'static>,
    outs: Outs<T>,
    stream: Stream,
    /// How gradients of gate and up are arranged, where these are the results.
    gradients: Option<Arrangement>,
}

/// How calls are enqueued, how it is planned where the layer says so, and where it rounds.
pub(crate) type Work = (Enqueue<'static>, Option<Plan>, Numerics);

/// What a case is computed with.
pub(crate) struct Setting<'a, T> {
    device: &'a Device,
    cuda: &'a Cuda,
    stream: &'a Stream,
    order: &'a Order<'a>,
    /// Copies of the data.
    count: usize,
    outs: Outs<T>,
}

/// A case on a CUDA device.
pub(super) fn prepare<T: Element>(
    device: &Device,
    cuda: &Cuda,
    order: &Order<'_>,
) -> anyhow::Result<Prepared> {
    let stream = cuda.new_stream()?;
    let setting = Setting::<T>::new(device, cuda, &stream, order)?;
    let mut design = None;
    let (enqueue, plan, numerics) = match order.options.design {
        None => setting.work()?,
        Some(choice) => {
            let (work, name) = setting.block(choice)?;
            design = Some(name);
            work
        }
    };
    // Those of other cases are not of this one.
    cuda.take_used_kernels();
    let Setting { count, outs, .. } = setting;
    let passes = Passes::new(stream.clone(), count, order.options.graph, enqueue)?;
    let (variants, plan) = (cuda.take_used_kernels(), plan.as_ref().map(Plan::to_string));
    let backward = order.case.op == CaseOp::ActivationBackward;
    let gradients = backward.then_some(order.case.arrangement);
    let job = Box::new(CudaJob { passes, outs, stream, gradients });
    Ok(Prepared { job, plan: plan.or(design), variants, notes: notes(numerics, count) })
}

impl<'a, T: Element> Setting<'a, T> {
    pub(crate) fn new(
        device: &'a Device,
        cuda: &'a Cuda,
        stream: &'a Stream,
        order: &'a Order<'a>,
    ) -> anyhow::Result<Self> {
        let case = order.case;
        let bytes = order.held().map_or(case.compulsory_bytes(), |held| held.compulsory_bytes());
        let count = order.copies.unwrap_or(match case.heat {
            Heat::Hot => 1,
            Heat::Cold => timing::copies(cuda, bytes as usize),
        });
        let [rows, cols] = case.output_shape();
        // Gradients are arranged as gate and up are.
        let backward = case.op == CaseOp::ActivationBackward;
        let tensors = if backward && !case.arrangement.is_packed() { 2 } else { 1 };
        let out = |_| -> Result<Vec<_>, CudaError> {
            (0..tensors).map(|_| DeviceMatrix::new(stream, rows, cols / tensors)).collect()
        };
        let outs = (0..count).map(out).collect::<Result<Vec<_>, CudaError>>()?;
        Ok(Self { device, cuda, stream, order, count, outs: Rc::new(RefCell::new(outs)) })
    }

    /// The case as it is planned.
    pub(crate) fn work(&self) -> anyhow::Result<Work> {
        if self.case().op.has_weights() { self.layer() } else { self.activation() }
    }

    fn case(&self) -> &Case {
        self.order.case
    }

    /// A copy of these for each set of data.
    fn upload(&self, host: &[Matrix<T>]) -> Result<Vec<Vec<DeviceMatrix<T>>>, CudaError> {
        let matrix = |m: &Matrix<T>| DeviceMatrix::from_host(self.stream, m.view());
        (0..self.count).map(|_| host.iter().map(matrix).collect()).collect()
    }

    /// Calls of layers, one for each copy of x.
    fn calls<L: 'static>(
        &self,
        layers: Vec<L>,
        forward: impl Fn(
            &L,
            &Stream,
            DeviceMatrixRef<'_, T>,
            DeviceMatrixMut<'_, T>,
        ) -> anyhow::Result<()>
        + 'static,
    ) -> anyhow::Result<Enqueue<'static>> {
        let inputs = self.upload(&[inputs::x(self.case(), self.order.seed)?])?;
        let outs = self.outs.clone();
        Ok(Box::new(move |stream, at| {
            forward(&layers[at], stream, inputs[at][0].view(), outs.borrow_mut()[at][0].view_mut())
        }))
    }

    /// A layer.
    fn layer(&self) -> anyhow::Result<Work> {
        let layers = self.order.layers::<T>(self.device, self.count)?;
        let plan = layers[0].plan(self.case().m);
        let numerics = plan.problem.numerics;
        let calls = self.calls(layers, |layer: &Packed, stream, x, out| {
            Ok(layer.forward_on(stream, x, out)?)
        })?;
        Ok((calls, Some(plan), numerics))
    }

    /// A feed-forward block by a design that was asked for, with its name.
    fn block(&self, choice: DesignChoice) -> anyhow::Result<(Work, String)> {
        let (case, order) = (self.case(), self.order);
        if order.options.path.is_some() || case.weights.is_some() {
            bail!("option design: it is one of blocks of elements, without path; give one of them");
        }
        let weights = Dense::<T>::derive(case, order.seed)?;
        let Params::Mlp(params) = weights.params() else {
            bail!("option design: it is one of feed-forward blocks, and the case is {}", case.op);
        };
        let design = choice.design();
        let name = design.map_or("step by step".into(), |design| design.to_string());
        let mut layers = Vec::new();
        for _ in 0..self.count {
            let layer = Mlp::with_design(self.cuda, &params, design)?;
            if layer.design(case.m) != design {
                let why = format!("a layer computes {} such tokens in another way", case.m);
                return Err(CoreError::Unsupported { what: name, why }.into());
            }
            layers.push(layer);
        }
        let calls = self
            .calls(layers, |layer: &Mlp<T>, stream, x, out| Ok(layer.forward(stream, x, out)?))?;
        Ok(((calls, None, case.numerics), name))
    }

    /// The activation, or its gradients.
    fn activation(&self) -> anyhow::Result<Work> {
        let (case, seed) = (self.case(), self.order.seed);
        let (activation, numerics, arrangement) =
            (case.activation, case.numerics, case.arrangement);
        let inputs = self.upload(&inputs::activation(case, seed)?)?;
        let out_grads = match case.op {
            CaseOp::ActivationBackward => self.upload(&[inputs::out_grad(case, seed)?])?,
            _ => Vec::new(),
        };
        let (cuda, outs) = (self.cuda.clone(), self.outs.clone());
        let enqueue: Enqueue<'static> = Box::new(move |stream, at| {
            let inputs = match inputs[at].as_slice() {
                [gate, up] => DeviceGateUp::separate(gate.view(), up.view())?,
                tensors => DeviceGateUp::packed(tensors[0].view(), arrangement)?,
            };
            let mut outs = outs.borrow_mut();
            let outs = outs[at].as_mut_slice();
            let Some(out_grad) = out_grads.get(at) else {
                let out = outs[0].view_mut();
                return Ok(cuda.activation(stream, &activation, numerics, inputs, out)?);
            };
            let grads = match outs {
                [gate, up] => DeviceGateUpMut::separate(gate.view_mut(), up.view_mut())?,
                tensors => DeviceGateUpMut::packed(tensors[0].view_mut(), arrangement)?,
            };
            let out_grad = out_grad[0].view();
            Ok(cuda.activation_backward(stream, &activation, numerics, out_grad, inputs, grads)?)
        });
        Ok((enqueue, None, numerics))
    }
}

impl<T: Element> Job for CudaJob<T> {
    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        for out in self.outs.borrow_mut().iter_mut().flatten() {
            out.buffer_mut().poison(0xFF)?;
        }
        self.stream.synchronize()?;
        self.passes.pass()?;
        let outs = self.outs.borrow();
        let outs = outs.last().context("a job has at least one copy")?;
        let mut bytes = Vec::new();
        for &r in rows {
            let row =
                |out: &DeviceMatrix<T>| out.view().rows_range(r..r + 1)?.to_host(&self.stream);
            let tensors = outs.iter().map(row).collect::<Result<Vec<_>, CudaError>>()?;
            let Some(arrangement) = self.gradients else {
                tensors.iter().for_each(|row| push_row(&mut bytes, row.as_slice()));
                continue;
            };
            // Gradients are shown beside each other, however they are arranged.
            let grads = inputs::gate_up(&tensors, arrangement)?;
            for half in [Half::Gate, Half::Up] {
                let of = |i| grads.at(half, 0, i);
                push_row(&mut bytes, &(0..grads.intermediate()).map(of).collect::<Vec<T>>());
            }
        }
        Ok(bytes)
    }
}

impl<T: Element> Timed for CudaJob<T> {
    fn turn(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        self.passes.turn(budget_us)
    }
}
