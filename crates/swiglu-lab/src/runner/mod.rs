//! A run: cases × profiles, interleaved, written down after every case.

mod measure;
pub(crate) mod peers;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::case::Case;
use crate::code::Code;
use crate::definition::{Experiment, Pace, ProfileDef};
use crate::error::{LabError, Result};
use crate::peer::{Limits, PeerCommands};
use crate::place::is_name;
use crate::record::{
    CaseFacts, Executed, Machine, Opened, ProtocolUsed, RECORD_SCHEMA, Record, ResultEntry,
    RunLock, Status, Store,
};
use crate::verdict::RecordVerdict;
use measure::{CaseRun, Outcome};
use peers::Peers;

/// Seed of every experiment's inputs.
pub const SEED: u64 = 0x5eed;
/// What is decided when a profile is prepared, as where its data lie, changes its times by about a
/// percent; so many preparations show by how much.
const PREPARATIONS: usize = 5;
/// Between turns of different processes on one CPU: idle threads of the last one may still spin,
/// waiting for work, and would take the next one's processors.
const SETTLE: Duration = Duration::from_millis(5);

/// What to run and how.
#[derive(Debug, Clone, PartialEq)]
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
    /// Prepare profiles more often until the claim is decided, for at most so long after the run.
    pub until_decided: Option<Duration>,
    /// Pause between turns of different peers on the CPU.
    pub settle: Duration,
    /// Where this happens, if an executor started it.
    pub executor: Option<Executed>,
    /// Ends the run after the case in progress.
    pub stop: Stop,
}

/// Asks a run to end after the case in progress; what is measured does not depend on it.
#[derive(Debug, Clone, Default)]
pub struct Stop(pub Arc<AtomicBool>);

impl Stop {
    /// Whether it was asked.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl PartialEq for Stop {
    fn eq(&self, _: &Self) -> bool {
        true
    }
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
            settle: SETTLE,
            executor: None,
            stop: Stop::default(),
        }
    }

    /// Refuses a selection that leaves nothing of an experiment, before anything is begun for it.
    ///
    /// # Errors
    /// [`LabError::NothingSelected`].
    pub fn expect_selection(&self, experiment: &Experiment) -> Result<()> {
        selected_profiles(experiment, self)?;
        selected_cases(experiment, self).map(|_| ())
    }

    /// Refuses a run id that cannot be part of a file name; for callers that make files of their
    /// own for the run.
    ///
    /// # Errors
    /// [`LabError::Name`].
    pub fn expect_name(&self) -> Result<()> {
        match is_name(&self.run_id) {
            true => Ok(()),
            false => Err(LabError::Name {
                what: "run id",
                given: self.run_id.clone(),
                expected: "lowercase letters, digits and -",
            }),
        }
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
    Case {
        /// The case.
        case: &'a Case,
    },
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
    /// The claim is not decided: every case is prepared so many times more.
    Deciding {
        /// Preparations more.
        preparations: usize,
    },
    /// A case is done and written.
    Done {
        /// Its results.
        results: &'a [ResultEntry],
    },
}

/// A finished run.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The record's file.
    pub path: PathBuf,
    /// What it holds.
    pub record: Record,
    /// Whether it was asked to stop, with cases left.
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
    /// [`LabError::Name`], [`LabError::NothingSelected`], [`LabError::Io`]. What goes wrong with a
    /// peer is a result, not an error.
    pub fn run(
        &self,
        experiment: &Experiment,
        options: &RunOptions,
        watch: &mut dyn FnMut(Event<'_>),
    ) -> Result<Finished> {
        options.expect_name()?;
        let mut options = options.clone();
        options.protocol.pace = experiment.pace;
        if experiment.pace.turn_ms > 0 {
            let budget_us = experiment.pace.turn_ms * 1000;
            options.protocol.budget_us = options.protocol.budget_us.min(budget_us);
        }
        let options = &options;
        let profiles = selected_profiles(experiment, options)?;
        let cases = selected_cases(experiment, options)?;
        let (mut record, path) = self.begin(experiment, options)?;
        let mut peers = Peers::new(self.commands, experiment.device, options.limits);
        let done = |case: &&Case, peers: &mut Peers<'_>| is_done(&record, case, &profiles, peers);
        let missing: Vec<&Case> =
            cases.iter().copied().filter(|case| !done(case, &mut peers)).collect();
        watch(Event::Started {
            cases: missing.len(),
            kept: cases.len() - missing.len(),
            path: &path,
        });
        let mut stopped = false;
        for case in missing {
            stopped = options.stop.asked();
            if stopped {
                break;
            }
            watch(Event::Case { case });
            let key = case.key();
            // A case that was measured in part is measured anew, with what it had: only neighbours
            // in time compare.
            let had = |p: &&ProfileDef| {
                profiles.iter().any(|wanted| wanted.id == p.id)
                    || record.entry(&key, &p.id).is_some()
            };
            let profiles: Vec<&ProfileDef> = experiment.profiles.iter().filter(had).collect();
            let run = CaseRun { case, profiles: &profiles, options };
            let mut outcome = run.run(&mut peers, watch)?;
            let drift = |outcome: &Outcome| {
                CaseFacts { case: case.clone(), clocks: outcome.clocks, repeated: false }.drift()
            };
            // Whoever ends a job may end its peers, too: that is no result of theirs.
            let cut_short = |outcome: &Outcome| outcome.broken && options.stop.asked();
            // Once: where a clock changes again, the case keeps the mark.
            let repeated = drift(&outcome).is_some() && !options.protocol.quick;
            if repeated && !cut_short(&outcome) {
                outcome = run.run(&mut peers, watch)?;
            }
            stopped = cut_short(&outcome);
            if stopped {
                break;
            }
            record.results.retain(|entry| entry.case_key != key);
            let first = record.results.len();
            record.results.extend(outcome.results);
            let facts = CaseFacts { case: case.clone(), clocks: outcome.clocks, repeated };
            record.cases.insert(key, facts);
            self.save(&mut record, &path, experiment, &peers)?;
            watch(Event::Done { results: &record.results[first..] });
        }
        let mut finished = Finished { path, record, stopped };
        if finished.record.complete && !finished.stopped {
            self.decide(experiment, &mut finished, options, &mut peers, watch)?;
        }
        Ok(finished)
    }

    /// Prepares every case more often until noise no longer forbids an answer, or the time is over.
    fn decide(
        &self,
        experiment: &Experiment,
        finished: &mut Finished,
        options: &RunOptions,
        peers: &mut Peers<'_>,
        watch: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        let Some(limit) = options.until_decided else { return Ok(()) };
        let begun = Instant::now();
        loop {
            let undecided = RecordVerdict::of(experiment, &finished.record).undecided;
            let Some(more) = undecided.and_then(|u| u.preparations) else { return Ok(()) };
            let more = more.clamp(2, PREPARATIONS);
            watch(Event::Deciding { preparations: more });
            for case in &experiment.cases {
                finished.stopped = options.stop.asked();
                if finished.stopped || begun.elapsed() > limit {
                    return Ok(());
                }
                self.prepare_more(experiment, case, finished, (more, options), peers, watch)?;
            }
        }
    }

    /// Adds preparations to a case, which is written when it is done.
    fn prepare_more(
        &self,
        experiment: &Experiment,
        case: &Case,
        finished: &mut Finished,
        (more, options): (usize, &RunOptions),
        peers: &mut Peers<'_>,
        watch: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        let Finished { path, record, .. } = finished;
        let mut options = options.clone();
        let each = record.protocol.turns.div_ceil(record.protocol.preparations.max(1));
        options.protocol =
            ProtocolUsed { preparations: more, turns: more * each, ..record.protocol.clone() };
        let key = case.key();
        // Those that have no result have none of more preparations either.
        let counts = |p: &&ProfileDef| {
            record.entry(&key, &p.id).is_some_and(|entry| entry.status == Status::Ok)
        };
        let profiles: Vec<&ProfileDef> = experiment.profiles.iter().filter(counts).collect();
        watch(Event::Case { case });
        let outcome = CaseRun { case, profiles: &profiles, options: &options }.run(peers, watch)?;
        watch(Event::Done { results: &outcome.results });
        for result in outcome.results {
            let same = |e: &&mut ResultEntry| e.case_key == key && e.profile == result.profile;
            if let Some(entry) = record.results.iter_mut().find(same) {
                entry.extend(result);
            }
        }
        self.save(record, path, experiment, peers)
    }

    /// Writes what is known by now.
    fn save(
        &self,
        record: &mut Record,
        path: &Path,
        experiment: &Experiment,
        peers: &Peers<'_>,
    ) -> Result<()> {
        for (peer, versions) in peers.versions() {
            record.versions.insert(peer.clone(), versions.clone());
        }
        if record.machine.gpu.is_none() {
            record.machine.gpu = peers.device_name().map(str::to_owned);
        }
        record.finished = now();
        record.complete = is_complete(record, experiment);
        self.store.write(record, path)
    }

    /// The record to go on with, or a new one. A new one is written at once: a directory that
    /// cannot be written is better found before measuring than after.
    fn begin(&self, experiment: &Experiment, options: &RunOptions) -> Result<(Record, PathBuf)> {
        let found = self.store.find(&self.machine.name, &experiment.id, &options.run_id)?;
        if let Some(opened) = found {
            let r = &opened.record;
            let why = if r.definition_hash != experiment.definition_hash {
                Some("the run began with another definition of the experiment".to_owned())
            } else if r.code != *self.code {
                let commit = r.code.commit.as_deref().unwrap_or("an unknown commit");
                Some(format!("the run began with other code: {commit}"))
            } else if r.protocol != options.protocol {
                Some("the run began with other turns or preparations".to_owned())
            } else {
                None
            };
            return match why {
                None => {
                    let Opened { path, mut record } = opened;
                    if let Some(executed) = options.executor.clone() {
                        record.executor = Some(executed.after(record.executor.as_ref()));
                        self.store.write(&mut record, &path)?;
                    }
                    Ok((record, path))
                }
                Some(why) => Err(LabError::Record {
                    path: opened.path,
                    why,
                    advice: "begin a new run with another --run-id",
                }),
            };
        }
        let started = now();
        let mut record = Record {
            schema: RECORD_SCHEMA,
            experiment: experiment.id.clone(),
            definition_hash: experiment.definition_hash.clone(),
            code: self.code.clone(),
            run_id: options.run_id.clone(),
            finished: started.clone(),
            started,
            complete: false,
            machine: self.machine.clone(),
            versions: BTreeMap::new(),
            protocol: options.protocol.clone(),
            executor: options.executor.clone(),
            cases: BTreeMap::new(),
            ceilings: None,
            results: Vec::new(),
            profiling: Vec::new(),
            content_hash: String::new(),
        };
        let path = self.store.path_of(&record);
        self.store.write(&mut record, &path)?;
        Ok((record, path))
    }
}

fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Whether a case has a result of each profile, and none that lacked its peer could be had now.
fn is_done(record: &Record, case: &Case, profiles: &[&ProfileDef], peers: &mut Peers<'_>) -> bool {
    let key = case.key();
    profiles.iter().all(|p| match record.entry(&key, &p.id) {
        None => false,
        Some(entry) if entry.status == Status::NotAvailable => peers.get(&p.peer).is_err(),
        Some(_) => true,
    })
}

fn is_complete(record: &Record, experiment: &Experiment) -> bool {
    let there: BTreeSet<(&str, &str)> =
        record.results.iter().map(|e| (e.case_key.as_str(), e.profile.as_str())).collect();
    experiment.cases.iter().all(|case| {
        let key = case.key();
        experiment.profiles.iter().all(|p| there.contains(&(key.as_str(), p.id.as_str())))
    })
}

fn selected_profiles<'a>(
    experiment: &'a Experiment,
    options: &RunOptions,
) -> Result<Vec<&'a ProfileDef>> {
    let Some(wanted) = &options.profiles else { return Ok(experiment.profiles.iter().collect()) };
    let choices =
        || experiment.profiles.iter().map(|p| p.id.as_str()).collect::<Vec<_>>().join(", ");
    let nothing = |given: &str| LabError::NothingSelected {
        what: "profile",
        given: given.to_owned(),
        choices: choices(),
    };
    if let Some(unknown) = wanted.iter().find(|id| experiment.profile(id).is_none()) {
        return Err(nothing(unknown));
    }
    match wanted.is_empty() {
        true => Err(nothing("")),
        // In the definition's order: its first baseline is the baseline.
        false => Ok(experiment.profiles.iter().filter(|p| wanted.contains(&p.id)).collect()),
    }
}

fn selected_cases<'a>(experiment: &'a Experiment, options: &RunOptions) -> Result<Vec<&'a Case>> {
    let filter = options.cases.as_deref().unwrap_or_default();
    let words: Vec<&str> = filter.split_whitespace().collect();
    let fits = |case: &&Case| {
        let key = format!("{} {}", case.key(), case.model.as_deref().unwrap_or_default());
        words.iter().all(|word| key.split(' ').any(|part| part == *word))
    };
    let cases: Vec<&Case> = experiment.cases.iter().filter(fits).collect();
    if cases.is_empty() {
        let keys: Vec<String> = experiment.cases.iter().take(20).map(Case::key).collect();
        let more = experiment.cases.len() - keys.len();
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        return Err(LabError::NothingSelected {
            what: "case filter",
            given: filter.to_owned(),
            choices: format!("words of these: {}{more}", keys.join("; ")),
        });
    }
    Ok(cases)
}
