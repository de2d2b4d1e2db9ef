//! `swiglu lab run --on PLACE`: the run happens there, and its record comes back. `status`, `fetch` and `cancel`: what
//! became of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use swiglu_lab::executor::{Job, JobEvent, Jobs, Merged, Polled, Request};
use swiglu_lab::record::Opened;

use super::places::LabDirArgs;
use super::request::Asked;
use crate::table::{Table, or_dash};
use crate::terminal::{Terminal, Verdict, say, shown, stop_on_signals, tell};

/// How often the state of a job is told where nobody watches a terminal.
const REMINDER: Duration = Duration::from_secs(60);

/// Runs an experiment in a place; its record, or none if whoever waited left.
pub(super) fn run(
    Asked { args, lab, experiment, store, jobs, spec, .. }: &Asked<'_>,
    run_id: &str,
    terminal: &Terminal,
) -> Result<Option<Opened>> {
    let program = &std::env::current_exe().context("the path of this program")?;
    let (arguments, peers) = (args.arguments(spec), &args.peers.dir(lab));
    let request = Request { experiment, run_id, arguments, program, lab, peers, store };
    let interrupted = Arc::new(AtomicBool::new(false));
    stop_on_signals(&interrupted, "a look at the job, which goes on")?;
    let (bar, place) = (terminal.spinner(), spec.place());
    let (mut told, mut at) = (String::new(), Instant::now());
    let mut watch = |event: JobEvent<'_>| match event {
        JobEvent::Staged(bytes) => tell(&bar, format!("bundle: {} MB copied", bytes / 1_000_000)),
        JobEvent::Submitted { id, again: None } => tell(&bar, format!("{place}: job {id}")),
        JobEvent::Submitted { id, again: Some(why) } => {
            tell(&bar, format!("{place}: the job {why}; it goes on as job {id}"));
        }
        JobEvent::Polled(polled) => {
            let (state, line) = (polled.state.to_string(), line(polled));
            bar.set_message(line.clone());
            if state != told || at.elapsed() > REMINDER {
                tell(&bar, format!("{place}: {line}"));
                (told, at) = (state, Instant::now());
            }
        }
        _ => {}
    };
    let name = format!("{}-{run_id}", experiment.id);
    let lock = jobs.watch(&name)?;
    let mut job = jobs.submit(&lock, spec, &request, &mut watch)?;
    let outcome = job.follow(jobs, &lock, &interrupted, &mut watch);
    bar.finish_and_clear();
    // From here on the first time ends it at once.
    interrupted.store(true, Ordering::Relaxed);
    match outcome? {
        None => {
            let id = job.id.as_deref().unwrap_or("not yet known");
            let command = |words: String| args.places.dir.command(&words);
            let status = command("status".into());
            let [fetch, cancel] = ["fetch", "cancel"].map(|verb| command(format!("{verb} {name}")));
            say(format!(
                "job {id} goes on at {place}: {status} shows it, {fetch} brings its record, {cancel} \
                 ends it"
            ));
            Ok(None)
        }
        // A run that went on on another machine has a record of each; the last one is the newest.
        Some(mut merged) => Ok(merged.records.pop()),
    }
}

/// A job on one line.
fn line(polled: &Polled) -> String {
    match polled.log.last().filter(|_| !polled.state.is_over()) {
        Some(log) => format!("{}: {log}", polled.state),
        None => polled.state.to_string(),
    }
}

pub(super) fn status(all: bool, jobs: &Jobs, terminal: &mut Terminal) -> Result<Verdict> {
    let mut rows = Vec::new();
    for mut job in jobs.all()?.into_iter().filter(|job| all || !job.fetched) {
        let state = match (job.fetched, &job.id) {
            (true, None) => "was not submitted".to_owned(),
            (true, Some(_)) => format!("{}; fetched", line(&job.poll(jobs)?)),
            (false, _) => line(&job.poll(jobs)?),
        };
        rows.push((job, state));
    }
    let document = |(job, state): &(Job, String)| {
        json!({
            "job": job.name, "experiment": job.experiment, "run_id": job.run_id, "id": job.id,
            "place": job.spec.place(), "state": state, "fetched": job.fetched,
        })
    };
    terminal.print(&rows.iter().map(document).collect::<Vec<_>>(), |_, terminal| {
        Table::of(&rows)
            .text("job", |(job, _)| &job.name)
            .text("place", |(job, _)| job.spec.place())
            .text("id", |(job, _)| or_dash(job.id.as_ref()))
            .text("state", |(_, state)| state)
            .print(terminal)
    })
}

pub(super) fn fetch(job: Option<&str>, jobs: &Jobs, terminal: &mut Terminal) -> Result<Verdict> {
    let chosen: Vec<Job> = match job {
        Some(name) => vec![jobs.find(name)?],
        None => jobs.all()?.into_iter().filter(|job| !job.fetched).collect(),
    };
    let (mut fetched, mut said, mut over) = (Vec::new(), String::new(), true);
    for mut job in chosen {
        // Those that are new here or have more results than before.
        let Merged { news: merged, records } = job.fetch(jobs)?;
        over &= job.fetched;
        let (name, state) = (&job.name.clone(), line(&job.poll(jobs)?));
        let records: Vec<_> = records.into_iter().map(|opened| shown(opened.path)).collect();
        said += &format!("{name}: {state}; {merged} of {} records are new\n", records.len());
        said.extend(records.iter().map(|path| format!("record: {path}\n")));
        fetched.push(json!({ "job": name, "state": state, "merged": merged, "records": records }));
    }
    terminal.print(&fetched, |_, terminal| write!(terminal, "{said}"))?;
    Ok(if over { Verdict::Passed } else { Verdict::Unfinished })
}

pub(super) fn cancel(job: &str, places: &LabDirArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let jobs = places.jobs()?;
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
        let rest = job.id.is_some().then(|| format!("; {fetch} brings finished cases"));
        writeln!(terminal, "{name}: {state}{}", rest.unwrap_or_default())
    })
}
