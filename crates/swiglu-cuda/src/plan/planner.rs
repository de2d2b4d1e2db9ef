//! What plans are made from, beside the problem: options, the device's limits, the cost model's numbers, measurements; and
//! what was chosen by them.

use std::panic::UnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError, Weak};

use swiglu_core::{Path, Problem};

use super::basis::{Basis, Subject};
use super::calibration::{Calibrated, Calibration, Reading};
use super::choices::{Choices, Lent};
use super::machine::{Machine, Model, Rates};
use super::tuning::{self, NotKept, Refusal, Tuning, TuningOptions};
use crate::device::arch::Arch;
use crate::device::cuda::{Cuda, Opening};
use crate::device::error::Result;
use crate::device::jit::cache::CacheOptions;
use crate::kernels::decode_mlp::Limits;

/// How a [`Cuda`] is made.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Number of the device, from 0.
    pub device: usize,
    /// Whether f32 matrix products may round their inputs to TF32 (11 significant bits).
    pub tf32: bool,
    /// Whether memory comes from plain allocations, which wait for the device, and not from its
    /// stream-ordered pool: to measure what the pool changes.
    pub plain_allocations: bool,
    /// Whether plans leave out the kernels of one architecture, and what was measured with them: what a device without
    /// them would run, to measure it on one that has them.
    pub portable_kernels: bool,
    /// Where compiled kernels are kept.
    pub cache: CacheOptions,
    /// Where measurements are kept that plans are chosen by.
    pub tuning: TuningOptions,
}

impl CudaOptions {
    /// A device by its number, from 0.
    pub fn new(device: usize) -> Self {
        Self { device, ..Self::default() }
    }

    swiglu_core::setters! {
        /// Another device.
        with_device(device: usize);
        /// Whether f32 matrix products may round their inputs to TF32.
        with_tf32(tf32: bool);
        /// Whether memory comes from plain allocations.
        with_plain_allocations(plain_allocations: bool);
        /// Whether plans leave out the kernels of one architecture.
        with_portable_kernels(portable_kernels: bool);
        /// Where compiled kernels are kept.
        with_cache(cache: CacheOptions);
        /// Where measurements are kept.
        with_tuning(tuning: TuningOptions);
    }
}

pub(super) type ReadBasis = Box<dyn FnOnce() -> Basis + Send + UnwindSafe>;

/// What is attached to a device: its planners.
struct Attached {
    subject: Subject,
    first: Planner,
    /// Held while the device is measured: two that measure at once would measure each other.
    measuring: Mutex<()>,
}

impl Attached {
    fn of(cuda: &Cuda) -> &Self {
        cuda.attached()
    }

    /// In the order in which they were made.
    fn planners(&self) -> impl Iterator<Item = &Planner> {
        std::iter::successors(Some(&self.first), |planner| Some(&**planner.next.get()?))
    }

    fn latest(&self) -> &Planner {
        self.planners().last().unwrap_or(&self.first)
    }
}

/// A device's planner. It is made with the device, and what it plans never changes: when the device is measured, another
/// follows it, for layers that are made from then on.
pub(crate) struct Planner {
    arch: Arch,
    limits: Limits,
    /// Read when the first plan asks: a program that computes nothing here does not wait for it.
    basis: LazyLock<Basis, ReadBasis>,
    /// Whether plans leave out the kernels of one architecture.
    pub(crate) portable_kernels: bool,
    /// Those of the layers that there are.
    choices: Mutex<Vec<Weak<Choices>>>,
    /// Planners before it.
    generation: usize,
    next: OnceLock<Box<Planner>>,
}

impl Planner {
    pub(super) fn new(
        arch: Arch,
        limits: Limits,
        basis: ReadBasis,
        portable_kernels: bool,
        generation: usize,
    ) -> Self {
        let (choices, next) = Default::default();
        let basis = LazyLock::new(basis);
        Self { arch, limits, basis, portable_kernels, choices, generation, next }
    }

    /// What kernels are compiled for.
    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    /// The planner for what is made now.
    pub(crate) fn of(cuda: &Cuda) -> &Self {
        Attached::of(cuda).latest()
    }

    /// The planner for what was made when there were so many before it.
    pub(super) fn at(cuda: &Cuda, generation: usize) -> &Self {
        let attached = Attached::of(cuda);
        attached.planners().nth(generation).unwrap_or(&attached.first)
    }

    /// What the decode kernels need to know of the device.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// What the cost model knows of the device.
    pub(crate) fn model(&self) -> &Model {
        &self.basis.model
    }

    pub(crate) fn tuning(&self) -> &Tuning {
        &self.basis.tuning
    }

    /// What is chosen for layers of this problem, whatever its number of tokens: one for all that are the same.
    pub(crate) fn choices(
        &self,
        problem: &Problem,
        path: Option<Path>,
        lent: Option<Lent>,
    ) -> Arc<Choices> {
        // Nothing that panics is done under the lock.
        let mut all = self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().filter_map(Weak::upgrade).find(|c| c.is_of(problem, path, lent));
        known.unwrap_or_else(|| {
            let new = Arc::new(Choices::new(problem, path, lent, self.generation));
            all.retain(|choices| choices.strong_count() > 0);
            all.push(Arc::downgrade(&new));
            new
        })
    }
}

impl Cuda {
    /// The device with this number and default options.
    ///
    /// # Errors
    /// As [`Cuda::with_options`].
    pub fn new(device: usize) -> Result<Self> {
        Self::with_options(&CudaOptions::new(device))
    }

    /// A device with options.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`](crate::CudaError::LibraryMissing) and
    /// [`CudaError::SymbolMissing`](crate::CudaError::SymbolMissing) without a usable driver,
    /// [`CudaError::NoDevice`](crate::CudaError::NoDevice), [`CudaError::DeviceIndex`](crate::CudaError::DeviceIndex),
    /// [`CudaError::Unsupported`](crate::CudaError::Unsupported) for a device older than any kernel, and whatever the
    /// driver reports.
    pub fn with_options(options: &CudaOptions) -> Result<Self> {
        let CudaOptions { device, tf32, plain_allocations, portable_kernels, cache, tuning } =
            options;
        let opening = Opening {
            device: *device,
            tf32: *tf32,
            plain_allocations: *plain_allocations,
            cache: cache.clone(),
        };
        Self::open(&opening, |context, facts, arch| {
            let disabled = tuning.disabled || *portable_kernels;
            let limits = Limits::new(context, facts, arch);
            let model = Model {
                machine: Machine::new(&Rates::from(facts), facts.sm_count, arch),
                limits,
                tf32: *tf32,
            };
            let tuning = TuningOptions { dir: tuning.directory(), disabled };
            let subject = Subject { facts: facts.clone(), arch, model, tuning };
            let of = subject.clone();
            let basis: ReadBasis = Box::new(move || of.basis(None));
            let first = Planner::new(arch, limits, basis, *portable_kernels, 0);
            Attached { subject, first, measuring: Mutex::default() }
        })
    }

    /// What was found of measurements that plans are chosen by, and why a record is not used; at the end whether the rates
    /// that they are estimated with were measured. None of it is an error: without a record a cost model chooses.
    pub fn tuning_notes(&self) -> &[String] {
        &Planner::of(self).basis.notes
    }

    /// The rates that plans which are made now are estimated with, and which of them were measured. It measures nothing.
    pub fn calibration(&self) -> &Calibration {
        &Planner::of(self).basis.calibration
    }

    /// Has plans made from now on by what `measure` finds, and keeps that. Layers that there are stay with the planner that
    /// they were made by.
    pub(crate) fn recalibrate(
        &self,
        measure: impl FnOnce() -> Result<Calibration<Reading>>,
    ) -> Result<Calibrated> {
        let Attached { subject, measuring, .. } = Attached::of(self);
        let _one = measuring.lock().unwrap_or_else(PoisonError::into_inner);
        let readings = measure()?;
        let latest = Planner::of(self);
        // It is not to find what is kept now.
        LazyLock::force(&latest.basis);
        let replaced = subject.read().err().map(|(_, refusal)| refusal);
        let kept = subject.keep(&readings);
        let of = subject.clone();
        let rates = subject.calibration(Some(&readings));
        let next = Planner::new(
            latest.arch,
            latest.limits,
            Box::new(move || of.basis(Some(&readings))),
            latest.portable_kernels,
            latest.generation + 1,
        );
        // The lock is held: nobody else has set it.
        let _ = latest.next.set(Box::new(next));
        Ok(Calibrated { rates, kept, replaced })
    }

    /// Keeps measurements of this device for the plans of processes to come: adds them to the record
    /// of its kind in the directory of `options`. A record that is of anything else is replaced, and
    /// the reason is returned beside the file's path.
    ///
    /// # Errors
    /// [`NotKept`], and the record is as it was.
    pub fn keep_tuning(
        &self,
        options: &TuningOptions,
        entries: Vec<tuning::Entry>,
    ) -> std::result::Result<(PathBuf, Option<Refusal>), NotKept> {
        let Some(dir) = options.directory() else {
            let why = "nothing says where: set SWIGLU_TUNING_DIR".into();
            return Err(NotKept { path: "~".into(), why });
        };
        // Plans of this device stay what they are.
        LazyLock::force(&Planner::of(self).basis);
        let subject = tuning::Subject::here(self.facts(), self.arch());
        let rates = Rates::from(self.facts());
        tuning::keep(&dir, subject, self.facts().driver_version, rates, entries)
    }
}
