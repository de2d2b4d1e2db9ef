//! A run of the lab on this machine: what it takes for itself, its peers, and what they say meanwhile.

use std::collections::BTreeSet;
use std::fs::DirEntry;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use swiglu_cuda::DeviceFacts;
use swiglu_lab::peer::PeerCommands;
use swiglu_lab::record::{Locks, Machine, Measured, RunLock, Store};
use swiglu_lab::{
    Code, DeviceKind, Event, Experiment, Finished, LabError, Laboratory, ProfileDef, ResultEntry,
    RunOptions, Status,
};
use tempfile::TempDir;

use super::places::{OUR_PEERS, PeerArgs};
use crate::terminal::{Terminal, say, tell};

/// What runs on this machine share. While it is there no other process of this user measures the same.
pub(super) struct Session<'a> {
    experiment: &'a Experiment,
    store: &'a Store,
    machine: &'a Machine,
    lock: RunLock,
    logs: Logs,
    code: Code,
    pub(super) commands: PeerCommands,
}

impl<'a> Session<'a> {
    /// What a run of this name needs, with records in `store`. It takes for itself what it measures: the processor with
    /// everything around it, or the first accelerator that this process sees, which is the one that peers see first. No
    /// other process of this user measures that meanwhile, wherever it writes; none writes a record of this name into the
    /// store.
    pub(super) fn begin(
        name: &str,
        experiment: &'a Experiment,
        store: &'a Store,
        machine: &'a Machine,
        lab: &Path,
        peers: &PeerArgs,
    ) -> Result<Self> {
        let none = |e: swiglu_cuda::CudaError| LabError::Refused {
            place: format!("experiment {}", experiment.id),
            what: "measuring a CUDA device",
            why: e.to_string(),
            advice: "run it on a machine with one. Nothing was recorded",
        };
        let identity = match experiment.device {
            DeviceKind::Cpu => String::new(),
            DeviceKind::Cuda => DeviceFacts::of(0).map_err(none)?.uuid,
        };
        // One that has no identity could be the one that another run measures.
        let known = (!identity.is_empty()).then_some(Measured::Device(&identity));
        let measured = known.unwrap_or(Measured::Machine);
        let lock = store.lock(&Locks::of_user()?, measured, &machine.name, name)?;
        let logs = Logs::of(name)?;
        let commands = peers.commands(lab, logs.dir())?;
        let code = Code::detect(lab, &std::env::current_exe().context("the path of this program")?);
        Ok(Self { experiment, store, machine, lock, logs, code, commands })
    }

    pub(super) fn run(
        &mut self,
        options: &RunOptions,
        watch: &mut dyn FnMut(Event<'_>),
    ) -> swiglu_lab::Result<Finished> {
        let Self { store, machine, lock, code, commands, .. } = &*self;
        let laboratory = Laboratory { store, lock, commands, machine, code };
        let finished = laboratory.run(self.experiment, options, watch);
        self.logs.close(&finished);
        finished
    }

    /// Runs with a progress bar; what goes wrong with a peer is told at once.
    pub(super) fn shown(&mut self, options: &RunOptions, terminal: &Terminal) -> Result<Finished> {
        let mut bar = ProgressBar::hidden();
        let mut case = String::new();
        let (mut begun, mut all) = (0, 0);
        let mut told = BTreeSet::new();
        let finished = self.run(options, &mut |event| match event {
            Event::Started { cases, kept, path } => {
                bar = terminal.bar(cases as u64);
                all = cases;
                let kept = if kept > 0 { format!(", {kept} cases kept") } else { String::new() };
                tell(&bar, format!("{cases} cases to measure{kept}: {}", path.display()));
            }
            Event::Case(next) => {
                case = next.key();
                bar.set_message(case.clone());
                begun += 1;
                // Whoever waits for a job sees the last line of its log.
                if options.executor.is_some() {
                    tell(&bar, format!("{begun}/{all} {case}"));
                }
            }
            Event::Profile { id, what } => bar.set_message(doing(&case, id, what, options)),
            // What is missing is missing in every case: told once.
            Event::Trouble { profile, reason }
                if told.insert((profile.to_owned(), reason.to_owned())) =>
            {
                tell(&bar, format!("{case}: {profile}: {reason}"));
            }
            Event::Deciding { preparations, expected } => {
                let what = format!("not decided: every case is prepared {preparations} times more");
                tell(&bar, what + &about(expected));
            }
            Event::Again { cases, expected } => {
                let few = "outside of the claim's margin after few preparations";
                let what = format!("{cases} cases are {few}: measured anew with more");
                tell(&bar, what + &about(expected));
            }
            Event::Done(_) => bar.inc(1),
            _ => {}
        });
        bar.finish_and_clear();
        finished.with_context(|| format!("experiment {}", self.experiment.id))
    }
}

/// How long something is expected to take, if that is known.
fn about(expected: Option<Duration>) -> String {
    expected
        .map_or_else(String::new, |time| format!(", which takes about {:.0} s", time.as_secs_f64()))
}

/// What is going on; a peer that is started for it may take long to say hello.
pub(super) fn doing(case: &str, profile: &str, what: &str, options: &RunOptions) -> String {
    let limit = match what {
        "preparing" => format!(" (a new peer has {} s to answer)", options.limits.hello.as_secs()),
        _ => String::new(),
    };
    format!("{case}: {what} {profile}{limit}")
}

/// A program that is not optimised measures its compiler's settings, where it measures itself.
pub(super) fn expect_optimised<'a>(mut ran: impl Iterator<Item = &'a ProfileDef>) -> Result<()> {
    if cfg!(debug_assertions) && ran.any(|p| OUR_PEERS.contains(&p.peer.as_str())) {
        bail!(
            "this program is not optimised, so its times are no evidence: build it with --release, \
             or take a quick look with --quick"
        );
    }
    Ok(())
}

/// What the peers of a run write to standard error: kept where it may tell why something failed.
pub(super) struct Logs(TempDir);

impl Logs {
    /// A directory of this run alone: a fixed name would belong to whoever made it first.
    pub(super) fn of(run: &str) -> Result<Self> {
        let made = tempfile::Builder::new().prefix(&format!("swiglu-lab-{run}-")).tempdir();
        Ok(Self(made.context("a directory for the peers' logs")?))
    }

    pub(super) fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Keeps them, and says where, if the run or a profile in it failed and they say anything.
    fn close(&mut self, run: &swiglu_lab::Result<Finished>) {
        let failed = |r: &ResultEntry| r.status == Status::Failed;
        let passed = run.as_ref().is_ok_and(|f| !f.record.results.iter().any(failed));
        // A log is made when its peer starts.
        let says = |log: std::io::Result<DirEntry>| {
            !log.and_then(|log| log.metadata()).is_ok_and(|log| log.len() == 0)
        };
        if passed || self.dir().read_dir().is_ok_and(|mut logs| !logs.any(says)) {
            return;
        }
        self.0.disable_cleanup(true);
        say(format!("logs of the peers: {}", self.dir().display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_kept_where_a_run_failed_and_a_peer_said_something() {
        let failed = || {
            Err(LabError::Record {
                path: "r.json".into(),
                why: "a peer has ended".into(),
                advice: "run it again",
            })
        };
        for (said, kept) in [(&b""[..], false), (b"Segmentation fault", true)] {
            let mut logs = Logs::of("test").unwrap();
            let dir = logs.dir().to_owned();
            std::fs::write(dir.join("other.log"), b"").unwrap();
            std::fs::write(dir.join("peer.log"), said).unwrap();
            logs.close(&failed());
            drop(logs);
            assert_eq!(dir.join("peer.log").exists(), kept);
            if kept {
                std::fs::remove_dir_all(dir).unwrap();
            }
        }
    }
}
