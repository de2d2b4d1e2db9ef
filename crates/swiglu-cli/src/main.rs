//! The `swiglu` command.
//!
//! Exit codes: 0 done, 1 a check failed, a result is outside its tolerance or a peer broke, 2 bad input or
//! usage, 75 a run of the lab has stopped early or goes on elsewhere. Results go to standard output,
//! everything else to standard error; with `--json` an error is one line of it,
//! `{"error": {"message": "…"}}`.

mod args;
mod ceilings;
mod cli;
mod inputs;
mod layer;
mod models;
mod table;
mod terminal;
mod timing;
mod training;
mod verbs;
mod verify;
mod weights;

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;

use cli::Cli;
use terminal::{Terminal, Verdict, describe, say};

fn main() -> ExitCode {
    let (json, result) = match Cli::try_parse() {
        Ok(cli) => {
            let mut terminal = Terminal::new(&cli.output);
            let result = cli.verb.execute(&mut terminal);
            (terminal.json(), result.and_then(|verdict| Ok(terminal.flush().map(|()| verdict)?)))
        }
        Err(usage) if usage.use_stderr() => usage.exit(),
        Err(help) => (false, print(&help)),
    };
    match result {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(1),
        Ok(Verdict::Unfinished) => ExitCode::from(swiglu_lab::executor::STOPPED),
        // The reader has seen enough, for example `swiglu info | head -1`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
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

/// Prints what `--help` or `--version` asked for.
fn print(help: &clap::Error) -> anyhow::Result<Verdict> {
    help.print().and_then(|()| io::stdout().flush()).map_err(terminal::named)?;
    Ok(Verdict::Passed)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}
