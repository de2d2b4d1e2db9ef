//! The plain way: one thread, three loops, nothing packed. A yardstick, and what the kernels are
//! explained against; its results follow the same numerics modes.

use swiglu_core::{
    Activation, Element, GateUpRef, GatedLinearParams, Half, MatrixMut, MatrixRef, MlpParams,
    Numerics, Result, Rounding, Sparsity,
};

fn dot<T: Element>(x: &[T], weight: impl Fn(usize) -> T) -> f32 {
    x.iter().enumerate().map(|(k, v)| v.to_f32() * weight(k).to_f32()).sum()
}

/// h = act(gate, up).
///
/// # Errors
/// [`swiglu_core::Error::Shape`] if `out` is not `[M, H]`.
pub fn activation<T: Element>(
    act: &Activation,
    numerics: Numerics,
    inputs: GateUpRef<'_, T>,
    mut out: MatrixMut<'_, T>,
) -> Result<()> {
    out.expect_shape("output", [inputs.rows(), inputs.intermediate()])?;
    for m in 0..inputs.rows() {
        for (h, o) in out.row_mut(m).iter_mut().enumerate() {
            let (g, u) = (inputs.at(Half::Gate, m, h), inputs.at(Half::Up, m, h));
            *o = act.apply(numerics, g.to_f32(), u.to_f32());
        }
    }
    Ok(())
}

/// h = act(x·Wg + bg, x·Wu + bu).
///
/// # Errors
/// [`swiglu_core::Error::Shape`] if a shape disagrees.
pub fn gated_linear<T: Element>(
    params: &GatedLinearParams<'_, T>,
    x: MatrixRef<'_, T>,
    out: MatrixMut<'_, T>,
) -> Result<()> {
    hidden(params, None, x, out)
}

/// h of a gate that is sparse or not.
fn hidden<T: Element>(
    params: &GatedLinearParams<'_, T>,
    sparsity: Option<Sparsity>,
    x: MatrixRef<'_, T>,
    mut out: MatrixMut<'_, T>,
) -> Result<()> {
    params.validate()?;
    let w = &params.weights;
    x.expect_shape("x", [x.rows(), w.hidden()])?;
    out.expect_shape("output", [x.rows(), w.intermediate()])?;
    let linear = |half, h: usize, row: &[T], bias: Option<&[f32]>| {
        let sum = dot(row, |k| w.at(half, h, k)) + bias.map_or(0.0, |b| b[h]);
        match params.numerics.rounding {
            Rounding::Fused => sum,
            Rounding::PreRound | Rounding::Eager => T::from_f32(sum).to_f32(),
        }
    };
    for m in 0..x.rows() {
        let gate = |h| linear(Half::Gate, h, x.row(m), params.gate_bias);
        let sparse = sparsity.map(|sparsity| {
            let mut row: Vec<T> = (0..w.intermediate()).map(|h| T::from_f32(gate(h))).collect();
            sparsity.apply(params.numerics.rounding, &mut row);
            row
        });
        for (h, o) in out.row_mut(m).iter_mut().enumerate() {
            let gate = sparse.as_ref().map_or_else(|| gate(h), |row| row[h].to_f32());
            let up = linear(Half::Up, h, x.row(m), params.up_bias);
            *o = params.activation.apply(params.numerics, gate, up);
        }
    }
    Ok(())
}

/// y = h·Wd + bd, with the row steps of the block.
///
/// # Errors
/// [`swiglu_core::Error::Shape`] if a shape disagrees.
pub fn mlp<T: Element>(
    params: &MlpParams<'_, T>,
    x: MatrixRef<'_, T>,
    mut out: MatrixMut<'_, T>,
) -> Result<()> {
    params.validate()?;
    out.expect_shape("output", [x.rows(), params.gated.weights.hidden()])?;
    let mut h = swiglu_core::Matrix::zeros(x.rows(), params.gated.weights.intermediate())?;
    hidden(&params.gated, params.rows.steps.sparsity, x, h.view_mut())?;
    for m in 0..x.rows() {
        params.rows.normalise(params.gated.numerics.rounding, h.view_mut().row_mut(m));
        for (k, o) in out.row_mut(m).iter_mut().enumerate() {
            let sum = dot(h.view().row(m), |j| params.down_at(k, j));
            *o = T::from_f32(sum + params.down_bias.map_or(0.0, |b| b[k]));
        }
    }
    Ok(())
}
