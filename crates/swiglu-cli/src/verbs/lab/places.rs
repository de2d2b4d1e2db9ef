//! Where experiments, peers and records are, and what a run takes for itself.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use swiglu_cuda::DeviceFacts;
use swiglu_lab::peer::PeerCommands;
use swiglu_lab::record::{Locks, Machine, Measured, RunLock, Store};
use swiglu_lab::{DeviceKind, Experiment, Finished, LabError, ResultEntry, Status};
use tempfile::TempDir;

/// Says on standard error which records nothing counts.
pub(super) fn warn_of_strays(strays: impl IntoIterator<Item: Display>) {
    for stray in strays {
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "warning: {stray}");
    }
}

/// Where experiments and peers are.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Places")]
pub(super) struct LabDirArgs {
    /// The lab: a directory with `experiments` in it [default: `lab`, here or above]
    #[arg(long, value_name = "DIR")]
    lab: Option<PathBuf>,
}

/// Where experiments, records and decisions are.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Places")]
pub(super) struct PlaceArgs {
    #[command(flatten)]
    dir: LabDirArgs,
    /// Where records are [default: `records` in the lab]
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
}

impl LabDirArgs {
    /// Whether a directory was named.
    pub(super) fn is_given(&self) -> bool {
        self.lab.is_some()
    }

    /// The lab's directory.
    pub(super) fn lab(&self) -> anyhow::Result<PathBuf> {
        if let Some(lab) = &self.lab {
            if !lab.join("experiments").is_dir() {
                bail!("{}: expected a directory with `experiments` in it", lab.display());
            }
            return Ok(lab.clone());
        }
        let here = std::env::current_dir().context("the current directory")?;
        let found = here.ancestors().map(|dir| dir.join("lab"));
        match found.into_iter().find(|lab| lab.join("experiments").is_dir()) {
            Some(lab) => Ok(lab),
            None => bail!(
                "no `lab/experiments` in {} or above: go into the repository, or give --lab DIR",
                here.display()
            ),
        }
    }
}

impl PlaceArgs {
    /// The lab's directory.
    pub(super) fn lab(&self) -> anyhow::Result<PathBuf> {
        self.dir.lab()
    }

    pub(super) fn experiments(&self) -> anyhow::Result<PathBuf> {
        Ok(self.lab()?.join("experiments"))
    }

    /// The records of something that reads them: a directory that was named must be there.
    pub(super) fn records(&self) -> anyhow::Result<Store> {
        if let Some(records) = self.records.as_ref().filter(|records| !records.is_dir()) {
            bail!("--records {}: expected a directory with records", records.display());
        }
        self.store()
    }

    /// Where records are or will be.
    pub(super) fn store(&self) -> anyhow::Result<Store> {
        Ok(Store::new(match &self.records {
            Some(records) => records.clone(),
            None => self.lab()?.join("records"),
        }))
    }
}

/// How peers are started.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Peers")]
pub(super) struct PeerArgs {
    /// Where peers are [default: `peers` in the lab]
    #[arg(long, value_name = "DIR")]
    peers: Option<PathBuf>,
    /// What runs peers written in Python
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub(super) python: PathBuf,
}

/// What records say of where they were taken.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Places")]
pub(super) struct MachineArgs {
    /// Name of this machine: the directory of its records [default: made of its facts]
    #[arg(long, value_name = "NAME")]
    pub(super) machine: Option<String>,
}

impl PeerArgs {
    /// Where peers are.
    pub(super) fn dir(&self, lab: &Path) -> PathBuf {
        self.peers.clone().unwrap_or_else(|| lab.join("peers"))
    }

    /// The commands, with logs in a directory that exists.
    pub(super) fn commands(&self, lab: &Path, logs: &Path) -> anyhow::Result<PeerCommands> {
        if let Some(peers) = self.peers.as_ref().filter(|peers| !peers.is_dir()) {
            bail!("--peers {}: expected a directory with peers", peers.display());
        }
        Ok(PeerCommands {
            own: own_peer()?,
            python: self.python.clone(),
            dir: self.dir(lab),
            logs: logs.to_owned(),
        })
    }
}

/// Takes for a run what it measures: the processor with everything around it, or the first accelerator
/// that this process sees, which is the one that peers see first. No other process of this user measures
/// that meanwhile, wherever it writes; none writes a record of this name into the store.
pub(super) fn lock(
    store: &Store,
    experiment: &Experiment,
    machine: &Machine,
    run: &str,
) -> anyhow::Result<RunLock> {
    let identity = match experiment.device {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda => Some(accelerator(experiment)?),
    };
    // One that has no identity could be the one that another run measures.
    let measured = match identity.as_deref() {
        None | Some("") => Measured::Machine,
        Some(id) => Measured::Device(id),
    };
    Ok(store.lock(&Locks::of_user()?, measured, &machine.name, run)?)
}

/// The identity of the accelerator that an experiment measures.
fn accelerator(experiment: &Experiment) -> Result<String, LabError> {
    let none = |e: swiglu_cuda::CudaError| LabError::NoDevice {
        experiment: experiment.id.clone(),
        device: "CUDA",
        why: e.to_string(),
    };
    Ok(DeviceFacts::of(0).map_err(none)?.uuid)
}

/// How this program is started as a peer.
pub(crate) fn own_peer() -> anyhow::Result<Vec<OsString>> {
    let program = std::env::current_exe().context("the path of this program")?;
    Ok(vec![program.into_os_string(), "lab".into(), "peer".into()])
}

/// What the peers of a run write to standard error: removed with this, or kept where it may tell why
/// something failed.
pub(super) struct Logs(TempDir);

impl Logs {
    /// A directory of this run alone: a fixed name would belong to whoever made it first.
    pub(super) fn of(run: &str) -> anyhow::Result<Self> {
        let made = tempfile::Builder::new().prefix(&format!("swiglu-lab-{run}-")).tempdir();
        Ok(Self(made.context("a directory for the peers' logs")?))
    }

    pub(super) fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Whether no peer had anything to say: a log is made when its peer starts.
    fn nothing_written(&self) -> std::io::Result<bool> {
        for log in self.dir().read_dir()? {
            if log?.metadata()?.len() > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Keeps them, and says where, if the run or a profile in it failed and they say anything.
    pub(super) fn close(self, run: &anyhow::Result<Finished>) {
        let failed = |r: &ResultEntry| r.status == Status::Failed;
        let passed = run.as_ref().is_ok_and(|f| !f.record.results.iter().any(failed));
        if passed || self.nothing_written().unwrap_or(false) {
            return;
        }
        let kept = self.0.keep();
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "logs of the peers: {}", kept.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_kept_where_a_run_failed_and_a_peer_said_something() {
        let failed: anyhow::Result<Finished> = Err(anyhow::anyhow!("a peer has ended"));
        for (said, kept) in [(&b""[..], false), (b"Segmentation fault", true)] {
            let logs = Logs::of("test").unwrap();
            let dir = logs.dir().to_owned();
            std::fs::write(dir.join("other.log"), b"").unwrap();
            std::fs::write(dir.join("peer.log"), said).unwrap();
            logs.close(&failed);
            assert_eq!(dir.join("peer.log").exists(), kept);
            if kept {
                std::fs::remove_dir_all(dir).unwrap();
            }
        }
    }
}
