//! Whether a place could run something now, and what it lacks.

use std::process::Stdio;

use super::spec::{ExecutorKind, ExecutorSpec};
use super::transport::version;
use crate::ready::Check;

/// Prints what a place has: a word, and what was found.
const ASK: &str = include_str!("sh/ready.sh");

/// What a place has of all that its kind needs. Nothing is written there.
pub fn readiness(spec: &ExecutorSpec) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut check = |what: &str, found: Option<String>, must: bool, advice: &str| {
        let (ok, advice) = (found.is_some() || !must, found.is_none().then(|| advice.to_owned()));
        checks.push(Check { what: what.to_owned(), found, ok, advice });
    };
    if spec.kind == ExecutorKind::Local {
        check("this machine", Some(std::env::consts::ARCH.into()), true, "");
        return checks;
    }
    let transport = spec.transport();
    let remote = transport.host.is_some();
    check("tar here", version("tar", "--version"), true, "install tar");
    if remote {
        check("ssh here", version("ssh", "-V"), true, "install OpenSSH");
        let rsync = version("rsync", "--version");
        check("rsync here", rsync, false, "install rsync on both sides");
    }
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
    check(&transport.name(), there("system"), true, &silent);
    if let Some(command) = &spec.command {
        check(words[0], there("command"), true, &format!("install `{command}`"));
        return checks;
    }
    check("tar there", there("tar"), true, "install tar there");
    check("space there", there("space"), false, "see `df` there");
    if remote {
        check("rsync there", there("rsync"), false, "install rsync on both sides");
    }
    if spec.kind == ExecutorKind::Slurm {
        let advice = "go to a login node, or give its name as `host` in lab/executors.toml";
        check("sbatch", there("sbatch"), true, advice);
        check("partitions", there("partition"), true, "ask `sinfo`");
        if let Some(wanted) = &spec.partition {
            let all = there("partition").unwrap_or_default();
            let names = all.split("; ").filter_map(|line| line.split_whitespace().next());
            let found = names.map(|name| name.trim_end_matches('*')).find(|name| name == wanted);
            let what = format!("partition {wanted}");
            check(&what, found.map(str::to_owned), true, "name another");
        }
    }
    checks
}
