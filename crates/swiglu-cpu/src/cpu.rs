//! The CPU as a device: an instruction set and a number of threads.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::ThreadPoolBuilder;
use swiglu_core::{BlockType, DType, Error, Op, Path, Plan, Problem, Result};

use crate::isa::Isa;
use crate::team::{self, Step, Team};
use crate::{elementwise, layers, simd};

/// Choices for [`Cpu::new`]; `None` means detected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// The instruction set.
    pub isa: Option<Isa>,
    /// Threads that take part in one call, the caller included.
    pub threads: Option<usize>,
}

/// An instruction set and a thread pool. Cheap to clone; clones share the pool.
#[derive(Debug, Clone)]
pub struct Cpu {
    isa: Isa,
    threads: usize,
    team: Option<Arc<Team>>,
}

impl Cpu {
    /// The device with the given choices. Where the instruction set is detected, or is [`Isa::AmxBf16`], Linux
    /// is asked to let this process use AMX tiles, which has an effect on alternate signal stacks: see
    /// [`Isa::is_available`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for zero threads, or more than four times the processors; [`Error::Unavailable`] for an instruction set this
    /// machine lacks or threads that cannot be started.
    pub fn new(options: &CpuOptions) -> Result<Self> {
        let isa = options.isa.unwrap_or_else(Isa::detect);
        if !isa.is_available() {
            return Err(Error::Unavailable {
                what: format!("instruction set {isa}"),
                why: format!(
                    "this machine has {}",
                    Isa::available().map(Isa::name).collect::<Vec<_>>().join(", ")
                ),
            });
        }
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = options.threads.unwrap_or(processors);
        // A few more than there are processors only cost time; many more bring work to a halt.
        let most = (4 * processors).max(16);
        if threads == 0 || threads > most {
            return Err(Error::OutOfRange {
                what: "threads",
                given: threads.to_string(),
                expected: format!("1 to {most}; there are {processors} processors"),
            });
        }
        simd::learn();
        let team = Self::team(threads)?;
        Ok(Self { isa, threads, team })
    }

    fn team(threads: usize) -> Result<Option<Arc<Team>>> {
        match threads {
            0 | 1 => Ok(None),
            // The caller takes part, so the pool has one thread less than the call.
            n => ThreadPoolBuilder::new()
                .num_threads(n - 1)
                .thread_name(|i| format!("swiglu-{i}"))
                .build()
                .map(|pool| Some(Arc::new(Team::new(pool))))
                .map_err(|e| Error::Unavailable {
                    what: format!("a pool of {n} threads"),
                    why: e.to_string(),
                }),
        }
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that take part in one call, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Up to this many rows of `dtype` a layer of these blocks multiplies their integers as they are: the fast
    /// one where weights come from memory. Decoded weights that stay in the cache can be faster before (by 15 %
    /// for 8 rows of a small layer), and with more rows decoded ones are at least as fast.
    pub fn quantized_rows(&self, dtype: DType, block: BlockType) -> usize {
        crate::quant::digit_rows_max(self.isa, dtype, block)
    }

    /// Runs steps on up to `workers` threads.
    pub(crate) fn run(&self, workers: usize, steps: &[Step<'_>]) {
        team::run(self.team.as_deref(), workers.min(self.threads), steps);
    }

    /// Threads worth waking for this much work: handing work to another thread costs some
    /// microseconds, so calls shorter than that stay with the caller.
    pub(crate) fn workers(&self, flops: f64, bytes: f64) -> usize {
        const FLOPS_PER_S: f64 = 200e9;
        const BYTES_PER_S: f64 = 100e9;
        const WORTH_SHARING_S: f64 = 10e-6;
        let seconds = (flops / FLOPS_PER_S).max(bytes / BYTES_PER_S);
        if seconds < WORTH_SHARING_S { 1 } else { self.threads }
    }

    /// How `problem` will be computed on `path`: the same as the layer's own plan, from the numbers
    /// alone.
    pub fn plan(&self, problem: Problem, path: Path) -> Plan {
        match problem.op {
            Op::Activation => elementwise::plan(self, problem),
            Op::GatedLinear | Op::Mlp => layers::plan(self, problem, path),
        }
    }

    pub(crate) fn make_plan(
        &self,
        problem: Problem,
        path: Path,
        workers: usize,
        parameters: &[(&str, usize)],
        reason: &str,
    ) -> Plan {
        Plan {
            problem,
            backend: "cpu".into(),
            kernel: self.isa.to_string(),
            path,
            threads: workers.min(self.threads),
            parameters: BTreeMap::from_iter(parameters.iter().map(|&(k, v)| (k.to_owned(), v))),
            reason: reason.to_owned(),
        }
    }
}
