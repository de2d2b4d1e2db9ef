//! The CPU as a device: an instruction set and a number of threads.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};
use swiglu_core::{
    Activation, Element, Error, GateUpRef, MatrixMut, Numerics, Path, Plan, Problem, Result,
};

use crate::isa::Isa;

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
    pool: Option<Arc<ThreadPool>>,
}

impl Cpu {
    /// The device with the given choices.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for zero threads; [`Error::Unavailable`] for an instruction set this
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
        let detected = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = options.threads.unwrap_or_else(detected);
        let pool = Self::pool(threads)?;
        Ok(Self { isa, threads, pool })
    }

    fn pool(threads: usize) -> Result<Option<Arc<ThreadPool>>> {
        match threads {
            0 => Err(Error::OutOfRange {
                what: "threads",
                given: "0".into(),
                expected: "at least 1".into(),
            }),
            1 => Ok(None),
            // The caller takes part, so the pool has one thread less than the call.
            n => ThreadPoolBuilder::new()
                .num_threads(n - 1)
                .thread_name(|i| format!("swiglu-{i}"))
                .build()
                .map(|pool| Some(Arc::new(pool)))
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

    pub(crate) fn plan(
        &self,
        problem: Problem,
        path: Path,
        parameters: &[(&str, usize)],
        reason: &str,
    ) -> Plan {
        Plan {
            problem,
            backend: "cpu".into(),
            kernel: self.isa.to_string(),
            path,
            threads: self.threads,
            parameters: BTreeMap::from_iter(parameters.iter().map(|&(k, v)| (k.to_owned(), v))),
            reason: reason.to_owned(),
        }
    }

    /// h = act(gate, up), `[M, H]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `out` is not `[M, H]`.
    pub fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<()> {
        crate::naive::activation(act, numerics, inputs, out)
    }

    /// The plan [`Cpu::activation`] follows.
    pub fn plan_activation(&self, problem: Problem) -> Plan {
        self.plan(problem, Path::Fused, &[], "one pass over gate and up")
    }
}
