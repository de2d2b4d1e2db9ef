//! The plan of a layer, from the problem alone.

use swiglu_core::{Op, Path, Plan, Problem};

use super::pass::{packed_row_bytes, pass_rows};
use crate::cpu::Cpu;
use crate::gemm::Blocks;
use crate::quant::dot_rows_max;
use crate::simd;

/// Rows of one pass over the weights.
pub(super) fn rows(cpu: &Cpu, problem: &Problem, path: Path) -> usize {
    let packed = |n: usize| packed_row_bytes(n, problem.dtype, problem.quantized.is_some());
    let bytes = match (problem.op, path) {
        // Packed x and packed h of a pass share the cache.
        (Op::Mlp, Path::Fused) => (packed(problem.hidden) + packed(problem.intermediate)) / 2,
        _ => packed(problem.hidden),
    };
    pass_rows(cpu, problem.m, bytes)
}

/// How a layer computes `problem` on `path`.
pub(crate) fn plan(cpu: &Cpu, problem: Problem, path: Path) -> Plan {
    let pass_rows = rows(cpu, &problem, path);
    let pass = problem.m.min(pass_rows);
    let digits = problem.quantized.is_some() && pass <= dot_rows_max(cpu.isa());
    let tile_rows = if digits { simd::dot_rows(cpu.isa()) } else { simd::tile_rows(cpu.isa()) };
    let blocks = Blocks::new(pass, tile_rows);
    let parameters = [
        ("tile_rows", blocks.rows),
        ("tile_features", 2 * simd::lanes(cpu.isa())),
        ("row_blocks", blocks.count()),
        ("passes", problem.m.div_ceil(pass_rows)),
    ];
    let reason = match (path, blocks.count()) {
        (Path::Fused, _) if digits => {
            "fused; quantised weights times fixed-point inputs, streamed once at memory speed"
        }
        (Path::Fused, _) if problem.quantized.is_some() => {
            "fused; quantised weights decoded chunk by chunk into the second-level cache"
        }
        (Path::Unfused, _) => "asked for: separate linear maps, then the activation",
        (Path::Fused, 0 | 1) => "fused; one row block, weights streamed once at memory speed",
        (Path::Fused, _) => {
            "fused; several row blocks share each weight chunk from the second-level cache"
        }
    };
    let workers = cpu.workers(problem.flops(), problem.weight_bytes());
    cpu.make_plan(problem, path, workers, &parameters, reason)
}
