//! The `swiglu` command.
//!
//! Exit codes: 0 done, 1 a check failed or a result is outside its tolerance, 2 bad input or
//! usage, 75 a run of the lab has stopped early or goes on elsewhere. Results go to standard output, everything else to standard error; with `--json` an error
//! is one line of it, `{"error": {"message": "…"}}`.

mod args;
mod ceilings;
mod cli;
mod inputs;
mod layer;
mod table;
mod terminal;
mod timing;
mod verbs;
mod verify;

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;

use cli::Cli;
use terminal::{Terminal, Verdict, describe};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) if usage.use_stderr() => usage.exit(),
        Err(help) => return end_of_help(print(&help)),
    };
    let mut terminal = Terminal::new(&cli.output);
    let result = cli.verb.execute(&mut terminal).and_then(|verdict| {
        terminal.flush()?;
        Ok(verdict)
    });
    match result {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(1),
        Ok(Verdict::Unfinished) => ExitCode::from(swiglu_lab::executor::STOPPED),
        // The reader has seen enough, for example `swiglu info | head -1`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let text = describe(&error);
            let line = match terminal.json() {
                true => json!({ "error": { "message": text } }).to_string(),
                false => format!("error: {text}"),
            };
            // Without a standard error there is only the exit code.
            let _ = writeln!(io::stderr(), "{line}");
            ExitCode::from(2)
        }
    }
}

/// Prints what `--help` or `--version` asked for.
fn print(help: &clap::Error) -> io::Result<()> {
    help.print()?;
    io::stdout().flush()
}

/// Printed, but for a reader who has seen enough.
fn end_of_help(printed: io::Result<()>) -> ExitCode {
    match printed {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "error: standard output: {error}");
            ExitCode::from(2)
        }
        _ => ExitCode::SUCCESS,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = |e: &io::Error| e.kind() == ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(kind)
        || error
            .downcast_ref::<serde_json::Error>()
            .is_some_and(|e| e.io_error_kind() == Some(ErrorKind::BrokenPipe))
}
