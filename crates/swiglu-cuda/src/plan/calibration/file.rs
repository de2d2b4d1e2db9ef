//! What was measured of a device, on disk beside the tuning records.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Calibration, Reading};
use crate::device::arch::Arch;
use crate::device::facts::DeviceFacts;
use crate::device::files;
use crate::kernels::probe;
use crate::plan::machine::Rates;
use crate::plan::tuning::{NotKept, Refusal, SCHEMA, file_name, hash_of, read_sealed, seal};

/// Larger files are none of ours.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// What a measurement depends on: one card stands for another of its kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Card {
    device: String,
    arch: Arch,
    sm_count: u32,
    rates: Rates,
    /// The CUDA version of the driver: launches are its work too.
    driver: (u32, u32),
    /// A hash of the kernels that measure.
    source: String,
}

impl Card {
    pub(crate) fn here(facts: &DeviceFacts, arch: Arch) -> Self {
        Self {
            device: facts.name.clone(),
            arch,
            sm_count: facts.sm_count,
            rates: Rates::from(facts),
            driver: facts.driver_version,
            source: hash_of([probe::file()].into_iter()),
        }
    }

    /// Whether what was measured on it is what would be measured here.
    fn check(&self, here: &Self) -> Result<(), Refusal> {
        if (Self { source: here.source.clone(), ..self.clone() }) != *here {
            return Err(Refusal::Device { recorded: self.to_string(), here: here.to_string() });
        }
        if self.source != here.source { Err(Refusal::Source) } else { Ok(()) }
    }

    fn path(&self, dir: &Path) -> PathBuf {
        dir.join(file_name(&self.device, self.arch, "machine.json"))
    }
}

impl std::fmt::Display for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { device, arch, sm_count, rates, driver: (major, minor), .. } = self;
        let (mhz, gigabytes) = (rates.clock_khz / 1000, rates.memory_bandwidth / 1_000_000_000);
        write!(
            f,
            "{device} ({arch}, {sm_count} SMs, {mhz} MHz, {gigabytes} GB/s, driver {major}.{minor})"
        )
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: u32,
    card: Card,
    readings: Calibration<Reading>,
}

/// The path of a file, and what it has of a card, or why that is not used; nothing if there is no such file.
pub(crate) type Kept = Option<(PathBuf, Result<Calibration<Reading>, Refusal>)>;

/// What was measured of such a card.
pub(crate) fn read(dir: &Path, here: &Card) -> Kept {
    let path = here.path(dir);
    let checked = |File { card, readings, .. }: File| card.check(here).map(|()| readings);
    let kept = read_sealed(&path, MAX_FILE_BYTES).transpose()?.and_then(checked);
    Some((path, kept))
}

/// Keeps what was measured in the place of what the file has.
///
/// # Errors
/// [`NotKept`]. The file is then as it was.
pub(crate) fn keep(
    dir: &Path,
    card: &Card,
    readings: &Calibration<Reading>,
) -> Result<PathBuf, NotKept> {
    let path = card.path(dir);
    let not_kept = |why: String| NotKept { path: path.clone(), why };
    let file = File { schema: SCHEMA, card: card.clone(), readings: readings.clone() };
    let body = serde_json::to_string(&file).map_err(|e| not_kept(e.to_string()))?;
    let written = files::write_whole(dir, &path, seal(&body).as_bytes());
    written.map_err(|e| not_kept(e.to_string()))?;
    Ok(path)
}
