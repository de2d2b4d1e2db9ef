use super::*;
use crate::Rounding;

/// Plain loops with `f32` accumulation and the mode's roundings, and optionally one fault.
struct Naive {
    fault: Option<fn(&mut [f32])>,
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

    fn hidden_row<T: Element>(p: &GatedLinearParams<'_, T>, x: &[T]) -> Vec<f32> {
        use crate::layout::Half;
        let pre = |half, j, bias: Option<&[f32]>| {
            let v = dot(x, |k| p.weights.at(half, j, k)) + bias.map_or(0.0, |b| b[j]);
            if p.numerics.rounding == Rounding::Fused { v } else { T::from_f32(v).to_f32() }
        };
        (0..p.weights.intermediate())
            .map(|j| {
                let (g, u) = (pre(Half::Gate, j, p.gate_bias), pre(Half::Up, j, p.up_bias));
                p.activation.apply::<T>(p.numerics, g, u).to_f32()
            })
            .collect()
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
            self.finish(Self::hidden_row(params, x.row(i)), out.row_mut(i));
        }
        Ok(())
    }
    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        for i in 0..out.rows() {
            let h: Vec<T> =
                Self::hidden_row(&params.gated, x.row(i)).into_iter().map(T::from_f32).collect();
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
        let outcome = run(&Naive { fault: None }, case).unwrap();
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
            caught += usize::from(!run(&Naive { fault: Some(fault) }, &case).unwrap().passed());
        }
        assert!(caught * 100 >= total * 99, "{name}: caught {caught} of {total}");
    }
}
