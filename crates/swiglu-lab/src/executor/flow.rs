//! The way of a job: from a bundle to a place, from there to records here.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::bundle::Bundle;
use super::job::{Job, Jobs};
use super::scheduler::{JobState, Polled};
use super::script::{self, CARRIED};
use super::spec::ExecutorKind;
use super::transport::{Script, pack, quote, version};
use crate::error::{LabError, Result};
use crate::files::file_name;
use crate::place::{NAME, is_name};
use crate::record::{Opened, Record, Store};

/// The bundle of a job whose script carries it, packed.
const PACKED: &str = "bundle.tar.gz";
/// A job that was cut short so often without one more result is not started again.
const FRUITLESS: u32 = 3;
/// The first pause between two questions, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(15)];

const PROBE: Script = Script {
    what: "looking for a place for jobs",
    text: include_str!("sh/probe.sh"),
    advice: "name one that can be written as `stage` in lab/executors.toml",
};
const STAGE: Script = Script {
    what: "copying the bundle",
    text: include_str!("sh/stage.sh"),
    advice: "free space there, or name another `stage` in lab/executors.toml, and do it again",
};
const FORGET: Script = Script {
    what: "removing what was copied",
    text: include_str!("sh/forget.sh"),
    advice: "`swiglu lab cancel` tries again",
};
const KEEP: Script = Script {
    what: "copying the record to go on with",
    text: include_str!("sh/keep.sh"),
    advice: "free space there, and do it again",
};
const COLLECT: Script = Script {
    what: "bringing back records",
    text: include_str!("sh/collect.sh"),
    advice: "`swiglu lab fetch` tries again",
};
const PRINTED: Script = Script {
    what: "reading what the command printed",
    text: "[ ! -e \"$1/output\" ] || cat \"$1/output\"",
    advice: "`swiglu lab fetch` tries again",
};
const NOT_MERGED: &str = "it was not merged, and the records here are as they were";

/// What happens to a job, for whoever waits.
#[derive(Debug)]
#[non_exhaustive]
pub enum JobEvent<'a> {
    /// A bundle of so many bytes was copied; one that was there already is not.
    Staged(u64),
    /// It is a job from now on.
    Submitted {
        /// As the scheduler calls it.
        id: &'a str,
        /// Why it was submitted again.
        again: Option<&'a JobState>,
    },
    /// It was asked for.
    Polled(&'a Polled),
}

/// What came back.
#[derive(Debug, Clone, PartialEq)]
pub struct Merged {
    /// The records of the job as they are here now.
    pub records: Vec<Opened>,
    /// How many of them are new, or have more results than before.
    pub news: usize,
}

impl Merged {
    fn results(&self) -> usize {
        self.records.iter().map(|opened| opened.record.results.len()).sum()
    }
}

impl Job {
    fn bundle_dir(&self) -> String {
        format!("{}/bundles/{}", self.root, self.bundle)
    }

    /// Brings a bundle there, if it is not.
    pub(super) fn stage(
        &mut self,
        jobs: &Jobs,
        bundle: &Bundle,
        tell: &mut dyn FnMut(JobEvent<'_>),
    ) -> Result<()> {
        let transport = self.spec.transport();
        let own = jobs.dir.to_string_lossy();
        let default = if transport.host.is_none() { &*own } else { "" };
        let stage = self.spec.stage.as_deref().unwrap_or(default);
        let refused = |what, why, advice| {
            Err(LabError::Refused { place: transport.name(), what, why, advice })
        };
        let probed = transport.run(PROBE, &[stage])?;
        let [root, machine, rsync] = probed.lines().collect::<Vec<_>>()[..] else {
            let why = format!("expected a directory, an architecture and rsync, not `{probed}`");
            return refused(PROBE.what, why, PROBE.advice);
        };
        self.root = root.to_owned();
        if self.spec.kind == ExecutorKind::Command {
            let (dir, packed) = (PathBuf::from(self.dir()), pack(bundle.dir.path(), "-czf")?);
            fs::create_dir_all(&dir).map_err(LabError::io("create directory", &dir))?;
            let path = dir.join(PACKED);
            fs::write(&path, &packed).map_err(LabError::io("write", &path))?;
            tell(JobEvent::Staged(packed.len() as u64));
            return Ok(());
        }
        let here = std::env::consts::ARCH;
        if self.spec.program.is_none() && machine.replace("arm64", "aarch64") != here {
            let why = format!("it is {machine}, and this program is for {here}");
            let advice = "name a program for it as `program` in lab/executors.toml";
            return refused("staging", why, advice);
        }
        let to = self.bundle_dir();
        if transport.output(STAGE.text, &["has", &to], Stdio::null())?.status.success() {
            return Ok(());
        }
        let with_rsync = rsync != "none" && version("rsync", "--version").is_some();
        match transport.host.as_deref().filter(|_| with_rsync) {
            Some(host) => {
                let sent = transport.rsync(host, STAGE, bundle.dir.path(), &format!("{to}.part"));
                let then = if sent.is_ok() { "rsynced" } else { "failed" };
                transport.run(STAGE, &[then, &to])?;
                sent?;
            }
            None => {
                let is_far = transport.host.is_some();
                let [from, into] = if is_far { ["-czf", "-xzf"] } else { ["-cf", "-xf"] };
                let packed = pack(bundle.dir.path(), from)?;
                transport.send(STAGE, &["tar", &to, into], &packed)?;
            }
        }
        tell(JobEvent::Staged(bundle.bytes));
        Ok(())
    }

    /// Removes what was brought there for it.
    pub(super) fn forget(&self) -> Result<()> {
        let (dir, bundle) = (self.dir(), self.bundle_dir());
        self.spec.transport().run(FORGET, &[&dir, &bundle]).map(drop)
    }

    /// Submits it, with the record to go on with. What is known of it is written before, so that a program
    /// that is killed on the way finds it again, by the id that lies beside its script or by its name.
    pub(super) fn start(
        &mut self,
        jobs: &Jobs,
        again: Option<&JobState>,
        tell: &mut dyn FnMut(JobEvent<'_>),
    ) -> Result<()> {
        let begun = self.begun()?;
        let dir = self.dir();
        let script = if self.spec.kind == ExecutorKind::Command {
            let [packed, carried] = [PACKED, CARRIED].map(|name| Path::new(&dir).join(name));
            let bundle = fs::read(&packed).map_err(LabError::io("read", &packed))?;
            let text = self.carried(&bundle, begun.as_ref())?;
            fs::write(&carried, text).map_err(LabError::io("write", &carried))?;
            self.command()
        } else {
            if let Some((path, text)) = &begun {
                let to = format!("{dir}/records/{path}");
                self.spec.transport().send(KEEP, &[&to], text.as_bytes())?;
            }
            self.staged(&self.bundle_dir())?
        };
        (self.id, self.cancelled, self.fetched) = (None, false, false);
        jobs.write(self)?;
        let id = self.submit_script(&script)?;
        self.id = Some(id.clone());
        jobs.write(self)?;
        tell(JobEvent::Submitted { id: &id, again });
        Ok(())
    }

    /// The newest record of the run here: its place among records, and its text.
    fn begun(&self) -> Result<Option<(String, String)>> {
        let (records, _) = Store::new(&self.records).of_experiment(&self.experiment)?;
        let Some(opened) = records.into_iter().rev().find(|o| o.record.run_id == self.run_id)
        else {
            return Ok(None);
        };
        let text = fs::read_to_string(&opened.path).map_err(LabError::io("read", &opened.path))?;
        let place = format!("{}/{}", opened.record.machine.name, file_name(&opened.path));
        Ok(Some((place, text)))
    }

    /// Brings back the records that there are, finished or not, and merges them. Once more is no harm.
    ///
    /// # Errors
    /// [`LabError::Foreign`] if one is of something else, [`LabError::Record`] if it is damaged;
    /// what was here before is then as it was.
    pub fn fetch(&mut self, jobs: &Jobs) -> Result<Merged> {
        let Polled { state, .. } = self.poll(jobs)?;
        let merged = self.collect()?;
        if state.is_over() && !state.is_cut_short() && !self.fetched {
            self.fetched = true;
            jobs.write(self)?;
        }
        Ok(merged)
    }

    fn collect(&self) -> Result<Merged> {
        let script = if self.spec.kind == ExecutorKind::Command { PRINTED } else { COLLECT };
        let printed = self.spec.transport().run(script, &[&self.dir()])?;
        let store = Store::new(&self.records);
        let mut merged = Merged { records: Vec::new(), news: 0 };
        for text in script::records(&printed) {
            let label = PathBuf::from(format!("a record of job {}", self.name));
            let mut record = Record::from_bytes(text.as_bytes(), &label)?;
            self.expect_own(&record)?;
            let here = store.find(&record.machine.name, &record.experiment, &record.run_id)?;
            if let Some(here) = &here {
                self.expect("start", &record.started, &here.record.started)?;
            }
            let extent = |record: &Record| (record.results.len(), record.finished.clone());
            let opened = match here {
                Some(here) if extent(&here.record) >= extent(&record) => here,
                here => {
                    let path = here.map_or_else(|| store.path_of(&record), |here| here.path);
                    match &mut record.executor {
                        // Nobody tells a command what its job is called here.
                        Some(executed) if executed.kind == ExecutorKind::Command => {
                            executed.job_id.clone_from(&self.id);
                            store.replace(&mut record, &path)?;
                        }
                        _ => store.keep(text.as_bytes(), &path)?,
                    }
                    merged.news += 1;
                    Opened { path, record }
                }
            };
            merged.records.push(opened);
        }
        merged.records.sort_by(|a, b| a.record.finished.cmp(&b.record.finished));
        Ok(merged)
    }

    /// That a record is of this job, and its names make no other path.
    fn expect_own(&self, record: &Record) -> Result<()> {
        let bundle = record.executor.as_ref().map_or("none", |executed| executed.bundle.as_str());
        self.expect("experiment", &record.experiment, &self.experiment)?;
        self.expect("definition hash", &record.definition_hash, &self.definition_hash)?;
        self.expect("run id", &record.run_id, &self.run_id)?;
        self.expect("bundle hash", bundle, &self.bundle)?;
        if !is_name(&record.machine.name) {
            self.expect("machine", &record.machine.name, NAME)?;
        }
        if humantime::parse_rfc3339(&record.started).is_err() {
            self.expect("start", &record.started, "a date and time")?;
        }
        Ok(())
    }

    fn expect(&self, what: &str, found: &str, expected: &str) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let what = format!("the {what} of a record that job {} brought", self.name);
        let (found, expected) = (found.to_owned(), expected.to_owned());
        Err(LabError::Foreign { what, found, expected, advice: NOT_MERGED })
    }

    /// Waits until the run has ended and its records are here; none if whoever waits was interrupted, and the job
    /// goes on. A job that stopped early, or was ended from outside, is submitted again and goes on, as long as
    /// it gets any further.
    ///
    /// # Errors
    /// [`LabError::Unfinished`] if the run did not end by itself; those of [`Job::fetch`].
    pub fn follow(
        &mut self,
        jobs: &Jobs,
        _watch: &File,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(JobEvent<'_>),
    ) -> Result<Option<Merged>> {
        let (mut done, mut fruitless, mut pause) = (0, 0, PAUSES[0]);
        let mut last = None;
        loop {
            let polled = self.poll(jobs)?;
            tell(JobEvent::Polled(&polled));
            match &polled.state {
                JobState::Ended(0 | 1) => {
                    let merged = self.fetch(jobs)?;
                    return match merged.records.is_empty() {
                        true => Err(self.unfinished(&polled, "without a record", 0)),
                        false => Ok(Some(merged)),
                    };
                }
                state if state.is_cut_short() => {
                    let now = self.collect()?.results();
                    fruitless = if now > done { 0 } else { fruitless + 1 };
                    done = now;
                    if fruitless == FRUITLESS {
                        return Err(self.unfinished(&polled, "again and again", done));
                    }
                    self.start(jobs, Some(state), tell)?;
                }
                state if state.is_over() => {
                    // Finished cases count, whatever ended it.
                    let done = self.collect()?.results();
                    return Err(self.unfinished(&polled, "before its run was done", done));
                }
                _ => {}
            }
            let same = last.as_ref() == Some(&polled.state);
            pause = if same { pause.mul_f64(1.2).min(PAUSES[1]) } else { PAUSES[0] };
            last = Some(polled.state);
            let since = Instant::now();
            while since.elapsed() < pause {
                if interrupted.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                thread::sleep(Duration::from_millis(50));
            }
        }
    }

    fn unfinished(&self, polled: &Polled, how: &str, done: usize) -> LabError {
        let mut log = polled.log.join(" / ");
        if !log.is_empty() {
            log.insert_str(0, "; the end of its log: ");
        }
        let (job, why) = (self.name.clone(), format!("{} {how}", polled.state));
        let (id, place, run) = (&self.experiment, quote(&self.spec.name), &self.run_id);
        // The program of that place and its progress are not what a person types.
        let typed = |word: &&String| !word.starts_with("--no-") && !word.starts_with("--python");
        let options: String =
            self.arguments.iter().filter(typed).map(|w| format!(" {}", quote(w))).collect();
        let advice = format!("`swiglu lab run {id} --on {place} --run-id {run}{options}` goes on");
        LabError::Unfinished { job, why, done, log, advice }
    }
}
