//! Cases on a CUDA device: resident data, passes over all copies, call by call or as a captured graph.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context, bail};
use swiglu::{CoreError, Device, Element, Matrix, Orientation, Plan};
use swiglu_core::Numerics;
use swiglu_cuda::ceilings::Product;
use swiglu_cuda::{
    Cuda, CudaError, DecodeDesign, DeviceGateUp, DeviceGateUpMut, DeviceMatrix, DeviceMatrixMut,
    DeviceMatrixRef, Mlp, Stream,
};
use swiglu_lab::{Case, CaseOp, Heat};

use super::candidate::{self, Which};
use super::job::{self, Job, Order, Prepared};
use crate::inputs::{self, Dense};
use crate::layer::{Packed, Params};
use crate::timing::{self, Enqueue, Passes};
use crate::training::StepOnDevice;

/// What a call writes on the device.
enum Out<T> {
    /// One matrix, or one per gradient.
    Matrices(Vec<DeviceMatrix<T>>),
    Step(Box<StepOnDevice<T>>),
}

/// The results of each copy.
type Outs<T> = Rc<RefCell<Vec<Out<T>>>>;

impl<T: Element> Out<T> {
    fn matrices(&mut self) -> &mut [DeviceMatrix<T>] {
        match self {
            Out::Matrices(matrices) => matrices,
            Out::Step(_) => &mut [],
        }
    }

    fn poison(&mut self) -> Result<(), CudaError> {
        match self {
            Out::Matrices(all) => all.iter_mut().try_for_each(|m| m.buffer_mut().poison(0xFF)),
            Out::Step(step) => step.poison(),
        }
    }

    fn to_host(&self, stream: &Stream) -> Result<Vec<(Matrix<T>, Orientation)>, CudaError> {
        let there = |m: &DeviceMatrix<T>| Ok((m.view().to_host(stream)?, Orientation::OutIn));
        match self {
            Out::Matrices(all) => all.iter().map(there).collect(),
            Out::Step(step) => step.to_host(stream),
        }
    }
}

/// A case on a CUDA device, with its copies of the data.
struct CudaJob<T> {
    case: Case,
    passes: Passes<'static>,
    outs: Outs<T>,
    stream: Stream,
}

/// How calls are enqueued, how it is planned where the layer says so, and where it rounds.
pub(crate) struct Work {
    pub(crate) enqueue: Enqueue<'static>,
    plan: Option<String>,
    numerics: Numerics,
}

impl Work {
    fn planned(enqueue: Enqueue<'static>, plan: &Plan) -> Self {
        Self { enqueue, plan: Some(plan.to_string()), numerics: plan.problem.numerics }
    }
}

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
    let Work { enqueue, plan, numerics } = setting.work()?;
    // Those of other cases are not of this one.
    cuda.take_used_kernels();
    let Setting { count, outs, .. } = setting;
    let passes = Passes::new(stream.clone(), count, order.options.graph, enqueue)?;
    let (variants, notes) = (cuda.take_used_kernels(), order.notes(numerics, count));
    let job = Box::new(CudaJob { case: order.case.clone(), passes, outs, stream });
    Ok(Prepared { job, plan, variants, notes })
}

impl<'a, T: Element> Setting<'a, T> {
    pub(crate) fn new(
        device: &'a Device,
        cuda: &'a Cuda,
        stream: &'a Stream,
        order: &'a Order<'a>,
    ) -> anyhow::Result<Self> {
        let case = order.case;
        let count = order.copies.unwrap_or(match case.heat {
            Heat::Hot => 1,
            Heat::Cold => timing::copies(cuda, order.bytes() as usize),
        });
        let [rows, cols] = case.output_shape();
        // Gradients are arranged as gate and up are.
        let backward = case.op == CaseOp::ActivationBackward;
        let tensors = if backward && !case.arrangement.is_packed() { 2 } else { 1 };
        let out = |_| -> Result<_, CudaError> {
            let matrix = |_| DeviceMatrix::new(stream, rows, cols / tensors);
            Ok(Out::Matrices((0..tensors).map(matrix).collect::<Result<_, _>>()?))
        };
        // A training step has its results beside its data.
        let outs = if case.op == CaseOp::MlpTrain { 0 } else { count };
        let outs = (0..outs).map(out).collect::<Result<Vec<_>, CudaError>>()?;
        Ok(Self { device, cuda, stream, order, count, outs: Rc::new(RefCell::new(outs)) })
    }

    /// The case as it is planned, or by the design that was asked for.
    pub(crate) fn work(&self) -> anyhow::Result<Work> {
        if let Some(which) = self.order.options.candidate {
            return self.candidate(which);
        }
        match (self.order.case.op, self.order.options.design) {
            (_, Some(design)) => self.block(design),
            (CaseOp::MlpTrain, _) if self.order.options.products => self.products(),
            (CaseOp::MlpTrain, _) => self.step(),
            (op, _) if op.has_weights() => self.layer(),
            _ => self.activation(),
        }
    }

    /// What calls read, a copy for each set of data.
    fn inputs(&self) -> anyhow::Result<Vec<Vec<DeviceMatrix<T>>>> {
        let host = inputs::read::<T>(self.order.case, self.order.seed)?;
        let matrix = |m: &Matrix<T>| DeviceMatrix::from_host(self.stream, m.view());
        let copies = (0..self.count).map(|_| host.iter().map(matrix).collect());
        Ok(copies.collect::<Result<_, CudaError>>()?)
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
        let (inputs, outs) = (self.inputs()?, self.outs.clone());
        Ok(Box::new(move |stream, at| {
            let mut outs = outs.borrow_mut();
            let out = outs[at].matrices()[0].view_mut();
            forward(&layers[at], stream, inputs[at][0].view(), out)
        }))
    }

    /// A layer.
    fn layer(&self) -> anyhow::Result<Work> {
        let layers = self.order.layers::<T>(self.device, self.count)?;
        let plan = layers[0].plan(self.order.case.m);
        let enqueue = self.calls(layers, |layer: &Packed, stream, x, out| {
            Ok(layer.forward_on(stream, x, out)?)
        })?;
        Ok(Work::planned(enqueue, &plan))
    }

    /// A layer by one candidate of its plan.
    fn candidate(&self, which: Which) -> anyhow::Result<Work> {
        let order = self.order;
        let (by, near) = candidate::find(self.cuda, order.case, which)?;
        let layers = order.shared.layers::<T>(self.cuda, order.case, order.seed, self.count)?;
        let layers = (0..self.count).map(|at| (layers.clone(), at)).collect();
        let (name, numerics) = (by.name.clone(), by.numerics.unwrap_or(order.case.numerics));
        let enqueue = self.calls(layers, move |(layers, at), stream, x, out| {
            layers[*at](stream, &by, x, out).with_context(|| by.name.clone())
        })?;
        let plan = match which {
            Which::Near(at) => format!("{name}, expected as number {at} of {near}"),
            Which::Planned | Which::Unfused => name,
        };
        Ok(Work { enqueue, plan: Some(plan), numerics })
    }

    /// Both passes of a layer.
    fn step(&self) -> anyhow::Result<Work> {
        let case = self.order.case;
        let layers = self.order.layers::<T>(self.device, self.count)?;
        let plan = layers[0].plan(case.m);
        let given = inputs::read(case, self.order.seed)?;
        let (given, lies) = ([given[0].view(), given[1].view()], case.orientation);
        for _ in 0..self.count {
            let (problem, policy) = (&plan.problem, self.order.policy());
            let step = StepOnDevice::new(self.stream, problem, lies, policy, given)?;
            self.outs.borrow_mut().push(Out::Step(Box::new(step)));
        }
        let outs = self.outs.clone();
        let enqueue: Enqueue<'static> =
            Box::new(move |stream, at| match &mut outs.borrow_mut()[at] {
                Out::Step(step) => Ok(step.enqueue(stream, &layers[at])?),
                Out::Matrices(_) => Ok(()),
            });
        Ok(Work::planned(enqueue, &plan))
    }

    /// The products of both passes of a block by themselves, in a row: gate and up, down, dh, dx, dWg and dWu, dWd.
    fn products(&self) -> anyhow::Result<Work> {
        let Case { m, hidden: k, intermediate: h, numerics, .. } = *self.order.case;
        let (out_in, in_out) = (Orientation::OutIn, Orientation::InOut);
        let all = [
            ([m, k, 2 * h], false, out_in),
            ([m, h, k], false, out_in),
            ([m, k, h], false, in_out),
            ([m, 2 * h, k], false, in_out),
            ([2 * h, m, k], true, in_out),
            ([k, m, h], true, in_out),
        ];
        let product =
            |(shape, transposed, lies)| Product::<T>::new(self.stream, shape, transposed, lies);
        let of_a_copy = |_| all.into_iter().map(product).collect::<Result<Vec<_>, CudaError>>();
        let mut copies = (0..self.count).map(of_a_copy).collect::<Result<Vec<_>, _>>()?;
        let enqueue: Enqueue<'static> = Box::new(move |stream, at| {
            Ok(copies[at].iter_mut().try_for_each(|product| product.enqueue(stream))?)
        });
        Ok(Work { enqueue, plan: None, numerics })
    }

    /// A feed-forward block by a design that was asked for, or step by step.
    fn block(&self, design: Option<DecodeDesign>) -> anyhow::Result<Work> {
        let (case, order) = (self.order.case, self.order);
        if order.options.path.is_some() || case.weights.is_some() {
            bail!("option design: it is one of blocks of elements, without path; give one of them");
        }
        let weights = Dense::<T>::derive(case, order.seed)?;
        let Params::Mlp(params) = weights.params() else {
            bail!("option design: it is one of feed-forward blocks, and the case is {}", case.op);
        };
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
        let enqueue = self
            .calls(layers, |layer: &Mlp<T>, stream, x, out| Ok(layer.forward(stream, x, out)?))?;
        Ok(Work { enqueue, plan: Some(name), numerics: case.numerics })
    }

    /// The activation, or its gradients.
    fn activation(&self) -> anyhow::Result<Work> {
        let Case { op, activation, numerics, arrangement, .. } = *self.order.case;
        let (inputs, cuda, outs) = (self.inputs()?, self.cuda.clone(), self.outs.clone());
        let enqueue: Enqueue<'static> = Box::new(move |stream, at| {
            let (inputs, out_grad) = match inputs[at].split_last() {
                Some((last, others)) if op == CaseOp::ActivationBackward => (others, Some(last)),
                _ => (inputs[at].as_slice(), None),
            };
            let inputs = match inputs {
                [gate, up] => DeviceGateUp::separate(gate.view(), up.view())?,
                tensors => DeviceGateUp::packed(tensors[0].view(), arrangement)?,
            };
            let mut outs = outs.borrow_mut();
            let outs = outs[at].matrices();
            let Some(out_grad) = out_grad.map(DeviceMatrix::view) else {
                let out = outs[0].view_mut();
                return Ok(cuda.activation(stream, &activation, numerics, inputs, out)?);
            };
            let grads = match outs {
                [gate, up] => DeviceGateUpMut::separate(gate.view_mut(), up.view_mut())?,
                tensors => DeviceGateUpMut::packed(tensors[0].view_mut(), arrangement)?,
            };
            Ok(cuda.activation_backward(stream, &activation, numerics, out_grad, inputs, grads)?)
        });
        Ok(Work { enqueue, plan: None, numerics })
    }
}

impl<T: Element> Job for CudaJob<T> {
    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        self.outs.borrow_mut().iter_mut().try_for_each(Out::poison)?;
        self.stream.synchronize()?;
        self.passes.pass()?;
        let outs = self.outs.borrow();
        let last = outs.last().context("it computes nothing that could be compared")?;
        let written = last.to_host(&self.stream)?;
        let written: Vec<_> = written.iter().map(|(m, lies)| (m.view(), *lies)).collect();
        job::rows(&self.case, &written, rows)
    }

    fn turn(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        self.passes.turn(budget_us)
    }
}
