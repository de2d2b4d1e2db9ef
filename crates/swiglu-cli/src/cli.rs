//! The command line: options common to all verbs, and the verbs.

use std::io::Write;

use anyhow::bail;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::terminal::{OutputArgs, Terminal, Verdict};
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

Exit codes: 0 done, 1 a check failed, a result is wrong or a peer broke, 2 bad input or usage, 75 a run \
of the lab stopped early or goes on elsewhere";

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

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run a layer: time, speed-up over the unfused way, error against float64
    Run(Box<verbs::run::RunArgs>),
    /// Say what a model file holds: layers, experts, types, activation, and what would be refused
    Inspect(verbs::inspect::InspectArgs),
    /// Check every kernel of this machine against the float64 oracle
    Check(verbs::check::CheckArgs),
    /// Measure speed as a fraction of what this machine can do, beside other libraries
    Bench(Box<verbs::bench::BenchArgs>),
    /// Show how a problem would be computed and what it costs at least; measure where its time goes
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
    Completions {
        /// The shell the script is for
        shell: Shell,
    },
}

impl Verb {
    pub(crate) fn execute(&self, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
        match self {
            Verb::Run(args) => verbs::run::run(args, terminal),
            Verb::Inspect(args) => verbs::inspect::inspect(args, terminal),
            Verb::Check(args) => verbs::check::check(args, terminal),
            Verb::Bench(args) => verbs::bench::bench(args, terminal),
            Verb::Explain(args) => verbs::explain::explain(args, terminal),
            Verb::Tune(args) => verbs::tune::tune(args, terminal),
            Verb::Kernels(args) => verbs::kernels::kernels(args, terminal),
            Verb::Lab(args) => verbs::lab::lab(args, terminal),
            Verb::Info => verbs::info::info(terminal),
            Verb::Completions { shell } => completions(*shell, terminal),
        }
    }
}

fn completions(shell: Shell, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    if terminal.json() {
        bail!("--json: a script for a shell is no JSON document; leave the option out");
    }
    // Into memory first: the generator panics where a pipe is closed early.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "swiglu", &mut script);
    terminal.write_all(&script)?;
    Ok(Verdict::Passed)
}
