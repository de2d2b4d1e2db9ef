//! Where experiments, peers and records are.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use swiglu_lab::executor::Jobs;
use swiglu_lab::peer::PeerCommands;
use swiglu_lab::record::Store;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Places")]
pub(super) struct LabDirArgs {
    /// The lab: a directory with `experiments` in it [default: `lab`, here or above]
    #[arg(long, value_name = "DIR")]
    pub(super) lab: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Places")]
pub(super) struct PlaceArgs {
    #[command(flatten)]
    pub(super) dir: LabDirArgs,
    /// Where records are [default: `records` in the lab]
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
}

impl LabDirArgs {
    pub(super) fn jobs(&self) -> Result<Jobs> {
        Ok(Jobs::new(&self.lab()?))
    }

    /// A command to go on with, in the same lab.
    pub(super) fn command(&self, words: &str) -> String {
        let lab = self.lab.iter().map(|lab| format!(" --lab '{}'", lab.display()));
        format!("`swiglu lab {words}{}`", lab.collect::<String>())
    }

    pub(super) fn lab(&self) -> Result<PathBuf> {
        if let Some(lab) = &self.lab {
            if !lab.join("experiments").is_dir() {
                bail!("{}: expected a directory with `experiments` in it", lab.display());
            }
            return Ok(lab.clone());
        }
        let here = std::env::current_dir().context("the current directory")?;
        let found = here.ancestors().map(|dir| dir.join("lab"));
        found.into_iter().find(|lab| lab.join("experiments").is_dir()).with_context(|| {
            let here = here.display();
            format!(
                "no `lab/experiments` in {here} or above: go into the repository, or give --lab DIR"
            )
        })
    }
}

impl PlaceArgs {
    pub(super) fn experiments(&self) -> Result<PathBuf> {
        Ok(self.dir.lab()?.join("experiments"))
    }

    /// The records of something that reads them: a directory that was named must be there.
    pub(super) fn records(&self) -> Result<Store> {
        if let Some(records) = self.records.as_ref().filter(|records| !records.is_dir()) {
            bail!("--records {}: expected a directory with records", records.display());
        }
        self.store()
    }

    /// Where records are or will be.
    pub(super) fn store(&self) -> Result<Store> {
        Ok(Store::new(match &self.records {
            Some(records) => records.clone(),
            None => self.dir.lab()?.join("records"),
        }))
    }
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Peers")]
pub(super) struct PeerArgs {
    /// Where peers are [default: `peers` in the lab]
    #[arg(long, value_name = "DIR")]
    pub(super) peers: Option<PathBuf>,
    /// What runs peers written in Python
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub(super) python: PathBuf,
}

impl PeerArgs {
    pub(super) fn dir(&self, lab: &Path) -> PathBuf {
        self.peers.clone().unwrap_or_else(|| lab.join("peers"))
    }

    /// Refuses a directory that was named and is not there.
    pub(super) fn expect_dir(&self) -> Result<()> {
        if let Some(peers) = self.peers.as_ref().filter(|peers| !peers.is_dir()) {
            bail!("--peers {}: expected a directory with peers", peers.display());
        }
        Ok(())
    }

    /// The commands, with logs in a directory that exists.
    pub(super) fn commands(&self, lab: &Path, logs: &Path) -> Result<PeerCommands> {
        self.expect_dir()?;
        Ok(PeerCommands {
            own: own_peer()?,
            python: self.python.clone(),
            dir: self.dir(lab),
            logs: logs.to_owned(),
        })
    }
}

/// The peer that computes as this project does.
pub(crate) const OWN: &str = "swiglu";
/// The peers that this program is.
pub(crate) const OUR_PEERS: [&str; 2] = [OWN, "read"];

/// How this program is started as a peer.
pub(crate) fn own_peer() -> Result<Vec<OsString>> {
    let program = std::env::current_exe().context("the path of this program")?;
    Ok(vec![program.into_os_string(), "lab".into(), "peer".into()])
}
