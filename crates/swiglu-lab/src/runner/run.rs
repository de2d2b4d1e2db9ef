//! A run under way, and its record.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::measure::{CaseRun, Outcome};
use super::peers::Peers;
use super::{Event, Finished, Laboratory, PREPARATIONS, RunOptions};
use crate::case::Case;
use crate::definition::{Experiment, ProfileDef};
use crate::error::{LabError, Result};
use crate::files::now;
use crate::record::{CaseFacts, Opened, ProtocolUsed, RECORD_SCHEMA, Record, ResultEntry, Status};
use crate::verdict::{RecordVerdict, outside};

pub(super) struct Run<'a> {
    lab: &'a Laboratory<'a>,
    experiment: &'a Experiment,
    options: RunOptions,
    watch: &'a mut dyn FnMut(Event<'_>),
    peers: Peers<'a>,
    path: PathBuf,
    record: Record,
    begun: Instant,
    /// How long cases took, and how often all of their profiles were prepared meanwhile.
    spent: (Duration, usize),
}

impl<'a> Run<'a> {
    /// Opens the record to go on with, or a new one. A new one is written at once: a directory that
    /// cannot be written is better found before measuring than after.
    pub(super) fn begin(
        lab: &'a Laboratory<'a>,
        experiment: &'a Experiment,
        options: &RunOptions,
        watch: &'a mut dyn FnMut(Event<'_>),
    ) -> Result<Self> {
        let begun = Instant::now();
        options.validate(experiment)?;
        let mut options = options.clone();
        options.protocol.pace = experiment.pace;
        if experiment.pace.turn_ms > 0 {
            let budget_us = experiment.pace.turn_ms * 1000;
            options.protocol.budget_us = options.protocol.budget_us.min(budget_us);
        }
        let found = lab.store.find(&lab.machine.name, &experiment.id, &options.run_id)?;
        let Opened { path, record } = match found {
            Some(begun) => go_on(begun, lab, experiment, &options)?,
            None => {
                let record = new_record(lab, experiment, &options);
                let mut opened = Opened { path: lab.store.path_of(&record), record };
                lab.store.write(&mut opened.record, &opened.path)?;
                opened
            }
        };
        let peers = Peers::new(lab.commands, experiment.device, options.limits);
        let spent = (Duration::ZERO, 0);
        Ok(Self { lab, experiment, options, watch, peers, path, record, begun, spent })
    }

    pub(super) fn finish(mut self) -> Result<Finished> {
        let experiment = self.experiment;
        let profiles = self.options.selected_profiles(experiment)?;
        let cases = self.options.selected_cases(experiment)?;
        let missing: Vec<&Case> =
            cases.iter().copied().filter(|case| !self.is_done(case, &profiles)).collect();
        (self.watch)(Event::Started {
            cases: missing.len(),
            kept: cases.len() - missing.len(),
            path: &self.path,
        });
        let (mut stopped, last) = (false, missing.len());
        let options = self.options.clone();
        for (i, case) in missing.into_iter().enumerate() {
            // Of a run that may take no time at all one case is measured.
            stopped = options.is_stopped()
                || !self.measure(case, &profiles, &options)?
                || i + 1 < last && self.is_over();
            if stopped {
                break;
            }
        }
        if let Some(limit) = self.options.until_decided
            && self.record.complete
            && !stopped
        {
            stopped = self.decide(limit)?;
        }
        Ok(Finished { path: self.path, record: self.record, stopped })
    }

    /// It was asked to stop, or its time is over.
    fn is_over(&self) -> bool {
        let is_late = |limit| self.begun.elapsed() >= limit;
        self.options.is_stopped() || self.options.time_limit.is_some_and(is_late)
    }

    /// Whether a case has a result of each profile, and none that lacked its peer could be had now.
    fn is_done(&mut self, case: &Case, profiles: &[&ProfileDef]) -> bool {
        let key = case.key();
        profiles.iter().all(|p| match self.record.entry(&key, &p.id) {
            None => false,
            Some(entry) if entry.status == Status::NotAvailable => self.peers.get(&p.peer).is_err(),
            Some(_) => true,
        })
    }

    /// Measures and writes a case; false if it was cut short.
    fn measure(
        &mut self,
        case: &Case,
        wanted: &[&ProfileDef],
        options: &RunOptions,
    ) -> Result<bool> {
        (self.watch)(Event::Case(case));
        let key = case.key();
        // A case that was measured in part is measured anew, with what it had: only neighbours in time
        // compare.
        let had = |p: &&ProfileDef| {
            wanted.iter().any(|wanted| wanted.id == p.id)
                || self.record.entry(&key, &p.id).is_some()
        };
        let profiles: Vec<&ProfileDef> = self.experiment.profiles.iter().filter(had).collect();
        let facts = |outcome: &Outcome, repeated| CaseFacts {
            case: case.clone(),
            clocks: outcome.clocks,
            repeated,
        };
        // Whoever ends a job may end its peers, too: that is no result of theirs.
        let cut_short = |outcome: &Outcome| outcome.broken && self.options.is_stopped();
        let began = Instant::now();
        let mut run = CaseRun::new(case, &profiles, options, &mut self.peers, self.watch);
        let mut outcome = run.run();
        // Once: where a clock changes again, the case keeps the mark.
        let drifted = facts(&outcome, false).drift().is_some();
        let repeated = drifted && self.options.repeat_drifted;
        if repeated && !cut_short(&outcome) {
            outcome = run.run();
        }
        if cut_short(&outcome) {
            return Ok(false);
        }
        self.took(began, options.protocol.preparations);
        self.record.cases.insert(key.clone(), facts(&outcome, repeated));
        self.record.results.retain(|entry| entry.case_key != key);
        let first = self.record.results.len();
        self.record.results.extend(outcome.results);
        self.save()?;
        (self.watch)(Event::Done(&self.record.results[first..]));
        Ok(true)
    }

    /// Measures cases outside of the claim's margin anew, then prepares every case more often until noise no longer
    /// forbids an answer, or the time is over; true if it was asked to stop.
    fn decide(&mut self, limit: Duration) -> Result<bool> {
        let begun = Instant::now();
        if self.again(begun, limit)? {
            return Ok(true);
        }
        while begun.elapsed() <= limit {
            let undecided = RecordVerdict::of(self.experiment, &self.record).undecided;
            let Some(more) = undecided.and_then(|u| u.preparations) else { return Ok(false) };
            let more = more.clamp(2, PREPARATIONS);
            let expected = self.expected(self.experiment.cases.len() * more);
            (self.watch)(Event::Deciding { preparations: more, expected });
            for case in &self.experiment.cases {
                if self.is_over() {
                    return Ok(true);
                }
                if begun.elapsed() > limit {
                    return Ok(false);
                }
                self.prepare_more(case, more)?;
            }
        }
        Ok(false)
    }

    /// Notes that a case is done which began then, with so many preparations.
    fn took(&mut self, began: Instant, preparations: usize) {
        let (time, count) = self.spent;
        self.spent = (time + began.elapsed(), count + preparations);
    }

    /// How long so many preparations of cases take, by those of this run.
    fn expected(&self, preparations: usize) -> Option<Duration> {
        let (time, count) = self.spent;
        (count > 0).then(|| time.mul_f64(preparations as f64 / count as f64))
    }

    /// Measures each case that is outside of the claim's margin after fewer preparations than usual once more, with as many
    /// as usual, in place of what it had: those few were what put it there. The rest keep theirs where the time is over. True
    /// if it was asked to stop.
    fn again(&mut self, begun: Instant, limit: Duration) -> Result<bool> {
        let experiment = self.experiment;
        let mut options = self.options.clone();
        options.protocol.preparations = PREPARATIONS;
        let profiles: Vec<&ProfileDef> = experiment.profiles.iter().collect();
        loop {
            let outside = outside(experiment, &self.record, PREPARATIONS);
            if outside.is_empty() {
                return Ok(false);
            }
            let expected = self.expected(outside.len() * PREPARATIONS);
            (self.watch)(Event::Again { cases: outside.len(), expected });
            // A new figure of one may put another outside.
            for case in experiment.cases.iter().filter(|case| outside.contains(&case.key())) {
                if begun.elapsed() > limit {
                    return Ok(false);
                }
                if self.is_over() || !self.measure(case, &profiles, &options)? {
                    return Ok(true);
                }
            }
        }
    }

    /// Adds preparations to a case, which is written when it is done.
    fn prepare_more(&mut self, case: &Case, more: usize) -> Result<()> {
        let protocol = &self.record.protocol;
        let each = protocol.turns.div_ceil(protocol.preparations.max(1));
        let mut options = self.options.clone();
        options.protocol =
            ProtocolUsed { preparations: more, turns: more * each, ..protocol.clone() };
        let key = case.key();
        // Those that have no result have none of more preparations either.
        let counts = |p: &&ProfileDef| {
            self.record.entry(&key, &p.id).is_some_and(|entry| entry.status == Status::Ok)
        };
        let profiles: Vec<&ProfileDef> = self.experiment.profiles.iter().filter(counts).collect();
        (self.watch)(Event::Case(case));
        let began = Instant::now();
        let run = &mut CaseRun::new(case, &profiles, &options, &mut self.peers, self.watch);
        let Outcome { results, .. } = run.run();
        self.took(began, more);
        (self.watch)(Event::Done(&results));
        for result in results {
            let same = |e: &&mut ResultEntry| e.case_key == key && e.profile == result.profile;
            if let Some(entry) = self.record.results.iter_mut().find(same) {
                entry.extend(result);
            }
        }
        self.save()
    }

    fn save(&mut self) -> Result<()> {
        let record = &mut self.record;
        let versions = self.peers.versions.iter();
        record.versions.extend(versions.map(|(peer, parts)| (peer.clone(), parts.clone())));
        if record.machine.gpu.is_none() {
            record.machine.gpu.clone_from(&self.peers.device_name);
        }
        record.finished = now();
        record.complete = is_complete(record, self.experiment);
        self.lab.store.write(record, &self.path)
    }
}

/// A run that has begun, if this is the same one.
fn go_on(
    begun: Opened,
    lab: &Laboratory<'_>,
    experiment: &Experiment,
    options: &RunOptions,
) -> Result<Opened> {
    let Opened { path, mut record } = begun;
    let why = if record.definition_hash != experiment.definition_hash {
        "the run began with another definition of the experiment".to_owned()
    } else if record.code != *lab.code {
        format!("the run began with other code: {}", record.code.short())
    } else if record.protocol != options.protocol {
        "the run began with other turns or preparations".to_owned()
    } else {
        if let Some(executed) = options.executor.clone() {
            record.executor = Some(executed.after(record.executor.as_ref()));
            lab.store.write(&mut record, &path)?;
        }
        return Ok(Opened { path, record });
    };
    Err(LabError::Record { path, why, advice: "begin a new run with another --run-id" })
}

fn new_record(lab: &Laboratory<'_>, experiment: &Experiment, options: &RunOptions) -> Record {
    let started = now();
    Record {
        schema: RECORD_SCHEMA,
        experiment: experiment.id.clone(),
        definition_hash: experiment.definition_hash.clone(),
        code: lab.code.clone(),
        run_id: options.run_id.clone(),
        finished: started.clone(),
        started,
        machine: lab.machine.clone(),
        protocol: options.protocol.clone(),
        executor: options.executor.clone(),
        ..Record::default()
    }
}

fn is_complete(record: &Record, experiment: &Experiment) -> bool {
    let there: BTreeSet<(&str, &str)> =
        record.results.iter().map(|e| (e.case_key.as_str(), e.profile.as_str())).collect();
    experiment.cases.iter().all(|case| {
        let key = case.key();
        experiment.profiles.iter().all(|p| there.contains(&(key.as_str(), p.id.as_str())))
    })
}
