//! Where shell scripts run, and how bytes get there: here, or on a host by ssh.

use std::fs::File;
use std::io::{Seek, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::error::{LabError, Result};
use crate::files::ran;

/// Never asks, gives up in time, and notices a connection that has died.
const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 \
                   -o ServerAliveCountMax=4";
/// How ssh ends where it is ssh that failed.
const SSH_FAILED: i32 = 255;
/// How much of what a command said a message quotes.
const QUOTED: usize = 600;

/// A machine on which shell scripts can be run.
pub(super) struct Transport {
    pub(super) host: Option<String>,
}

/// A script that must succeed.
#[derive(Clone, Copy)]
pub(super) struct Script {
    /// What it does.
    pub(super) what: &'static str,
    /// In the language of POSIX `sh`.
    pub(super) text: &'static str,
    /// What to do if it fails.
    pub(super) advice: &'static str,
}

impl Transport {
    pub(super) fn name(&self) -> String {
        self.host.clone().unwrap_or_else(|| "this machine".into())
    }

    /// Runs a script with arguments, which the shell there sees as they are, whatever is in them.
    pub(super) fn output(&self, script: &str, args: &[&str], input: Stdio) -> Result<Output> {
        let mut command;
        match &self.host {
            None => {
                command = Command::new("sh");
                command.args(["-c", script, "sh"]).args(args);
            }
            Some(host) => {
                let mut words = SSH.split(' ');
                command = Command::new(words.next().unwrap_or_default());
                command.args(words).arg("--").arg(host).arg(remote(script, args));
            }
        }
        // Ctrl-C is for this program, which leaves jobs as they are, and not for what it started.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let output = ended(command.stdin(input))?;
        if self.host.is_some() && output.status.code() == Some(SSH_FAILED) {
            let advice = "`ssh HOST true` must work without a password";
            return self.expect_success(Script { what: "ssh", text: "", advice }, output);
        }
        Ok(output)
    }

    /// Runs a script that must succeed; what it printed.
    pub(super) fn run(&self, script: Script, args: &[&str]) -> Result<String> {
        self.send(script, args, &[])
    }

    /// The same with these bytes as its input.
    pub(super) fn send(&self, script: Script, args: &[&str], bytes: &[u8]) -> Result<String> {
        let output = self.output(script.text, args, input(bytes)?)?;
        let Output { stdout, .. } = self.expect_success(script, output)?;
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    }

    /// Copies a directory to the host with rsync, which sends what is not there.
    pub(super) fn rsync(&self, host: &str, script: Script, dir: &Path, to: &str) -> Result<()> {
        let mut command = Command::new("rsync");
        // `-s`: the shell there does not read the path.
        command.args(["-rlptzs", "--delete", "-e", SSH, "--"]);
        let output = ended(command.arg(dir.join("")).arg(format!("{host}:{to}/")))?;
        self.expect_success(script, output).map(drop)
    }

    fn expect_success(&self, script: Script, output: Output) -> Result<Output> {
        if output.status.success() {
            return Ok(output);
        }
        let Script { what, advice, .. } = script;
        let from = output.stderr.len().saturating_sub(QUOTED);
        let said = String::from_utf8_lossy(&output.stderr[from..]);
        let lines: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        let why = format!("{} ({})", lines.join(" / "), output.status);
        Err(LabError::Refused { place: self.name(), what, why, advice })
    }
}

fn ended(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_owned();
    command.output().map_err(LabError::io("start the program", Path::new(&program)))
}

/// `tar` packs a directory with these options: `-czf` for ways that are slow, else `-cf`. Compressing a program
/// takes seconds, copying it on one machine a fraction of one.
pub(super) fn pack(dir: &Path, options: &str) -> Result<Vec<u8>> {
    let output = ended(Command::new("tar").arg("-C").arg(dir).args([options, "-", "."]))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(LabError::io("pack with tar", dir)(std::io::Error::other(said)))
        }
    }
}

pub(super) fn input(bytes: &[u8]) -> Result<Stdio> {
    if bytes.is_empty() {
        return Ok(Stdio::null());
    }
    let dir = std::env::temp_dir();
    let mut file: File = tempfile::tempfile().map_err(LabError::io("make a file in", &dir))?;
    let written = file.write_all(bytes).and_then(|()| file.rewind());
    written.map_err(LabError::io("write a file in", &dir))?;
    Ok(file.into())
}

/// What a program here says of itself.
pub(super) fn version(program: &str, option: &str) -> Option<String> {
    let Output { stdout, stderr, .. } = ran(program, [option])?;
    let said = [stdout, stderr].concat();
    String::from_utf8_lossy(&said).lines().next().map(|line| line.trim().to_owned())
}

/// A word as every shell of the Bourne family reads it.
pub(super) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

pub(super) fn words(words: &[impl AsRef<str>]) -> String {
    words.iter().map(|word| quote(word.as_ref())).collect::<Vec<_>>().join(" ")
}

/// A script and its arguments as one command for the shell of a user elsewhere, which may be any:
/// quotes, line breaks and exclamation marks, in which shells differ, are written as octal numbers, and
/// `sh` puts them back.
fn remote(script: &str, args: &[&str]) -> String {
    let mut escaped = String::new();
    for c in format!("set -- {}\n{script}", words(args)).chars() {
        match c {
            '\'' | '\n' | '!' | '\\' => escaped.push_str(&format!("\\0{:03o}", u32::from(c))),
            _ => escaped.push(c),
        }
    }
    format!("sh -c 'eval \"$(printf %b \"$1\")\"' sh '{escaped}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_a_script_as_they_are() {
        let hostile =
            ["a b", "it's", "$(touch x) `id` \\n \\012", "two\nlines!", "--help; rm -rf /"];
        let script = "for word; do printf '%s\\0' \"$word\"; done; cat";
        let expected = hostile.join("\0") + "\0from here";
        let here = Transport { host: None };
        let out = here.output(script, &hostile, input(b"from here").unwrap()).unwrap();
        assert_eq!(String::from_utf8(out.stdout).unwrap(), expected);
        // As a shell on the other side of ssh reads it.
        let mut far = Command::new("sh");
        far.arg("-c").arg(remote(script, &hostile)).stdin(input(b"from here").unwrap());
        assert_eq!(String::from_utf8(far.output().unwrap().stdout).unwrap(), expected);
        assert!(!remote(script, &hostile).contains('\n'));
    }
}
