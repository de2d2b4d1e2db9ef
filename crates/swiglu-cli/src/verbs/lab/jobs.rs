//! `swiglu lab status`, `fetch` and `cancel`: runs that happen elsewhere.

use std::io::Write;

use serde::Serialize;
use serde_json::json;
use swiglu_lab::executor::{Job, Jobs, Merged};

use super::on::line;
use super::places::LabDirArgs;
use crate::table::{Table, or_dash};
use crate::terminal::{Terminal, Verdict, shown};

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

pub(super) fn status(
    all: bool,
    places: &LabDirArgs,
    terminal: &mut Terminal,
) -> anyhow::Result<Verdict> {
    let jobs = Jobs::new(&places.lab()?);
    let mut rows = Vec::new();
    for mut job in jobs.all()?.into_iter().filter(|job| all || !job.fetched) {
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

pub(super) fn fetch(
    job: Option<&str>,
    places: &LabDirArgs,
    terminal: &mut Terminal,
) -> anyhow::Result<Verdict> {
    let jobs = Jobs::new(&places.lab()?);
    let chosen: Vec<Job> = match job {
        Some(name) => vec![jobs.find(name)?],
        None => jobs.all()?.into_iter().filter(|job| !job.fetched).collect(),
    };
    let (mut fetched, mut said, mut over) = (Vec::new(), String::new(), true);
    for mut job in chosen {
        // Those that are new here or have more results than before.
        let Merged { news: merged, records } = job.fetch(&jobs)?;
        over &= job.fetched;
        let (name, state) = (&job.name.clone(), line(&job.poll(&jobs)?));
        let records: Vec<_> = records.into_iter().map(|opened| shown(opened.path)).collect();
        said += &format!("{name}: {state}; {merged} of {} records are new\n", records.len());
        said.extend(records.iter().map(|path| format!("record: {path}\n")));
        fetched.push(json!({ "job": name, "state": state, "merged": merged, "records": records }));
    }
    terminal.print(&fetched, |_, terminal| Ok(terminal.write_all(said.as_bytes())?))?;
    Ok(if over { Verdict::Passed } else { Verdict::Unfinished })
}

pub(super) fn cancel(
    job: &str,
    places: &LabDirArgs,
    terminal: &mut Terminal,
) -> anyhow::Result<Verdict> {
    let jobs = Jobs::new(&places.lab()?);
    let mut job = jobs.find(job)?;
    job.cancel(&jobs)?;
    let polled = job.poll(&jobs)?;
    let state = match (&job.id, job.cancelled && !polled.state.is_over()) {
        (None, _) => "was not submitted, and is forgotten".to_owned(),
        (Some(_), true) => format!("is being cancelled, {}", polled.state),
        (Some(_), false) => polled.state.to_string(),
    };
    let name = &job.name;
    terminal.print(&json!({ "job": name, "state": state }), |_, terminal| {
        let fetch = places.command(&format!("fetch {name}"));
        Ok(writeln!(terminal, "{name}: {state}; {fetch} brings finished cases")?)
    })?;
    Ok(Verdict::Passed)
}
