//! `swiglu completions`: a script for a shell.

use anyhow::bail;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::terminal::{Terminal, Verdict};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell the script is for
    shell: Shell,
}

pub(crate) fn completions(
    args: &CompletionsArgs,
    mut command: Command,
    terminal: &mut Terminal,
) -> anyhow::Result<Verdict> {
    if terminal.json() {
        bail!("--json: a script for a shell is no JSON document; leave the option out");
    }
    // Into memory first: the generator panics where a pipe is closed early.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "swiglu", &mut script);
    std::io::Write::write_all(terminal, &script)?;
    Ok(Verdict::Passed)
}
