//! Whether a place could run something now, and what it lacks.

use std::process::Stdio;

use serde::Serialize;

use super::spec::{ExecutorKind, ExecutorSpec};
use super::transport::{Transport, version};

/// Prints what a place has: a word, and what was found.
const ASK: &str = include_str!("sh/ready.sh");

/// One thing that a place needs or could use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked for.
    pub what: String,
    /// What was found; none if nothing was.
    pub found: Option<String>,
    /// What it is for.
    pub needed: String,
    /// Whether runs can do with what was found.
    pub ok: bool,
    /// What to do.
    pub advice: Option<String>,
}

/// What a place has of all that its kind needs. Nothing is written there.
pub fn readiness(spec: &ExecutorSpec) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut check = |what: &str, found: Option<String>, needed: &str, must: bool, advice: &str| {
        let (ok, advice) = (found.is_some() || !must, found.is_none().then(|| advice.to_owned()));
        checks.push(Check { what: what.to_owned(), found, needed: needed.to_owned(), ok, advice });
    };
    if spec.kind == ExecutorKind::Local {
        check("this machine", Some(std::env::consts::ARCH.into()), "runs here", true, "");
        return checks;
    }
    let remote = spec.kind != ExecutorKind::Command && spec.host.is_some();
    check("tar here", version("tar", "--version"), "packs the bundle", true, "install tar");
    if remote {
        check("ssh here", version("ssh", "-V"), "reaches the host", true, "install OpenSSH");
        let rsync = version("rsync", "--version");
        check("rsync here", rsync, "sends less than tar", false, "install rsync on both sides");
    }
    let transport = Transport { host: spec.host.clone().filter(|_| remote) };
    let words = [spec.command.as_deref().unwrap_or("sh").split_whitespace().next().unwrap_or("sh")];
    let (said, silent) = match transport.output(ASK, &words, Stdio::null()) {
        Ok(output) => (String::from_utf8_lossy(&output.stdout).into_owned(), String::new()),
        Err(error) => (String::new(), error.to_string()),
    };
    let there = |name: &str| {
        let lines = said.lines().filter_map(|line| line.split_once(' '));
        let found: Vec<&str> =
            lines.filter(|(key, _)| *key == name).map(|(_, v)| v.trim()).collect();
        Some(found.join("; ")).filter(|found| !found.is_empty())
    };
    check(&transport.name(), there("system"), "runs shell scripts", true, &silent);
    if let Some(command) = &spec.command {
        check(words[0], there("command"), "is the command", true, &format!("install `{command}`"));
        return checks;
    }
    check("tar there", there("tar"), "unpacks the bundle", true, "install tar there");
    check("space there", there("space"), "100 MB for a bundle", false, "see `df` there");
    if remote {
        check("rsync there", there("rsync"), "as here", false, "install rsync on both sides");
    }
    if spec.kind == ExecutorKind::Slurm {
        let advice = "go to a login node, or give its name as `host` in lab/executors.toml";
        check("sbatch", there("sbatch"), "submits jobs", true, advice);
        check("partitions", there("partition"), "run jobs", true, "ask `sinfo`");
        if let Some(wanted) = &spec.partition {
            let all = there("partition").unwrap_or_default();
            let names = all.split("; ").filter_map(|line| line.split_whitespace().next());
            let found = names.map(|name| name.trim_end_matches('*')).find(|name| name == wanted);
            let what = format!("partition {wanted}");
            check(&what, found.map(str::to_owned), "was named", true, "name another");
        }
    }
    checks
}
