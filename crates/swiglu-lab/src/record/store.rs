//! Records on disk: `<root>/<machine>/<date>-<experiment>-<run-id>.json`, where a run id that begins with the
//! date has it there alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::lock::{Locks, Measured, RunLock, movable};
use super::rows;
use super::schema::{OLDEST_SCHEMA, RECORD_SCHEMA, Record};
use crate::error::{LabError, Result};
use crate::files::{entries, file_name, file_stem, sha256, write_whole};

/// Where unfinished files begin their names; a killed run may leave one.
const TEMPORARY: &str = ".unfinished-";
/// Stands between a run's name and what makes the name of an unfinished file its own.
const UNFINISHED_END: &str = "-part-";

/// This is to be done with JSON that is no record.
const ELSEWHERE: &str = "move it elsewhere";

/// A directory of records.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

/// A record and its file.
#[derive(Debug, Clone, PartialEq)]
pub struct Opened {
    /// The file.
    pub path: PathBuf,
    /// What it holds.
    pub record: Record,
}

impl Opened {
    /// Reads one record and believes it only if it is whole, of this schema and unchanged.
    ///
    /// # Errors
    /// [`LabError::Record`] with what is wrong and what to do, [`LabError::Io`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).map_err(LabError::io("read", path))?;
        Ok(Self { path: path.to_path_buf(), record: Record::from_bytes(&text, path)? })
    }
}

impl Store {
    /// The records below `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Every record of an experiment, oldest first, and what was refused among the files that are
    /// named like one.
    pub fn of_experiment(&self, experiment: &str) -> Result<(Vec<Opened>, Vec<LabError>)> {
        let (mut records, mut refused) = (Vec::new(), Vec::new());
        for dir in entries(&self.root)?.into_iter().filter(|path| path.is_dir()) {
            for path in files_of(&dir, experiment)? {
                match Opened::read(&path) {
                    // `mlp-decode-1` is a run of `mlp-decode`, or run `decode-1` of `mlp`.
                    Ok(opened) if opened.record.experiment != experiment => {}
                    Ok(opened) => records.push(opened),
                    Err(error) => refused.push(error),
                }
            }
        }
        records.sort_by(|a, b| a.record.finished.cmp(&b.record.finished).then(a.path.cmp(&b.path)));
        Ok((records, refused))
    }

    /// Records that are none of `counted`, each with the reason why it counts for nothing: they have
    /// another name or place, or none of `experiments` is theirs. Files without the `schema` of a record are
    /// something else, which may lie here.
    pub fn strays(
        &self,
        counted: &BTreeSet<PathBuf>,
        experiments: &[String],
    ) -> Result<Vec<LabError>> {
        let mut files = Vec::new();
        for path in entries(&self.root)? {
            match path.is_dir() {
                true => files.extend(entries(&path)?),
                false => files.push(path),
            }
        }
        files.retain(|path| {
            path.is_file() && !counted.contains(path) && !file_name(path).starts_with('.')
        });
        Ok(files.into_iter().filter_map(|path| self.stray(path, experiments)).collect())
    }

    fn stray(&self, path: PathBuf, experiments: &[String]) -> Option<LabError> {
        let (why, advice) = match Opened::read(&path).map(|opened| opened.record) {
            Ok(record) if experiments.contains(&record.experiment) => {
                let right = self.path_of(&record);
                // Of an experiment whose definition is broken.
                if right == path {
                    return None;
                }
                let advice = match right.exists() {
                    true => "it counts for nothing: it is a copy, or one of them is to be renamed",
                    false => "it counts for nothing: rename it",
                };
                (format!("a record that would count as {}", right.display()), advice)
            }
            Ok(record) => {
                let why =
                    format!("a record of `{}`, which is no experiment here", record.experiment);
                (why, "it counts for nothing: restore the experiment, or move it elsewhere")
            }
            // Something else.
            Err(LabError::Record { advice: ELSEWHERE, .. }) => return None,
            Err(error) => return file_name(&path).ends_with(".json").then_some(error),
        };
        Some(LabError::Record { path, why, advice })
    }

    /// The record of a run, if it has begun.
    ///
    /// # Errors
    /// [`LabError::Record`] if its file is not a believable record.
    pub fn find(&self, machine: &str, experiment: &str, run_id: &str) -> Result<Option<Opened>> {
        let dir = self.root.join(machine);
        let named = |path: &PathBuf| {
            let name = file_name(path);
            name == name_of(&name, experiment, run_id)
        };
        for path in files_of(&dir, experiment)?.into_iter().filter(named) {
            let opened = Opened::read(&path)?;
            if opened.record.run_id == run_id {
                return Ok(Some(opened));
            }
        }
        Ok(None)
    }

    /// The file of a run that begins now.
    pub fn path_of(&self, record: &Record) -> PathBuf {
        let name = name_of(&record.started, &record.experiment, &record.run_id);
        self.root.join(&record.machine.name).join(name)
    }

    /// Takes the right to measure, of `user` on this machine and here, and clears what a killed run left
    /// behind: all of it where nobody else can be measuring, else what a run of this name left. Runs on all
    /// machines whose records lie here are asked, whatever they are called: one host has several names.
    ///
    /// # Errors
    /// [`LabError::Busy`] if another run measures what this one needs, or has its name and writes here;
    /// [`LabError::Io`].
    pub fn lock(
        &self,
        user: &Locks,
        measured: Measured<'_>,
        machine: &str,
        run: &str,
    ) -> Result<RunLock> {
        let mut lock = user.take(measured, run).map_err(movable)?;
        let dir = self.root.join(machine);
        fs::create_dir_all(&dir).map_err(LabError::io("create directory", &dir))?;
        let here = Locks::new(&self.root);
        // Both are one where a user wants it so.
        if !here.is(user) {
            lock.files.append(&mut here.take(measured, run)?.files);
        }
        here.expect_alone(measured, run)?;
        for leftover in entries(&dir)? {
            let name = file_name(&leftover);
            let Some(rest) = name.strip_prefix(TEMPORARY) else { continue };
            let own = rest.split_at_checked(DATE_LEN).is_some_and(|(date, rest)| {
                let run = run.replacen(&format!("{date}-"), "", 1);
                rest.starts_with(&format!("-{run}{UNFINISHED_END}"))
            });
            if measured == Measured::Machine || own {
                fs::remove_file(&leftover).map_err(LabError::io("remove", &leftover))?;
            }
        }
        Ok(lock)
    }

    /// Writes a record.
    ///
    /// # Errors
    /// [`LabError::Record`] if the file is not what this record was read from or last written as;
    /// [`LabError::Io`]. The old file is then untouched.
    pub fn write(&self, record: &mut Record, path: &Path) -> Result<()> {
        if path.exists() && Opened::read(path)?.record.content_hash != record.content_hash {
            let why = "another program has changed it since it was read".to_owned();
            let advice = "nothing was written: run again, which goes on with what is there";
            return Err(LabError::Record { path: path.to_path_buf(), why, advice });
        }
        self.replace(record, path)
    }

    /// Writes a record, whatever is there.
    pub(crate) fn replace(&self, record: &mut Record, path: &Path) -> Result<()> {
        record.schema = RECORD_SCHEMA;
        let value = serde_json::to_value(&*record).map_err(LabError::io("write", path))?;
        let mut value = rows::pack(value);
        record.content_hash = content_hash(&value);
        value["content_hash"] = record.content_hash.clone().into();
        self.keep((laid_out(&value, 0) + "\n").as_bytes(), path)
    }

    /// Writes the text of a record as it is.
    pub(crate) fn keep(&self, text: &[u8], path: &Path) -> Result<()> {
        let prefix = format!("{TEMPORARY}{}{UNFINISHED_END}", file_stem(path));
        // A record is for everybody.
        write_whole(path, text, &prefix, 0o644)
    }
}

/// A document with a line for each of its parts, and for each part of those with several: short, and changes
/// of it can be read line by line.
fn laid_out(value: &Value, depth: usize) -> String {
    let part = |value| laid_out(value, depth + 1);
    let named =
        |(name, value): (&String, _)| format!("{}: {}", Value::from(name.clone()), part(value));
    let ([open, close], parts): (_, Vec<_>) = match value {
        Value::Object(map) if depth == 0 || depth == 1 && map.values().any(Value::is_object) => {
            (["{", "}"], map.iter().map(named).collect())
        }
        Value::Array(items) if depth == 1 && items.iter().any(Value::is_object) => {
            (["[", "]"], items.iter().map(part).collect())
        }
        short => return short.to_string(),
    };
    let indent = "  ".repeat(depth);
    format!("{open}\n{indent}  {}\n{indent}{close}", parts.join(&format!(",\n{indent}  ")))
}

/// `YYYY-MM-DD`.
const DATE_LEN: usize = 10;

/// A run's file has this name. It begins with the date that `time` does, which a run's id made of it would repeat.
fn name_of(time: &str, experiment: &str, run_id: &str) -> String {
    let date = time.get(..DATE_LEN).unwrap_or_default();
    let run = run_id.strip_prefix(date).and_then(|rest| rest.strip_prefix('-')).unwrap_or(run_id);
    format!("{date}-{experiment}-{run}.json")
}

impl Record {
    /// Believes text that came from `path` only if it is a whole record, of this schema and unchanged.
    pub(crate) fn from_bytes(text: &[u8], path: &Path) -> Result<Self> {
        let refuse =
            |why: String, advice| LabError::Record { path: path.to_path_buf(), why, advice };
        let value: Value = serde_json::from_slice(text).map_err(|e| {
            let advice = "it is cut off or damaged: restore it, or delete it and measure again";
            refuse(format!("not JSON ({e})"), advice)
        })?;
        let Some(schema) = value.get("schema").cloned() else {
            return Err(refuse("it has no `schema`: not a record of the lab".into(), ELSEWHERE));
        };
        if schema != OLDEST_SCHEMA && schema != RECORD_SCHEMA {
            let why = format!(
                "record schema {schema}, this program reads {OLDEST_SCHEMA} and {RECORD_SCHEMA}"
            );
            return Err(refuse(why, "use the version of the program that wrote it"));
        }
        if value["content_hash"] != content_hash(&value) {
            let advice = "it was edited or damaged: restore it, or measure again";
            return Err(refuse("its content hash does not fit its content".into(), advice));
        }
        let other = |why: String| {
            refuse(format!("not a record of schema {schema} ({why})"), "measure again")
        };
        let value = match value.get("rows") {
            Some(_) => rows::unpack(value).ok_or_else(|| other("its rows are no rows".into()))?,
            None => value,
        };
        serde_json::from_value(value).map_err(|e| other(e.to_string()))
    }
}

/// The files of `dir` that are named like records of `experiment`, sorted.
fn files_of(dir: &Path, experiment: &str) -> Result<Vec<PathBuf>> {
    let named = |path: &PathBuf| {
        let name = file_name(path);
        let rest = name.get(DATE_LEN..).and_then(|rest| rest.strip_prefix('-'));
        let rest = rest.and_then(|rest| rest.strip_prefix(experiment));
        rest.is_some_and(|rest| rest.starts_with('-') && rest.ends_with(".json"))
    };
    Ok(entries(dir)?.into_iter().filter(named).collect())
}

/// JSON without blanks and with the keys of every object sorted: equal values are equal text.
pub fn canonical(value: &Value) -> String {
    let mut value = value.clone();
    // Whether it is sorted already depends on a feature that any crate may switch on.
    value.sort_all_objects();
    value.to_string()
}

/// SHA-256 of the canonical JSON, in hexadecimal; the key `content_hash` of the outermost object is
/// left out.
pub fn content_hash(value: &Value) -> String {
    let mut value = value.clone();
    if let Some(map) = value.as_object_mut() {
        map.remove("content_hash");
    }
    sha256(canonical(&value))
}
