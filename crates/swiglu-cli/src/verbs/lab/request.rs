//! What a run of the lab is told, and which run that is.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use swiglu_lab::executor::{ENVIRONMENT, ExecutorKind, ExecutorSpec, Jobs};
use swiglu_lab::record::{Machine, Opened, Store};
use swiglu_lab::{Experiment, RunOptions};

use super::places::{PeerArgs, PlaceArgs};
use crate::args::whole;

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The experiment's id
    pub(super) experiment: String,
    /// Names the run; the same again goes on with it [default: date, commit and place]
    #[arg(long, value_name = "ID")]
    pub(super) run_id: Option<String>,
    /// Go on with the newest incomplete run of this experiment and place, or with that of --run-id
    #[arg(long)]
    pub(super) resume: bool,
    /// Where it happens: local, ssh:HOST, slurm, slurm:PARTITION, 'command:… {script} …', or a name in
    /// executors.toml of the lab
    #[arg(long, value_name = "PLACE", default_value = "local")]
    pub(super) on: String,
    /// Only these profiles, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub(super) profiles: Option<Vec<String>>,
    /// Only cases that have all these words, for example "m=1 bf16"
    #[arg(long, value_name = "WORDS")]
    pub(super) cases: Option<String>,
    /// Few and short turns: a look that is no evidence, and never counts for a verdict
    #[arg(long)]
    pub(super) quick: bool,
    /// How often every profile is prepared anew; fewer take less time and make intervals wider
    #[arg(long, value_name = "N", value_parser = whole(2..=5usize), conflicts_with = "quick")]
    pub(super) preparations: Option<usize>,
    /// End after the case in progress once so many minutes have passed; --resume goes on
    #[arg(long, value_name = "MINUTES", value_parser = whole(1..=600u64))]
    pub(super) time_limit: Option<u64>,
    /// Measure cases outside of the claim's margin anew with five preparations, then prepare profiles more often until
    /// noise no longer forbids an answer, for at most so many minutes after the run [default: 30]
    #[arg(long, value_name = "MINUTES", num_args = 0..=1, require_equals = true,
        default_missing_value = "30", value_parser = whole(1..=600u64),
        conflicts_with_all = ["quick", "profiles", "cases"])]
    pub(super) until_decided: Option<u64>,
    /// Count with Nsight Compute what the kernels of this program do, once per case, after the run
    #[arg(long)]
    pub(super) with_profiling: bool,
    #[command(flatten)]
    pub(super) places: PlaceArgs,
    /// Name of this machine: the directory of its records [default: made of its facts]
    #[arg(long, value_name = "NAME", help_heading = "Places")]
    pub(super) machine: Option<String>,
    #[command(flatten)]
    pub(super) peers: PeerArgs,
}

impl RunArgs {
    /// The run as it is here.
    pub(super) fn options(&self, run_id: &str) -> RunOptions {
        let mut options = RunOptions {
            profiles: self.profiles.clone(),
            cases: self.cases.clone(),
            ..RunOptions::new(run_id, self.quick)
        };
        if let Some(preparations) = self.preparations {
            options.protocol.preparations = preparations;
        }
        let minutes = |minutes| Duration::from_secs(60 * minutes);
        options.until_decided = self.until_decided.map(minutes);
        options.time_limit = self.time_limit.map(minutes);
        options
    }

    /// The options of this run that are the same in another place.
    pub(super) fn arguments(&self, spec: &ExecutorSpec) -> Vec<String> {
        let mut words = vec!["--no-progress".to_owned()];
        let mut option = |name: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("--{name}={value}")));
        };
        option("profiles", self.profiles.as_ref().map(|ids| ids.join(",")));
        option("cases", self.cases.clone());
        option("preparations", self.preparations.map(|n| n.to_string()));
        option("time-limit", self.time_limit.map(|minutes| minutes.to_string()));
        option("machine", self.machine.clone());
        let python = spec.python.clone();
        option("python", python.or_else(|| Some(self.peers.python.to_string_lossy().into_owned())));
        words.extend(self.until_decided.map(|minutes| format!("--until-decided={minutes}")));
        words.extend(self.quick.then(|| "--quick".to_owned()));
        words.extend(self.with_profiling.then(|| "--with-profiling".to_owned()));
        words
    }
}

/// A run that was asked for, with all that it is found by.
pub(super) struct Asked<'a> {
    pub(super) args: &'a RunArgs,
    pub(super) lab: PathBuf,
    pub(super) experiment: Experiment,
    pub(super) machine: Machine,
    pub(super) store: Store,
    pub(super) jobs: Jobs,
    pub(super) spec: ExecutorSpec,
}

impl<'a> Asked<'a> {
    pub(super) fn of(args: &'a RunArgs) -> Result<Self> {
        let lab = args.places.dir.lab()?;
        let experiment = Experiment::find(&args.places.experiments()?, &args.experiment)?;
        experiment.expect_measured()?;
        let machine = Machine::detect(experiment.device, args.machine.as_deref())?;
        let store = args.places.store()?;
        let (jobs, spec) = (Jobs::new(&lab), ExecutorSpec::find(&args.on, &lab)?);
        Ok(Self { args, lab, experiment, machine, store, jobs, spec })
    }

    /// What it is called, and what there is of it, on this machine if it runs here.
    pub(super) fn named(&self) -> Result<(String, Option<Opened>)> {
        let Self { args, experiment, spec, .. } = self;
        let (mut records, _) = self.store.of_experiment(&experiment.id)?;
        let local = spec.kind == ExecutorKind::Local;
        records.retain(|opened| !local || opened.record.machine.name == self.machine.name);
        let mut jobs = self.jobs.all()?;
        jobs.retain(|job| job.experiment == experiment.id);
        let run_id = match (&args.run_id, args.resume) {
            (Some(given), _) => given.clone(),
            (None, false) => spec.run_name(&self.lab, |name| {
                records.iter().any(|opened| opened.record.run_id == name)
                    || jobs.iter().any(|job| job.run_id == name)
            }),
            (None, true) => {
                // What is here of a job that was left may be less than there.
                let left =
                    jobs.iter().find(|job| !local && !job.fetched && job.spec.name == spec.name);
                let place = (!local).then(|| spec.place());
                let ran = |o: &Opened| o.record.executor.as_ref().map(|e| e.place.clone());
                let of_place = |opened: &&Opened| ran(opened).as_deref() == place;
                let incomplete = records.iter().rev().filter(of_place).find(|opened| {
                    let record = &opened.record;
                    let same = record.definition_hash == experiment.definition_hash;
                    !record.complete && same && record.protocol.quick == args.quick
                });
                let found = left.map(|job| job.run_id.clone());
                let found = found.or(incomplete.map(|opened| opened.record.run_id.clone()));
                found.with_context(|| {
                    let (id, place) = (&experiment.id, spec.place());
                    let quick = if args.quick { "with" } else { "without" };
                    format!(
                        "--resume: there is no incomplete run of {id} on {place} with this definition and \
                         {quick} --quick; leave it out to begin one"
                    )
                })?
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
        Ok((run_id, begun))
    }
}
