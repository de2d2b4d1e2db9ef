//! The CPU as a device: an instruction set and a number of threads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};
use swiglu_core::{BlockType, DType, Error, Op, Path, Plan, Problem, Result};

use crate::isa::Isa;
use crate::quant::expect_quantized;
use crate::team::{self, ForkJoin, Step, Team};
use crate::workspace::Workspaces;
use crate::{elementwise, layers, simd};

/// Choices for [`Cpu::new`]; `None` means detected.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CpuOptions {
    /// The instruction set.
    pub isa: Option<Isa>,
    /// Threads that take part in one call, the caller included: one per processor, or as many as the given pool has.
    pub threads: Option<usize>,
    /// The pool whose threads help callers, instead of one of the device's own.
    pub pool: Option<Arc<ThreadPool>>,
    /// Another runtime whose threads take part, instead of a pool.
    pub fork_join: Option<Arc<dyn ForkJoin>>,
}

impl CpuOptions {
    /// Forces an instruction set.
    #[must_use]
    pub fn with_isa(self, isa: impl Into<Option<Isa>>) -> Self {
        Self { isa: isa.into(), ..self }
    }

    /// Limits the threads that take part in one call, the caller included.
    #[must_use]
    pub fn with_threads(self, threads: impl Into<Option<usize>>) -> Self {
        Self { threads: threads.into(), ..self }
    }

    /// Takes helpers from a pool of rayon that other devices and the program itself may use too, also while they call.
    #[must_use]
    pub fn with_pool(self, pool: impl Into<Option<Arc<ThreadPool>>>) -> Self {
        Self { pool: pool.into(), ..self }
    }

    /// Computes on the threads of another runtime: on as many as it has in each call, up to `threads`. A call then waits for
    /// all of them.
    #[must_use]
    pub fn with_fork_join(self, threads: impl Into<Option<Arc<dyn ForkJoin>>>) -> Self {
        Self { fork_join: threads.into(), ..self }
    }
}

/// Limits of one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallOptions {
    /// The most threads of the host that take part, the caller included; 1 is the caller alone. `None`: as many as the
    /// device has. Results do not depend on it.
    pub max_threads: Option<usize>,
}

impl CallOptions {
    /// Limits the threads of the host that take part, the caller included.
    #[must_use]
    pub fn with_max_threads(self, threads: impl Into<Option<usize>>) -> Self {
        Self { max_threads: threads.into(), ..self }
    }

    /// Refuses limits that no call can keep.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for no threads.
    pub fn validate(&self) -> Result<()> {
        match self.max_threads {
            Some(0) => Err(Error::OutOfRange {
                what: "max_threads",
                given: "0".into(),
                expected: "at least 1, the caller".into(),
            }),
            _ => Ok(()),
        }
    }
}

/// An instruction set, a thread pool and working memory. Cheap to clone; clones share the pool and the memory.
#[derive(Debug, Clone)]
pub struct Cpu {
    isa: Isa,
    threads: usize,
    shared: Arc<Shared>,
}

/// Whether they are the same: clones, not devices that were made alike.
impl PartialEq for Cpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.threads == other.threads
    }
}

impl Eq for Cpu {}

/// What the clones of a device share.
#[derive(Debug)]
struct Shared {
    team: Option<Team>,
    workspaces: Workspaces,
    /// What forward passes keep for backward passes.
    kept: Workspaces,
}

impl Cpu {
    /// The device with the given choices. Where the instruction set is detected, or is [`Isa::AmxBf16`], Linux
    /// is asked to let this process use AMX tiles, which has an effect on alternate signal stacks: see
    /// [`Isa::is_available`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for zero threads, more than four times the processors, or more than a given pool has and the
    /// caller, or for a pool and another runtime at once; [`Error::Unavailable`] for an instruction set this machine lacks or
    /// threads that cannot be started.
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
        let (detected, most, there_are) = match &options.pool {
            None => {
                // A few more than there are processors only cost time; many more bring work to a halt.
                (processors, (4 * processors).max(16), format!("{processors} processors"))
            }
            Some(pool) => {
                let helpers = pool.current_num_threads();
                (helpers, helpers + 1, format!("{helpers} threads in the pool"))
            }
        };
        let threads = options.threads.unwrap_or(detected);
        if threads == 0 || threads > most {
            return Err(Error::OutOfRange {
                what: "threads",
                given: threads.to_string(),
                expected: format!("1 to {most}; there are {there_are}"),
            });
        }
        simd::learn();
        // The caller takes part, so a team has one thread less than the call.
        let team = match (&options.pool, &options.fork_join) {
            (Some(_), Some(_)) => {
                return Err(Error::OutOfRange {
                    what: "fork_join",
                    given: "a runtime beside a pool".into(),
                    expected: "one of the two".into(),
                });
            }
            _ if threads == 1 => None,
            (Some(pool), None) => Some(Team::of_pool(pool.clone())),
            (None, Some(runtime)) => Some(Team::of_fork_join(runtime.clone())),
            (None, None) => Some(Team::of_pool(Arc::new(Self::pool(threads - 1)?))),
        };
        let (workspaces, kept) = Default::default();
        let shared = Arc::new(Shared { team, workspaces, kept });
        Ok(Self { isa, threads, shared })
    }

    fn pool(threads: usize) -> Result<ThreadPool> {
        ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("swiglu-{i}"))
            .build()
            .map_err(|e| Error::Unavailable {
                what: format!("a pool of {threads} threads"),
                why: format!("{e}; one thread needs none (CpuOptions::with_threads)"),
            })
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

    /// Makes ready what so many calls at the same time take, of up to `bytes` of working memory each.
    pub(crate) fn reserve(&self, bytes: usize, callers: usize) -> Result<()> {
        /// More than any process has threads.
        const MOST: usize = 1 << 16;
        if callers > MOST {
            return Err(Error::OutOfRange {
                what: "callers",
                given: callers.to_string(),
                expected: format!("at most {MOST} calls at the same time"),
            });
        }
        if let Some(team) = &self.shared.team {
            team.reserve(callers);
        }
        self.shared.workspaces.reserve(bytes, callers)
    }

    /// Frees the working memory that no call uses at the moment, and returns its bytes.
    ///
    /// Layers share the memory: there are as many blocks as were in use at the same time, not larger than what was taken of
    /// them. The device keeps them until this.
    pub fn trim(&self) -> usize {
        self.shared.workspaces.trim() + self.shared.kept.trim()
    }

    /// Bytes of working memory that is kept and that no call uses at the moment.
    pub fn workspace_bytes(&self) -> usize {
        self.shared.workspaces.bytes() + self.shared.kept.bytes()
    }

    pub(crate) fn kept(&self) -> &Workspaces {
        &self.shared.kept
    }

    pub(crate) fn workspaces(&self) -> &Workspaces {
        &self.shared.workspaces
    }

    /// The device with as many threads as a call may have.
    pub(crate) fn for_call(&self, options: &CallOptions) -> Result<Cow<'_, Self>> {
        options.validate()?;
        Ok(match options.max_threads {
            Some(most) if most < self.threads => Cow::Owned(Self { threads: most, ..self.clone() }),
            _ => Cow::Borrowed(self),
        })
    }

    /// Runs steps on up to `workers` threads.
    pub(crate) fn run(&self, workers: usize, steps: &[Step<'_>]) {
        team::run(self.shared.team.as_ref(), workers.min(self.threads), steps);
    }

    /// Runs the steps of a call with this much work on the threads that are worth waking for it, and free.
    pub(crate) fn run_work(&self, (flops, bytes): (f64, f64), steps: &[Step<'_>]) {
        // Less than the system leaves a thread its processor while others want it.
        const SHORT_S: f64 = 3e-3;
        let (team, workers) = (self.shared.team.as_ref(), self.workers(flops, bytes));
        if seconds(flops, bytes) < SHORT_S {
            team::run_short(team, workers, steps);
        } else {
            team::run(team, workers, steps);
        }
    }

    /// Threads worth waking for this much work: handing work to another thread costs some
    /// microseconds, so calls shorter than that stay with the caller.
    pub(crate) fn workers(&self, flops: f64, bytes: f64) -> usize {
        const WORTH_SHARING_S: f64 = 10e-6;
        if seconds(flops, bytes) < WORTH_SHARING_S { 1 } else { self.threads }
    }

    /// How `problem` will be computed on `path`: the same as the layer's own plan, from the numbers
    /// alone; of quantised weights that there are no kernels for, as that of a layer whose weights are decoded.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unsupported`] for what no layer computes ([`Problem::expect_computed`]).
    pub fn plan(&self, problem: Problem, path: Path) -> Result<Plan> {
        problem.expect_computed()?;
        let types = problem.quantized.map(|types| [Some(types.gate_up), types.down]);
        let check = |kind| expect_quantized(problem.op, problem.dtype, kind).err();
        if let Some(why) = types.into_iter().flatten().flatten().find_map(check) {
            let mut plan = self.plan(problem.with_quantized(None), path)?;
            plan.reason += &format!("; weights decoded to {}: {why}", problem.dtype);
            return Ok(plan);
        }
        Ok(match problem.op {
            Op::Activation => elementwise::plan(self, problem),
            _ => layers::plan(self, problem, path),
        })
    }

    pub(crate) fn make_plan(
        &self,
        problem: Problem,
        path: Path,
        workers: usize,
        parameters: &[(&str, usize)],
        reason: &str,
    ) -> Plan {
        Plan::new(problem, "cpu", self.isa.name(), path)
            .with_threads(workers.min(self.threads))
            .with_parameters(BTreeMap::from_iter(
                parameters.iter().map(|&(k, v)| (k.to_owned(), v)),
            ))
            .with_reason(reason)
    }
}

/// About the time of this much work.
fn seconds(flops: f64, bytes: f64) -> f64 {
    const FLOPS_PER_S: f64 = 200e9;
    const BYTES_PER_S: f64 = 100e9;
    (flops / FLOPS_PER_S).max(bytes / BYTES_PER_S)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_the_threads_of_the_device_or_fewer() {
        let cpu = Cpu::new(&CpuOptions::default().with_threads(3)).unwrap();
        for (most, expected) in [(None, 3), (Some(1), 1), (Some(2), 2), (Some(3), 3), (Some(9), 3)]
        {
            let options = CallOptions::default().with_max_threads(most);
            let limited = cpu.for_call(&options).unwrap();
            assert_eq!((limited.threads(), limited.workers(1e12, 0.0)), (expected, expected));
        }
    }
}
