use super::*;
use crate::GateUpRef;
use crate::activation::Activation;
use crate::layout::Half;
use crate::matrix::{MatrixMut, MatrixRef};
use crate::numerics::{Numerics, Rounding};
use crate::problem::Accumulate;
use crate::problem::{GatedLinearParams, MlpParams};

/// Plain loops with `f32` accumulation and the mode's roundings, and optionally one fault.
struct Naive {
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    None,
    /// Every second derivative of the gate is off by two per cent.
    Slope,
    /// Gradients of up go to gate.
    Exchanged,
    /// The last token is left out of gradients of weights.
    LastToken,
    /// Gradients of weights replace what they are to be added to, and the reverse.
    Accumulation,
    /// A gradient of weights is that of the transpose.
    Transposed,
    /// A gap between rows is written.
    Gap,
    /// The factors of rows are left out of what the gradient of the down weight takes.
    Unscaled,
    /// The gradient of a row's factor lacks what goes through the bias.
    Unbiased,
}

/// Rows of a matrix that has a stride.
fn write<V: Element>(m: &mut MatrixMut<'_, V>, add: bool, value: impl Fn(usize, usize) -> f32) {
    for r in 0..m.rows() {
        for (c, o) in m.row_mut(r).iter_mut().enumerate() {
            let before = if add { o.to_f32() } else { 0.0 };
            *o = V::from_f32(before + value(r, c));
        }
    }
}

fn place<T: Element>(
    place: &mut Option<GradientMut<'_, T>>,
    add: bool,
    value: impl Fn(usize, usize) -> f32,
) {
    match place {
        Some(GradientMut::Element(m)) => write(m, add, value),
        Some(GradientMut::F32(m)) => write(m, add, value),
        None => {}
    }
}

impl Naive {
    /// Everything below dh.
    fn inner<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        dh: &Matrix<f32>,
        into: &mut GradientsMut<'_, T>,
    ) -> Matrix<T> {
        let (w, m) = (&params.weights, x.rows());
        let (k_len, h_len) = (w.hidden(), w.intermediate());
        let sum = |half, bias: Option<&[f32]>, i: usize, j: usize| {
            let products = (0..k_len).map(|k| x.row(i)[k].to_f32() * w.at(half, j, k).to_f32());
            T::from_f32(products.sum::<f32>() + bias.map_or(0.0, |b| b[j])).to_f32()
        };
        let zeros = || Matrix::<T>::zeros(m, h_len).unwrap();
        let (mut h, mut dgate, mut dup) = (zeros(), zeros(), zeros());
        for at in (0..m).flat_map(|i| (0..h_len).map(move |j| (i, j))) {
            let gate = sum(Half::Gate, params.gate_bias, at.0, at.1);
            let up = sum(Half::Up, params.up_bias, at.0, at.1);
            h[at] = params.activation.apply(params.numerics, gate, up);
            let given = [gate, up, dh[at]];
            [dgate[at], dup[at]] = params.activation.apply_backward(params.numerics, given);
            if self.fault == Fault::Slope && at.1 % 2 == 1 {
                dgate[at] = T::from_f32(dgate[at].to_f32() * 1.02);
            }
            if self.fault == Fault::Exchanged {
                (dgate[at], dup[at]) = (dup[at], dgate[at]);
            }
        }
        let tokens = if self.fault == Fault::LastToken { m.saturating_sub(1) } else { m };
        let add = (into.accumulate == Accumulate::Add) != (self.fault == Fault::Accumulation);
        let turned = w.layout().orientation == Orientation::InOut;
        for (d, half) in [(&dgate, &mut into.gate), (&dup, &mut into.up)] {
            place(half, add, |r, c| {
                let (j, k) = if turned { (c, r) } else { (r, c) };
                (0..tokens).map(|i| d[(i, j)].to_f32() * x.row(i)[k].to_f32()).sum()
            });
        }
        for (d, bias) in [(&dgate, &mut into.gate_bias), (&dup, &mut into.up_bias)] {
            for (j, b) in bias.iter_mut().flat_map(|b| b.iter_mut()).enumerate() {
                let sum: f32 = (0..tokens).map(|i| d[(i, j)].to_f32()).sum();
                *b = if add { *b + sum } else { sum };
            }
        }
        if let Some(dx) = &mut into.dx {
            write(dx, false, |i, k| {
                let of = |d: &Matrix<T>, half| -> f32 {
                    (0..h_len).map(|j| d[(i, j)].to_f32() * w.at(half, j, k).to_f32()).sum()
                };
                of(&dgate, Half::Gate) + of(&dup, Half::Up)
            });
            if self.fault == Fault::Gap && dx.row_stride() > dx.cols() && dx.rows() > 1 {
                let cols = dx.cols();
                dx.as_mut_slice()[cols] = T::from_f32(1.0);
            }
        }
        h
    }
}

impl Backend for Naive {
    fn name(&self) -> String {
        "plain loops".into()
    }
    fn activation<T: Element>(
        &self,
        _: &Activation,
        _: Numerics,
        _: GateUpRef<'_, T>,
        _: MatrixMut<'_, T>,
    ) -> Result<()> {
        Err(refused("loops", Op::Activation))
    }
    fn gated_linear<T: Element>(
        &self,
        _: &GatedLinearParams<'_, T>,
        _: MatrixRef<'_, T>,
        _: MatrixMut<'_, T>,
    ) -> Result<()> {
        Err(refused("loops", Op::GatedLinear))
    }
    fn mlp<T: Element>(
        &self,
        _: &MlpParams<'_, T>,
        _: MatrixRef<'_, T>,
        _: MatrixMut<'_, T>,
    ) -> Result<()> {
        Err(refused("loops", Op::Mlp))
    }
    fn gated_linear_backward<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        _: SavePolicy,
        x: MatrixRef<'_, T>,
        dh: StridedRef<'_, T>,
        mut into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let [m, h] = dh.shape();
        let at = (0..m).flat_map(|i| (0..h).map(move |j| (i, j)));
        let dh = Matrix::from_values(at.map(|(i, j)| dh.at(i, j).to_f32()), m, h)?;
        self.inner(params, x, &dh, &mut into);
        Ok(())
    }
    fn mlp_backward<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        _: SavePolicy,
        x: MatrixRef<'_, T>,
        dy: StridedRef<'_, T>,
        mut into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let ([m, k_len], h_len) = (dy.shape(), params.gated.weights.intermediate());
        let rounds = params.gated.numerics.rounding != Rounding::Fused;
        let dh = (0..m).flat_map(|i| (0..h_len).map(move |j| (i, j))).map(|(i, j)| {
            let products = (0..k_len).map(|k| dy.at(i, k).to_f32() * params.down_at(k, j).to_f32());
            let sum = products.sum::<f32>();
            if rounds { T::from_f32(sum).to_f32() } else { sum }
        });
        let dh = Matrix::from_values(dh, m, h_len)?;
        let factor = |i| into.row_scale.of_row(i);
        let places = || (0..m).flat_map(|i| (0..h_len).map(move |j| (i, j)));
        let scaled = Matrix::from_values(places().map(|at| dh[at] * factor(at.0)), m, h_len)?;
        let mut h = self.inner(&params.gated, x, &scaled, &mut into);
        for (i, sum) in into.row_scale_grad.iter_mut().flat_map(|s| s.iter_mut()).enumerate() {
            *sum = (0..h_len).map(|j| h[(i, j)].to_f32() * dh[(i, j)]).sum();
            let bias = params.down_bias.filter(|_| self.fault != Fault::Unbiased);
            let through_bias = bias.into_iter().flatten().enumerate();
            *sum += through_bias.map(|(k, b)| dy.at(i, k).to_f32() * b).sum::<f32>();
        }
        if self.fault != Fault::Unscaled {
            places()
                .for_each(|at| h[at] = T::from_f32(h[at].to_f32() * into.row_scale.of_row(at.0)));
        }
        let add = (into.accumulate == Accumulate::Add) != (self.fault == Fault::Accumulation);
        let turned = (params.down_orientation == Orientation::InOut)
            != (self.fault == Fault::Transposed && k_len == h_len);
        place(&mut into.down, add, |r, c| {
            let (k, j) = if turned { (c, r) } else { (r, c) };
            (0..m).map(|i| dy.at(i, k).to_f32() * h[(i, j)].to_f32()).sum()
        });
        for (k, b) in into.down_bias.iter_mut().flat_map(|b| b.iter_mut()).enumerate() {
            let terms = (0..m).map(|i| dy.at(i, k).to_f32() * into.row_scale.of_row(i));
            let sum: f32 = terms.sum();
            *b = if add { *b + sum } else { sum };
        }
        Ok(())
    }
}

/// Every gradient of a right implementation is within its bounds, in every case.
#[test]
fn plain_loops_pass_every_case() {
    let backend = Naive { fault: Fault::None };
    let cases = gradient_suite(&DType::ALL);
    assert!(cases.len() > 900, "{}", cases.len());
    for case in cases {
        let outcome = run_gradients(&backend, &case).unwrap();
        assert!(outcome.passed(), "{case}: {outcome:?}");
    }
}

/// Each fault is found, and more often than in a single case.
#[test]
fn faults_are_found() {
    use Fault::{Accumulation, Exchanged, Gap, LastToken, Slope, Transposed, Unbiased, Unscaled};
    for fault in [Slope, Exchanged, LastToken, Accumulation, Transposed, Gap, Unscaled, Unbiased] {
        let backend = Naive { fault };
        let cases = gradient_suite(&[DType::F32]);
        let fails = |case: &&GradientCase| !run_gradients(&backend, case).unwrap().passed();
        let found = cases.iter().filter(fails).take(4).count();
        assert_eq!(found, 4, "{fault:?} was found in {found} of {}", cases.len());
    }
}
