//! Which kernels layers need on a device that is not here: from its architecture and the number of its SMs.

use std::collections::{BTreeMap, HashSet};

use swiglu_core::{Path, Problem};

use super::planner::Subject;
use super::tuning::{self, Record};
use super::{Algorithm, Planner, best_kernel, choose, decoded_because, of_h, of_pass};
use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::device::jit::Variant;
use crate::kernels::NamedVariant;
use crate::kernels::decode_mlp::{Limits, MOST_TOKENS};
use crate::kernels::gated_gemm::Kernel;

/// A kind of device, for which kernels are compiled before there is one.
pub struct Target {
    /// Of each device of the kind that a tuning record is shipped of, and of one that is none of these.
    planners: Vec<Planner>,
}

/// Which of the algorithms for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ways {
    /// What plans choose by the shipped records and the cost model, and what a call falls back to.
    Planned,
    /// Every candidate, as a tuner tries them.
    Every,
}

/// Up to so many tokens each number is planned, beyond that what begins and ends a tile of so many.
const EACH: usize = 512;
const BEYOND: usize = 64;
const MOST: usize = 16_384;

impl Target {
    /// The devices of an architecture with so many SMs; by default as many as the one for data centres has, or the
    /// largest where there is none.
    pub fn new(arch: Arch, multiprocessors: Option<u32>) -> Self {
        let mut typical = typical(arch);
        typical.sm_count = multiprocessors.unwrap_or(typical.sm_count);
        // By name: a device may have several records.
        let mut devices = BTreeMap::from([(String::new(), typical.clone())]);
        for Record { subject, rates, .. } in tuning::shipped(arch) {
            if subject.sm_count == typical.sm_count {
                let name = subject.device;
                let unknown = DeviceFacts { name: name.clone(), ..typical.clone() };
                let facts = devices.entry(name).or_insert(unknown);
                if let Some(rates) = rates {
                    facts.clock_khz = rates.clock_khz;
                    facts.memory_bandwidth = rates.memory_bandwidth;
                    facts.l2_bytes = rates.l2_bytes;
                    facts.shared_bytes_optin = rates.shared_bytes_optin;
                }
            }
        }
        let planner = |facts: DeviceFacts| {
            let limits = Limits::of_arch(arch, &facts, true);
            Planner::new(Subject::new(facts, arch, limits, false), None)
        };
        Self { planners: devices.into_values().map(planner).collect() }
    }

    /// What is compiled for a layer with packed weights, each variant once; whatever the problem's number of tokens, for
    /// those given, or for all.
    pub fn kernels(
        &self,
        layer: &Problem,
        tokens: Option<&[usize]>,
        ways: Ways,
    ) -> Vec<NamedVariant> {
        let all = || {
            let beyond = (EACH..MOST).step_by(BEYOND).flat_map(|m| [m + 1, m + BEYOND]);
            (1..=EACH).chain(beyond).collect()
        };
        let tokens = tokens.map_or_else(all, <[usize]>::to_vec);
        let mut seen: HashSet<Variant> = HashSet::new();
        let mut kernels = Vec::new();
        for planner in &self.planners {
            let decoded = decoded_because(planner, layer).is_some();
            let layer = if decoded { layer.with_quantized(None) } else { *layer };
            // More quantised weights are computed with a pass at a time, the last of which may be of any number.
            let passes = (1..=MOST_TOKENS).collect();
            let tokens = if layer.quantized.is_some() { &passes } else { &tokens };
            for problem in tokens.iter().map(|&m| of_pass(&layer.with_m(m))) {
                let all = of_problem(planner, &problem, ways);
                kernels.extend(all.into_iter().filter(|kernel| seen.insert(kernel.variant)));
            }
        }
        kernels
    }
}

fn of_problem(planner: &Planner, problem: &Problem, ways: Ways) -> Vec<NamedVariant> {
    let all = match ways {
        Ways::Planned => planned(planner, problem),
        Ways::Every => {
            let computes = |algorithm: &Algorithm| algorithm.check(planner, problem).is_ok();
            Algorithm::all(problem.op).filter(computes).collect()
        }
    };
    let mut kernels = Vec::new();
    for algorithm in all {
        kernels.extend(algorithm.needed(planner, problem));
        // What takes the rows of x where the kernel that was chosen does not.
        let takes = |kernel: &Kernel| kernel.takes_rows_of(problem);
        if algorithm.kernel_of_h().is_some_and(|kernel| !takes(&kernel))
            && let Some(other) = best_kernel(planner, &of_h(problem), takes)
        {
            kernels.extend(Algorithm::gated(other).needed(planner, problem));
        }
    }
    kernels
}

/// The algorithms that a layer prepares for a number of tokens ([`crate::Layer::reserve`]): the one that is chosen; a fused kernel,
/// which takes what cuBLASLt does not; step by step, for an x that a decode kernel does not take.
fn planned(planner: &Planner, problem: &Problem) -> Vec<Algorithm> {
    let chosen = choose(planner, problem, None, None).0;
    let by_steps = |path| choose(planner, &of_h(problem), path, None).0.of(problem.op);
    let fused = chosen.stored().map(|_| by_steps(Some(Path::Fused)));
    let alone = chosen.design().filter(|_| problem.quantized.is_none());
    [chosen].into_iter().chain(fused).chain(alone.map(|_| by_steps(None))).collect()
}

/// A device by the vendor's data sheets: of the A100 80 GB, A40, Jetson Orin, L40S, H100, B200, B300,
/// Jetson Thor, RTX 5090 and DGX Spark. The shared memory of a block decides on variants, the rest on what is expected to be
/// the fastest.
fn typical(arch: Arch) -> DeviceFacts {
    let (sm_count, clock_mhz, gigabytes, l2_mib, shared_kib) = match arch {
        Arch::Sm80 => (108, 1410, 2039, 40, 163),
        Arch::Sm86 => (84, 1740, 696, 6, 99),
        Arch::Sm87 => (16, 1300, 205, 4, 163),
        Arch::Sm89 => (142, 2520, 864, 96, 99),
        Arch::Sm90a => (132, 1980, 3352, 50, 227),
        Arch::Sm100a | Arch::Sm103a => (148, 1965, 8000, 126, 227),
        Arch::Sm110a => (20, 1575, 273, 32, 227),
        Arch::Sm120a => (170, 2407, 1792, 96, 99),
        Arch::Sm121a => (48, 2418, 273, 24, 99),
    };
    DeviceFacts {
        ordinal: 0,
        name: String::new(),
        compute_capability: arch.capability(),
        sm_count,
        l2_bytes: l2_mib << 20,
        shared_bytes_optin: shared_kib << 10,
        memory_bytes: 0,
        clock_khz: clock_mhz * 1000,
        memory_bandwidth: gigabytes * 1_000_000_000,
        driver_version: (0, 0),
        uuid: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use swiglu_core::conformance::{Case, Parameters};
    use swiglu_core::{Activation, DType, Element, Numerics, Op, bf16};

    use super::*;
    use crate::common;
    use crate::device::cuda::Cuda;
    use crate::{GatedLinear, Mlp};

    const TOKENS: [usize; 4] = [1, 2, 5, 40];

    fn problem(op: Op, [k, h]: [usize; 2], dtype: DType) -> Problem {
        Problem::new(op, 0, k, h, dtype, Activation::SWIGLU)
            .with_numerics(Numerics::default_for(dtype))
    }

    /// What layers of a device compile before calls of these numbers of tokens.
    fn prepared<T: Element>(cuda: &Cuda, layer: &Problem) -> BTreeSet<String> {
        let case = Case::new(layer.op, [0, layer.hidden, layer.intermediate], T::DTYPE);
        let parameters = Parameters::<T>::new(&case).unwrap();
        let stream = cuda.stream();
        for m in TOKENS {
            match layer.op {
                Op::Mlp => Mlp::new(cuda, &parameters.mlp()).unwrap().reserve(&stream, m),
                _ => GatedLinear::new(cuda, &parameters.gated()).unwrap().reserve(&stream, m),
            }
            .unwrap();
        }
        cuda.take_used_kernels().into_keys().collect()
    }

    fn expect_prepared<T: Element>(op: Op, size: [usize; 2]) {
        let Some(cuda) = common::open(0) else { return };
        let (cuda, layer) = (cuda.unwrap(), problem(op, size, T::DTYPE));
        let mut named = BTreeSet::new();
        let planner = Planner::of(&cuda);
        let decoding = |m: usize| planned(planner, &layer.with_m(m))[0].design().is_some();
        // Preparing a number of tokens prepares each smaller one that is decoded.
        let each = (1..=MOST_TOKENS).filter(|m| decoding(*m) && *m < TOKENS[3]);
        for m in each.chain(TOKENS) {
            let kernels = of_problem(planner, &layer.with_m(m), Ways::Planned);
            named.extend(kernels.into_iter().map(|kernel| kernel.variant.to_string()));
        }
        assert_eq!(prepared::<T>(&cuda, &layer), named, "{layer}");
    }

    #[test]
    fn what_layers_compile_is_known_without_them() {
        expect_prepared::<bf16>(Op::GatedLinear, [72, 88]);
        // Rows that TMA does not take.
        expect_prepared::<bf16>(Op::GatedLinear, [20, 24]);
        expect_prepared::<bf16>(Op::Mlp, [64, 96]);
        expect_prepared::<f32>(Op::Mlp, [24, 16]);
    }

    #[test]
    fn every_architecture_has_kernels_and_records_have_their_devices() {
        for arch in Arch::ALL {
            let target = Target::new(arch, None);
            let devices = if arch == Arch::Sm90a { 3 } else { 1 };
            assert_eq!(target.planners.len(), devices, "{arch}");
            for op in [Op::GatedLinear, Op::Mlp] {
                let layer = problem(op, [4096, 14336], DType::Bf16);
                let of = |tokens, ways| target.kernels(&layer, tokens, ways);
                let (planned, every) = (of(None, Ways::Planned), of(None, Ways::Every));
                assert!(!planned.is_empty() && planned.len() <= every.len(), "{arch}");
                let one = of(Some(&[4096]), Ways::Planned);
                assert!(!one.is_empty() && one.len() <= planned.len(), "{arch}");
                let variants: HashSet<Variant> = every.iter().map(|k| k.variant).collect();
                assert_eq!(variants.len(), every.len(), "{arch}");
            }
        }
        // Tiles are fitted to the SMs.
        let layer = problem(Op::GatedLinear, [4096, 14336], DType::Bf16);
        let of = |sms| Target::new(Arch::Sm90a, sms).kernels(&layer, Some(&[8]), Ways::Planned);
        assert_ne!(of(None)[0].variant, of(Some(114))[0].variant);
    }
}
