//! The gate: a record, measured again.
//!
//! What is compared is the time of our profiles relative to a yardstick in the same run, the
//! fastest profile of others that both runs verified, else the faster ceiling, so that another state of
//! the machine is no regression. Without a yardstick it is the time itself. A regression is *beyond noise* if the new
//! interval lies below the old one by more than the tolerance; if only a part of it does, noise hides the answer.

use serde::Serialize;

use crate::definition::{Experiment, ProfileDef, Role};
use crate::error::{LabError, Result};
use crate::record::{CaseFacts, Interval, Machine, Opened, Record, ResultEntry, Status};
use crate::stats;
use crate::text::named;

named! {
    /// What became of one profile in one case.
    #[derive(Default)]
    pub enum Outcome {
        /// Within noise and tolerance.
        Held = "held",
        /// Faster beyond noise and tolerance.
        Improved = "improved",
        /// Slower beyond noise and tolerance, or no longer verified.
        Regressed = "regressed",
        /// Noise reaches further than the tolerance: nobody knows whether it held.
        Undecided = "undecided",
        /// One of the two runs has no usable result.
        #[default]
        NotComparable = "not-comparable",
    }
}

/// One of our profiles in one case, then and now.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// The case.
    pub case_key: String,
    /// The profile.
    pub profile: String,
    /// What the two values are: a speed relative to another profile, or calls per second.
    pub measure: String,
    /// In the record.
    pub old: Option<Interval>,
    /// Now.
    pub new: Option<Interval>,
    /// What that means.
    pub outcome: Outcome,
    /// Why, where the values do not say it.
    pub reason: Option<String>,
}

/// What the gate found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GateReport {
    /// The experiment's id.
    pub experiment: String,
    /// The run that it is compared with.
    pub run_id: String,
    /// What may be lost beyond noise.
    pub tolerance: f64,
    /// Every profile of ours in every case that was measured again.
    pub comparisons: Vec<Comparison>,
}

/// Refuses a record that cannot be measured again here.
///
/// # Errors
/// [`LabError::Record`] if it is of another experiment, definition or machine, or a quick one; as
/// [`Experiment::expect_measured`].
pub fn expect_comparable(
    experiment: &Experiment,
    machine: &Machine,
    opened: &Opened,
) -> Result<()> {
    experiment.expect_measured()?;
    let old = &opened.record;
    let (why, advice) = if old.experiment != experiment.id {
        (format!("a record of {}", old.experiment), "give one of this experiment")
    } else if old.definition_hash != experiment.definition_hash {
        ("the definition has changed since".to_owned(), "run the experiment first")
    } else if old.machine.name != machine.name {
        let here = &machine.name;
        (format!("a record of {}, and this is {here}", old.machine.name), "gate on that machine")
    } else if old.protocol.quick {
        ("a quick run".to_owned(), "run the experiment without --quick first")
    } else {
        return Ok(());
    };
    Err(LabError::Record { path: opened.path.clone(), why, advice })
}

/// The profiles to measure again: ours, and those that can be a yardstick.
pub fn needed_profiles(experiment: &Experiment, old: &Record) -> Vec<String> {
    let worked = |id: &str| old.results.iter().any(|e| e.profile == id && e.status == Status::Ok);
    let needed =
        |p: &&ProfileDef| p.role == Role::Ours || (is_yardstick(experiment, p) && worked(&p.id));
    experiment.profiles.iter().filter(needed).map(|p| p.id.clone()).collect()
}

impl GateReport {
    /// Compares two runs.
    pub fn of(experiment: &Experiment, old: &Record, new: &Record, tolerance: f64) -> Self {
        let role = |id: &str| experiment.profile(id).map(|p| p.role);
        let ours = new.results.iter().filter(|e| role(&e.profile) == Some(Role::Ours));
        let comparisons = ours.map(|entry| compare(experiment, old, new, entry, tolerance));
        Self {
            experiment: experiment.id.clone(),
            run_id: old.run_id.clone(),
            tolerance,
            comparisons: comparisons.collect(),
        }
    }

    /// How many comparisons came to this.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.comparisons.iter().filter(|c| c.outcome == outcome).count()
    }

    /// Whether nothing regressed and something could be compared; none if noise hides the answer.
    pub fn passed(&self) -> Option<bool> {
        let compared = self.count(Outcome::NotComparable) < self.comparisons.len();
        let held = self.count(Outcome::Regressed) == 0 && compared;
        (!held || self.count(Outcome::Undecided) == 0).then_some(held)
    }
}

/// An entry that counts, of the case of another.
fn good<'a>(record: &'a Record, like: &ResultEntry, profile: &str) -> Option<&'a ResultEntry> {
    let entry = record.entry(&like.case_key, profile);
    entry.filter(|e| e.status == Status::Ok && e.summary.is_some())
}

fn compare(
    experiment: &Experiment,
    old: &Record,
    new: &Record,
    now: &ResultEntry,
    tolerance: f64,
) -> Comparison {
    let (case_key, profile) = (now.case_key.clone(), now.profile.clone());
    let mut comparison = Comparison { case_key, profile, ..Comparison::default() };
    let Some(then) = good(old, now, &now.profile) else {
        let reason = Some("the record has no verified result".into());
        return Comparison { reason, ..comparison };
    };
    if now.status != Status::Ok {
        let lost = matches!(now.status, Status::Failed | Status::FailedVerification);
        let outcome = if lost { Outcome::Regressed } else { Outcome::NotComparable };
        let reason = now.reason.clone().or(Some(now.status.to_string()));
        return Comparison { outcome, reason, ..comparison };
    }
    let yardstick = yardstick(experiment, old, new, now);
    let speed = |record: &Record, entry: &ResultEntry| match yardstick {
        Some(id) => entry.speed_over(good(record, entry, id)?),
        None => calls_per_second(entry),
    };
    let relative = |id| format!("speed relative to {id}");
    comparison.measure = yardstick.map_or("calls per second".into(), relative);
    (comparison.old, comparison.new) = (speed(old, then), speed(new, now));
    match (comparison.old, comparison.new) {
        (Some(then), Some(speed)) => comparison.outcome = judge(then, speed, tolerance),
        _ => comparison.reason = Some("prepared less than twice, which tells no interval".into()),
    }
    let drift = || new.cases.get(&now.case_key).and_then(CaseFacts::drift);
    Comparison { reason: comparison.reason.or_else(drift), ..comparison }
}

/// So that more is better here too.
fn calls_per_second(entry: &ResultEntry) -> Option<Interval> {
    let ones = vec![1.0; entry.preparations.len()];
    let seed = stats::seed_of(&[&entry.case_key, &entry.profile]);
    let rate = 1e6 / entry.summary?.median;
    stats::ratio(rate, &ones, &entry.preparations, seed)
}

/// Whether times can be held against a profile's: another way of computing the cases, or a ceiling where an
/// experiment has no other way.
fn is_yardstick(experiment: &Experiment, profile: &ProfileDef) -> bool {
    let other = |p: &ProfileDef| p.role.is_ranked() && p.role != Role::Ours;
    let alone = !experiment.profiles.iter().any(other);
    other(profile) || (alone && profile.role == Role::Ceiling)
}

/// The fastest profile of others, by the record, that both runs verified.
fn yardstick<'a>(
    experiment: &'a Experiment,
    old: &Record,
    new: &Record,
    like: &ResultEntry,
) -> Option<&'a str> {
    let others = experiment.profiles.iter().filter(|p| is_yardstick(experiment, p));
    let timed = others.filter_map(|p| {
        good(new, like, &p.id)?;
        Some((p.id.as_str(), good(old, like, &p.id)?.summary?.median))
    });
    timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(id, _)| id)
}

fn judge(old: Interval, new: Interval, tolerance: f64) -> Outcome {
    if new.ci95[1] < old.ci95[0] * (1.0 - tolerance) {
        Outcome::Regressed
    } else if new.ci95[0] > old.ci95[1] * (1.0 + tolerance) {
        Outcome::Improved
    } else if new.ci95[0] < old.ci95[0] * (1.0 - tolerance)
        || new.value < old.value * (1.0 - tolerance)
    {
        Outcome::Undecided
    } else {
        Outcome::Held
    }
}
