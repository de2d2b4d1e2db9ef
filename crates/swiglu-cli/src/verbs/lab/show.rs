//! `swiglu lab show`: what an experiment asks, what its records say, and why.

use std::io::Write;

use clap::Args;
use serde::Serialize;
use swiglu_lab::record::Opened;
use swiglu_lab::{Experiment, History, RecordVerdict, Verdict as LabVerdict, VerdictState};

use super::places::PlaceArgs;
use crate::terminal::{Terminal, Verdict, shown};

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// The experiment's id
    experiment: String,
    #[command(flatten)]
    places: PlaceArgs,
}

#[derive(Serialize)]
struct Document {
    id: String,
    title: String,
    question: String,
    claim: String,
    verdict: VerdictState,
    headline: String,
    /// The one that the verdict is of comes first.
    machines: Vec<RecordVerdict>,
    records: Vec<Kept>,
    boundary: String,
}

/// A record.
#[derive(Serialize)]
struct Kept {
    file: String,
    finished: String,
    commit: Option<String>,
    /// Commits to the backend since.
    age_commits: Option<u64>,
    complete: bool,
    quick: bool,
}

pub(super) fn show(args: &ShowArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let experiment = Experiment::find(&args.places.experiments()?, &args.experiment)?;
    let (records, refused) = args.places.records()?.of_experiment(&experiment.id)?;
    if let Some(refused) = refused.into_iter().next() {
        return Err(refused.error.into());
    }
    let history = History::around(&args.places.lab()?);
    let verdict = LabVerdict::of(&experiment, &records);
    let kept = |opened: Opened| Kept {
        age_commits: history.age(&opened.record.code, experiment.device),
        file: shown(opened.path),
        finished: opened.record.finished,
        commit: opened.record.code.commit,
        complete: opened.record.complete,
        quick: opened.record.protocol.quick,
    };
    let document = Document {
        records: records.into_iter().map(kept).collect(),
        id: experiment.id,
        title: experiment.title,
        question: experiment.question,
        claim: experiment.claim.text,
        verdict: verdict.state,
        headline: verdict.headline,
        machines: verdict.machines,
        boundary: experiment.boundary,
    };
    terminal.print(&document, print)?;
    Ok(Verdict::Passed)
}

fn print(document: &Document, terminal: &mut Terminal) -> anyhow::Result<()> {
    writeln!(terminal, "{}: {}", document.verdict, document.headline)?;
    writeln!(terminal, "question  {}", document.question)?;
    writeln!(terminal, "claim     {}", document.claim)?;
    for machine in &document.machines {
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
    for record in &document.records {
        let commit = record.commit.as_deref().and_then(|c| c.get(..9)).unwrap_or("unknown commit");
        let age = match record.age_commits {
            Some(n) => format!("{n} commits to this backend since"),
            None => "its age is not known here".into(),
        };
        let state = match (record.quick, record.complete) {
            (true, _) => ", quick: not evidence",
            (false, false) => ", not complete",
            (false, true) => "",
        };
        writeln!(terminal, "record {} at {commit}, {age}{state}", record.file)?;
    }
    writeln!(terminal, "\nnot covered: {}", document.boundary.replace('\n', " "))?;
    Ok(())
}
