//! The script of a job, as text.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::bundle::{LAB, PROGRAM};
use super::job::Job;
use super::spec::{ExecutorKind, SCRIPT};
use super::transport::{quote, words};
use crate::error::{LabError, Result};
use crate::record::Executed;

/// Tells a run in its environment which executor started it, as JSON of its origin.
pub const ENVIRONMENT: &str = "SWIGLU_LAB_EXECUTOR";
/// The script that a command takes, in the directory of its job.
pub(super) const CARRIED: &str = "carried";
/// Around each record in what a job prints.
const RECORD: [&str; 2] = ["=== swiglu-lab record", "=== swiglu-lab end"];
/// Bytes that make a line of 76 characters.
const LINE: usize = 57;

const JOB: &str = include_str!("sh/job.sh");
const REQUEUE: &str = include_str!("sh/requeue.sh");
const LEAVE: &str = "echo \"$code\" >exit.part && mv exit.part exit\nexit \"$code\"\n";

impl Job {
    /// Goes to the directory of the job, where all that it says is kept.
    fn enter(&self) -> String {
        format!(
            "#!/bin/sh\nset -u\ncd {} || exit\nrm -f exit\nexec >>log 2>&1\n",
            quote(&self.dir())
        )
    }

    /// Tells the run by whom it was started, and sets `"$@"` to what starts the program of a bundle; both
    /// directories are as a shell has them.
    fn words(&self, bundle: &str, dir: &str) -> Result<String> {
        let origin = Executed {
            kind: self.spec.kind,
            place: self.spec.place().to_owned(),
            host: self.spec.host.clone(),
            bundle: self.bundle.clone(),
            ..Executed::default()
        };
        let failed = LabError::io("describe", Path::new(&self.name));
        let origin = serde_json::to_string(&origin).map_err(failed)?;
        let run = ["lab", "run", &self.experiment, "--run-id", &self.run_id, "--resume"];
        let arguments = [&run.map(str::to_owned), self.arguments.as_slice()].concat();
        Ok(format!(
            "{ENVIRONMENT}={}\nexport {ENVIRONMENT}\nset -- {} {bundle}/{PROGRAM} {} --lab \
             {bundle}/{LAB} --records {dir}/records\n",
            quote(&origin),
            words(&self.spec.container),
            words(&arguments),
        ))
    }

    /// For a bundle that lies where the job runs.
    pub(super) fn staged(&self, bundle: &str) -> Result<String> {
        let slurm = self.spec.kind == ExecutorKind::Slurm;
        let [before, after] = if slurm { ["before=$(lines)\n", "again\n"] } else { [""; 2] };
        let functions = if slurm { REQUEUE } else { "" };
        Ok(format!(
            "{}{functions}{}input=/dev/null out=1\n{before}{JOB}{after}{LEAVE}",
            self.enter(),
            self.words(&quote(bundle), &quote(&self.dir()))?,
        ))
    }

    /// For nothing but a shell with `tar` and `base64`: the bundle, packed, is part of the script, and so
    /// is the record to go on with, with its place among records. It prints records.
    pub(super) fn carried(
        &self,
        packed: &[u8],
        begun: Option<&(String, String)>,
    ) -> Result<String> {
        let lines: Vec<_> = packed.chunks(LINE).map(|bytes| STANDARD.encode(bytes)).collect();
        let lines = lines.join("\n");
        let begun = begun.map_or(String::new(), |(path, text)| {
            let keep = include_str!("sh/keep.sh");
            let path = format!("\"$work\"/records/{}", quote(path));
            format!("(\nset -- {path}\n{keep}) <<'RECORD' || exit\n{text}\nRECORD\n")
        });
        // As a function: a shell that reads its script from standard input has all of it before it starts
        // anything that could read it too.
        Ok(format!(
            "#!/bin/sh\nmain() {{\nset -u\nwork=$(mktemp -d) || exit\ntrap 'rm -rf \"$work\"' EXIT\n\
             mkdir \"$work/bundle\" || exit\nbase64 -d <<'BUNDLE' | tar -C \"$work/bundle\" -xzf - || \
             exit\n{lines}\nBUNDLE\n{begun}{}input=/dev/null out=2\n{JOB}(\nset -- \"$work\"\n{})\n\
             echo \"=== swiglu-lab exit $code\"\nexit \"$code\"\n}}\nmain\n",
            self.words("\"$work\"/bundle", "\"$work\"")?,
            include_str!("sh/collect.sh"),
        ))
    }

    /// Runs a command that takes the carried script.
    pub(super) fn command(&self) -> String {
        let command = self.spec.command.as_deref().unwrap_or_default();
        let script = quote(&format!("{}/{CARRIED}", self.dir()));
        let input = if command.contains(SCRIPT) { "/dev/null" } else { &script };
        let command = quote(&command.replace(SCRIPT, &script));
        format!(
            "{}exec 3>output\nset -- sh -c {command}\ninput={input} out=3\n{JOB}\
             # What the script said counts, if the command ends otherwise.\n\
             own=$(sed -n 's/^=== swiglu-lab exit //p' output | tr -d '\\r' | tail -n 1)\n\
             code=${{own:-$code}}\n{LEAVE}",
            self.enter(),
        )
    }
}

/// The records in what a job printed.
pub(super) fn records(printed: &str) -> Vec<String> {
    let mut records = Vec::new();
    let mut record: Option<String> = None;
    for line in printed.lines().map(|line| line.trim_end_matches('\r')) {
        if line == RECORD[0] {
            record = Some(String::new());
        } else if line == RECORD[1] {
            records.extend(record.take());
        } else if let Some(text) = &mut record {
            text.push_str(line);
            text.push('\n');
        }
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_in_whatever_surrounds_them() {
        let [begin, end] = RECORD;
        let printed = format!("noise\n{begin}\n{{}}\n{end}\nnoise\n{begin}\n{{\"a\": 1}}\n{end}\n");
        assert_eq!(records(&printed), ["{}\n", "{\"a\": 1}\n"]);
        // A terminal in between does no harm; a record without its end is none.
        let terminal = printed.replace('\n', "\r\n");
        assert_eq!(records(&terminal), records(&printed));
        assert_eq!(records(terminal.rsplit_once(end).unwrap().0).len(), 1);
    }
}
