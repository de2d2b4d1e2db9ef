//! The `swiglu` command.
//!
//! Exit codes: 0 done, 1 a check failed, a result is outside its tolerance, a peer broke or none that was named is here, 2 bad
//! input or usage, 75 a run of the lab has stopped early or goes on elsewhere, or noise hides its verdict, 130 interrupted. Results
//! go to standard output, everything else to standard error; with `--json` an error is one line of it,
//! `{"error": {"message": "…"}}`.

mod args;
mod ceilings;
mod inputs;
mod layer;
mod step;
mod table;
mod terminal;
mod timing;
mod verbs;
mod verify;
mod weights;

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::{Arg, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use serde_json::json;
use signal_hook::consts::SIGPIPE;

use terminal::{OutputArgs, Terminal, Verdict, describe, say};

/// What the environment says, beside CUDA_VISIBLE_DEVICES and NO_COLOR.
const ENVIRONMENT: &str = "\
Environment:
  SWIGLU_CUDA_LIBRARY_PATH    Directories where CUDA's libraries are looked for first
  SWIGLU_CACHE_DIR            Where compiled kernels are kept [default: swiglu in the user's cache]
  SWIGLU_CACHE_READ_ONLY_DIR  Where kernels are looked for first: what `kernels build` made
  SWIGLU_TUNING_DIR           Where measurements are kept [default: in the user's data]
  SWIGLU_LAB_LOCK_DIR         Where runs of the lab keep each other out [default: temporary files]
  SWIGLU_LAB_EXECUTOR         What the script of a job tells the run that it starts

Exit codes: 0 done, 1 a check failed, a result is wrong, a peer broke or none that was named is here, \
2 bad input or usage, 75 a run of the lab stopped early or goes on elsewhere, or noise hides its verdict, 130 interrupted";

/// Fused SwiGLU and every other gated linear unit: run, check, benchmark and explain them.
///
/// `swiglu run` without arguments computes a real layer that is part of the program, proves the
/// result and compares its time with that of the unfused way.
#[derive(Debug, Parser)]
#[command(name = "swiglu", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = ENVIRONMENT)]
struct Cli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
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
    /// Measure a CUDA device and every way of computing a layer there, for plans to follow
    Tune(Box<verbs::tune::TuneArgs>),
    /// Compile the kernels of CUDA devices: show what comes out, or fill a cache
    Kernels(verbs::kernels::KernelsArgs),
    /// Experiments against other libraries: run them, list what their records say
    Lab(verbs::lab::LabArgs),
    /// Show this program, processor and what is available; measure what CUDA devices can do
    Info(verbs::info::InfoArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell the script is for
        shell: Shell,
    },
}

impl Verb {
    fn execute(&self, terminal: &mut Terminal) -> Result<Verdict> {
        match self {
            Verb::Run(args) => verbs::run::run(args, terminal),
            Verb::Inspect(args) => verbs::inspect::inspect(args, terminal),
            Verb::Check(args) => verbs::check::check(args, terminal),
            Verb::Bench(args) => verbs::bench::bench(args, terminal),
            Verb::Explain(args) => verbs::explain::explain(args, terminal),
            Verb::Tune(args) => verbs::tune::tune(args, terminal),
            Verb::Kernels(args) => verbs::kernels::kernels(args, terminal),
            Verb::Lab(args) => verbs::lab::lab(args, terminal),
            Verb::Info(args) => verbs::info::info(args, terminal),
            Verb::Completions { shell } => completions(*shell, terminal),
        }
    }
}

fn completions(shell: Shell, terminal: &mut Terminal) -> Result<Verdict> {
    if terminal.json {
        bail!("--json: a script for a shell is no JSON document; leave the option out");
    }
    // Into memory first: the generator panics where a pipe is closed early.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "swiglu", &mut script);
    terminal.write_all(&script)?;
    Ok(Verdict::Passed)
}

fn main() -> ExitCode {
    let (json, result) = match parse(env::args_os()) {
        Ok(cli) => {
            let mut terminal = Terminal::new(&cli.output);
            let result = cli.verb.execute(&mut terminal);
            (terminal.json, result.and_then(|verdict| Ok(terminal.flush().map(|()| verdict)?)))
        }
        Err(usage) if usage.use_stderr() && asks_for_json() => (true, Err(anyhow!(bare(&usage)))),
        Err(usage) if usage.use_stderr() => usage.exit(),
        Err(help) => (false, print(&help)),
    };
    match result {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(1),
        Ok(Verdict::Unfinished) => ExitCode::from(swiglu_lab::executor::STOPPED),
        // The reader has seen enough, for example `swiglu info | head -1`: it ends as programs do that wait for the signal.
        Err(e) if e.downcast_ref().is_some_and(terminal::is_unread) => {
            let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
            ExitCode::from(128 + SIGPIPE as u8)
        }
        Err(error) => {
            let text = describe(&error);
            say(match json {
                true => json!({ "error": { "message": text } }).to_string(),
                false => format!("error: {text}"),
            });
            ExitCode::from(2)
        }
    }
}

fn parse(words: impl IntoIterator<Item: Into<OsString> + Clone>) -> clap::error::Result<Cli> {
    Cli::from_arg_matches(&numbers_may_be_negative(Cli::command()).try_get_matches_from(words)?)
}

/// Whether `--json` is among the words, of which clap has made nothing.
fn asks_for_json() -> bool {
    env::args_os().skip(1).take_while(|word| word != "--").any(|word| word == "--json")
}

/// What clap says, without what is for a terminal.
fn bare(usage: &clap::Error) -> String {
    let text = usage.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    text.split("\n\nFor more information").next().unwrap_or(text).trim().to_owned()
}

/// Behind an option `-1` is a value, which whoever reads it refuses, and no option.
fn numbers_may_be_negative(command: Command) -> Command {
    let takes_value = |arg: &Arg| !arg.is_positional() && arg.get_action().takes_values();
    command
        .mut_args(|arg| if takes_value(&arg) { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(numbers_may_be_negative)
}

fn print(help: &clap::Error) -> Result<Verdict> {
    help.print().and_then(|()| io::stdout().flush()).map_err(terminal::named)?;
    Ok(Verdict::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an option reads has the type of the field that takes it, which clap finds out when it is given.
    #[test]
    fn numbers_are_read_as_their_options_hold_them() {
        let lines = [
            "run --weights w --tokens 3 --seed 3 --threads 3 --seconds 1 --layer 3 --expert 3 --rescale -3",
            "check --seed 3 --threads 3",
            "bench mlp --m 3 --hidden 8 --intermediate 8 --seconds 1 --threads 3",
            "bench activation --rows 3 --cols 3",
            "explain --m 3 --hidden 8 --intermediate 8 --threads 3 --measure --seconds 1",
            "explain --weights w --layer 3 --expert 3 --rescale 3",
            "tune --shape 3,8,8 --seconds 1 --threads 3",
            "kernels build --arch sm_80 --out o --shape 8,8 --sms 3",
            "lab run e --preparations 3 --time-limit 3",
            "lab run e --until-decided=3",
            "lab gate e --tolerance 0.5",
        ];
        for line in lines {
            let words = std::iter::once("swiglu").chain(line.split(' '));
            if let Err(error) = parse(words) {
                panic!("{line}: {error}");
            }
        }
        expect_tried("", &Cli::command(), &lines);
    }

    /// Every option that takes numbers is in one of the lines.
    fn expect_tried(path: &str, command: &Command, lines: &[&str]) {
        let names = ["N", "M", "K", "H", "S", "E", "MINUTES", "FRACTION", "K,H[,M,...]", "M,K,H"];
        let is_number = |name: &clap::builder::Str| names.contains(&name.as_str());
        let is_number =
            |arg: &&Arg| arg.get_value_names().is_some_and(|of| of.iter().any(is_number));
        for long in command.get_arguments().filter(is_number).filter_map(Arg::get_long) {
            let words = |line: &str| format!("{line} ").replace('=', " ");
            let tried =
                |line: &str| line.starts_with(path) && words(line).contains(&format!(" --{long} "));
            assert!(lines.iter().any(|line| tried(line)), "{path}--{long}");
        }
        for inner in command.get_subcommands() {
            expect_tried(&format!("{path}{} ", inner.get_name()), inner, lines);
        }
    }
}
