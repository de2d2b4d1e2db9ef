//! Cases on a CUDA device: resident data, passes over all copies, call by call or as a captured graph.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use swiglu::{CoreError, Device, Element, Matrix, Orientation, Path};
use swiglu_core::Numerics;
use swiglu_cuda::ceilings::Product;
use swiglu_cuda::{
    Candidate, Cuda, CudaError, DecodeDesign, DeviceGateUp, DeviceGateUpMut, DeviceMatrix, Mlp,
    Stream,
};
use swiglu_lab::{Case, CaseOp, Heat};

use super::job::{self, Job, Order, Prepared};
use super::options::Which;
use crate::inputs::{self, Derived};
use crate::layer::Params;
use crate::step::OnDevice;
use crate::timing::{self, Enqueue, Passes};

/// A candidate whose expected time is at most so many times the plan's is near it.
const NEAR: f64 = 1.2;

/// What each copy of a case reads and writes.
type Copies<T> = Rc<RefCell<Vec<OnDevice<T>>>>;

struct CudaJob<T> {
    passes: Passes<'static>,
    copies: Copies<T>,
    stream: Stream,
}

/// How calls are enqueued, how it is planned where the layer says so, and where it rounds.
pub(crate) struct Work<T> {
    pub(crate) enqueue: Enqueue<'static>,
    copies: Copies<T>,
    plan: Option<String>,
    numerics: Numerics,
}

pub(crate) struct Setting<'a> {
    pub(crate) cuda: &'a Cuda,
    pub(crate) stream: &'a Stream,
    pub(crate) order: &'a Order<'a>,
}

pub(super) fn prepare<T: Element>(cuda: &Cuda, order: &Order<'_>) -> Result<Prepared> {
    let stream = cuda.new_stream()?;
    let setting = Setting { cuda, stream: &stream, order };
    let Work { enqueue, copies, plan, numerics } = setting.work::<T>()?;
    // Those of other cases are not of this one.
    cuda.take_used_kernels();
    let count = setting.count();
    let passes = Passes::new(stream.clone(), count, order.options.graph, enqueue)?;
    let (variants, notes) = (cuda.take_used_kernels(), order.notes(numerics, count));
    Ok(Prepared { job: Box::new(CudaJob { passes, copies, stream }), plan, variants, notes })
}

impl Setting<'_> {
    fn count(&self) -> usize {
        let Order { case, copies, .. } = self.order;
        copies.unwrap_or(match case.heat {
            Heat::Hot => 1,
            Heat::Cold => timing::copies(self.cuda, self.order.bytes() as usize),
        })
    }

    /// The case as it is planned, or by the design that was asked for.
    pub(crate) fn work<T: Element>(&self) -> Result<Work<T>> {
        let Order { case, options, .. } = self.order;
        if let Some(which) = options.candidate {
            return self.candidate(which);
        }
        match options.design {
            Some(design) => self.block(design),
            None if case.op == CaseOp::MlpTrain && options.products => self.products(),
            None if case.op.has_weights() => self.layer(),
            None => self.activation(),
        }
    }

    /// Calls over the copies of what they read, each with what it writes.
    fn calls<T: Element>(
        &self,
        (plan, numerics): (Option<String>, Numerics),
        call: impl Fn(&Stream, usize, &mut OnDevice<T>) -> Result<()> + 'static,
    ) -> Result<Work<T>> {
        let case = self.order.case;
        let [rows, cols] = case.output_shape();
        // Gradients are arranged as gate and up are.
        let backward = case.op == CaseOp::ActivationBackward;
        let tensors = if backward && !case.arrangement.is_packed() { 2 } else { 1 };
        let read = inputs::read::<T>(case, self.order.seed)?;
        let read: Vec<_> = read.iter().map(Matrix::view).collect();
        let copy = |_| match case.problem().filter(|_| case.op == CaseOp::MlpTrain) {
            Some(problem) => {
                let (lies, policy) = (case.orientation, self.order.policy());
                OnDevice::step(self.stream, &problem, lies, policy, &read)
            }
            None => OnDevice::new(self.stream, &read, vec![[rows, cols / tensors]; tensors]),
        };
        let copies = (0..self.count()).map(copy).collect::<Result<_, _>>()?;
        let copies: Copies<T> = Rc::new(RefCell::new(copies));
        let all = copies.clone();
        let enqueue: Enqueue<'static> =
            Box::new(move |stream, at| call(stream, at, &mut all.borrow_mut()[at]));
        Ok(Work { enqueue, copies, plan, numerics })
    }

    fn layer<T: Element>(&self) -> Result<Work<T>> {
        let device = Device::Cuda(self.cuda.clone());
        let layers = self.order.layers::<T>(&device, self.count())?;
        let plan = layers[0].plan(self.order.case.m);
        let planned = (Some(plan.to_string()), plan.problem.numerics);
        self.calls(planned, move |stream, at, data| Ok(data.enqueue(stream, &layers[at])?))
    }

    fn candidate<T: Element>(&self, which: Which) -> Result<Work<T>> {
        let Order { case, shared, seed, .. } = self.order;
        let (by, near) = find(self.cuda, case, which)?;
        let layers = shared.layers::<T>(self.cuda, case, *seed, self.count())?;
        let plan = match which {
            Which::Near(at) => format!("{by}, expected as number {at} of {near}"),
            Which::Planned | Which::Unfused => by.to_string(),
        };
        let planned = (Some(plan), by.numerics.unwrap_or(case.numerics));
        self.calls(planned, move |stream, at, data| {
            layers[at](stream, &by, data).with_context(|| by.name.clone())
        })
    }

    /// The products of both passes of a block by themselves, in a row: gate and up, down, dh, dx, dWg and dWu, dWd.
    fn products<T: Element>(&self) -> Result<Work<T>> {
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
            |(shape, transposed, lies)| Product::<T, T>::new(self.stream, shape, transposed, lies);
        let of_a_copy = |_| all.into_iter().map(product).collect::<Result<Vec<_>, CudaError>>();
        let mut copies = (0..self.count()).map(of_a_copy).collect::<Result<Vec<_>, _>>()?;
        let enqueue: Enqueue<'static> = Box::new(move |stream, at| {
            Ok(copies[at].iter_mut().try_for_each(|product| product.enqueue(stream))?)
        });
        Ok(Work { enqueue, copies: Copies::default(), plan: None, numerics })
    }

    /// A feed-forward block by a design that was asked for, or step by step.
    fn block<T: Element>(&self, design: Option<DecodeDesign>) -> Result<Work<T>> {
        let (case, order) = (self.order.case, self.order);
        if order.options.path.is_some() || case.weights.is_some() {
            bail!("option design: it is one of blocks of elements, without path; give one of them");
        }
        let weights = Derived::<T>::derive(case, order.seed, true)?;
        let Params::Mlp(params) = weights.params() else {
            bail!("option design: it is one of feed-forward blocks, and the case is {}", case.op);
        };
        let name = design.map_or("step by step".into(), |design| design.to_string());
        let mut layers = Vec::new();
        for _ in 0..self.count() {
            let layer = Mlp::with_design(self.cuda, &params, design)?;
            if layer.design(case.m) != design {
                let why = format!("a layer computes {} such tokens in another way", case.m);
                return Err(CoreError::Unsupported { what: name, why }.into());
            }
            layers.push(layer);
        }
        self.calls((Some(name), case.numerics), move |stream, at, data: &mut OnDevice<T>| {
            let (x, out) = (data.read[0].view(), data.written[0].view_mut());
            Ok(layers[at].forward(stream, x, out)?)
        })
    }

    fn activation<T: Element>(&self) -> Result<Work<T>> {
        let Case { op, activation, numerics, arrangement, .. } = *self.order.case;
        let cuda = self.cuda.clone();
        self.calls((None, numerics), move |stream, _, data: &mut OnDevice<T>| {
            let (inputs, out_grad) = match data.read.split_last() {
                Some((last, others)) if op == CaseOp::ActivationBackward => (others, Some(last)),
                _ => (data.read.as_slice(), None),
            };
            let inputs = match inputs {
                [gate, up] => DeviceGateUp::separate(gate.view(), up.view())?,
                tensors => DeviceGateUp::packed(tensors[0].view(), arrangement)?,
            };
            let Some(out_grad) = out_grad.map(DeviceMatrix::view) else {
                let out = data.written[0].view_mut();
                return Ok(cuda.activation(stream, &activation, numerics, inputs, out)?);
            };
            let grads = match data.written.as_mut_slice() {
                [gate, up] => DeviceGateUpMut::separate(gate.view_mut(), up.view_mut())?,
                tensors => DeviceGateUpMut::packed(tensors[0].view_mut(), arrangement)?,
            };
            Ok(cuda.activation_backward(stream, &activation, numerics, out_grad, inputs, grads)?)
        })
    }
}

/// The candidate of a case, and how many are near its plan.
fn find(cuda: &Cuda, case: &Case, which: Which) -> Result<(Candidate, usize)> {
    let problem = case.problem().filter(|_| case.op != CaseOp::MlpTrain && case.weights.is_none());
    let Some(problem) = problem.filter(|_| case.op.has_weights()) else {
        bail!(
            "option candidate: it is one of layers with weights of elements, forward; not of {case}"
        );
    };
    let unfused = cuda.plan(problem, Some(Path::Unfused))?.kernel;
    let (planned, others): (Vec<_>, Vec<_>) =
        cuda.candidates(&problem, None).into_iter().partition(|candidate| candidate.chosen);
    let planned = planned.into_iter().next().context("no candidate is the plan")?;
    let most = planned.expected_us.unwrap_or(f64::INFINITY) * NEAR;
    let is_near = |c: &&Candidate| {
        let expected = c.expected_us.filter(|_| c.refusal.is_none() && c.name != unfused);
        expected.is_some_and(|us| us <= most)
    };
    let mut near: Vec<_> = others.iter().filter(is_near).cloned().collect();
    near.sort_by(|a, b| a.expected_us.unwrap_or(most).total_cmp(&b.expected_us.unwrap_or(most)));
    let count = near.len();
    let found = match which {
        Which::Unfused if planned.name != unfused => others.into_iter().find(|c| c.name == unfused),
        Which::Planned | Which::Unfused => Some(planned),
        Which::Near(at) => near.into_iter().nth(at - 1),
    };
    let found = found.ok_or_else(|| CoreError::Unsupported {
        what: "another candidate".into(),
        why: format!("{count} are expected to take at most {NEAR} times as long as the plan"),
    })?;
    Ok((found, count))
}

impl<T: Element> Job for CudaJob<T> {
    fn verify(&mut self, case: &Case, rows: &[usize]) -> Result<Vec<u8>> {
        self.copies.borrow_mut().iter_mut().try_for_each(OnDevice::poison)?;
        self.stream.synchronize()?;
        self.passes.pass()?;
        let copies = self.copies.borrow();
        let last = copies.last().context("it computes nothing that could be compared")?;
        let written = last.to_host(&self.stream)?;
        let written: Vec<_> = written.iter().map(|(m, lies)| (m.view(), *lies)).collect();
        job::rows(case, &written, rows)
    }

    fn turn(&mut self, budget_us: u64) -> Result<Vec<f64>> {
        self.passes.turn(budget_us)
    }
}
