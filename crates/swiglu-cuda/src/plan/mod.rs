//! Which kernel computes a problem, from the numbers alone.

mod by_tokens;
mod cost;
pub mod tuning;

pub(crate) use by_tokens::ByTokens;
pub(crate) use cost::Machine;

use swiglu_core::{DType, Numerics, Op, Orientation, Path, Plan, Problem, Rounding};

use crate::device::context::Cuda;
use crate::device::error::CudaError;
use crate::kernels::decode_mlp::{self, Decode, Design, MOST_TOKENS};
use crate::kernels::elementwise::Stored;
use crate::kernels::gated_gemm::{Kernel, Shape};
use crate::kernels::obstacle::Obstacle;
use crate::layers::Down;
use crate::plan::tuning::Origin;

/// One way of computing a problem, and why it was or was not chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The kernel with its tile, `cublaslt + elementwise` or `cublaslt f32 + elementwise`.
    pub name: String,
    /// Whether the plan uses it.
    pub chosen: bool,
    /// Microseconds that the cost model expects, where this way computes the problem.
    pub predicted_us: Option<f64>,
    /// Microseconds that were measured for the number of tokens that stands for this one.
    pub measured_us: Option<f64>,
    /// Why, or why not.
    pub reason: String,
}

/// What runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// One kernel.
    Fused(Kernel),
    /// cuBLASLt, then the element-wise kernel, with gate and up in memory between them.
    Unfused(Stored),
    /// The whole feed-forward block for a few tokens.
    Decode(Design),
    /// One kernel, then ours for the down projection of few tokens, where others leave that to cuBLASLt.
    Skinny(Kernel),
}

impl Choice {
    /// Every way there is, also those that compute only other problems.
    pub(crate) fn all() -> impl Iterator<Item = Choice> {
        let steps = Kernel::all().map(Choice::Fused).chain(UNFUSED.map(Choice::Unfused));
        let skinny = Kernel::all().flat_map(Kernel::before_down);
        Design::every().map(Choice::Decode).chain(steps).chain(skinny.map(Choice::Skinny))
    }

    pub(crate) fn path(self) -> Path {
        match self {
            Choice::Fused(_) | Choice::Decode(_) | Choice::Skinny(_) => Path::Fused,
            Choice::Unfused(_) => Path::Unfused,
        }
    }

    /// Whether this way gives what the problem asks for, or why not.
    pub(crate) fn check(self, cuda: &Cuda, problem: &Problem) -> Result<(), Obstacle> {
        let (dtype, rounding) = (problem.dtype, problem.numerics.rounding);
        let rounds = dtype != DType::F32;
        match (problem.quantized, self) {
            (None, _) | (_, Choice::Decode(_)) => {}
            (Some(types), _) => return Err(Obstacle::Quantized(types.gate_up)),
        }
        if cuda.portable_kernels() && self.is_of_one_architecture() {
            return Err(Obstacle::NotPortable);
        }
        match self {
            Choice::Skinny(_) if problem.op != Op::Mlp => {
                Err(Obstacle::Decode(decode_mlp::Obstacle::NotABlock(problem.op)))
            }
            Choice::Skinny(kernel) => {
                kernel.check_problem(cuda.arch(), problem, cuda.tf32())?;
                Down::of(kernel.next()).check(cuda, problem)
            }
            Choice::Fused(kernel) => kernel.check_problem(cuda.arch(), problem, cuda.tf32()),
            Choice::Unfused(_) if problem.hidden == 0 => Err(Obstacle::NothingToMultiply),
            Choice::Unfused(Stored::Elements) => match rounding {
                Rounding::Fused if rounds => Err(Obstacle::RoundsBetween(dtype)),
                _ if rounds && problem.bias => Err(Obstacle::RoundsBias(dtype)),
                _ => Ok(()),
            },
            Choice::Unfused(Stored::Sums) => match rounding {
                _ if !rounds => Err(Obstacle::SumsAreElements),
                Rounding::Fused => Ok(()),
                Rounding::PreRound | Rounding::Eager => Err(Obstacle::KeepsBetween(dtype)),
            },
            Choice::Decode(design) => {
                let decode = Decode::check_problem(design, problem, cuda.decode_limits());
                decode.map(drop).map_err(Obstacle::Decode)
            }
        }
    }

    fn is_of_one_architecture(self) -> bool {
        match self {
            Choice::Decode(design) => design.needs_copy_engine(),
            Choice::Fused(kernel) | Choice::Skinny(kernel) => kernel.needs_copy_engine(),
            Choice::Unfused(_) => false,
        }
    }

    /// Whether it is taken only where a tuning record says so.
    fn waits_for_tuning(self, problem: &Problem) -> bool {
        match self {
            Choice::Decode(design) => design.waits_for_tuning(problem),
            Choice::Fused(kernel) => {
                // A block's weights are packed `[out, in]`, whichever way they came.
                let in_out = problem.op == Op::GatedLinear
                    && problem.layout.orientation == Orientation::InOut;
                kernel.cluster() > 1 || in_out && kernel.copies_narrow_rows()
            }
            Choice::Unfused(_) => false,
            // Its cost is predicted from its form, without what both kernels share, and fitted to no measurement.
            Choice::Skinny(_) => true,
        }
    }

    /// Seconds that the cost model expects.
    pub(crate) fn seconds(self, cuda: &Cuda, problem: &Problem) -> f64 {
        let (machine, tf32) = (cuda.machine(), cuda.tf32());
        let h = match self {
            Choice::Skinny(kernel) => {
                return cost::fused(kernel, problem, machine) + cost::skinny_down(problem, machine);
            }
            Choice::Fused(kernel) => cost::fused(kernel, problem, machine),
            Choice::Unfused(stored) => cost::unfused(stored, problem, machine, tf32),
            Choice::Decode(design) => {
                let limits = cuda.decode_limits();
                let decode = Decode::check_problem(design, problem, limits);
                return decode
                    .map_or(f64::INFINITY, |d| cost::decode(&d, problem, machine, limits));
            }
        };
        match problem.op {
            Op::Mlp => h + cost::down(problem, machine, tf32),
            _ => h,
        }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Choice::Fused(kernel) => kernel.fmt(f),
            Choice::Unfused(stored) => f.pad(unfused_name(*stored)),
            Choice::Decode(design) => design.fmt(f),
            Choice::Skinny(kernel) => {
                f.pad(&format!("{kernel}{}", Down::of(kernel.next()).joined()))
            }
        }
    }
}

/// What the unfused ways keep in memory.
const UNFUSED: [Stored; 2] = [Stored::Elements, Stored::Sums];

fn unfused_name(stored: Stored) -> &'static str {
    match stored {
        Stored::Elements => "cublaslt + elementwise",
        Stored::Sums => "cublaslt f32 + elementwise",
    }
}

/// As plans name it.
const BACKEND: &str = "cuda";

/// One way of computing a problem, to be tried: see [`Cuda::ways`].
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    pub(crate) choice: Choice,
    /// Why it does not give what the problem asks for.
    pub refusal: Option<String>,
    /// The rounding that a layer computes the problem with by this way; [`None`] where it does not.
    pub numerics: Option<Numerics>,
    /// Microseconds that the cost model expects, where the way computes the problem.
    pub predicted_us: Option<f64>,
}

impl std::fmt::Display for Way {
    /// The name, for example `sm90_gated_gemm 128x64`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.choice.fmt(f)
    }
}

/// Why a choice was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Why {
    AskedFor,
    /// It took the least time of the ways that were measured with so many tokens.
    Fastest(Origin, usize),
    /// The cost model expects the least time, in seconds.
    LowestCost(f64),
    NoFusedKernel,
    /// The weights are lent, and kernels for few tokens do not take them as they lie.
    Lent,
}

/// What a linear layer runs for `problem`: on the path asked for, else by the fastest way that rounds as
/// asked. The unfused path that is asked for keeps elements. It allocates nothing.
pub(crate) fn choose(cuda: &Cuda, problem: &Problem, path: Option<Path>) -> (Choice, Why) {
    // Without input features there is nothing for cuBLASLt to multiply.
    if path == Some(Path::Unfused) && problem.hidden > 0 {
        return (Choice::Unfused(Stored::Elements), Why::AskedFor);
    }
    let admitted = |choice: &Choice| {
        let asked = path.is_none() || choice.path() == Path::Fused;
        asked && choice.check(cuda, problem).is_ok()
    };
    if let Some((origin, tuned)) = cuda.tuning().find(problem, cuda.tf32()) {
        let fastest = tuned.ways.iter().find(|(choice, _)| admitted(choice));
        if let Some(&(choice, _)) = fastest {
            return (choice, Why::Fastest(origin, tuned.m));
        }
    }
    let known = |choice: &Choice| !choice.waits_for_tuning(problem) && admitted(choice);
    let costs = Choice::all().filter(known).map(|c| (c, c.seconds(cuda, problem)));
    match costs.min_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((choice, seconds)) => (choice, Why::LowestCost(seconds)),
        // A fused kernel exists for every problem: see the tests of `gated_gemm`.
        None => (Choice::Unfused(Stored::Elements), Why::NoFusedKernel),
    }
}

/// Refuses a way that does not compute a problem; one that rounds otherwise does.
pub(crate) fn expect_way(
    cuda: &Cuda,
    way: &Way,
    problem: &Problem,
) -> crate::device::error::Result<()> {
    match way.choice.check(cuda, problem) {
        Ok(()) | Err(Obstacle::RoundsBetween(_) | Obstacle::RoundsBias(_)) => Ok(()),
        Err(why) => Err(CudaError::Unsupported { what: way.to_string(), why: why.to_string() }),
    }
}

/// The reason for people.
fn explain(choice: Choice, why: Why, problem: &Problem, machine: &cost::Machine) -> String {
    match (why, choice) {
        (Why::AskedFor, Choice::Unfused(_)) => "asked for: linear maps, then the activation".into(),
        (Why::AskedFor, _) => "asked for".into(),
        (Why::Fastest(origin, m), _) => {
            let whose = match origin {
                Origin::Measured => "measured",
                Origin::Shipped => "measured and shipped",
            };
            format!("the fastest, {whose} with {m} tokens")
        }
        (Why::LowestCost(_), Choice::Decode(_)) => {
            "the least time expected: each weight once, the next ones under way at any time".into()
        }
        (Why::LowestCost(_), Choice::Unfused(Stored::Elements)) => {
            "the least time expected, with the same rounding".into()
        }
        (Why::LowestCost(_), Choice::Unfused(Stored::Sums)) => {
            "the least time expected, with nothing rounded between: gate and up pass as f32".into()
        }
        (Why::LowestCost(_), Choice::Fused(kernel) | Choice::Skinny(kernel)) => {
            let form = kernel.form(Shape::of(problem, machine.multiprocessors as usize));
            let [rows, columns] = form.tile;
            let tiles = problem.m.div_ceil(rows) * problem.intermediate.div_ceil(columns);
            let slots = machine.multiprocessors * cost::residents(&form, machine) as f64;
            let waves = (tiles * form.split) as f64 / slots;
            format!("the least time expected: {tiles} tiles are {waves:.2} waves")
        }
        (Why::Lent, _) => "step by step: kernels for few tokens need weights [out, in] whose rows begin and end at \
             multiples of 16 bytes, or packed ones"
            .into(),
        (Why::NoFusedKernel, _) => "no fused kernel computes this".into(),
    }
}

/// Quantised weights are computed with at most [`MOST_TOKENS`] tokens at a time: what one of these
/// passes is.
fn of_pass(problem: &Problem) -> Problem {
    match problem.quantized {
        Some(_) => problem.with_m(problem.m.clamp(1, MOST_TOKENS)),
        None => *problem,
    }
}

/// Why quantised weights of this problem are decoded, where no kernel computes with them.
fn decoded_because(cuda: &Cuda, problem: &Problem) -> Option<decode_mlp::Obstacle> {
    problem.quantized?;
    let check =
        |design| Decode::check_problem(design, &of_pass(problem), cuda.decode_limits()).map(drop);
    match Design::COMMON.map(check) {
        // Without features nothing is multiplied, however weights are stored.
        [Err(why), Err(_)] if why != decode_mlp::Obstacle::Empty => Some(why),
        _ => None,
    }
}

/// What the unfused path that is asked for can round: gate and up lie in memory as T between its two steps.
pub(crate) fn unfused_rounding(problem: Problem) -> Problem {
    let mut problem = problem;
    if problem.numerics.rounding == Rounding::Fused {
        problem.numerics.rounding = Rounding::PreRound;
    }
    problem
}

/// Refuses numerics in which no layer is computed.
///
/// # Errors
/// [`swiglu_core::Error::Unsupported`] for layers that are to be batch-invariant.
pub fn expect_numerics(op: Op, numerics: Numerics) -> swiglu_core::Result<()> {
    if op == Op::Activation || !numerics.batch_invariant {
        return Ok(());
    }
    let what = format!("computing {op} in {numerics} on a CUDA device");
    let why = "kernels, and with them the order of sums, follow the number of tokens there; compute on the \
               CPU, or leave out that it is to be batch-invariant"
        .into();
    Err(swiglu_core::Error::Unsupported { what, why })
}

/// Refuses a block with row steps.
///
/// # Errors
/// [`swiglu_core::Error::Unsupported`] for any.
pub fn expect_row_steps(steps: swiglu_core::RowSteps) -> swiglu_core::Result<()> {
    steps.expect_none("on a CUDA device", "take the CPU (Device::cpu)")
}

impl Cuda {
    /// How a problem is computed: on `path`, else on the one that is expected to be faster. Making
    /// a plan has no effects; whether there is such a layer says [`expect_numerics`].
    pub fn plan(&self, problem: Problem, path: Option<Path>) -> Plan {
        if problem.op == Op::Activation {
            return Plan::new(problem, BACKEND, "elementwise", Path::Fused)
                .with_reason("one pass: each value is read once and written once");
        }
        if let Some(why) = decoded_because(self, &problem) {
            let mut plan = self.plan(problem.with_quantized(None), path);
            plan.reason += &format!("; weights decoded to {}: {why}", problem.dtype);
            return plan;
        }
        let (choice, why) = choose(self, &of_pass(&problem), path);
        let mut plan = self.plan_of(problem, choice, why);
        if let Err(refusal) = expect_numerics(problem.op, problem.numerics) {
            plan.reason += &format!("; refused: {refusal}");
        }
        plan
    }

    /// The plan that follows from a choice.
    pub(crate) fn plan_of(&self, problem: Problem, choice: Choice, why: Why) -> Plan {
        let pass = of_pass(&problem);
        let mut reason = explain(choice, why, &pass, self.machine());
        let shape = Shape::of(&problem, self.facts().sm_count as usize);
        let (kernel, mut parameters) = match choice {
            Choice::Fused(kernel) => (kernel.name().to_owned(), kernel.parameters(shape).to_vec()),
            Choice::Skinny(kernel) => {
                let down = Down::of(kernel.next());
                let own = kernel.parameters(shape).into_iter();
                let parameters = own.chain(down.parameters(self, &problem)).collect();
                (format!("{} + {}", kernel.name(), down.kernel()), parameters)
            }
            Choice::Unfused(stored) => (unfused_name(stored).to_owned(), Vec::new()),
            Choice::Decode(design) => {
                let decode = Decode::check_problem(design, &pass, self.decode_limits());
                let parameters = decode.map(|decode| decode.parameters().to_vec());
                (design.kernel().to_owned(), parameters.unwrap_or_default())
            }
        };
        if problem.quantized.is_some() {
            let passes = problem.m.div_ceil(MOST_TOKENS);
            parameters.push(("passes", passes));
            if passes > 1 {
                reason += &format!(
                    "; {MOST_TOKENS} tokens at a time, {passes} times all weights: for many tokens decode \
                     them"
                );
            }
        }
        let problem = match choice {
            Choice::Unfused(Stored::Elements) => unfused_rounding(problem),
            Choice::Unfused(Stored::Sums)
            | Choice::Fused(_)
            | Choice::Decode(_)
            | Choice::Skinny(_) => problem,
        };
        Plan::new(problem, BACKEND.to_owned(), kernel, choice.path())
            .with_parameters(parameters.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
            .with_reason(reason)
    }

    /// Every way of computing a problem that has weights, to be tried one after the other:
    /// [`crate::GatedLinear::forward_by`], [`crate::Mlp::forward_by`].
    pub fn ways(&self, problem: &Problem) -> Vec<Way> {
        Choice::all().map(|choice| self.way(choice, problem)).collect()
    }

    /// One of [`Self::ways`].
    pub(crate) fn way(&self, choice: Choice, problem: &Problem) -> Way {
        let check = choice.check(self, problem);
        let numerics = match check {
            Ok(()) => Some(problem.numerics),
            Err(Obstacle::RoundsBetween(_) | Obstacle::RoundsBias(_)) => {
                Some(unfused_rounding(*problem).numerics)
            }
            Err(_) => None,
        };
        Way {
            choice,
            refusal: check.err().map(|obstacle| obstacle.to_string()),
            numerics,
            predicted_us: numerics.map(|_| choice.seconds(self, problem) * 1e6),
        }
    }

    /// Every way of computing a problem, with what speaks for or against it.
    pub fn candidates(&self, problem: &Problem, path: Option<Path>) -> Vec<Candidate> {
        if problem.op == Op::Activation {
            let plan = self.plan(*problem, path);
            let (name, reason) = (plan.kernel, plan.reason);
            return vec![Candidate {
                name,
                chosen: true,
                predicted_us: None,
                measured_us: None,
                reason,
            }];
        }
        if decoded_because(self, problem).is_some() {
            return self.candidates(&problem.with_quantized(None), path);
        }
        let passes = problem.quantized.map_or(1, |_| problem.m.div_ceil(MOST_TOKENS));
        let problem = &of_pass(problem);
        let (chosen, why) = choose(self, problem, path);
        let best = chosen.seconds(self, problem);
        let tuned = self.tuning().find(problem, self.tf32()).map(|(_, tuned)| tuned);
        let measured = |choice: Choice| {
            let same = |(way, _): &&(Choice, f64)| *way == choice;
            tuned?.ways.iter().find(same).map(|&(_, us)| us)
        };
        let fastest = measured(chosen);
        let all = Choice::all().map(|choice| {
            let check = choice.check(self, problem);
            let asked = choice == chosen && why == Why::AskedFor;
            let seconds = (check.is_ok() || asked).then(|| choice.seconds(self, problem));
            let measured_us = measured(choice);
            let ratio = measured_us.zip(fastest).map(|(us, fastest)| us / fastest);
            let reason = match (check, seconds) {
                _ if choice == chosen => explain(choice, why, problem, self.machine()),
                (Err(obstacle), _) => obstacle.to_string(),
                (Ok(()), _) if ratio.is_some() => {
                    format!("{:.2} times as long measured", ratio.unwrap_or(f64::NAN))
                }
                (Ok(()), Some(seconds)) => {
                    let expected = format!("{:.2} times as long expected", seconds / best);
                    match choice.waits_for_tuning(problem) {
                        true => {
                            format!("{expected}; taken only once `swiglu tune` has measured it")
                        }
                        false => expected,
                    }
                }
                (Ok(()), None) => String::new(),
            };
            Candidate {
                name: choice.to_string(),
                chosen: choice == chosen,
                predicted_us: seconds.map(|s| s * 1e6 * passes as f64),
                measured_us,
                reason,
            }
        });
        all.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common;
    use crate::{GatedLinear, Mlp, QuantizedMlp};
    use swiglu_core::conformance::{Case, Parameters, QuantizedParameters};
    use swiglu_core::{Activation, BlockType, QuantizedTypes, WeightLayout, bf16};

    fn problem(dtype: DType, rounding: Rounding, bias: bool) -> Problem {
        Problem::new(Op::GatedLinear, 40, 72, 88, dtype, Activation::SWIGLU)
            .with_numerics(Numerics::default_for(dtype).with_rounding(rounding))
            .with_layout(WeightLayout::HF)
            .with_bias(bias)
    }

    const ELEMENTS: Choice = Choice::Unfused(Stored::Elements);
    const SUMS: Choice = Choice::Unfused(Stored::Sums);

    #[test]
    fn batch_invariant_layers_are_refused() {
        let Some(cuda) = common::device() else { return };
        let asked = problem(DType::Bf16, Rounding::Fused, false);
        let invariant = asked.numerics.with_batch_invariance();
        assert_eq!(expect_numerics(Op::Mlp, asked.numerics), Ok(()));
        assert_eq!(expect_numerics(Op::Activation, invariant), Ok(()));
        let plan = cuda.plan(asked.with_numerics(invariant), None);
        assert!(plan.reason.contains("refused: "), "{}", plan.reason);

        let case = |op| Case { numerics: invariant, ..Case::new(op, [1, 32, 32], DType::Bf16) };
        let parameters = Parameters::<bf16>::new(&case(Op::Mlp)).unwrap();
        let types = QuantizedTypes::of(Op::Mlp, BlockType::Q8_0);
        let quantized = QuantizedParameters::new::<bf16>(&case(Op::Mlp), types).unwrap();
        for refused in [
            GatedLinear::new(&cuda, &parameters.gated()).err(),
            Mlp::new(&cuda, &parameters.mlp()).err(),
            Mlp::with_path(&cuda, &parameters.mlp(), Path::Unfused).err(),
            QuantizedMlp::<bf16>::new(&cuda, &quantized.mlp().unwrap()).err(),
        ] {
            let refused = swiglu_core::Error::from(refused.unwrap());
            let swiglu_core::Error::Unsupported { what, why } = refused else {
                panic!("expected a refusal, not {refused}")
            };
            assert!(what.contains("batch-invariant") && why.contains("CPU"), "{what}: {why}");
        }
    }

    #[test]
    fn what_is_kept_between_decides_what_an_unfused_way_computes() {
        let Some(cuda) = common::device() else { return };
        for dtype in [DType::F16, DType::Bf16] {
            for bias in [false, true] {
                let fused = problem(dtype, Rounding::Fused, bias);
                assert_eq!(ELEMENTS.check(&cuda, &fused), Err(Obstacle::RoundsBetween(dtype)));
                assert_eq!(SUMS.check(&cuda, &fused), Ok(()));
                for rounding in [Rounding::PreRound, Rounding::Eager] {
                    let rounded = problem(dtype, rounding, bias);
                    let elements = if bias { Err(Obstacle::RoundsBias(dtype)) } else { Ok(()) };
                    assert_eq!(ELEMENTS.check(&cuda, &rounded), elements);
                    assert_eq!(SUMS.check(&cuda, &rounded), Err(Obstacle::KeepsBetween(dtype)));
                }
                let nothing = fused.with_hidden(0);
                assert_eq!(SUMS.check(&cuda, &nothing), Err(Obstacle::NothingToMultiply));
            }
        }
        let single = problem(DType::F32, Rounding::Fused, true);
        assert_eq!(ELEMENTS.check(&cuda, &single), Ok(()));
        assert_eq!(SUMS.check(&cuda, &single), Err(Obstacle::SumsAreElements));
    }

    #[test]
    fn the_unfused_path_that_is_asked_for_keeps_elements() {
        let Some(cuda) = common::device() else { return };
        let fused = problem(DType::Bf16, Rounding::Fused, true);
        assert_eq!(choose(&cuda, &fused, Some(Path::Unfused)), (ELEMENTS, Why::AskedFor));
        let plan = cuda.plan(fused, Some(Path::Unfused));
        assert_eq!(plan.kernel, "cublaslt + elementwise");
        assert_eq!(plan.problem.numerics.rounding, Rounding::PreRound);
        // And the fused one has neither.
        assert_eq!(choose(&cuda, &fused, Some(Path::Fused)).0.path(), Path::Fused);
    }

    #[test]
    fn a_plan_with_sums_rounds_as_asked() {
        let Some(cuda) = common::device() else { return };
        let fused = problem(DType::F16, Rounding::Fused, true);
        let plan = cuda.plan_of(fused, SUMS, Why::AskedFor);
        assert_eq!((plan.path, plan.problem), (Path::Unfused, fused));
        assert_eq!(plan.kernel, "cublaslt f32 + elementwise");
        let ways = cuda.ways(&fused);
        let way = ways.iter().find(|way| way.to_string() == plan.kernel).unwrap();
        assert_eq!((way.numerics, &way.refusal), (Some(fused.numerics), &None));
        assert!(way.predicted_us.unwrap() > 0.0);
        let rounded = problem(DType::F16, Rounding::PreRound, true);
        let candidates = cuda.candidates(&rounded, None);
        let candidate = candidates.iter().find(|c| c.name == plan.kernel).unwrap();
        assert_eq!(candidate.predicted_us, None);
        assert!(candidate.reason.contains("would not be rounded to f16"), "{}", candidate.reason);
        assert_eq!(cuda.way(SUMS, &rounded).numerics, None);
    }
}
