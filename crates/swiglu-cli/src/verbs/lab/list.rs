//! `swiglu lab list` and `show`: what experiments ask, what their records say, and why.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::bail;
use serde_json::{Value, json};
use swiglu_lab::record::{Interval, Opened, Store};
use swiglu_lab::{
    Experiment, History, LabError, RecordVerdict, Verdict as LabVerdict, VerdictState,
};

use super::places::PlaceArgs;
use crate::table::{self, Table, or_dash};
use crate::terminal::{Terminal, Verdict, say, shown};

/// An experiment.
struct Row {
    id: String,
    verdict: LabVerdict,
    /// Commits to the backend since the record that the verdict is of; none where there is no repository to ask, or it
    /// does not have the commit.
    age: Option<u64>,
}

impl Row {
    fn new(experiment: &Experiment, records: &[Opened], history: &History) -> Self {
        let verdict = LabVerdict::of(experiment, records);
        let opened = verdict.decisive().and_then(|d| {
            let of =
                |o: &&Opened| o.record.run_id == d.run_id && o.record.machine.name == d.machine;
            records.iter().find(of)
        });
        let age = opened.and_then(|o| history.age(&o.record.code, experiment.device));
        Self { id: experiment.id.clone(), verdict, age }
    }

    /// What is decisive, with the claim's statistic: the geometric mean over the cases; none where no case could be
    /// compared.
    fn headline(&self) -> Option<(&RecordVerdict, Interval)> {
        self.verdict.decisive().and_then(|decisive| Some((decisive, decisive.aggregate?)))
    }

    fn document(&self) -> Value {
        let headline = self.headline().map(|(of, Interval { value: ratio, ci95: [low, high] })| {
            let (cases, exceptions) = (of.cases.len(), of.exceptions.len());
            json!({
                "ratio": ratio, "low": low, "high": high, "cases": cases, "exceptions": exceptions,
            })
        });
        let decisive = self.verdict.decisive();
        json!({
            "id": self.id,
            "verdict": self.verdict.state,
            "why": headline.is_none().then_some(&self.verdict.headline),
            "headline": headline,
            "machine": decisive.map(|d| &d.machine),
            "age_commits": self.age,
            // What would decide it, where it is inconclusive.
            "undecided": decisive.and_then(|d| d.undecided.as_ref()),
        })
    }
}

pub(super) fn list(places: &PlaceArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let dir = places.experiments()?;
    let history = History::around(&places.lab()?);
    let store = places.records()?;
    let (mut rows, mut broken) = (Vec::new(), Vec::new());
    let (mut counted, mut ids) = (BTreeSet::new(), Vec::new());
    for experiment in Experiment::read_dir(&dir)? {
        let experiment = match experiment {
            Ok(experiment) => experiment,
            Err(error) => {
                // Its records are not strange for that.
                if let LabError::Definition { path, .. } = &error {
                    ids.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
                }
                broken.push(error.to_string());
                continue;
            }
        };
        let (records, refused) = store.of_experiment(&experiment.id)?;
        broken.extend(refused.iter().map(|r| r.error.to_string()));
        counted.extend(refused.into_iter().map(|r| r.path));
        counted.extend(records.iter().map(|r| r.path.clone()));
        rows.push(Row::new(&experiment, &records, &history));
        ids.push(experiment.id);
    }
    let document: Vec<Value> = rows.iter().map(Row::document).collect();
    terminal.print(&document, |_, terminal| table_of(&rows, terminal))?;
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    for stray in store.strays(&counted, &ids)? {
        say(format!("warning: {}", stray.error));
    }
    if !broken.is_empty() {
        // What could be read has been shown; what could not is an error all the same.
        bail!("{}", broken.join("\nerror: "));
    }
    Ok(Verdict::Passed)
}

fn table_of(rows: &[Row], terminal: &mut Terminal) -> anyhow::Result<()> {
    let figure = |r: &Row, of: fn(&RecordVerdict, Interval) -> String| {
        r.headline().map(|(decisive, ratio)| of(decisive, ratio)).unwrap_or_default()
    };
    Table::of(rows)
        .text("experiment", |r| &r.id)
        .text("verdict", |r| match r.verdict.state {
            state @ VerdictState::Supported => table::good(state),
            state @ VerdictState::Refuted => table::bad(state),
            state @ VerdictState::Inconclusive => table::open(state),
            state @ VerdictState::NotRun => state.into(),
        })
        .number("ratio", |r| figure(r, |_, ratio| format!("{:.2}×", ratio.value)))
        .number("interval", |r| {
            figure(r, |_, Interval { ci95: [low, high], .. }| format!("{low:.2} – {high:.2}"))
        })
        .number("cases", |r| figure(r, |d, _| d.cases.len().to_string()))
        .number("below", |r| {
            figure(r, |d, _| match d.exceptions.len() {
                0 => String::new(),
                n => n.to_string(),
            })
        })
        .text("machine", |r| r.verdict.decisive().map_or(&r.verdict.headline, |d| &d.machine))
        .number("age", |r| or_dash(r.age))
        .print(terminal)
}

/// The records of an experiment, of which none is refused.
pub(super) fn records_of(store: &Store, experiment: &str) -> anyhow::Result<Vec<Opened>> {
    let (records, refused) = store.of_experiment(experiment)?;
    match refused.into_iter().next() {
        Some(refused) => Err(refused.error.into()),
        None => Ok(records),
    }
}

/// One experiment.
pub(super) fn show(
    id: &str,
    places: &PlaceArgs,
    terminal: &mut Terminal,
) -> anyhow::Result<Verdict> {
    let experiment = Experiment::find(&places.experiments()?, id)?;
    let records = records_of(&places.records()?, &experiment.id)?;
    let history = History::around(&places.lab()?);
    let age = |opened: &Opened| history.age(&opened.record.code, experiment.device);
    let verdict = LabVerdict::of(&experiment, &records);
    let kept = |opened: &Opened| {
        let record = &opened.record;
        json!({
            "file": shown(&opened.path), "finished": record.finished, "commit": record.code.commit,
            "age_commits": age(opened), "complete": record.complete, "quick": record.protocol.quick,
        })
    };
    let (claim, boundary) = (&experiment.claim.text, &experiment.boundary);
    let document = json!({
        "id": experiment.id, "title": experiment.title, "question": experiment.question,
        "claim": claim, "verdict": verdict.state, "headline": verdict.headline,
        "machines": verdict.machines, "boundary": boundary,
        "records": records.iter().map(kept).collect::<Vec<_>>(),
    });
    terminal.print(&document, |_, terminal| {
        writeln!(terminal, "{}: {}", verdict.state, verdict.headline)?;
        writeln!(terminal, "question  {}\nclaim     {claim}", experiment.question)?;
        for machine in &verdict.machines {
            writeln!(terminal, "\n{} ({}): {}", machine.machine, machine.run_id, machine.state)?;
            machine.reasons.iter().try_for_each(|reason| writeln!(terminal, "  {reason}"))?;
            if let Some(undecided) = &machine.undecided {
                writeln!(terminal, "  to decide it: {}", undecided.text)?;
            }
            for exception in &machine.exceptions {
                writeln!(terminal, "  exception: {exception}")?;
            }
            machine.marks.iter().try_for_each(|mark| writeln!(terminal, "  mark: {mark}"))?;
        }
        writeln!(terminal)?;
        for opened in &records {
            let record = &opened.record;
            let commit = record.code.commit.as_deref().and_then(|c| c.get(..9));
            let commit = commit.unwrap_or("unknown commit");
            let age = match age(opened) {
                Some(n) => format!("{n} commits to this backend since"),
                None => "its age is not known here".into(),
            };
            let state = match (record.protocol.quick, record.complete) {
                (true, _) => ", quick: not evidence",
                (false, false) => ", not complete",
                (false, true) => "",
            };
            writeln!(terminal, "record {} at {commit}, {age}{state}", opened.path.display())?;
        }
        Ok(writeln!(terminal, "\nnot covered: {}", boundary.replace('\n', " "))?)
    })
}
