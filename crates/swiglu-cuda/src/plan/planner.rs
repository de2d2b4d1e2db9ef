//! What plans are made from, beside the problem: options, the device's limits, the cost model's numbers, measurements; and
//! what was chosen by them.

use std::panic::UnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use swiglu_core::{Path, Problem};

use super::choices::{Choices, Lent};
use super::machine::{Machine, Model, Rates};
use super::tuning::{self, NotKept, Refusal, Tuning, TuningOptions};
use crate::device::arch::Arch;
use crate::device::context::{Cuda, Opening};
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

pub(super) type ReadTuning = Box<dyn FnOnce() -> Tuning + Send + UnwindSafe>;

/// A device's planner. It is made with the device, and what it plans never changes.
pub(crate) struct Planner {
    arch: Arch,
    model: Model,
    /// Read when the first plan asks: a program that computes nothing here does not wait for it.
    tuning: LazyLock<Tuning, ReadTuning>,
    /// Whether plans leave out the kernels of one architecture.
    pub(crate) portable_kernels: bool,
    /// Those of the layers that there are.
    choices: Mutex<Vec<Weak<Choices>>>,
}

impl Planner {
    pub(super) fn new(
        arch: Arch,
        model: Model,
        tuning: ReadTuning,
        portable_kernels: bool,
    ) -> Self {
        let (tuning, choices) = (LazyLock::new(tuning), Mutex::default());
        Self { arch, model, tuning, portable_kernels, choices }
    }

    /// What kernels are compiled for.
    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    pub(crate) fn of(cuda: &Cuda) -> &Self {
        cuda.attached()
    }

    /// What the decode kernels need to know of the device.
    pub(crate) fn limits(&self) -> &Limits {
        &self.model.limits
    }

    /// What the cost model knows of the device.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    pub(crate) fn tuning(&self) -> &Tuning {
        &self.tuning
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
            let new = Arc::new(Choices::new(problem, path, lent));
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
            let tuning = TuningOptions { dir: tuning.directory(), disabled };
            let of = facts.clone();
            let model = Model {
                machine: Machine::new(&Rates::from(facts), facts.sm_count, arch),
                limits: Limits::new(context, facts, arch),
                tf32: *tf32,
            };
            let tuning: ReadTuning = Box::new(move || Tuning::load(&tuning, &of, arch, &model));
            Planner::new(arch, model, tuning, *portable_kernels)
        })
    }

    /// What was found of measurements that plans are chosen by, and why a record is not used. None
    /// of it is an error: without a record a cost model chooses.
    pub fn tuning_notes(&self) -> &[String] {
        Planner::of(self).tuning.notes()
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
        LazyLock::force(&Planner::of(self).tuning);
        let subject = tuning::Subject::here(self.facts(), self.arch());
        let rates = Rates::from(self.facts());
        tuning::keep(&dir, subject, self.facts().driver_version, rates, entries)
    }
}
