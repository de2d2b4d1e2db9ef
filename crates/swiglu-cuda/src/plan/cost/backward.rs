//! What the steps of a backward pass are expected to cost.
//!
//! Products and kernels are those of the forward pass, with their constants; what differs has been measured on an H200 in bf16
//! alone (docs/kernels/training-h200.txt).

use swiglu_core::{Op, Orientation, Problem};

use super::{ACTIVATION, Ends, bytes, of_tiles, product};
use crate::kernels::dgated_gemm::Kernel;
use crate::plan::machine::{Machine, Model};

/// Cycles per result of the epilogue that differentiates, of which [`ACTIVATION`] is half: the exponential and the
/// reciprocal are the same, there is twice as much beside them. Predicted.
const DERIVATIVE: f64 = 1.5 * ACTIVATION;
/// Steps with memory between as a multiple of what follows from their form: fitted on an H200 to gate and up unfused and to
/// whole backward passes.
const STEPS: f64 = 1.07;

/// M, K and H.
fn extents(problem: &Problem) -> [f64; 3] {
    [problem.m, problem.hidden, problem.intermediate].map(|extent| extent as f64)
}

/// Seconds in which a kernel computes gradients of gate and up, and h, in the epilogue of dy·Wdᵀ. The portable one's
/// constants are those of `mma_gated_gemm`, whose main loop it has; on devices that it is for nobody has measured it.
pub(crate) fn differentiated(kernel: Kernel, problem: &Problem, machine: &Machine) -> f64 {
    let [m, k, h] = extents(problem);
    // One matrix of weights is the work of two with half as many columns, and has a result for each sum.
    let halves = problem.with_intermediate(problem.intermediate.div_ceil(2));
    let (operands, results) = (m * k + k * h, 5.0 * m * h);
    let ends = Ends { cycles: 2.0 * DERIVATIVE, bytes: bytes(problem, operands + results) };
    of_tiles(&kernel.form(), &halves, machine, ends)
}

/// Seconds of the same step by step: dh to memory by cuBLASLt, then both element-wise passes.
pub(crate) fn step_by_step(problem: &Problem, model: &Model) -> f64 {
    let ([m, _, h], machine) = (extents(problem), &model.machine);
    let passed_on = machine.pass_on(bytes(problem, m * h));
    let shape = [problem.m, problem.hidden, problem.intermediate];
    let dh = product(shape, problem.dtype, passed_on, model);
    let forward = machine.launch + machine.stream(bytes(problem, 3.0 * m * h));
    STEPS * (dh + forward) + activation(problem, machine)
}

/// Seconds of the element-wise pass from dh, gate and up to two gradients.
pub(crate) fn activation(problem: &Problem, machine: &Machine) -> f64 {
    let [m, _, h] = extents(problem);
    let passed_on = machine.pass_on(bytes(problem, m * h));
    STEPS * (machine.launch + passed_on + machine.stream(bytes(problem, 4.0 * m * h)))
}

/// Seconds of a product by cuBLASLt whose results, of T, are written once.
fn multiplied([m, k, n]: [usize; 3], problem: &Problem, model: &Model) -> f64 {
    let results = model.machine.stream(bytes(problem, m as f64 * n as f64));
    STEPS * product([m, k, n], problem.dtype, results, model)
}

/// Seconds of ∂L/∂x.
pub(crate) fn input(problem: &Problem, model: &Model) -> f64 {
    multiplied([problem.m, 2 * problem.intermediate, problem.hidden], problem, model)
}

/// Seconds of ∂L/∂Wg and ∂L/∂Wu.
pub(crate) fn gate_up_weights(problem: &Problem, model: &Model) -> f64 {
    let Problem { m, hidden: k, intermediate: h, .. } = *problem;
    match problem.layout.orientation {
        Orientation::OutIn => multiplied([2 * h, m, k], problem, model),
        Orientation::InOut => 2.0 * multiplied([k, m, h], problem, model),
    }
}

/// Seconds of ∂L/∂Wd.
pub(crate) fn down_weight(problem: &Problem, model: &Model) -> f64 {
    multiplied([problem.hidden, problem.m, problem.intermediate], problem, model)
}

/// Seconds of the sums of columns that are the gradients of all biases.
pub(crate) fn biases(problem: &Problem, machine: &Machine) -> f64 {
    let [m, k, h] = extents(problem);
    let sums = |columns: f64| machine.launch + machine.stream(bytes(problem, m * columns));
    let of_down = if problem.op == Op::Mlp { sums(k) } else { 0.0 };
    2.0 * sums(h) + of_down
}

#[cfg(test)]
mod tests;
