//! A block's gradients, as far as its down projection and the factors of its rows are concerned.

use super::*;

/// What the gradients of a block follow from.
pub(super) struct Block<'a, T> {
    /// Behind the down projection and the factors of the rows.
    pub(super) inner: Inner<'a, T>,
    pub(super) dy: Off,
    /// The baseline's, times the factors.
    pub(super) eager_dy: Matrix<T>,
    /// ∂L/∂h where all factors are 1.
    dh: Off,
    /// h times the factors.
    scaled_h: Off,
}

impl<'a, T: Element> Block<'a, T> {
    pub(super) fn of(
        x: MatrixRef<'_, T>,
        params: &MlpParams<'a, T>,
        (dy, scale): (MatrixRef<'_, T>, RowScale<'_>),
        stored: DType,
        roundoff: f64,
    ) -> Result<Self> {
        params.validate()?;
        let instead = "take the gradients of its parts";
        params.rows.steps.expect_none("in bounds of gradients", instead)?;
        let (k, h) = (params.gated.weights.hidden(), params.gated.weights.intermediate());
        dy.expect_shape("dy", [x.rows(), k])?;
        scale.validate(x.rows())?;
        let dh = oracle::down_transposed(params, &to_f64(dy)?)?;
        let rounds = (params.gated.numerics.rounding != Rounding::Fused).then_some(T::DTYPE);
        let error = |magnitude: &f64| linear_error(*magnitude, sum_error(k, roundoff), rounds);
        let [m, _] = dh.value.shape();
        let bound = Matrix::from_values(dh.magnitude.as_slice().iter().map(error), m, h)?;
        let dh = Off { value: dh.value, bound };
        let by_factor = |(i, v): (usize, &T)| match scale {
            RowScale::None => *v,
            _ => T::from_f32(v.to_f32() * scale.of_row(i / k)),
        };
        let eager_dy = copied(dy)?;
        let eager_dy =
            Matrix::from_values(eager_dy.as_slice().iter().enumerate().map(by_factor), m, k)?;
        let down = |j, to: &mut [f64]| params.widen_down_from(j, to);
        let eager_dh = eager_linear(eager_dy.view(), h, None, roundoff, &down)?;
        let how = how::<T>(&params.gated, stored, roundoff);
        let inner = Inner::of(x, &params.gated, &dh.by_rows(scale, rounds)?, &eager_dh, how)?;
        let scaled_h = inner.h.by_rows(scale, Some(T::DTYPE))?;
        Ok(Self { inner, dy: Off::exact(to_f64(dy)?)?, eager_dy, dh, scaled_h })
    }

    pub(super) fn down(&self) -> Result<GradientReference> {
        let Self { inner, dy, eager_dy, scaled_h, .. } = self;
        inner.how.over_tokens([dy, scaled_h], [eager_dy, &inner.eager.h])
    }

    /// A sum for each row: of h·dh, and of dy·bd. The baseline sums dy·y.
    pub(super) fn row_scale(
        &self,
        params: &MlpParams<'_, T>,
        dy: MatrixRef<'_, T>,
    ) -> Result<GradientReference> {
        let Self { inner, dh, .. } = self;
        let [m, k] = dy.shape();
        let roundoff = inner.how.roundoff;
        let most = [inner.h.most()?, dh.most()?];
        let bias = params.down_bias.unwrap_or_default().iter().map(|b| f64::from(*b));
        let bias: Vec<f64> = bias.collect();
        let through_bias = |row: usize, product: Product| {
            let dy = &self.dy.value.view().row(row)[..bias.len()];
            match product {
                Product::Value => dot(dy, &bias, Product::Value),
                _ => dot(dy, &bias, Product::Size),
            }
        };
        let sums = |[a, b]: [&Matrix<f64>; 2], product: Product| {
            let sum = |row: usize| {
                dot(a.view().row(row), b.view().row(row), product) + through_bias(row, product)
            };
            Matrix::from_values((0..m).map(sum), 1, m)
        };
        let exact = [&inner.h.value, &dh.value];
        let (value, size) = (sums(exact, Product::Value)?, sums(exact, Product::Size)?);
        let most = sums(most.each_ref(), Product::Bound)?;
        let down = |column, to: &mut [f64]| params.widen_down(column, to);
        let y = eager_linear(inner.eager.h.view(), k, params.down_bias, roundoff, &down)?;
        let eager = (0..m).map(|row| {
            let products = dy.row(row).iter().zip(y.view().row(row));
            let sum: f32 =
                products.map(|(a, b)| T::from_f32(a.to_f32() * b.to_f32()).to_f32()).sum();
            T::from_f32(sum)
        });
        let eager = Matrix::from_values(eager, 1, m)?;
        let eager_error = relative_frobenius(eager.view(), value.view());
        // dh is summed as it is, without a rounding of factors.
        let how = As { roundoff: 0.0, stored: DType::F32, ..inner.how };
        how.sums(inner.h.value.cols() + k, (value, size, most), eager_error, m)
    }
}
