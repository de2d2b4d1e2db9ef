//! What plans are made from, beside the problem: options, the device's limits, the cost model's numbers, measurements; and
//! what was chosen by them.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::calibration::{self, Calibrated, Calibration, Card, Kept, Reading};
use super::choices::Choices;
use super::machine::{Machine, Model, Rates};
use super::tuning::{self, NotKept, Refusal, SHIPPED, Tuning, TuningOptions};
use crate::device::arch::Arch;
use crate::device::cuda::{Cuda, Opening};
use crate::device::error::Result;
use crate::device::facts::DeviceFacts;
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

/// The cost model's numbers, measurements that correct it, and where both are from.
struct Basis {
    model: Model,
    calibration: Calibration,
    tuning: Tuning,
}

/// What a device is and was opened with, as far as plans follow from it.
#[derive(Clone)]
pub(crate) struct Subject {
    facts: DeviceFacts,
    pub(super) arch: Arch,
    /// With the rates that are expected.
    model: Model,
    /// Whether plans leave out the kernels of one architecture.
    pub(super) portable_kernels: bool,
    /// Where its user keeps measurements.
    dir: Option<PathBuf>,
    /// Whether no measurements are read, neither the user's nor shipped ones.
    disabled: bool,
}

impl Subject {
    /// A device without options, of whose user nothing is known.
    pub(super) fn new(facts: DeviceFacts, arch: Arch, limits: Limits, tf32: bool) -> Self {
        let machine = Machine::new(&Rates::from(&facts), facts.sm_count, arch);
        let model = Model { machine, limits, tf32 };
        Self { facts, arch, model, portable_kernels: false, dir: None, disabled: false }
    }

    /// By what was measured of the device just now, else by what a file has of it.
    fn basis(&self, measured: Option<&Calibration<Reading>>) -> Basis {
        let kept = if measured.is_none() { self.read() } else { None };
        let readings = match &kept {
            Some((_, Ok(readings))) => Some(readings),
            _ => measured,
        };
        let calibration = self.calibration(readings);
        let said = match &kept {
            None => calibration.to_string(),
            Some((path, Ok(_))) => format!("{}: {calibration}", path.display()),
            Some((path, Err(refusal))) => {
                format!("{}: not used: {refusal}; {calibration}", path.display())
            }
        };
        let model = Model { machine: calibration.refine(&self.model.machine), ..self.model };
        let mut tuning = match self.disabled {
            true => Tuning::default(),
            false => Tuning::read(self.dir.as_deref(), SHIPPED, &self.facts, self.arch, &model),
        };
        tuning.notes.push(said);
        Basis { model, calibration, tuning }
    }

    fn calibration(&self, readings: Option<&Calibration<Reading>>) -> Calibration {
        Calibration::new(&Rates::from(&self.facts), self.facts.sm_count, readings)
    }

    /// What the directory has of measurements of the device, unless they are not to be read.
    fn read(&self) -> Kept {
        let dir = self.dir.as_deref().filter(|_| !self.disabled)?;
        calibration::read(dir, &Card::here(&self.facts, self.arch))
    }

    /// Keeps what was measured in the directory.
    fn keep(&self, readings: &Calibration<Reading>) -> std::result::Result<PathBuf, NotKept> {
        if self.disabled {
            let why = "the options say that none are used".into();
            return Err(NotKept { path: "~".into(), why });
        }
        let dir = self.dir.as_deref().ok_or_else(NotKept::nowhere)?;
        calibration::keep(dir, &Card::here(&self.facts, self.arch), readings)
    }
}

/// What is attached to a device: its planners.
struct Attached {
    first: Arc<Planner>,
    /// Held while the device is measured: two that measure at once would measure each other.
    measuring: Mutex<()>,
}

/// A device's planner. It is made with the device, and what it plans never changes: when the device is measured, another
/// follows it, for layers that are made from then on.
pub(crate) struct Planner {
    pub(super) subject: Subject,
    /// What was measured of the device just before the planner was made.
    measured: Option<Calibration<Reading>>,
    /// Read when the first plan asks: a program that computes nothing here does not wait for it.
    basis: OnceLock<Basis>,
    /// Those of the layers that there are.
    pub(super) choices: Mutex<Vec<Weak<Choices>>>,
    next: OnceLock<Arc<Planner>>,
}

impl Planner {
    pub(super) fn new(subject: Subject, measured: Option<Calibration<Reading>>) -> Self {
        let (basis, choices, next) = Default::default();
        Self { subject, measured, basis, choices, next }
    }

    /// The planner for what is made now.
    pub(crate) fn of(cuda: &Cuda) -> &Arc<Self> {
        let Attached { first, .. } = cuda.attached();
        let all = std::iter::successors(Some(first), |planner| planner.next.get());
        all.last().unwrap_or(first)
    }

    /// What the decode kernels need to know of the device.
    pub(crate) fn limits(&self) -> &Limits {
        &self.subject.model.limits
    }

    fn basis(&self) -> &Basis {
        self.basis.get_or_init(|| self.subject.basis(self.measured.as_ref()))
    }

    /// What the cost model knows of the device.
    pub(crate) fn model(&self) -> &Model {
        &self.basis().model
    }

    pub(crate) fn tuning(&self) -> &Tuning {
        &self.basis().tuning
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
        let opening = Opening {
            device: options.device,
            tf32: options.tf32,
            plain_allocations: options.plain_allocations,
            cache: options.cache.clone(),
            gemms: |cuda| Planner::of(cuda).tuning().gemms.clone(),
        };
        Self::open(&opening, |context, facts, arch| {
            let limits = Limits::new(context, facts, arch);
            let subject = Subject {
                portable_kernels: options.portable_kernels,
                dir: options.tuning.directory(),
                disabled: options.tuning.disabled || options.portable_kernels,
                ..Subject::new(facts.clone(), arch, limits, options.tf32)
            };
            let first = Arc::new(Planner::new(subject, None));
            Attached { first, measuring: Mutex::default() }
        })
    }

    /// What was found of measurements that plans are chosen by, and why a record is not used; at the end whether the rates
    /// that they are estimated with were measured. None of it is an error: without a record a cost model chooses.
    pub fn tuning_notes(&self) -> &[String] {
        &Planner::of(self).tuning().notes
    }

    /// The rates that plans which are made now are estimated with, and which of them were measured. It measures nothing.
    pub fn calibration(&self) -> &Calibration {
        &Planner::of(self).basis().calibration
    }

    /// Has plans made from now on by what `measure` finds, and keeps that. Layers that there are stay with the planner that
    /// they were made by.
    pub(crate) fn recalibrate(
        &self,
        measure: impl FnOnce() -> Result<Calibration<Reading>>,
    ) -> Result<Calibrated> {
        let Attached { measuring, .. } = self.attached();
        let _one = measuring.lock().unwrap_or_else(PoisonError::into_inner);
        let readings = measure()?;
        let latest = Planner::of(self);
        // It is not to find what is kept now.
        latest.basis();
        let subject = &latest.subject;
        let replaced = subject.read().and_then(|(_, kept)| kept.err());
        let kept = subject.keep(&readings);
        let rates = subject.calibration(Some(&readings));
        // The lock is held: nobody else has set it.
        let _ = latest.next.set(Arc::new(Planner::new(subject.clone(), Some(readings))));
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
        let dir = options.directory().ok_or_else(NotKept::nowhere)?;
        // Plans of this device stay what they are.
        Planner::of(self).basis();
        let subject = tuning::Subject::here(self.facts(), self.arch());
        let rates = Rates::from(self.facts());
        tuning::keep(&dir, subject, self.facts().driver_version, rates, entries)
    }

    /// Keeps measurements of cuBLASLt's proposals for devices that are opened from now on: adds them to what the directory of
    /// `options` has of this kind of device. A file that is of anything else is replaced, and the reason is returned beside its
    /// path.
    ///
    /// # Errors
    /// [`NotKept`], and the file is as it was.
    pub fn keep_gemms(
        &self,
        options: &TuningOptions,
        entries: Vec<tuning::GemmEntry>,
    ) -> std::result::Result<(PathBuf, Option<Refusal>), NotKept> {
        let dir = options.directory().ok_or_else(NotKept::nowhere)?;
        // Plans of this device stay what they are.
        Planner::of(self).basis();
        let subject = tuning::GemmSubject::here(self.facts(), self.arch());
        tuning::keep_gemms(&dir, subject, entries)
    }
}
