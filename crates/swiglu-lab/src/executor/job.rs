//! A job, and what is known of it on disk: enough to find it again after this program was killed.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::bundle::Bundle;
use super::flow::JobEvent;
use super::scheduler::{JobState, Polled};
use super::spec::ExecutorSpec;
use crate::case::DeviceKind;
use crate::definition::Experiment;
use crate::error::{LabError, Result};
use crate::files::{entries, locked, now, read_if_there, sha256, write_whole};
use crate::record::Store;

/// Jobs of a lab lie in it under this name.
const DIRECTORY: &str = ".jobs";
const FILE: &str = "job.json";

/// A job: one run of an experiment in one place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The experiment and the run: the directory of its files.
    pub name: String,
    /// The experiment's id.
    pub experiment: String,
    /// The run.
    pub run_id: String,
    /// Of the experiment.
    pub definition_hash: String,
    /// What the experiment measures.
    pub device: DeviceKind,
    /// The content hash of what was staged.
    pub bundle: String,
    /// Where it runs.
    pub spec: ExecutorSpec,
    /// Bundles and jobs lie there in this directory.
    pub root: String,
    /// What it is called there, where jobs of other labs may be.
    pub far_name: String,
    /// Where its records go.
    pub records: PathBuf,
    /// Options of the run.
    pub arguments: Vec<String>,
    /// When it was made, RFC 3339 in UTC.
    pub made: String,
    /// As the scheduler calls it; none before it was submitted.
    pub id: Option<String>,
    /// Whether it was cancelled from here.
    pub cancelled: bool,
    /// Whether it has ended by itself and what it left is here.
    pub fetched: bool,
}

/// What a job is to do.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// What to run.
    pub experiment: &'a Experiment,
    /// Names the run.
    pub run_id: &'a str,
    /// Further options of `swiglu lab run`.
    pub arguments: Vec<String>,
    /// The program that runs it.
    pub program: &'a Path,
    /// The lab with its definition.
    pub lab: &'a Path,
    /// Where peers are.
    pub peers: &'a Path,
    /// Where records go.
    pub store: &'a Store,
}

/// The jobs of a lab.
#[derive(Debug, Clone)]
pub struct Jobs {
    pub(super) dir: PathBuf,
}

impl Jobs {
    /// Those of the lab in `lab`.
    pub fn new(lab: &Path) -> Self {
        Self { dir: lab.join(DIRECTORY) }
    }

    /// All of this user, the newest first: in a lab that several share, others' cannot be read.
    ///
    /// # Errors
    /// [`LabError::Io`].
    pub fn all(&self) -> Result<Vec<Job>> {
        let mut jobs = Vec::new();
        for dir in entries(&self.dir)? {
            match read(&dir.join(FILE)) {
                Err(LabError::Io { source, .. })
                    if source.kind() == ErrorKind::PermissionDenied => {}
                job => jobs.extend(job?),
            }
        }
        jobs.sort_by(|a, b| b.made.cmp(&a.made).then(a.name.cmp(&b.name)));
        Ok(jobs)
    }

    /// The job of this name.
    ///
    /// # Errors
    /// [`LabError::Name`], [`LabError::Io`].
    pub fn find(&self, name: &str) -> Result<Job> {
        let all = self.all()?;
        let choices = all.iter().map(|job| job.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = all.into_iter().find(|job| job.name == name);
        found.ok_or_else(|| LabError::name("job", name, format!("one of {choices}")))
    }

    /// Writes what is known of a job.
    pub(super) fn write(&self, job: &Job) -> Result<()> {
        let path = self.dir.join(&job.name).join(FILE);
        let text = serde_json::to_string_pretty(job).map_err(LabError::io("write", &path))?;
        write_whole(&path, text.as_bytes(), ".tmp", 0o600)
    }

    /// The right to submit a job and to wait for it, of nobody else while the file is open.
    ///
    /// # Errors
    /// [`LabError::Refused`] if another process has it; [`LabError::Io`].
    pub fn watch(&self, name: &str) -> Result<File> {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).map_err(LabError::io("create directory", &dir))?;
        let path = dir.join("lock");
        let refused = || LabError::Refused {
            place: format!("job {name}"),
            what: "waiting for it",
            why: "another `swiglu lab run` does".into(),
            advice: "see it with `swiglu lab status`",
        };
        locked(&path, File::try_lock)?.ok_or_else(refused)
    }

    /// Submits a run to a place, or finds it there: a job of that name which has not ended is not submitted
    /// again.
    ///
    /// # Errors
    /// [`LabError::Refused`] by the place; what was there before is as it was.
    pub fn submit(
        &self,
        _watch: &File,
        spec: &ExecutorSpec,
        request: &Request<'_>,
        tell: &mut dyn FnMut(JobEvent<'_>),
    ) -> Result<Job> {
        let Request { experiment, run_id, .. } = request;
        experiment.expect_measured()?;
        let name = format!("{}-{run_id}", experiment.id);
        if let Some(mut job) = read(&self.dir.join(&name).join(FILE))? {
            let Polled { id, state, .. } = job.poll(self)?;
            if id.is_some() && !state.is_over() {
                return Ok(job);
            }
        }
        let program = spec.program.as_deref().unwrap_or(request.program);
        let bundle = Bundle::new(program, request.lab, request.peers)?;
        let records = request.store.root();
        let records = std::path::absolute(records).map_err(LabError::io("find", records))?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let lab = sha256(format!("{host}{}", records.display()));
        let mut job = Job {
            far_name: format!("{name}-{}", lab.get(..8).unwrap_or_default()),
            name,
            experiment: experiment.id.clone(),
            run_id: (*run_id).to_owned(),
            definition_hash: experiment.definition_hash.clone(),
            device: experiment.device,
            bundle: bundle.hash.clone(),
            spec: spec.clone(),
            root: String::new(),
            records,
            arguments: request.arguments.clone(),
            made: now(),
            id: None,
            cancelled: false,
            fetched: false,
        };
        job.stage(self, &bundle, tell)?;
        job.start(self, None, tell)?;
        Ok(job)
    }
}

impl Job {
    /// Where it lies.
    pub(super) fn dir(&self) -> String {
        format!("{}/jobs/{}", self.root, self.far_name)
    }

    /// What is known of it now.
    ///
    /// # Errors
    /// [`LabError::Io`]; that a place does not answer is a state.
    pub fn poll(&mut self, jobs: &Jobs) -> Result<Polled> {
        let mut polled = match self.ask() {
            Err(error @ LabError::Refused { .. }) => {
                let state = JobState::Unknown(error.to_string());
                Polled { id: self.id.clone(), state, log: Vec::new() }
            }
            polled => polled?,
        };
        if polled.id.is_some() && polled.id != self.id {
            self.id.clone_from(&polled.id);
            jobs.write(self)?;
        }
        if self.cancelled && polled.state.is_over() {
            polled.state = JobState::Cancelled;
        }
        Ok(polled)
    }

    /// Ends it; finished cases stay, and can be brought back. Of one that was never submitted what was copied goes.
    ///
    /// # Errors
    /// [`LabError::Refused`] if it could not be ended.
    pub fn cancel(&mut self, jobs: &Jobs) -> Result<()> {
        let Polled { id, state, .. } = self.poll(jobs)?;
        match &id {
            // What never got a name there is not there: nothing is to be ended or brought back.
            None => {
                // Where nobody could be asked it may be there all the same.
                if state.is_over() {
                    self.forget()?;
                }
                (self.cancelled, self.fetched) = (true, true);
            }
            Some(id) if !state.is_over() => {
                self.end(id)?;
                self.cancelled = true;
            }
            Some(_) => return Ok(()),
        }
        jobs.write(self)
    }
}

fn read(path: &Path) -> Result<Option<Job>> {
    let Some(text) = read_if_there(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(LabError::io("read", path))
}
