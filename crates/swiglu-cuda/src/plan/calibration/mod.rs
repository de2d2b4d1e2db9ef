//! The rates of a device: what its architecture and its driver let expect, and what was measured of this very one
//! ([`Cuda::calibrate`](crate::Cuda::calibrate)).
//!
//! The constants of the cost model are fitted to whole layers on one card, so that they are not what a probe finds there:
//! the 12000 bytes per cycle of L2 are more than any cache gives. So what counts of a measurement is how it stands to what
//! the same probe is expected to find, and a rate of the model is multiplied by that. Where nothing was measured, or
//! nothing that can be, the quotient is 1 and the model what it was.

mod file;

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::machine::{Machine, Rates};
use super::tuning::{NotKept, Refusal};
pub(crate) use file::{Card, Kept, keep, read};

/// What is measured of a device, each by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Calibration<T = Rate> {
    /// Bytes per second of a copy in device memory, far larger than L2; read and written ones together.
    pub copy: T,
    /// Cycles per second of the SMs right behind large products of random values in bf16.
    pub clock: T,
    /// Bytes per second that L2 gives all SMs together.
    pub l2: T,
    /// Seconds from one kernel of a stream to the next, of kernels that do nothing.
    pub launch: T,
    /// Seconds of a barrier of a grid that has one block on each SM.
    pub barrier: T,
}

/// A rate, in the unit that its field of [`Calibration`] says.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Rate {
    /// What is expected from the driver's facts and the architecture.
    pub prior: f64,
    /// What was measured, and is possible.
    pub measured: Option<f64>,
    /// Why nothing was measured that counts, where that was tried.
    pub refused: Option<String>,
}

impl Rate {
    /// A reading counts from the least to the most that is possible.
    fn new(prior: f64, [least, most]: [f64; 2], reading: Option<&Reading>) -> Self {
        let (measured, refused) = match reading {
            None => (None, None),
            Some(Reading::Value(value)) if (least..=most).contains(value) => (Some(*value), None),
            Some(Reading::Value(value)) => {
                let possible = format!("possible are {least:.3e} to {most:.3e}");
                (None, Some(format!("{value:e} was measured, {possible}")))
            }
            Some(Reading::Missing(why)) => (None, Some(why.clone())),
        };
        Self { prior, measured, refused }
    }

    /// What plans follow: what was measured, else the prior.
    pub fn used(&self) -> f64 {
        self.measured.unwrap_or(self.prior)
    }
}

/// What came of [`Cuda::calibrate`](crate::Cuda::calibrate).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Calibrated {
    /// The rates that plans made from now on follow.
    pub rates: Calibration,
    /// The file that later processes read them from, or why there is none.
    pub kept: Result<PathBuf, NotKept>,
    /// Why the file that was there was not used.
    pub replaced: Option<Refusal>,
}

/// What a probe came to, as files keep it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Reading {
    Value(f64),
    /// Why there is none.
    Missing(String),
}

impl Reading {
    /// To five digits: what is written is what is read again.
    pub(crate) fn new(value: f64) -> Self {
        match format!("{value:.4e}").parse() {
            Ok(value) if f64::is_finite(value) => Self::Value(value),
            _ => Self::Missing("the clock of the device stood still".into()),
        }
    }
}

impl<T> Calibration<T> {
    /// Each with the name of its field.
    pub fn each(&self) -> [(&'static str, &T); 5] {
        let Self { copy, clock, l2, launch, barrier } = self;
        [("copy", copy), ("clock", clock), ("l2", l2), ("launch", launch), ("barrier", barrier)]
    }
}

/// What the probe finds on the card that the model was fitted on, an H200: of the memory's nominal rate, of the greatest
/// clock, seconds of a launch and of a barrier.
const COPY_SHARE: f64 = 0.872;
const LOADED_SHARE: f64 = 0.784;
const CHAINED_LAUNCH: f64 = 1.5e-6;
const GRID_BARRIER: f64 = 0.97e-6;
/// Bytes from L2 per cycle of the greatest clock and SM. L2 has a clock of its own, which the power that products draw does
/// not lower.
const L2_PER_SM: f64 = 35.4;
/// Two probes of one card differ by less: a rate that is as near to what is expected is as expected.
const NOISE: f64 = 0.08;
/// A rate below this share of what the driver says is not this device's: it is shared, or simulated.
const LEAST: f64 = 0.25;
/// What clocks that are read one after the other let a rate be above what the driver says.
const ABOVE: f64 = 1.02;
/// Bytes that no SM takes from L2 in a cycle more than, and less than.
const L2_LIMITS: [f64; 2] = [4.0, 128.0];

impl Calibration {
    /// What is known of a device with these rates, after a probe or before one.
    pub(crate) fn new(
        rates: &Rates,
        multiprocessors: u32,
        readings: Option<&Calibration<Reading>>,
    ) -> Self {
        // Without the driver's word the limits are those of every device so far.
        let told = |value: f64, otherwise: f64, limits: [f64; 2]| match value > 0.0 {
            true => (value, [value * LEAST, value * ABOVE]),
            false => (otherwise, limits),
        };
        let (memory, memory_limits) = told(rates.memory_bandwidth as f64, 1e12, [1e9, 2e13]);
        let (clock, clock_limits) = told(f64::from(rates.clock_khz) * 1e3, 1.7e9, [2e8, 4e9]);
        let sms = f64::from(multiprocessors.max(1));
        let (l2, l2_limits) = (sms * clock * L2_PER_SM, L2_LIMITS.map(|bytes| sms * clock * bytes));
        let seconds = [0.1e-6, 20e-6];
        Self {
            copy: Rate::new(memory * COPY_SHARE, memory_limits, readings.map(|r| &r.copy)),
            clock: Rate::new(clock * LOADED_SHARE, clock_limits, readings.map(|r| &r.clock)),
            l2: Rate::new(l2, l2_limits, readings.map(|r| &r.l2)),
            launch: Rate::new(CHAINED_LAUNCH, seconds, readings.map(|r| &r.launch)),
            barrier: Rate::new(GRID_BARRIER, seconds, readings.map(|r| &r.barrier)),
        }
    }

    /// Whether a rate was measured.
    pub fn is_measured(&self) -> bool {
        self.each().into_iter().any(|(_, rate)| rate.measured.is_some())
    }

    /// The machine with these rates.
    pub(super) fn refine(&self, machine: &Machine) -> Machine {
        let Self { copy, clock, l2, launch, barrier } = self;
        let times = |rate: &Rate| {
            let times = rate.used() / rate.prior;
            if (times - 1.0).abs() <= NOISE { 1.0 } else { times }
        };
        Machine {
            memory: machine.memory * times(copy),
            clock: machine.clock * times(clock),
            l2: machine.l2 * times(l2) / times(clock),
            kept: machine.kept * times(l2) / times(clock),
            launch: machine.launch * times(launch),
            barrier: machine.barrier * times(barrier),
            ..*machine
        }
    }
}

impl fmt::Display for Calibration {
    /// Which rates were measured, and why others were not: a note of `explain`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |measured: bool| {
            let of = move |(_, rate): &(&'static str, &Rate)| rate.measured.is_some() == measured;
            let said = |(name, rate): (&str, &Rate)| match &rate.refused {
                Some(why) => format!("{name} ({why})"),
                None => name.to_owned(),
            };
            self.each().into_iter().filter(of).map(said).collect::<Vec<_>>().join(", ")
        };
        let nothing_tried = self.each().into_iter().all(|(_, rate)| rate.refused.is_none());
        match (&*named(true), &*named(false)) {
            ("", _) if nothing_tried => f.write_str(
                "rates expected from the architecture; `swiglu info --probe` measures them",
            ),
            ("", expected) => write!(f, "rates expected from the architecture: {expected}"),
            (measured, "") => write!(f, "rates measured: {measured}"),
            (measured, expected) => {
                write!(f, "rates measured: {measured}; expected from the architecture: {expected}")
            }
        }
    }
}

#[cfg(test)]
mod tests;
