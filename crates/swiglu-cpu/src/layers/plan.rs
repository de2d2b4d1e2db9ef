//! The plan of a layer, from the problem alone.

use swiglu_core::{Op, Path, Plan, Problem, QuantizedType};

use super::pass::{packed_row_bytes, pass_rows};
use crate::cpu::Cpu;
use crate::gemm::Blocks;
use crate::quant::Way;
use crate::simd;

/// Rows of one pass over the weights.
pub(super) fn rows(cpu: &Cpu, problem: &Problem, path: Path) -> usize {
    let packed = |n| packed_row_bytes(cpu, n, problem.dtype, problem.quantized.is_some());
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
    let way = |kind: QuantizedType| Some(Way::of(cpu.isa(), problem.dtype, kind.block()?, pass));
    let ways =
        problem.quantized.and_then(|q| Some((way(q.gate_up)?, way(q.down.unwrap_or(q.gate_up))?)));
    let tile_rows = match ways {
        Some((Way::Digits, _)) => simd::dot_rows(cpu.isa()),
        _ => simd::tile_rows(cpu.isa()),
    };
    let blocks = Blocks::new(pass, tile_rows);
    let parameters = [
        ("tile_rows", blocks.rows),
        ("tile_features", 2 * simd::lanes(cpu.isa())),
        ("row_blocks", blocks.count()),
        ("passes", problem.m.div_ceil(pass_rows)),
    ];
    let reason: String = match (path, ways, blocks.count()) {
        (Path::Unfused, ..) => "asked for: separate linear maps, then the activation".into(),
        (Path::Fused, Some((way, down)), _) if way == down => format!("fused; {}", way.describe()),
        (Path::Fused, Some((way, down)), _) => {
            format!("fused; {}; down: {}", way.describe(), down.describe())
        }
        (Path::Fused, None, 0 | 1) => {
            "fused; one row block, weights streamed once at memory speed".into()
        }
        (Path::Fused, None, _) => {
            "fused; several row blocks share each weight chunk from the second-level cache".into()
        }
    };
    let workers = cpu.workers(problem.flops(), problem.weight_bytes());
    cpu.make_plan(problem, path, workers, &parameters, &reason)
}
