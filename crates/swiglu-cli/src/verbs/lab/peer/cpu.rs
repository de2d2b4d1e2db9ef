//! Cases on the CPU, and reading alone: each call by the wall clock.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use anyhow::{Context, bail};
use swiglu::{CoreError, Device, Element, GateUpRef, GatedActivation, Matrix, Plan};
use swiglu_core::Result;
use swiglu_cpu::ceilings::Reading;
use swiglu_lab::{Case, CaseOp, sha256_of};

use super::job::{self, Job, Order, Prepared};
use crate::inputs;
use crate::step::Step;
use crate::timing::wall;

/// Computes what there is room for, with copy i of the data.
type Call<T> = Box<dyn Fn(usize, &mut Step<T>) -> swiglu::Result<()>>;

struct CpuJob<T> {
    call: Call<T>,
    outs: Vec<Step<T>>,
    next: usize,
}

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
        let mut digest = sha256_of(&path).with_context(|| path.display().to_string())?;
        digest.truncate(16);
        // Whoever was first has set the same.
        let _ = DIGEST.set(digest);
    }
    let digest = DIGEST.get().cloned().unwrap_or_default();
    Ok(BTreeMap::from([(cpu.isa().to_string(), digest)]))
}

fn job<T: Element>(device: &Device, order: &Order<'_>) -> anyhow::Result<(CpuJob<T>, Plan)> {
    let case = order.case;
    if case.op == CaseOp::ActivationBackward {
        let what = "the backward pass of the activation on the CPU".into();
        let why = "it is not available there; expected a CUDA device".into();
        return Err(CoreError::Unsupported { what, why }.into());
    }
    // Each copy has a layer, which has weights and a workspace, its tokens and results. With many tokens
    // the weights are the smaller part.
    let between = if case.op.has_weights() { 2 * case.m * case.intermediate } else { 0 };
    let count = order.copies_of(order.bytes() + (between * case.dtype.size()) as f64);
    let first = inputs::read::<T>(case, order.seed)?;
    let copy = |_| first.iter().map(Matrix::try_clone).collect();
    let inputs = (0..count).map(copy).collect::<Result<Vec<Vec<_>>>>()?;
    let (call, plan): (Call<T>, _) = if case.op.has_weights() {
        let layers = order.layers::<T>(device, count)?;
        let plan = layers[0].plan(case.m);
        // Where there is no gradient to go back from, none is read.
        let call: Call<T> = Box::new(move |at, out| {
            let (x, dy) = (&inputs[at][0], &inputs[at][inputs[at].len() - 1]);
            out.run(&layers[at], x.view(), dy.view()).map(drop)
        });
        (call, plan)
    } else {
        let activation = GatedActivation::new(device, case.activation).with_numerics(case.numerics);
        let arrangement = case.arrangement;
        let plan = activation.plan(case.m, case.intermediate, case.dtype, arrangement)?;
        let call: Call<T> = Box::new(move |at, out| {
            let inputs = match inputs[at].as_slice() {
                [gate, up] => GateUpRef::separate(gate.view(), up.view()),
                tensors => GateUpRef::packed(tensors[0].view(), arrangement),
            };
            activation.forward_into(inputs?, &mut out.y)
        });
        (call, plan)
    };
    let [rows, cols] = case.output_shape();
    let out = |_| match case.problem().filter(|_| case.op == CaseOp::MlpTrain) {
        Some(problem) => Step::new(&problem, case.orientation),
        None => Step::forward(rows, cols),
    };
    let outs = (0..count).map(out).collect::<Result<_>>()?;
    Ok((CpuJob::warm(call, outs)?, plan))
}

impl<T: Element> CpuJob<T> {
    /// After page faults, threads and workspaces of first calls, which each copy has: with many tokens they take
    /// as long as what is measured.
    fn warm(call: Call<T>, outs: Vec<Step<T>>) -> anyhow::Result<Self> {
        let mut job = Self { call, outs, next: 0 };
        (0..job.outs.len().max(3)).try_for_each(|_| job.step())?;
        Ok(job)
    }

    fn step(&mut self) -> anyhow::Result<()> {
        let at = self.next;
        self.next = (at + 1) % self.outs.len();
        Ok((self.call)(at, &mut self.outs[at])?)
    }
}

impl<T: Element> Job for CpuJob<T> {
    fn turn(&mut self, budget_us: u64) -> anyhow::Result<Vec<f64>> {
        wall(|| self.step(), budget_us)
    }

    fn verify(&mut self, case: &Case, rows: &[usize]) -> anyhow::Result<Vec<u8>> {
        if self.outs[0].y.as_slice().is_empty() {
            bail!("it computes nothing that could be compared, given rows {rows:?}");
        }
        let nan = |m: &mut Matrix<T>| m.as_mut_slice().fill(T::from_f32(f32::NAN));
        self.outs[0].matrices_mut().for_each(nan);
        self.next = 0;
        self.step()?;
        let written = self.outs[0].matrices().map(|(m, lies)| (m.view(), lies));
        job::rows(case, &written.collect::<Vec<_>>(), rows)
    }
}

/// Reading as many bytes as a case's weights have, several times over, and nothing done with it: what an
/// operation with weights cannot beat where they come from memory. It takes turns with the others, because
/// bandwidth that was measured before or after a run says little about a machine that gives half of it a
/// second later.
pub(super) fn read(device: &Device, order: &Order<'_>) -> anyhow::Result<Prepared> {
    let Device::Cpu(cpu) = device else { bail!("it reads the memory of a CPU, given {device}") };
    let (bytes, asks) = (order.case.compulsory_bytes(), order.options.asks);
    let read = |_| Reading::new(cpu, bytes as usize);
    let copies = (0..order.copies_of(bytes)).map(read).collect::<Result<Vec<_>>>()?;
    let way = if asks { "asked for as kernels do" } else { "left to the processor" };
    let rotation = format!("{} copies in rotation", copies.len());
    let notes = vec![format!("what comes later is {way}"), rotation];
    let outs = copies.iter().map(|_| Step::forward(0, 0)).collect::<Result<_>>()?;
    let call: Call<f32> = Box::new(move |at, _| {
        copies[at].pass(asks);
        Ok(())
    });
    let job = Box::new(CpuJob::warm(call, outs)?);
    Ok(Prepared { job, plan: None, variants: this_program(device)?, notes })
}

#[cfg(test)]
mod tests {
    use swiglu::{DType, bf16};
    use swiglu_lab::DeviceKind;

    use super::*;

    fn made(op: CaseOp, shape: [usize; 3], copies: Option<usize>) -> CpuJob<bf16> {
        let case = Case::new(DeviceKind::Cpu, op, shape, DType::Bf16);
        job(&Device::cpu().unwrap(), &Order::plain(&case, copies)).unwrap().0
    }

    /// Results are zeros until a call has left its own.
    #[test]
    fn every_copy_has_had_a_call_before_one_is_timed() {
        for op in [CaseOp::Activation, CaseOp::GatedLinear, CaseOp::Mlp, CaseOp::MlpTrain] {
            let job = made(op, [5, 24, 16], Some(20));
            assert_eq!(job.outs.len(), 20);
            for out in &job.outs {
                assert!(out.y.as_slice().iter().any(|v| *v != bf16::ZERO), "{op:?}");
            }
        }
    }

    /// With many tokens a copy is far more than its weights.
    #[test]
    fn copies_are_counted_by_all_that_a_call_touches() {
        assert_eq!(made(CaseOp::Mlp, [4096, 256, 512], None).outs.len(), 30);
        assert_eq!(made(CaseOp::Mlp, [1, 8, 8], None).outs.len(), 1000);
    }
}
