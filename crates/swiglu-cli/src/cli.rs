//! The command line: options common to all verbs, and the verbs.

use clap::{Args, Parser, Subcommand};

use crate::Verdict;
use crate::terminal::Terminal;
use crate::verbs;

/// What the environment says, beside CUDA_VISIBLE_DEVICES and NO_COLOR.
const ENVIRONMENT: &str = "\
Environment:
  SWIGLU_CUDA_LIBRARY_PATH    Directories where CUDA's libraries are looked for first
  SWIGLU_CACHE_DIR            Where compiled kernels are kept [default: swiglu in the user's cache]
  SWIGLU_CACHE_READ_ONLY_DIR  Where kernels are looked for first: what `kernels build` made
  SWIGLU_TUNING_DIR           Where measurements of plans are kept [default: in the user's data]
  SWIGLU_LAB_LOCK_DIR         Where runs of the lab keep each other out [default: temporary files]
  SWIGLU_LAB_EXECUTOR         What the script of a job tells the run that it starts

Exit codes: 0 done, 1 a check failed or a result is wrong, 2 bad input or usage, 75 a run of the lab \
stopped early or goes on elsewhere";

/// Fused SwiGLU and every other gated linear unit: run, check, benchmark and explain them.
///
/// `swiglu run` without arguments computes a real layer that is part of the program, proves the
/// result and compares its time with that of the unfused way.
#[derive(Debug, Parser)]
#[command(name = "swiglu", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = ENVIRONMENT)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// How results and progress are shown.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OutputArgs {
    /// Print one JSON document instead of text; an error is {"error": {"message": …}} in the last line
    /// of standard error, but for a command line that cannot be read
    #[arg(long, global = true, help_heading = "Output")]
    pub(crate) json: bool,
    /// Show no progress; automatic where standard error is not a terminal
    #[arg(long, global = true, help_heading = "Output")]
    pub(crate) no_progress: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run a layer: time, speed-up over the unfused way, error against float64
    Run(Box<verbs::run::RunArgs>),
    /// Check every kernel of this machine against the float64 oracle
    Check(verbs::check::CheckArgs),
    /// Measure speed as a fraction of what this machine can do
    Bench(verbs::bench::BenchArgs),
    /// Show where the time of a call goes, and what would make it shorter
    Profile(Box<verbs::profile::ProfileArgs>),
    /// Show how a problem would be computed, and what it costs at least
    Explain(Box<verbs::explain::ExplainArgs>),
    /// Measure every way of computing a layer on a CUDA device, for plans to follow
    Tune(Box<verbs::tune::TuneArgs>),
    /// Compile the kernels of CUDA devices: show what comes out, or fill a cache
    Kernels(verbs::kernels::KernelsArgs),
    /// Experiments against other libraries: run them, list what their records say
    Lab(verbs::lab::LabArgs),
    /// Show this program, processor and what is available
    Info,
    /// Print a completion script for a shell
    Completions(verbs::completions::CompletionsArgs),
}

impl Verb {
    pub(crate) fn execute(&self, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
        match self {
            Verb::Run(args) => verbs::run::run(args, terminal),
            Verb::Check(args) => verbs::check::check(args, terminal),
            Verb::Bench(args) => verbs::bench::bench(args, terminal),
            Verb::Profile(args) => verbs::profile::profile(args, terminal),
            Verb::Explain(args) => verbs::explain::explain(args, terminal),
            Verb::Tune(args) => verbs::tune::tune(args, terminal),
            Verb::Kernels(args) => verbs::kernels::kernels(args, terminal),
            Verb::Lab(args) => verbs::lab::lab(args, terminal),
            Verb::Info => verbs::info::info(terminal),
            Verb::Completions(args) => verbs::completions::completions(args, terminal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Names of environment variables in the sources, but for those of tests.
    fn variables(dir: &std::path::Path, found: &mut std::collections::BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                variables(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let quoted = text.split('"').filter(|s| s.starts_with("SWIGLU_"));
                let names =
                    quoted.filter(|s| s.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'));
                found.extend(names.filter(|s| !s.contains("TEST")).map(str::to_owned));
            }
        }
    }

    #[test]
    fn the_help_names_every_variable_that_is_read() {
        let help = Cli::command().render_help().to_string();
        let mut found = std::collections::BTreeSet::new();
        for name in ["swiglu", "swiglu-cpu", "swiglu-cuda", "swiglu-lab"] {
            let sources = format!("{}/../{name}/src", env!("CARGO_MANIFEST_DIR"));
            variables(std::path::Path::new(&sources), &mut found);
        }
        assert!(found.contains("SWIGLU_CACHE_DIR"), "{found:?}");
        for name in found {
            assert!(help.contains(&name), "{name}: {help}");
        }
    }
}
