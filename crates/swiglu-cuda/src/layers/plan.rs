//! Which kernel computes a problem, from the numbers alone.

use swiglu_core::{DType, Op, Path, Plan, Problem, Rounding};

use crate::context::Cuda;
use crate::kernels::gated_gemm::{Kernel, Obstacle};

/// One way of computing a problem, and why it was or was not chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The kernel with its tile, or `cublaslt + elementwise`.
    pub name: String,
    /// Whether the plan uses it.
    pub chosen: bool,
    /// Why, or why not.
    pub reason: String,
}

/// What runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// One kernel.
    Fused(Kernel),
    /// cuBLASLt, then the element-wise kernel.
    Unfused,
}

impl Choice {
    pub(crate) fn path(self) -> Path {
        match self {
            Choice::Fused(_) => Path::Fused,
            Choice::Unfused => Path::Unfused,
        }
    }
}

pub(crate) const UNFUSED: &str = "cublaslt + elementwise";

/// The cost of a kernel for a problem, in arbitrary units of the same size for all kernels: whole
/// waves of tiles, each as long as its tile is large, over how near the kernel comes to the rate of
/// the tensor cores. The three rates are from the bytes of shared memory that each k-step reads per
/// multiplication (device files' heads); only their ratios matter.
fn cost(kernel: Kernel, problem: &Problem, sm_count: u32) -> f64 {
    let ([rows, columns], cluster) = (kernel.tile(), kernel.cluster());
    let tiles = problem.m.div_ceil(rows) as f64 * problem.intermediate.div_ceil(columns) as f64;
    let per_block = rows * columns / cluster;
    let rate = match (kernel, per_block) {
        // Not measured yet, so they win only where the waves are in their favour. Sharing weights saves
        // bytes, not arithmetic; ping-pong has the narrow tile's rate and hides the activation.
        (Kernel::Sm90(_), 16_384..) if cluster > 1 => 0.98,
        (Kernel::Sm90(config), _) if config.ping_pong() => 0.89,
        (Kernel::Sm90(_), 16_384..) => 1.0,
        (Kernel::Sm90(_), _) => 0.9,
        (Kernel::Mma(_), 8_192..) => 0.6,
        (Kernel::Mma(_), 2_048..) => 0.4,
        (Kernel::Mma(_), _) => 0.25,
        (Kernel::Simt, _) => 0.05,
    };
    let waves = (tiles / (f64::from(sm_count.max(1)) / cluster as f64).floor().max(1.0)).ceil();
    waves * per_block as f64 / rate
}

/// Rows from which cuBLAS multiplies f32 faster than this crate's kernel: below, both stream the
/// weights at the speed of memory and one launch is less than two.
const UNFUSED_F32_ROWS: usize = 64;

/// The cost of a kernel on this device, or why it does not compute the problem.
fn judge(cuda: &Cuda, problem: &Problem, kernel: Kernel) -> Result<f64, Obstacle> {
    kernel.check_problem(cuda.arch(), problem, cuda.tf32())?;
    Ok(cost(kernel, problem, cuda.facts().sm_count))
}

/// The fused kernel of the lowest cost. One exists for every problem: see the tests of `gated_gemm`.
fn best_fused(cuda: &Cuda, problem: &Problem) -> Option<Kernel> {
    let costs = Kernel::all().filter_map(|k| Some((k, judge(cuda, problem, k).ok()?)));
    costs.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(kernel, _)| kernel)
}

/// Why a choice was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    AskedFor,
    FasterF32,
    LowestCost,
    NoFusedKernel,
}

/// What a linear layer runs for `problem`: on the path asked for, else on the faster one that rounds
/// as asked. Part of every call: it allocates nothing.
pub(crate) fn choose(cuda: &Cuda, problem: &Problem, path: Option<Path>) -> (Choice, Why) {
    // Without input features there is nothing for cuBLASLt to multiply.
    let multiplies = problem.hidden > 0;
    if multiplies && path == Some(Path::Unfused) {
        return (Choice::Unfused, Why::AskedFor);
    }
    let exact_f32 = problem.dtype == DType::F32 && !cuda.tf32();
    if multiplies && path.is_none() && exact_f32 && problem.m >= UNFUSED_F32_ROWS {
        return (Choice::Unfused, Why::FasterF32);
    }
    match best_fused(cuda, problem) {
        Some(kernel) => (Choice::Fused(kernel), Why::LowestCost),
        None => (Choice::Unfused, Why::NoFusedKernel),
    }
}

/// The reason for people.
fn explain(choice: Choice, why: Why, problem: &Problem, sm_count: u32) -> String {
    match (why, choice) {
        (Why::AskedFor, _) => "asked for: linear maps, then the activation".into(),
        (Why::FasterF32, _) => {
            "f32 without tensor cores: cuBLAS multiplies faster, with the same rounding".into()
        }
        (Why::LowestCost, Choice::Fused(kernel)) => {
            let [rows, columns] = kernel.tile();
            let tiles = problem.m.div_ceil(rows) * problem.intermediate.div_ceil(columns);
            let waves = (tiles * kernel.cluster()) as f64 / f64::from(sm_count.max(1));
            format!("{tiles} tiles are {waves:.2} waves")
        }
        (Why::LowestCost | Why::NoFusedKernel, _) => "no fused kernel computes this".into(),
    }
}

/// What the unfused path can round: gate and up lie in memory as T between its two steps.
pub(crate) fn unfused_rounding(problem: Problem) -> Problem {
    let mut problem = problem;
    if problem.numerics.rounding == Rounding::Fused {
        problem.numerics.rounding = Rounding::PreRound;
    }
    problem
}

impl Cuda {
    /// How a problem is computed: on `path`, else on the one that is expected to be faster. Making
    /// a plan has no effects.
    pub fn plan(&self, problem: Problem, path: Option<Path>) -> Plan {
        let backend = "cuda".to_owned();
        if problem.op == Op::Activation {
            return Plan {
                problem,
                backend,
                kernel: "elementwise".into(),
                path: Path::Fused,
                threads: 0,
                parameters: Default::default(),
                reason: "one pass: each value is read once and written once".into(),
            };
        }
        let (choice, why) = choose(self, &problem, path);
        let reason = explain(choice, why, &problem, self.facts().sm_count);
        let (kernel, parameters) = match choice {
            Choice::Fused(kernel) => (kernel.name(), kernel.parameters().to_vec()),
            Choice::Unfused => (UNFUSED, Vec::new()),
        };
        let problem = match choice {
            Choice::Unfused => unfused_rounding(problem),
            Choice::Fused(_) => problem,
        };
        Plan {
            problem,
            backend,
            kernel: kernel.into(),
            path: choice.path(),
            threads: 0,
            parameters: parameters.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            reason,
        }
    }

    /// Every way of computing a problem, with what speaks for or against it.
    pub fn candidates(&self, problem: &Problem, path: Option<Path>) -> Vec<Candidate> {
        if problem.op == Op::Activation {
            let plan = self.plan(*problem, path);
            let (name, reason) = (plan.kernel, plan.reason);
            return vec![Candidate { name, chosen: true, reason }];
        }
        let (choice, why) = choose(self, problem, path);
        let reason = explain(choice, why, problem, self.facts().sm_count);
        let best = cost_of(choice, problem, self);
        let mut all: Vec<Candidate> = Kernel::all()
            .map(|kernel| {
                let chosen = choice == Choice::Fused(kernel);
                let reason = match judge(self, problem, kernel) {
                    _ if chosen => reason.clone(),
                    Err(obstacle) => obstacle.to_string(),
                    Ok(cost) => match best {
                        Some(best) => format!("{:.2} times the work in whole waves", cost / best),
                        None => "the unfused path was preferred".into(),
                    },
                };
                Candidate { name: kernel.to_string(), chosen, reason }
            })
            .collect();
        let chosen = choice == Choice::Unfused;
        let traffic = 4.0 * problem.m as f64 * problem.intermediate as f64;
        let megabytes = traffic * problem.dtype.size() as f64 / 1e6;
        all.push(Candidate {
            name: UNFUSED.into(),
            chosen,
            reason: match chosen {
                true => reason,
                false => format!("gate and up would pass through memory: {megabytes:.2} MB more"),
            },
        });
        all
    }
}

fn cost_of(choice: Choice, problem: &Problem, cuda: &Cuda) -> Option<f64> {
    match choice {
        Choice::Fused(kernel) => Some(cost(kernel, problem, cuda.facts().sm_count)),
        Choice::Unfused => None,
    }
}
