use super::*;
use crate::Rounding;

/// Plain loops with `f32` accumulation and the mode's roundings, and optionally one fault.
struct Naive {
    fault: Option<fn(&mut [f32])>,
    /// The steps that it takes of those it is given.
    steps: fn(RowSteps) -> RowSteps,
    /// What it takes from n before it divides a sum of squares by it.
    fewer: f32,
}

const RIGHT: Naive = Naive { fault: None, steps: |steps| steps, fewer: 0.0 };

/// The sum of `f32` in order.
fn mean(row: &[f32], fewer: f32, value: impl Fn(f32) -> f32) -> f32 {
    row.iter().fold(0.0, |sum, &v| sum + value(v)) / (row.len() as f32 - fewer)
}

fn dot<T: Element>(x: &[T], mut w: impl FnMut(usize) -> T) -> f32 {
    x.iter().enumerate().map(|(k, v)| v.to_f32() * w(k).to_f32()).sum()
}

impl Naive {
    fn finish<T: Element>(&self, mut row: Vec<f32>, out: &mut [T]) {
        if let Some(fault) = self.fault {
            fault(&mut row);
        }
        for (o, v) in out.iter_mut().zip(row) {
            *o = T::from_f32(v);
        }
    }

    /// One row of h; the row of the gate goes through `steps` before its function.
    fn hidden_row<T: Element>(
        p: &GatedLinearParams<'_, T>,
        x: &[T],
        steps: impl Fn(&mut Vec<f32>),
    ) -> Vec<f32> {
        use crate::layout::Half;
        let pre = |half, j, bias: Option<&[f32]>| {
            let v = dot(x, |k| p.weights.at(half, j, k)) + bias.map_or(0.0, |b| b[j]);
            if p.numerics.rounding == Rounding::Fused { v } else { T::from_f32(v).to_f32() }
        };
        let mut gate: Vec<f32> =
            (0..p.weights.intermediate()).map(|j| pre(Half::Gate, j, p.gate_bias)).collect();
        steps(&mut gate);
        let h = gate.into_iter().enumerate().map(|(j, g)| {
            p.activation.apply::<T>(p.numerics, g, pre(Half::Up, j, p.up_bias)).to_f32()
        });
        h.collect()
    }

    fn sparse_row<T: Element>(&self, sparsity: Sparsity, rounding: Rounding, gate: &mut [f32]) {
        let round = |v| T::from_f32(v).to_f32();
        let step = |v| if rounding == Rounding::Eager { round(v) } else { v };
        gate.iter_mut().for_each(|v| *v = round(*v));
        let middle = mean(gate, 0.0, |v| v);
        let deviation = mean(gate, self.fewer, |v| (v - middle).powi(2)).sqrt();
        let above = step(step(deviation) * step(sparsity.deviations()));
        let cutoff = step(step(middle) + above);
        gate.iter_mut().for_each(|v| *v = round((*v - cutoff).max(0.0)));
    }

    fn normed_row<T: Element>(&self, rows: &RowParams<'_>, rounding: Rounding, h: &mut [f32]) {
        let Some(norm) = (self.steps)(rows.steps).norm else { return };
        let round = |v| T::from_f32(v).to_f32();
        let middle = if norm.kind() == NormKind::Layer { mean(h, 0.0, |v| v) } else { 0.0 };
        let root = (mean(h, self.fewer, |v| (v - middle).powi(2)) + norm.epsilon()).sqrt();
        for (j, v) in h.iter_mut().enumerate() {
            let eager = rounding == Rounding::Eager && norm.kind() == NormKind::Rms;
            let quotient = (*v - middle) / root;
            let quotient = if eager { round(quotient) } else { quotient };
            *v = quotient * rows.norm_weight.map_or(1.0, |w| w[j])
                + rows.norm_bias.map_or(0.0, |b| b[j]);
        }
    }
}

impl Backend for Naive {
    fn name(&self) -> String {
        "naive".into()
    }
    fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        use crate::layout::Half;
        for i in 0..out.rows() {
            let at = |half, j| inputs.at(half, i, j).to_f32();
            let row = (0..out.cols())
                .map(|j| act.apply::<T>(numerics, at(Half::Gate, j), at(Half::Up, j)).to_f32());
            self.finish(row.collect(), out.row_mut(i));
        }
        Ok(())
    }
    fn gated_linear<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        for i in 0..out.rows() {
            self.finish(Self::hidden_row(params, x.row(i), |_| {}), out.row_mut(i));
        }
        Ok(())
    }
    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let rounding = params.gated.numerics.rounding;
        let sparsity = (self.steps)(params.rows.steps).sparsity;
        for i in 0..out.rows() {
            let mut h = Self::hidden_row(&params.gated, x.row(i), |gate| {
                if let Some(sparsity) = sparsity {
                    self.sparse_row::<T>(sparsity, rounding, gate);
                }
            });
            self.normed_row::<T>(&params.rows, rounding, &mut h);
            let h: Vec<T> = h.into_iter().map(T::from_f32).collect();
            let y = (0..out.cols()).map(|k| {
                dot(&h, |j| params.down_at(k, j)) + params.down_bias.map_or(0.0, |b| b[k])
            });
            self.finish(y.collect(), out.row_mut(i));
        }
        Ok(())
    }
}

/// The bounds admit a correct implementation in every case of the suite …
#[test]
fn a_plain_implementation_passes_every_case() {
    let cases = suite(&DType::ALL);
    assert!(cases.len() > 900);
    for case in &cases {
        let outcome = run(&RIGHT, case).unwrap();
        assert!(outcome.passed(), "{case}: {outcome:?}");
    }
}

/// … and are tight enough to catch small faults wherever there is an output to be wrong.
#[test]
fn faulty_implementations_fail() {
    type Fault = (&'static str, fn(&mut [f32]));
    let faults: [Fault; 4] = [
        ("sign", |row| row.iter_mut().for_each(|v| *v = -*v)),
        ("last element not written", |row| {
            if let Some(v) = row.last_mut() {
                *v = f32::NAN;
            }
        }),
        ("2% scale", |row| row.iter_mut().for_each(|v| *v *= 1.02)),
        ("shifted by one", |row| row.rotate_left(1)),
    ];
    for (name, fault) in faults {
        let (mut caught, mut total) = (0, 0);
        for case in suite(&[DType::F32, DType::Bf16]) {
            let columns = if case.op == Op::Mlp { case.hidden } else { case.intermediate };
            if case.m * columns * case.intermediate * case.hidden < 64 || columns < 2 {
                continue;
            }
            total += 1;
            caught +=
                usize::from(!run(&Naive { fault: Some(fault), ..RIGHT }, &case).unwrap().passed());
        }
        assert!(caught * 100 >= total * 99, "{name}: caught {caught} of {total}");
    }
}

/// Cases of whole blocks, and the steps of each in turn.
fn with_steps(dtypes: &[DType]) -> impl Iterator<Item = (Case, RowSteps)> {
    let steps = row_steps().unwrap();
    let blocks = suite(dtypes).into_iter().filter(|case| case.op == Op::Mlp).step_by(2);
    blocks.flat_map(move |case| steps.map(|steps| (case, steps)))
}

/// Statistics in `f32`, in order, are within the bounds …
#[test]
fn a_plain_implementation_passes_with_every_row_step() {
    for (case, steps) in with_steps(&DType::ALL) {
        let outcome = run_within(&RIGHT, &case, steps).unwrap();
        assert!(outcome.passed(), "{case} {steps}: {outcome:?}");
    }
}

/// … and one that leaves a step out, or another's result in its place, is not.
#[test]
fn a_missing_or_other_row_step_fails() {
    type Fault = (&'static str, fn(RowSteps) -> RowSteps, f32);
    let faults: [Fault; 5] = [
        ("none", |_| RowSteps::NONE, 0.0),
        ("no sparsity", |steps| RowSteps { sparsity: None, ..steps }, 0.0),
        ("no norm", |steps| RowSteps { norm: None, ..steps }, 0.0),
        (
            "another cutoff",
            |steps| match steps.sparsity {
                Some(_) => steps.with_sparsity(Sparsity::of(0.75).unwrap()),
                None => RowSteps::NONE,
            },
            0.0,
        ),
        ("the deviation of a sample", |steps| steps, 1.0),
    ];
    for (name, changed, fewer) in faults {
        let backend = Naive { steps: changed, fewer, ..RIGHT };
        let (mut caught, mut total) = (0, 0);
        for (case, steps) in with_steps(&DType::ALL).step_by(5) {
            // 1/2n of the deviation is less than a rounding of bfloat16.
            let told = fewer == 0.0 || case.dtype == DType::F32;
            let large = case.m * case.hidden * case.intermediate >= 64 && case.intermediate > 8;
            if !large || !told || changed(steps) == steps && fewer == 0.0 {
                continue;
            }
            total += 1;
            caught += usize::from(!run_within(&backend, &case, steps).unwrap().passed());
        }
        assert!(total > 50 && caught * 100 >= total * 99, "{name}: caught {caught} of {total}");
    }
}

#[test]
fn row_steps_are_of_whole_blocks() {
    let case = Case::new(Op::GatedLinear, [1, 8, 8], DType::F32);
    let error = run_within(&RIGHT, &case, row_steps().unwrap()[0]).unwrap_err().to_string();
    assert!(error.contains("sparse-gate") && error.contains("gated-linear"), "{error}");
}
