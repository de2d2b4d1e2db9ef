//! The plan of a layer, from the problem alone.

use swiglu_core::{Op, Pass, Path, Plan, Problem, QuantizedType, RowSteps};

use super::pass::{self, Passes};
use crate::cpu::Cpu;
use crate::gemm::Blocks;
use crate::order::Order;
use crate::quant::Way;
use crate::rows::Steps;
use crate::simd;
use crate::tiles;

/// The path of a layer with these row steps where `asked` is asked for.
pub(super) fn path(asked: Path, steps: RowSteps) -> Path {
    if steps.sparsity.is_some() { Path::Unfused } else { asked }
}

/// The passes over the weights.
pub(super) fn passes(cpu: &Cpu, problem: &Problem, path: Path) -> Passes {
    let inputs = [problem.hidden, problem.intermediate];
    let inputs = match (problem.op, path) {
        (Op::Mlp, Path::Fused) if problem.rows.norm.is_none() => &inputs[..],
        _ => &inputs[..1],
    };
    let order = problem.numerics.into();
    pass::passes(cpu, problem.m, problem.dtype, problem.quantized.is_some(), order, inputs)
}

/// How a layer computes `problem` on `path`.
pub(crate) fn plan(cpu: &Cpu, problem: Problem, path: Path) -> Plan {
    let path = self::path(path, problem.rows);
    let problem = match path {
        Path::Unfused => problem.with_numerics(problem.numerics.unfused()),
        _ => problem,
    };
    let passes = passes(cpu, &problem, path);
    let (pass, order) = (passes.most_rows(), Order::from(problem.numerics));
    let way =
        |kind: QuantizedType| Some(Way::of(cpu.isa(), problem.dtype, kind.block()?, pass, order));
    let ways =
        problem.quantized.and_then(|q| Some((way(q.gate_up)?, way(q.down.unwrap_or(q.gate_up))?)));
    let tiles = ways.is_none() && tiles::take(cpu.isa(), problem.dtype, pass, order);
    let of_vectors = |tile_rows| {
        let blocks = Blocks::new(pass, tile_rows);
        (blocks.rows, blocks.count())
    };
    let (tile_rows, row_blocks) = match ways {
        Some((Way::Digits, _)) => of_vectors(simd::dot_rows(cpu.isa())),
        _ if tiles => {
            let layout = tiles::Layout { m: pass, inputs: problem.hidden };
            (layout.block_rows(), layout.blocks())
        }
        Some(_) => of_vectors(simd::tile_rows(cpu.isa())),
        None => of_vectors(Steps::Dense.tile_rows(cpu.isa(), problem.dtype)),
    };
    let parameters = [
        ("tile_rows", tile_rows),
        ("tile_features", 2 * simd::lanes(cpu.isa())),
        ("row_blocks", row_blocks),
        ("passes", passes.count),
    ];
    let mut reason: String = match (path, ways, row_blocks) {
        (Path::Unfused, ..) if problem.rows.sparsity.is_some() => {
            "all of a row of the gate decides what stays of it, so gate and up are separate linear maps"
                .into()
        }
        (Path::Unfused, ..) => "asked for: separate linear maps, then the activation".into(),
        (Path::Fused, Some((way, down)), _) if way == down => format!("fused; {}", way.describe()),
        (Path::Fused, Some((way, down)), _) => {
            format!("fused; {}; down: {}", way.describe(), down.describe())
        }
        (Path::Fused, None, _) if tiles => {
            "fused; AMX tiles, the epilogue between the products of the next panel".into()
        }
        (Path::Fused, None, 0 | 1) => {
            "fused; one row block, weights streamed once at memory speed".into()
        }
        (Path::Fused, None, _) => {
            "fused; several row blocks share each weight chunk from the second-level cache".into()
        }
    };
    if problem.pass == Pass::Backward {
        reason +=
            "; the derivative in the epilogue of dh, gradients of weights as products over tokens";
    }
    if order == Order::Common {
        reason += "; sums in one order for every number of tokens";
    }
    if problem.rows.norm.is_some() && problem.op == Op::Mlp {
        reason += "; h lies in memory while its rows are normalised";
    }
    let workers = cpu.workers(problem.flops(), problem.weight_bytes());
    cpu.make_plan(problem, path, workers, &parameters, &reason)
}
