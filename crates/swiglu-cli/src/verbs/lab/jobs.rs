//! `swiglu lab status`, `fetch` and `cancel`: runs that happen elsewhere.

use std::io::Write;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use swiglu_lab::executor::{Job, Jobs};

use super::on::line;
use super::places::LabDirArgs;
use crate::table::{Table, or_dash};
use crate::terminal::{Terminal, Verdict, shown};

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// Those that are done and fetched, too
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    places: LabDirArgs,
}

#[derive(Debug, Args)]
pub(super) struct FetchArgs {
    /// The job [default: every one that is not done and fetched]
    job: Option<String>,
    #[command(flatten)]
    places: LabDirArgs,
}

#[derive(Debug, Args)]
pub(super) struct CancelArgs {
    /// The job
    job: String,
    #[command(flatten)]
    places: LabDirArgs,
}

/// A job as `status` shows it.
#[derive(Debug, Serialize)]
struct Row {
    job: String,
    experiment: String,
    run_id: String,
    place: String,
    id: Option<String>,
    state: String,
    fetched: bool,
}

pub(super) fn status(args: &StatusArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let jobs = Jobs::new(&args.places.lab()?);
    let mut rows = Vec::new();
    for mut job in jobs.all()?.into_iter().filter(|job| args.all || !job.fetched) {
        let state = match (job.fetched, &job.id) {
            (true, None) => "was not submitted".to_owned(),
            (true, Some(_)) => format!("{}; fetched", line(&job.poll(&jobs)?)),
            (false, _) => line(&job.poll(&jobs)?),
        };
        rows.push(Row {
            place: job.spec.place().to_owned(),
            job: job.name,
            experiment: job.experiment,
            run_id: job.run_id,
            id: job.id,
            state,
            fetched: job.fetched,
        });
    }
    terminal.print(&rows, |rows, terminal| {
        Table::of(rows)
            .text("job", |r| &r.job)
            .text("place", |r| &r.place)
            .text("id", |r| or_dash(r.id.as_ref()))
            .text("state", |r| &r.state)
            .print(terminal)
    })?;
    Ok(Verdict::Passed)
}

/// What `fetch` did for a job.
#[derive(Debug, Serialize)]
struct Fetched {
    job: String,
    state: String,
    /// Records that are new here or have more results than before.
    merged: usize,
    records: Vec<String>,
}

pub(super) fn fetch(args: &FetchArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let jobs = Jobs::new(&args.places.lab()?);
    let chosen: Vec<Job> = match &args.job {
        Some(name) => vec![jobs.find(name)?],
        None => jobs.all()?.into_iter().filter(|job| !job.fetched).collect(),
    };
    let (mut fetched, mut over) = (Vec::new(), true);
    for mut job in chosen {
        let merged = job.fetch(&jobs)?;
        over &= job.fetched;
        fetched.push(Fetched {
            state: line(&job.poll(&jobs)?),
            job: job.name,
            merged: merged.news,
            records: merged.records.into_iter().map(|opened| shown(opened.path)).collect(),
        });
    }
    terminal.print(&fetched, |fetched, terminal| {
        for Fetched { job, state, merged, records } in fetched {
            writeln!(terminal, "{job}: {state}; {merged} of {} records are new", records.len())?;
            for path in records {
                writeln!(terminal, "record: {path}")?;
            }
        }
        Ok(())
    })?;
    Ok(Verdict::of_job(over))
}

pub(super) fn cancel(args: &CancelArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let jobs = Jobs::new(&args.places.lab()?);
    let mut job = jobs.find(&args.job)?;
    job.cancel(&jobs)?;
    let polled = job.poll(&jobs)?;
    let state = match (&job.id, job.cancelled && !polled.state.is_over()) {
        (None, _) => "was not submitted, and is forgotten".to_owned(),
        (Some(_), true) => format!("is being cancelled, {}", polled.state),
        (Some(_), false) => polled.state.to_string(),
    };
    let name = &job.name;
    terminal.print(&json!({ "job": name, "state": state }), |_, terminal| {
        let fetch = args.places.command(&format!("fetch {name}"));
        Ok(writeln!(terminal, "{name}: {state}; {fetch} brings finished cases")?)
    })?;
    Ok(Verdict::Passed)
}
