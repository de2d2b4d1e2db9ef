//! Cases on the CPU: each call by the wall clock.

use std::time::Instant;

use anyhow::bail;
use swiglu::{CoreError, Device, Element, GatedActivation, Matrix, Problem};
use swiglu_lab::{CaseOp, Heat};

use super::inputs::{self, ActivationInputs, LayerInputs};
use super::{Job, MAX_PER_TURN, Order, notes, rows_of};
use crate::layer::Packed;

/// Copies of cold data together have at least this many bytes: far more than any cache.
const COLD_BYTES: f64 = 400e6;
/// Tiny data are in a cache whatever is done; this many copies are enough of them.
const MAX_COPIES: f64 = 1000.0;

/// Bytes that a call touches: each copy has a layer, which has weights and a workspace, its tokens and results. With many
/// tokens the weights are the smaller part.
fn touched(problem: &Problem) -> f64 {
    let between = 2 * problem.m * problem.intermediate * problem.dtype.size();
    problem.compulsory_bytes() + between as f64
}

/// A case on the CPU, with its copies of the data.
pub(super) struct CpuJob<T> {
    work: Work<T>,
    outs: Vec<Matrix<T>>,
    next: usize,
    notes: Vec<String>,
}

/// What a call does with copy i.
enum Work<T> {
    Layer { layers: Vec<Packed>, inputs: Vec<Matrix<T>> },
    Activation { activation: GatedActivation, inputs: Vec<ActivationInputs<T>> },
}

fn copies(order: &Order<'_>) -> usize {
    let case = order.case;
    let held = |problem: Problem| match order.options.decode {
        true => touched(&Problem { quantized: None, ..problem }),
        false => touched(&problem),
    };
    let of_layer = matches!(case.op, CaseOp::GatedLinear | CaseOp::Mlp);
    let layer = case.problem().filter(|_| of_layer).map(held);
    order.copies.unwrap_or(match case.heat {
        Heat::Hot => 1,
        Heat::Cold => {
            let bytes = layer.unwrap_or_else(|| case.compulsory_bytes());
            (COLD_BYTES / bytes.max(1.0)).ceil().clamp(1.0, MAX_COPIES) as usize
        }
    })
}

/// Copies of the case's layer.
fn layers<T: Element>(
    device: &Device,
    order: &Order<'_>,
    count: usize,
) -> anyhow::Result<Vec<Packed>> {
    let (case, options) = (order.case, &order.options);
    let Some(block) = case.weights else {
        let weights = LayerInputs::<T>::derive(case, order.seed)?;
        let params = weights.params();
        let pack = |_| params.pack(device, options.path.path());
        return Ok((0..count).map(pack).collect::<swiglu::Result<Vec<_>>>()?);
    };
    let blocks = inputs::blocks(case, block, order.seed)?;
    let biases = inputs::biases(case, order.seed);
    let quantized = blocks.params(case.activation, case.numerics, biases.as_ref());
    if !options.decode {
        let pack = |_| quantized.pack::<T>(device);
        return Ok((0..count).map(pack).collect::<swiglu::Result<Vec<_>>>()?);
    }
    if case.bias {
        bail!("decoded weights are compared without biases");
    }
    let decoded = blocks.decode::<T>()?;
    let params = decoded.params(case.activation, case.numerics)?;
    let pack = |_| params.pack(device, options.path.path());
    Ok((0..count).map(pack).collect::<swiglu::Result<Vec<_>>>()?)
}

impl<T: Element> CpuJob<T> {
    pub(super) fn new(device: &Device, order: &Order<'_>) -> anyhow::Result<Self> {
        let (case, seed, count) = (order.case, order.seed, copies(order));
        let [rows, cols] = case.output_shape();
        let (work, notes) = match case.op {
            CaseOp::Activation | CaseOp::Copy => {
                let activation =
                    GatedActivation::new(device, case.activation).with_numerics(case.numerics);
                let first = ActivationInputs::derive(case, seed)?;
                let plan = activation.plan(case.m, case.intermediate, case.dtype, case.arrangement);
                let copies = (1..count).map(|_| first.copy());
                let mut inputs = copies.collect::<swiglu_core::Result<Vec<_>>>()?;
                inputs.push(first);
                let notes = notes(Some(&plan), plan.problem.numerics, count);
                (Work::Activation { activation, inputs }, notes)
            }
            CaseOp::ActivationBackward => {
                let what = "the backward pass of the activation on the CPU".into();
                let why = "it is not available there; expected a CUDA device".into();
                return Err(CoreError::Unsupported { what, why }.into());
            }
            CaseOp::GatedLinear | CaseOp::Mlp => {
                let layers = layers::<T>(device, order, count)?;
                let plan = layers.first().map(|layer| layer.plan(case.m));
                let numerics = plan.as_ref().map_or(case.numerics, |p| p.problem.numerics);
                let x = inputs::x(case, seed)?;
                let copies = (1..count).map(|_| x.try_clone());
                let mut inputs = copies.collect::<swiglu_core::Result<Vec<_>>>()?;
                inputs.push(x);
                (Work::Layer { layers, inputs }, notes(plan.as_ref(), numerics, count))
            }
        };
        let out = |_| Matrix::zeros(rows, cols);
        let outs = (0..count).map(out).collect::<swiglu_core::Result<_>>()?;
        let mut job = Self { work, outs, next: 0, notes };
        // Page faults, threads and workspaces of first calls, which each copy has: with many tokens they take as long as
        // what is measured.
        for _ in 0..count.max(3) {
            job.step()?;
        }
        Ok(job)
    }

    /// One call, with the next copy.
    fn step(&mut self) -> anyhow::Result<()> {
        let at = self.next;
        self.next = (at + 1) % self.outs.len();
        let out = self.outs[at].view_mut();
        match &self.work {
            Work::Layer { layers, inputs } => layers[at].forward_into(inputs[at].view(), out)?,
            Work::Activation { activation, inputs } => {
                activation.forward_into(inputs[at].view()?, out)?;
            }
        }
        Ok(())
    }
}

impl<T: Element> Job for CpuJob<T> {
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        self.outs[0].as_mut_slice().fill(T::from_f32(f32::NAN));
        self.next = 0;
        self.step()?;
        Ok(rows_of(self.outs[0].view(), rows))
    }

    fn sample(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        // Wakes the threads and, where data are hot, brings them back into the caches.
        self.step()?;
        let (mut samples, mut spent) = (Vec::new(), 0.0);
        while samples.is_empty() || (spent < budget_us as f64 && samples.len() < MAX_PER_TURN) {
            let start = Instant::now();
            self.step()?;
            let us = start.elapsed().as_secs_f64() * 1e6;
            samples.push(us);
            spent += us;
        }
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use swiglu::{Activation, Arrangement, DType, Numerics, Orientation, bf16};
    use swiglu_lab::{Case, DeviceKind};

    use super::*;

    fn case(op: CaseOp, [m, hidden, intermediate]: [usize; 3]) -> Case {
        Case {
            device: DeviceKind::Cpu,
            op,
            m,
            hidden,
            intermediate,
            model: None,
            dtype: DType::Bf16,
            weights: None,
            activation: Activation::SWIGLU,
            numerics: Numerics::default(),
            arrangement: Arrangement::Separate,
            orientation: Orientation::OutIn,
            bias: false,
            heat: Heat::Cold,
        }
    }

    fn order(case: &Case, copies: Option<usize>) -> Order<'_> {
        Order { case, options: Default::default(), seed: 1, copies }
    }

    /// Results are zeros until a call has left its own.
    #[test]
    fn every_copy_has_had_a_call_before_one_is_timed() {
        let device = Device::cpu().unwrap();
        for op in [CaseOp::Activation, CaseOp::GatedLinear, CaseOp::Mlp] {
            let case = case(op, [5, if op == CaseOp::Activation { 0 } else { 24 }, 16]);
            let job = CpuJob::<bf16>::new(&device, &order(&case, Some(20))).unwrap();
            let has_result = |out: &Matrix<bf16>| out.as_slice().iter().any(|v| *v != bf16::ZERO);
            assert_eq!(job.outs.iter().filter(|out| has_result(out)).count(), 20, "{op:?}");
        }
    }

    /// With many tokens a copy is far more than its weights.
    #[test]
    fn copies_are_counted_by_all_that_a_call_touches() {
        let copies_of = |shape| copies(&order(&case(CaseOp::Mlp, shape), None));
        assert_eq!(copies_of([1, 256, 512]), 507);
        assert_eq!(copies_of([4096, 256, 512]), 30);
        assert_eq!(copies_of([1, 8, 8]), 1000);
    }
}
