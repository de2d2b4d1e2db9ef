//! What a user says of a place: `local`, `ssh:HOST`, `slurm[:PARTITION]`, `command:…`, or a name in
//! `executors.toml` of the lab.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::transport::Transport;
use crate::case::DeviceKind;
use crate::code::Code;
use crate::error::{LabError, Result};
use crate::files::{now, read_if_there};
use crate::place::Place;

/// The file of the lab with places of its own names.
const FILE: &str = "executors.toml";
/// Stands for the path of the script in a command.
pub(super) const SCRIPT: &str = "{script}";

/// How a place runs things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExecutorKind {
    /// In this process.
    #[default]
    Local,
    /// On a host by ssh.
    Ssh,
    /// As a job of Slurm.
    Slurm,
    /// By a command that takes a script and ends with it.
    Command,
}

/// A place where runs happen. What is absent is left to the place.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExecutorSpec {
    /// As it was given: `slurm:gpu`, or its name in the file.
    pub name: String,
    /// How it runs things.
    pub kind: ExecutorKind,
    /// Reached by ssh; with `slurm` a host that has `sbatch`.
    pub host: Option<String>,
    /// A partition of Slurm.
    pub partition: Option<String>,
    /// Generic resources of Slurm, for each node: `gpu:h200:1`. An experiment of a CUDA device has one
    /// `gpu` unless this says otherwise.
    pub gres: Option<String>,
    /// Time limit of a job, as `sbatch --time` has it.
    pub time: Option<String>,
    /// Number of nodes; one if absent.
    pub nodes: Option<u32>,
    /// Whether no other job may be on the nodes. An experiment of a CPU measures all of a node, so it
    /// asks for that unless this says otherwise.
    pub exclusive: Option<bool>,
    /// Words in front of the program that start it in a container.
    pub container: Vec<String>,
    /// Further options of `sbatch`.
    pub options: Vec<String>,
    /// Where bundles and jobs lie, below `swiglu-lab`, on a file system that all nodes have.
    pub stage: Option<String>,
    /// What runs peers written in Python there.
    pub python: Option<String>,
    /// A program for that place, instead of this one.
    pub program: Option<PathBuf>,
    /// A command for `sh` with `{script}`, or with the word `-` for a script on standard input.
    pub command: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    #[serde(default)]
    executor: BTreeMap<String, toml::Spanned<ExecutorSpec>>,
}

impl ExecutorSpec {
    /// The place that `given` names, by itself or in `executors.toml` of a lab.
    ///
    /// # Errors
    /// [`LabError::Name`] if it names none, or one that could be taken for something else;
    /// [`LabError::Definition`] if the file is wrong.
    pub fn find(given: &str, lab: &Path) -> Result<Self> {
        let (word, rest) = match given.split_once(':') {
            Some((word, rest)) => (word, Some(rest.to_owned())),
            None => (given, None),
        };
        let spec = Self { name: given.to_owned(), ..Self::default() };
        let spec = match (word, rest) {
            ("local", None) => spec,
            ("slurm", partition) => Self { kind: ExecutorKind::Slurm, partition, ..spec },
            ("ssh", host) => Self { kind: ExecutorKind::Ssh, host, ..spec },
            ("command", command) => Self { kind: ExecutorKind::Command, command, ..spec },
            _ => return Self::named(given, lab),
        };
        spec.expect_sound()?;
        Ok(spec)
    }

    fn named(given: &str, lab: &Path) -> Result<Self> {
        let path = lab.join(FILE);
        let text = read_if_there(&path)?.unwrap_or_default();
        let place = Place::new(&text, &path);
        let mut entries: Entries = place.toml()?;
        let Some(entry) = entries.executor.remove(given) else {
            let names: Vec<&str> = entries.executor.keys().map(String::as_str).collect();
            let expected = format!(
                "`local`, `ssh:HOST`, `slurm`, `slurm:PARTITION`, `command:… {SCRIPT} …`, or a name in \
                 {} ({})",
                path.display(),
                if names.is_empty() { "which has none".to_owned() } else { names.join(", ") }
            );
            return Err(LabError::name("--on", given, expected));
        };
        let span = entry.span();
        let spec = Self { name: given.to_owned(), ..entry.into_inner() };
        let sound = match spec.kind {
            ExecutorKind::Local => Err(LabError::name("kind", "", "`ssh`, `slurm` or `command`")),
            _ => spec.expect_sound(),
        };
        let at = |error| place.at(span, format!("executor.{given}: {error}"));
        sound.map(|()| spec).map_err(at)
    }

    /// That it has what its kind needs, and nothing that a command would take for an option.
    fn expect_sound(&self) -> Result<()> {
        let strange = |c: char| c.is_whitespace() || c.is_control();
        let plain = |s: &String| !s.is_empty() && !s.starts_with('-') && !s.contains(strange);
        for (what, value, needed) in [
            ("host", &self.host, self.kind == ExecutorKind::Ssh),
            ("partition", &self.partition, false),
            ("gres", &self.gres, false),
            ("time", &self.time, false),
        ] {
            if !value.as_ref().map_or(!needed, plain) {
                let expected = "a word without blanks that does not begin with `-`";
                return Err(LabError::name(what, value.clone().unwrap_or_default(), expected));
            }
        }
        let takes_script =
            |c: &String| c.contains(SCRIPT) || c.split_whitespace().any(|word| word == "-");
        let command = self.command.as_ref();
        if !command.map_or(self.kind != ExecutorKind::Command, takes_script) {
            let expected = "a command with `{script}`, or with the word `-` if it reads a script \
                            from standard input";
            return Err(LabError::name("command", command.cloned().unwrap_or_default(), expected));
        }
        Ok(())
    }

    /// How it is reached; a command and this process are here.
    pub(super) fn transport(&self) -> Transport {
        let here = matches!(self.kind, ExecutorKind::Command | ExecutorKind::Local);
        Transport { host: self.host.clone().filter(|_| !here) }
    }

    /// What records call this place: a command as such, for it may be long.
    pub fn place(&self) -> &str {
        if self.name.starts_with("command:") { "command" } else { &self.name }
    }

    /// What a run here is called that nobody named: date, commit and place, as in
    /// `2026-11-25-0fd1164-slurm-gpu`; with a number behind it if that is `taken`. Outside a repository
    /// there is no commit in it.
    pub fn run_name(&self, lab: &Path, taken: impl Fn(&str) -> bool) -> String {
        let now = now();
        let commit = Code::commit(lab).unwrap_or_default();
        let commit = commit.get(..7).map(|commit| format!("-{commit}")).unwrap_or_default();
        let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        let place: String = self.place().chars().map(allowed).take(30).collect();
        let day = now.get(..10).unwrap_or(&now);
        let name = format!("{day}{commit}-{}", place.to_ascii_lowercase());
        let numbered = (2u32..).map(|n| format!("{name}-{n}"));
        let mut names = std::iter::once(name.clone()).chain(numbered);
        names.find(|name| !taken(name)).unwrap_or(name)
    }

    pub(super) fn sbatch(&self, device: DeviceKind) -> Vec<String> {
        let gpu = (device == DeviceKind::Cuda).then(|| "gpu:1".to_owned());
        let valued = [
            ("partition", self.partition.clone()),
            ("gres", self.gres.clone().or(gpu)),
            ("time", self.time.clone()),
            ("nodes", Some(self.nodes.unwrap_or(1).to_string())),
        ];
        let option = |(name, value): (&str, Option<String>)| Some(format!("--{name}={}", value?));
        let mut options: Vec<String> = valued.into_iter().filter_map(option).collect();
        if self.exclusive.unwrap_or(device == DeviceKind::Cpu) {
            options.push("--exclusive".into());
        }
        options.extend(self.options.iter().cloned());
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_or_all_of_a_node_is_asked_for_unless_a_place_says_otherwise() {
        let any = ExecutorSpec::default();
        assert_eq!(any.sbatch(DeviceKind::Cuda), ["--gres=gpu:1", "--nodes=1"]);
        assert_eq!(any.sbatch(DeviceKind::Cpu), ["--nodes=1", "--exclusive"]);
        let big = ExecutorSpec { gres: Some("gpu:h200:1".into()), exclusive: Some(true), ..any };
        assert_eq!(big.sbatch(DeviceKind::Cuda), ["--gres=gpu:h200:1", "--nodes=1", "--exclusive"]);
    }
}
