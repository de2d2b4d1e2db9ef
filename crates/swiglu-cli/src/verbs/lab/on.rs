//! `swiglu lab run --on PLACE`: the run happens there, and its record comes back.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use swiglu_lab::Experiment;
use swiglu_lab::executor::{ExecutorSpec, JobEvent, Jobs, Outcome, Polled, Request};
use swiglu_lab::record::{Opened, Store};

use super::request::{Named, RunArgs};
use crate::terminal::{Terminal, say, tell};

/// How often the state of a job is told where nobody watches a terminal.
const REMINDER: Duration = Duration::from_secs(60);

/// Runs an experiment in a place; its record, or none if whoever waited left.
pub(super) fn run(
    args: &RunArgs,
    experiment: &Experiment,
    store: &Store,
    jobs: &Jobs,
    spec: &ExecutorSpec,
    named: &Named,
    terminal: &Terminal,
) -> anyhow::Result<Option<Opened>> {
    let lab = args.places.lab()?;
    let program = std::env::current_exe().context("the path of this program")?;
    let request = Request {
        experiment,
        run_id: &named.run_id,
        arguments: args.arguments(spec),
        program: &program,
        lab: &lab,
        peers: &args.peers.dir(&lab),
        store,
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone()).context("listening to Ctrl-C")?;
    }
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
    let name = format!("{}-{}", experiment.id, named.run_id);
    let lock = jobs.watch(&name)?;
    let mut job = jobs.submit(&lock, spec, &request, &mut watch)?;
    let outcome = job.follow(jobs, &lock, &interrupted, &mut watch);
    bar.finish_and_clear();
    match outcome? {
        Outcome::Left => {
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
        Outcome::Done(mut merged) => Ok(merged.records.pop()),
    }
}

/// A job on one line.
pub(super) fn line(polled: &Polled) -> String {
    match polled.log.last().filter(|_| !polled.state.is_over()) {
        Some(log) => format!("{}: {log}", polled.state),
        None => polled.state.to_string(),
    }
}
