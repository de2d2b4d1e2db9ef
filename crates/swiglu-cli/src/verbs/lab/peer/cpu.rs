//! Cases on the CPU, and reading alone: each call by the wall clock.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};
use swiglu::{CoreError, Device, Element, GatedActivation, Matrix, Plan};
use swiglu_core::Result;
use swiglu_cpu::ceilings::Reading;
use swiglu_lab::{Case, CaseOp};

use super::job::{Job, Order, Outcome, Prepared};
use crate::inputs;
use crate::timing::{Timed, Wall};
use crate::training::Step;

/// Computes into an outcome, with copy i of the data.
type Call<T> = Box<dyn Fn(usize, &mut Outcome<T>) -> swiglu::Result<()>>;

/// A case on the CPU, with its copies of the data.
struct CpuJob<T> {
    case: Case,
    call: Call<T>,
    outs: Vec<Outcome<T>>,
    next: usize,
}

/// As many of the same.
fn repeated<T>(first: T, count: usize, copy: impl Fn(&T) -> Result<T>) -> Result<Vec<T>> {
    let mut copies = (1..count).map(|_| copy(&first)).collect::<Result<Vec<_>>>()?;
    copies.push(first);
    Ok(copies)
}

/// A case on the CPU.
pub(super) fn prepare<T: Element>(device: &Device, order: &Order<'_>) -> anyhow::Result<Prepared> {
    let (job, plan) = job::<T>(device, order)?;
    let notes = order.notes(plan.problem.numerics, job.outs.len());
    let (plan, variants) = (Some(plan.to_string()), this_program(device)?);
    Ok(Prepared { job: Box::new(job), plan, variants, notes })
}

/// The program that computes, by the façade that it computes with.
fn this_program(device: &Device) -> anyhow::Result<BTreeMap<String, String>> {
    static DIGEST: OnceLock<String> = OnceLock::new();
    let Device::Cpu(cpu) = device else { bail!("expected a CPU, given {device}") };
    if DIGEST.get().is_none() {
        let path = std::env::current_exe().context("the path of this program")?;
        let program = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let hex = |byte: &u8| format!("{byte:02x}");
        // Whoever was first has set the same.
        let _ = DIGEST.set(Sha256::digest(&program)[..8].iter().map(hex).collect());
    }
    let digest = DIGEST.get().cloned().unwrap_or_default();
    Ok(BTreeMap::from([(cpu.isa().to_string(), digest)]))
}

fn job<T: Element>(device: &Device, order: &Order<'_>) -> anyhow::Result<(CpuJob<T>, Plan)> {
    let (case, seed) = (order.case, order.seed);
    // Each copy has a layer, which has weights and a workspace, its tokens and results. With many tokens
    // the weights are the smaller part.
    let between = if case.op.has_weights() { 2 * case.m * case.intermediate } else { 0 };
    let count = order.copies_of(order.bytes() + (between * case.dtype.size()) as f64);
    let (call, plan): (Call<T>, _) = match case.op {
        CaseOp::Activation | CaseOp::Copy => {
            let activation =
                GatedActivation::new(device, case.activation).with_numerics(case.numerics);
            let plan = activation.plan(case.m, case.intermediate, case.dtype, case.arrangement);
            let copy = |tensors: &Vec<Matrix<T>>| tensors.iter().map(Matrix::try_clone).collect();
            let inputs = repeated(inputs::activation::<T>(case, seed)?, count, copy)?;
            let arrangement = case.arrangement;
            let call: Call<T> = Box::new(move |at, out| {
                activation.forward_into(inputs::gate_up(&inputs[at], arrangement)?, out.matrix())
            });
            (call, plan)
        }
        CaseOp::ActivationBackward => {
            let what = "the backward pass of the activation on the CPU".into();
            let why = "it is not available there; expected a CUDA device".into();
            return Err(CoreError::Unsupported { what, why }.into());
        }
        CaseOp::GatedLinear | CaseOp::Mlp => {
            let layers = order.layers::<T>(device, count)?;
            let plan = layers[0].plan(case.m);
            let inputs = repeated(inputs::x::<T>(case, seed)?, count, Matrix::try_clone)?;
            let call: Call<T> = Box::new(move |at, out| {
                layers[at].forward_into(inputs[at].view(), out.matrix().view_mut())
            });
            (call, plan)
        }
        CaseOp::MlpTrain => {
            let layers = order.layers::<T>(device, count)?;
            let plan = layers[0].plan(case.m);
            let inputs = repeated(inputs::x::<T>(case, seed)?, count, Matrix::try_clone)?;
            let out_grads = repeated(inputs::out_grad::<T>(case, seed)?, count, Matrix::try_clone)?;
            let call: Call<T> = Box::new(move |at, out| match out {
                Outcome::Step(step) => {
                    step.run(&layers[at], inputs[at].view(), out_grads[at].view()).map(drop)
                }
                Outcome::Matrices(_) => Ok(()),
            });
            (call, plan)
        }
    };
    let [rows, cols] = case.output_shape();
    let out = |_| {
        Ok(match case.problem().filter(|_| case.op == CaseOp::MlpTrain) {
            Some(problem) => Outcome::Step(Box::new(Step::new(&problem, case.orientation)?)),
            None => Outcome::Matrices(vec![Matrix::zeros(rows, cols)?]),
        })
    };
    let outs = (0..count).map(out).collect::<Result<_>>()?;
    let mut job = CpuJob { case: case.clone(), call, outs, next: 0 };
    // Page faults, threads and workspaces of first calls, which each copy has: with many tokens they take
    // as long as what is measured.
    (0..count.max(3)).try_for_each(|_| job.step())?;
    Ok((job, plan))
}

impl<T: Element> CpuJob<T> {
    /// One call, with the next copy.
    fn step(&mut self) -> anyhow::Result<()> {
        let at = self.next;
        self.next = (at + 1) % self.outs.len();
        Ok((self.call)(at, &mut self.outs[at])?)
    }
}

impl<T: Element> Job for CpuJob<T> {
    fn verify(&mut self, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        self.outs[0].poison();
        self.next = 0;
        self.step()?;
        self.outs[0].rows(&self.case, rows)
    }
}

impl<T: Element> Timed for CpuJob<T> {
    fn turn(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        Wall(|| self.step()).turn(budget_us)
    }
}

/// Memory of as many bytes as a case's weights have, several times over, that is read, and nothing done
/// with it: what an operation with weights cannot beat where they come from memory. It takes turns with
/// the others, because bandwidth that was measured before or after a run says little about a machine that
/// gives half of it a second later.
struct ReadJob {
    copies: Vec<Reading>,
    asks: bool,
    next: usize,
}

/// Reading as many bytes as a case on the CPU must.
pub(super) fn read(device: &Device, order: &Order<'_>) -> anyhow::Result<Prepared> {
    let Device::Cpu(cpu) = device else { bail!("it reads the memory of a CPU, given {device}") };
    let (bytes, asks) = (order.case.compulsory_bytes(), order.options.asks);
    let read = |_| Reading::new(cpu, bytes as usize);
    let copies = (0..order.copies_of(bytes)).map(read).collect::<Result<Vec<_>>>()?;
    let way = if asks { "asked for as kernels do" } else { "left to the processor" };
    let rotation = format!("{} copies in rotation", copies.len());
    let notes = vec![format!("what comes later is {way}"), rotation];
    let mut job = ReadJob { copies, asks, next: 0 };
    // Threads of first calls.
    (0..3).for_each(|_| job.step());
    Ok(Prepared { job: Box::new(job), plan: None, variants: this_program(device)?, notes })
}

impl ReadJob {
    fn step(&mut self) {
        self.copies[self.next].pass(self.asks);
        self.next = (self.next + 1) % self.copies.len();
    }
}

impl Timed for ReadJob {
    fn turn(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        let mut calls = Wall(|| {
            self.step();
            Ok(())
        });
        calls.turn(budget_us)
    }
}

impl Job for ReadJob {}

#[cfg(test)]
mod tests {
    use swiglu::{DType, bf16};
    use swiglu_lab::DeviceKind;

    use super::*;

    fn case(op: CaseOp, shape: [usize; 3]) -> Case {
        inputs::case(DeviceKind::Cpu, op, shape, DType::Bf16)
    }

    fn made(case: &Case, copies: Option<usize>) -> CpuJob<bf16> {
        let order = Order { case, options: Default::default(), seed: 1, copies };
        job(&Device::cpu().unwrap(), &order).unwrap().0
    }

    /// Results are zeros until a call has left its own.
    #[test]
    fn every_copy_has_had_a_call_before_one_is_timed() {
        for op in [CaseOp::Activation, CaseOp::GatedLinear, CaseOp::Mlp, CaseOp::MlpTrain] {
            let mut job = made(&case(op, [5, 24, 16]), Some(20));
            let has_result =
                |out: &mut Outcome<bf16>| out.matrix().as_slice().iter().any(|v| *v != bf16::ZERO);
            assert_eq!(
                job.outs.iter_mut().map(has_result).filter(|has| *has).count(),
                20,
                "{op:?}"
            );
        }
    }

    /// With many tokens a copy is far more than its weights.
    #[test]
    fn copies_are_counted_by_all_that_a_call_touches() {
        let copies_of = |shape| made(&case(CaseOp::Mlp, shape), None).outs.len();
        assert_eq!(copies_of([4096, 256, 512]), 30);
        assert_eq!(copies_of([1, 8, 8]), 1000);
    }
}
