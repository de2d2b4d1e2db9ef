//! What plans of a device are made from that is read from files or measured: rates, and times of layers.

use std::path::PathBuf;

use super::calibration::{self, Calibration, Card, Kept, Reading};
use super::machine::{Machine, Model, Rates};
use super::tuning::{NotKept, SHIPPED, Tuning};
use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::kernels::decode_mlp::Limits;

/// The cost model's numbers, measurements that correct it, and where both are from.
pub(crate) struct Basis {
    pub(super) model: Model,
    pub(super) calibration: Calibration,
    pub(super) tuning: Tuning,
}

/// What a device is and was opened with, as far as plans follow from it.
#[derive(Clone)]
pub(crate) struct Subject {
    pub(super) facts: DeviceFacts,
    pub(super) arch: Arch,
    /// With the rates that are expected.
    pub(super) model: Model,
    /// Whether plans leave out the kernels of one architecture.
    pub(super) portable_kernels: bool,
    /// Where its user keeps measurements.
    pub(super) dir: Option<PathBuf>,
    /// Whether no measurements are read, neither the user's nor shipped ones.
    pub(super) disabled: bool,
}

impl Subject {
    /// A device without options, of whose user nothing is known.
    pub(super) fn new(facts: DeviceFacts, arch: Arch, limits: Limits, tf32: bool) -> Self {
        let machine = Machine::new(&Rates::from(&facts), facts.sm_count, arch);
        let model = Model { machine, limits, tf32 };
        Self { facts, arch, model, portable_kernels: false, dir: None, disabled: false }
    }

    /// By what was measured of the device just now, else by what a file has of it.
    pub(super) fn basis(&self, measured: Option<&Calibration<Reading>>) -> Basis {
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

    pub(super) fn calibration(&self, readings: Option<&Calibration<Reading>>) -> Calibration {
        Calibration::new(&Rates::from(&self.facts), self.facts.sm_count, readings)
    }

    /// What the directory has of measurements of the device, unless they are not to be read.
    pub(super) fn read(&self) -> Kept {
        let dir = self.dir.as_deref().filter(|_| !self.disabled)?;
        calibration::read(dir, &self.card())
    }

    /// Keeps what was measured in the directory.
    pub(super) fn keep(&self, readings: &Calibration<Reading>) -> Result<PathBuf, NotKept> {
        if self.disabled {
            let why = "the options say that none are used".into();
            return Err(NotKept { path: "~".into(), why });
        }
        let dir = self.dir.as_deref().ok_or_else(NotKept::nowhere)?;
        calibration::keep(dir, &self.card(), readings)
    }

    fn card(&self) -> Card {
        Card::here(&self.facts, self.arch)
    }
}
