//! What plans of a device are made from that is read from files or measured: rates, and times of layers.

use std::path::PathBuf;

use super::calibration::{self, Calibration, Card, Kept, Reading};
use super::machine::{Model, Rates};
use super::tuning::{NotKept, Tuning, TuningOptions};
use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;

/// The cost model's numbers, measurements that correct it, and where both are from.
pub(crate) struct Basis {
    pub(super) model: Model,
    pub(super) calibration: Calibration,
    pub(super) tuning: Tuning,
    pub(super) notes: Vec<String>,
}

impl Basis {
    /// `model` has the rates that are expected, `said` is what a note says of those that are known.
    pub(super) fn new(
        model: Model,
        calibration: Calibration,
        said: String,
        tuning: impl FnOnce(&Model) -> Tuning,
    ) -> Self {
        let model = Model { machine: calibration.refine(&model.machine), ..model };
        let tuning = tuning(&model);
        let notes = tuning.notes().iter().cloned().chain([said]).collect();
        Self { model, calibration, tuning, notes }
    }
}

/// What a device is and was opened with, as far as plans follow from it.
#[derive(Clone)]
pub(crate) struct Subject {
    pub(super) facts: DeviceFacts,
    pub(super) arch: Arch,
    /// With the rates that are expected.
    pub(super) model: Model,
    pub(super) tuning: TuningOptions,
}

impl Subject {
    /// By what was measured of the device just now, else by what a file has of it.
    pub(super) fn basis(&self, measured: Option<&Calibration<Reading>>) -> Basis {
        let kept = if measured.is_none() { self.read() } else { Ok(None) };
        let readings = match &kept {
            Ok(Some((_, readings))) => Some(readings),
            _ => measured,
        };
        let calibration = self.calibration(readings);
        let said = match &kept {
            Ok(Some((path, _))) => format!("{}: {calibration}", path.display()),
            Ok(None) => calibration.to_string(),
            Err((path, refusal)) => {
                format!("{}: not used: {refusal}; {calibration}", path.display())
            }
        };
        Basis::new(self.model, calibration, said, |model| {
            Tuning::load(&self.tuning, &self.facts, self.arch, model)
        })
    }

    pub(super) fn calibration(&self, readings: Option<&Calibration<Reading>>) -> Calibration {
        Calibration::new(&Rates::from(&self.facts), self.facts.sm_count, readings)
    }

    /// What the directory has of measurements of the device, unless they are not to be read.
    pub(super) fn read(&self) -> Kept {
        match self.tuning.directory() {
            Some(dir) if !self.tuning.disabled => calibration::read(&dir, &self.card()),
            _ => Ok(None),
        }
    }

    /// Keeps what was measured in the directory.
    pub(super) fn keep(&self, readings: &Calibration<Reading>) -> Result<PathBuf, NotKept> {
        let not_kept = |why: &str| NotKept { path: "~".into(), why: why.into() };
        match self.tuning.directory() {
            _ if self.tuning.disabled => Err(not_kept("the options say that none are used")),
            None => Err(not_kept("nothing says where: set SWIGLU_TUNING_DIR")),
            Some(dir) => calibration::keep(&dir, &self.card(), readings),
        }
    }

    fn card(&self) -> Card {
        Card::here(&self.facts, self.arch)
    }
}
