//! A run: cases × profiles, interleaved, written down after every case.

mod measure;
pub(crate) mod peers;
mod run;
mod ways;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::case::Case;
use crate::code::Code;
use crate::definition::{Experiment, Pace, ProfileDef};
use crate::error::{LabError, Result};
use crate::peer::{Limits, PeerCommands};
use crate::record::{Executed, Machine, ProtocolUsed, Record, ResultEntry, RunLock, Store};
use crate::verdict::listed;
use run::Run;

/// Seed of every experiment's inputs.
pub const SEED: u64 = 0x5eed;
/// What is decided when a profile is prepared, as where its data lie, changes its times by about a
/// percent; so many preparations show by how much.
const PREPARATIONS: usize = 5;
/// Between turns of different processes on one CPU: idle threads of the last one may still spin,
/// waiting for work, and would take the next one's processors.
const SETTLE: Duration = Duration::from_millis(5);

/// What to run and how.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Names the run; the same name again goes on with it.
    pub run_id: String,
    /// Only these profiles.
    pub profiles: Option<Vec<String>>,
    /// Only cases whose key has each of these words in it.
    pub cases: Option<String>,
    /// How samples are taken; the pace is the experiment's, whatever it is here.
    pub protocol: ProtocolUsed,
    /// How long peers may be silent.
    pub limits: Limits,
    /// Measure cases anew, and prepare profiles more often, until the claim is decided, for at most so long after the run.
    pub until_decided: Option<Duration>,
    /// End after the case in progress once so much time has passed, as if asked to stop.
    pub time_limit: Option<Duration>,
    /// Pause between turns of different peers on the CPU.
    pub settle: Duration,
    /// Measure a case once more where a clock changed meanwhile; not so, it keeps the mark at once.
    pub repeat_drifted: bool,
    /// Where this happens, if an executor started it.
    pub executor: Option<Executed>,
    /// Asks the run to end after the case in progress; what is measured does not depend on it.
    pub stop: Arc<AtomicBool>,
}

impl RunOptions {
    /// A run of the full protocol, or a quick look.
    pub fn new(run_id: impl Into<String>, quick: bool) -> Self {
        let (turns, budget_us, preparations) =
            if quick { (5, 5_000, 1) } else { (15, 20_000, PREPARATIONS) };
        Self {
            run_id: run_id.into(),
            profiles: None,
            cases: None,
            protocol: ProtocolUsed {
                turns,
                budget_us,
                seed: SEED,
                preparations,
                pace: Pace::default(),
                quick,
            },
            limits: Limits::default(),
            until_decided: None,
            time_limit: None,
            settle: SETTLE,
            repeat_drifted: !quick,
            executor: None,
            stop: Arc::default(),
        }
    }

    /// Refuses a selection that leaves nothing of an experiment, and a run id that cannot be part of a file name,
    /// before anything is begun for it.
    ///
    /// # Errors
    /// [`LabError::Name`].
    pub fn validate(&self, experiment: &Experiment) -> Result<()> {
        LabError::expect_name("run id", &self.run_id)?;
        experiment.expect_measured()?;
        self.selected_profiles(experiment)?;
        self.selected_cases(experiment).map(|_| ())
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn selected_profiles<'e>(&self, experiment: &'e Experiment) -> Result<Vec<&'e ProfileDef>> {
        let all = &experiment.profiles;
        let Some(wanted) = &self.profiles else { return Ok(all.iter().collect()) };
        let unknown = wanted.iter().find(|id| experiment.profile(id).is_none());
        if unknown.is_some() || wanted.is_empty() {
            let choices: Vec<&str> = all.iter().map(|p| p.id.as_str()).collect();
            let expected = format!("one of {}", choices.join(", "));
            let unknown = unknown.cloned().unwrap_or_default();
            return Err(LabError::name("profile", unknown, expected));
        }
        // In the definition's order: its first baseline is the baseline.
        Ok(all.iter().filter(|p| wanted.contains(&p.id)).collect())
    }

    fn selected_cases<'e>(&self, experiment: &'e Experiment) -> Result<Vec<&'e Case>> {
        let filter = self.cases.as_deref().unwrap_or_default();
        let fits = |case: &&Case| {
            let key = format!("{} {}", case.key(), case.model.as_deref().unwrap_or_default());
            filter.split_whitespace().all(|word| key.split(' ').any(|part| part == word))
        };
        let cases: Vec<&Case> = experiment.cases.iter().filter(fits).collect();
        if cases.is_empty() {
            let keys: Vec<String> = experiment.cases.iter().map(Case::key).collect();
            let expected = format!("words of one of these: {}", listed(&keys, 20));
            return Err(LabError::name("case filter", filter, expected));
        }
        Ok(cases)
    }
}

/// What happens during a run, for whoever watches.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The run begins, or goes on.
    Started {
        /// Cases to measure.
        cases: usize,
        /// Cases kept from before.
        kept: usize,
        /// The record.
        path: &'a Path,
    },
    /// A case begins.
    Case(&'a Case),
    /// A profile is being prepared, verified or measured.
    Profile {
        /// The profile's id.
        id: &'a str,
        /// What is done.
        what: &'static str,
    },
    /// A peer was given up for a case; the run goes on.
    Trouble {
        /// The profile's id.
        profile: &'a str,
        /// What happened.
        reason: &'a str,
    },
    /// The claim is not decided: every case is prepared more often.
    Deciding {
        /// How many times more.
        preparations: usize,
        /// How long that takes, by what was measured in this run.
        expected: Option<Duration>,
    },
    /// Cases are outside of the claim's margin after few preparations, and are measured anew with more.
    Again {
        /// How many cases.
        cases: usize,
        /// How long that takes, by what was measured in this run.
        expected: Option<Duration>,
    },
    /// A case is done and written, with these results.
    Done(&'a [ResultEntry]),
}

/// A finished run.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The record's file.
    pub path: PathBuf,
    /// What it holds.
    pub record: Record,
    /// Whether it was asked to stop, or its time was over, with cases left.
    pub stopped: bool,
}

/// Everything that a run needs and does not decide.
#[derive(Debug, Clone, Copy)]
pub struct Laboratory<'a> {
    /// Where records go.
    pub store: &'a Store,
    /// The right to measure on this machine.
    pub lock: &'a RunLock,
    /// How peers are started.
    pub commands: &'a PeerCommands,
    /// This machine.
    pub machine: &'a Machine,
    /// The code that is measured.
    pub code: &'a Code,
}

impl Laboratory<'_> {
    /// Runs an experiment, or goes on with a run that was killed: finished cases are kept, the
    /// record is written after every case. A case in which a peer was not available is measured anew
    /// once that peer answers; until then its results are kept too.
    ///
    /// # Errors
    /// [`LabError::Record`] if the run has begun with another definition, code or protocol;
    /// [`LabError::Name`], [`LabError::Io`]. What goes wrong with a peer is a result, not an error.
    pub fn run(
        &self,
        experiment: &Experiment,
        options: &RunOptions,
        watch: &mut dyn FnMut(Event<'_>),
    ) -> Result<Finished> {
        Run::begin(self, experiment, options, watch)?.finish()
    }
}
