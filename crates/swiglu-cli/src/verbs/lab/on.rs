//! `swiglu lab run --on PLACE`: the run happens there, and its record comes back.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use signal_hook::consts::{SIGINT, SIGTERM};
use swiglu_lab::Experiment;
use swiglu_lab::executor::{
    ENVIRONMENT, ExecutorKind, ExecutorSpec, JobEvent, Jobs, Outcome, Polled, Request,
};
use swiglu_lab::record::{Opened, Store};

use super::run::{RunArgs, tell};
use crate::terminal::Terminal;

/// How often the state of a job is told where nobody watches a terminal.
const REMINDER: Duration = Duration::from_secs(60);

/// What a run is called, and what there is of it.
pub(super) struct Named {
    pub(super) run_id: String,
    pub(super) begun: Option<Opened>,
}

impl Named {
    /// The run that is asked for, on `machine` if it is this one.
    pub(super) fn find(
        args: &RunArgs,
        experiment: &Experiment,
        store: &Store,
        jobs: &Jobs,
        spec: &ExecutorSpec,
        machine: &str,
    ) -> anyhow::Result<Self> {
        let (mut records, _) = store.of_experiment(&experiment.id)?;
        let local = spec.kind == ExecutorKind::Local;
        records.retain(|opened| !local || opened.record.machine.name == machine);
        let jobs: Vec<_> =
            jobs.all()?.into_iter().filter(|job| job.experiment == experiment.id).collect();
        let run_id = match (&args.run_id, args.resume) {
            (Some(given), _) => given.clone(),
            (None, false) => spec.run_name(&args.places.lab()?, |name| {
                records.iter().any(|opened| opened.record.run_id == name)
                    || jobs.iter().any(|job| job.run_id == name)
            }),
            (None, true) => {
                // What is here of a job that was left may be less than there.
                let left =
                    jobs.iter().find(|job| !local && !job.fetched && job.spec.name == spec.name);
                let of_place = |opened: &&Opened| {
                    let executor = opened.record.executor.as_ref();
                    match local {
                        true => executor.is_none(),
                        false => executor.is_some_and(|e| e.place == spec.place()),
                    }
                };
                let incomplete = records.iter().rev().filter(of_place).find(|opened| {
                    let record = &opened.record;
                    let same = record.definition_hash == experiment.definition_hash;
                    !record.complete && same && record.protocol.quick == args.quick
                });
                let found = left
                    .map(|job| job.run_id.clone())
                    .or(incomplete.map(|opened| opened.record.run_id.clone()));
                match found {
                    Some(run_id) => run_id,
                    None => bail!(
                        "--resume: there is no incomplete run of {} on {} with this definition and \
                         {} --quick; leave it out to begin one",
                        experiment.id,
                        spec.place(),
                        if args.quick { "with" } else { "without" }
                    ),
                }
            }
        };
        let begun = records.into_iter().rev().find(|opened| opened.record.run_id == run_id);
        let known = begun.is_some() || jobs.iter().any(|job| job.run_id == run_id);
        // A job starts with both, also for the first time.
        let inside = std::env::var_os(ENVIRONMENT).is_some();
        if args.resume && !known && !inside {
            bail!(
                "--resume --run-id {run_id}: there is no such run of {}; leave --resume out to begin one",
                experiment.id
            );
        }
        Ok(Self { run_id, begun })
    }
}

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
        arguments: arguments(args, spec),
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
        JobEvent::Staged(bytes) => tell(&bar, &format!("bundle: {} MB copied", bytes / 1_000_000)),
        JobEvent::Submitted { id, again: None } => tell(&bar, &format!("{place}: job {id}")),
        JobEvent::Submitted { id, again: Some(why) } => {
            tell(&bar, &format!("{place}: the job {why}; it goes on as job {id}"));
        }
        JobEvent::Polled(polled) => {
            let (state, line) = (polled.state.to_string(), line(polled));
            bar.set_message(line.clone());
            if state != told || at.elapsed() > REMINDER {
                tell(&bar, &format!("{place}: {line}"));
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
            let left = format!(
                "job {id} goes on at {place}: `swiglu lab status` shows it, `swiglu lab fetch {name}` \
                 brings its record, `swiglu lab cancel {name}` ends it"
            );
            // Without a standard error there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "{left}");
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

/// The options of this run that are the same there.
fn arguments(args: &RunArgs, spec: &ExecutorSpec) -> Vec<String> {
    let mut words = vec!["--no-progress".to_owned()];
    let mut option = |name: &str, value: Option<String>| {
        words.extend(value.map(|value| format!("--{name}={value}")));
    };
    option("profiles", args.profiles.as_ref().map(|ids| ids.join(",")));
    option("cases", args.cases.clone());
    option("preparations", args.preparations.map(|n| n.to_string()));
    option("machine", args.machine.machine.clone());
    let python = spec.python.clone();
    option("python", python.or_else(|| Some(args.peers.python.to_string_lossy().into_owned())));
    words.extend(args.until_decided.map(|minutes| format!("--until-decided={minutes}")));
    words.extend(args.quick.then(|| "--quick".to_owned()));
    words.extend(args.with_profiling.then(|| "--with-profiling".to_owned()));
    words
}
