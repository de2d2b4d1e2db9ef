//! Standard output, the progress on standard error, and how the program ends.

use std::fmt::{Arguments, Display};
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Read, Stdout, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct OutputArgs {
    /// Print one JSON document instead of text; an error is {"error": {"message": …}} in the last line
    /// of standard error
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
    /// Show no progress; automatic where standard error is not a terminal
    #[arg(long, global = true, help_heading = "Output")]
    no_progress: bool,
}

/// What a verb found. Everything that is not a finding is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    /// Nothing yet: a run stopped early, or goes on elsewhere, or noise hides what it would be.
    Unfinished,
}

impl Verdict {
    pub(crate) fn from_passed(passed: bool) -> Self {
        if passed { Verdict::Passed } else { Verdict::Failed }
    }
}

/// Has Ctrl-C and SIGTERM set `stop`, and says at once what is still finished; the second time they end the program.
pub(crate) fn stop_on_signals(stop: &Arc<AtomicBool>, finished: &'static str) -> Result<()> {
    let listen = || {
        let (mut told, tell) = UnixStream::pair()?;
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register_conditional_default(signal, stop.clone())?;
            signal_hook::flag::register(signal, stop.clone())?;
            signal_hook::low_level::pipe::register(signal, tell.try_clone()?)?;
        }
        std::thread::Builder::new().spawn(move || {
            if told.read_exact(&mut [0]).is_ok() {
                // Behind a bar, or the ^C that a terminal shows.
                let begin = if io::stderr().is_terminal() { "\n" } else { "" };
                say(format!("{begin}stopping after {finished}; a second Ctrl-C stops now"));
            }
        })
    };
    listen().map(drop).context("listening to SIGTERM and Ctrl-C")
}

/// A line on standard error. Without one there is nobody to tell.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// The same, and it does not disturb the bar.
pub(crate) fn tell(bar: &ProgressBar, line: impl Display) {
    bar.suspend(|| say(line));
}

/// Functions that set the library's options, with ours. One that begins like another comes behind it.
const OPTIONS: [(&str, &str); 23] = [
    ("LoadOptions::with_beside_experts", "--beside-experts"),
    ("LoadOptions::with_expert", "--expert"),
    ("LoadOptions::with_orientation", "--orientation"),
    ("LoadOptions::with_arrangement", "--arrangement"),
    ("LoadOptions::with_prefix", "--prefix"),
    ("LoadOptions::with_ignored", "--ignore"),
    ("LoadOptions::without_config", "--no-config"),
    ("LoadOptions::with_rescale", "--rescale"),
    ("LoadOptions::with_plain_fp8", "--plain-fp8"),
    ("TensorNames::with_gate_up_bias", "--gate-up-bias-name"),
    ("TensorNames::with_gate_up", "--gate-up-name"),
    ("TensorNames::with_gate_bias", "--gate-bias-name"),
    ("TensorNames::with_gate", "--gate-name"),
    ("TensorNames::with_up_bias", "--up-bias-name"),
    ("TensorNames::with_up", "--up-name"),
    ("TensorNames::with_down_bias", "--down-bias-name"),
    ("TensorNames::with_down", "--down-name"),
    ("Weights::activation", "--activation"),
    ("Weights::decoded", "--decode-weights"),
    ("CpuOptions::with_threads", "--threads 1"),
    ("Device::cpu", "--device cpu"),
    ("GatedLinear::load", "--op gated-linear"),
    ("Mlp::load", "--op mlp"),
];

/// A message of the library in the words of this command: `LoadOptions::with_ignored(KEY)` is `--ignore KEY`.
pub(crate) fn by_options(message: &str) -> String {
    swiglu::in_words_of(message, &OPTIONS, |option, value| match value {
        Some(value) => format!("{option} {value}"),
        None => option.to_owned(),
    })
}

/// An error and its causes, each said once: many texts quote their cause already.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut said: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if !said.iter().any(|text| text.contains(&cause)) {
            said.push(cause);
        }
    }
    by_options(&said.join(": "))
}

/// A path in a document. JSON is text: what of a path is not UTF-8 shows as U+FFFD, as it does in messages.
pub(crate) fn shown(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}

pub(crate) struct Terminal {
    out: BufWriter<Stdout>,
    /// Whether one JSON document is wanted instead of text.
    pub(crate) json: bool,
    progress: bool,
    /// Standard error is kept, not watched.
    logged: bool,
    pub(crate) colour: bool,
}

impl Terminal {
    pub(crate) fn new(options: &OutputArgs) -> Self {
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Self {
            out: BufWriter::new(io::stdout()),
            json: options.json,
            progress: !options.no_progress && io::stderr().is_terminal(),
            logged: !options.no_progress && !io::stderr().is_terminal(),
            colour: !options.json && !no_colour && io::stdout().is_terminal(),
        }
    }

    /// Prints what was found: as JSON, or as `show` says it to people. A verb that only shows has passed then.
    pub(crate) fn print<T: Serialize + ?Sized>(
        &mut self,
        found: &T,
        show: impl FnOnce(&T, &mut Self) -> Result<()>,
    ) -> Result<Verdict> {
        if self.json {
            // Whole or not at all: what cannot be a document is an error without half of one before it.
            let document = serde_json::to_string_pretty(found)?;
            writeln!(self.out, "{document}")?;
        } else {
            show(found, self)?;
        }
        Ok(Verdict::Passed)
    }

    /// What `write!` and `writeln!` call, so that nobody who writes imports a trait.
    pub(crate) fn write_fmt(&mut self, text: Arguments<'_>) -> Result<()> {
        Ok(Write::write_fmt(self, text)?)
    }

    /// Says what begins and takes long, where a bar would not be seen.
    pub(crate) fn announce(&self, what: &str) {
        if self.logged {
            say(what);
        }
    }

    /// A progress bar over `len` steps, hidden where nobody would see it.
    pub(crate) fn bar(&self, len: u64) -> ProgressBar {
        let bar = self.moving(ProgressBar::new(len));
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} eta {eta} {msg}") {
            bar.set_style(style);
        }
        bar
    }

    /// What becomes of one after the other, with a bar that says what goes on.
    pub(crate) fn each<I, R>(
        &self,
        items: impl ExactSizeIterator<Item = I>,
        message: impl Fn(&I) -> String,
        mut of: impl FnMut(I) -> Result<R>,
    ) -> Result<Vec<R>> {
        let bar = self.bar(items.len() as u64);
        let told = items.inspect(|item| bar.set_message(message(item)));
        let all = told.map(|item| of(item).inspect(|_| bar.inc(1))).collect();
        bar.finish_and_clear();
        all
    }

    /// A message that changes, over work of unknown length; hidden where nobody would see it.
    pub(crate) fn spinner(&self) -> ProgressBar {
        self.moving(ProgressBar::new_spinner())
    }

    /// Keeps moving while one step takes long.
    fn moving(&self, bar: ProgressBar) -> ProgressBar {
        // One that nobody sees needs no thread, where perhaps none can be started.
        if !self.progress {
            return ProgressBar::hidden();
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }
}

impl Write for Terminal {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.out.write(data).map_err(named)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush().map_err(named)
    }
}

/// That standard output could not be written, which the system does not say.
#[derive(Debug, thiserror::Error)]
#[error("standard output: {0}")]
struct Unwritten(io::Error);

pub(crate) fn named(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), Unwritten(error))
}

/// Whether whoever read standard output has gone. Other pipes, as that to a peer, break for other reasons.
pub(crate) fn is_unread(error: &io::Error) -> bool {
    let own = error.get_ref().is_some_and(|inner| inner.is::<Unwritten>());
    own && error.kind() == ErrorKind::BrokenPipe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_pipe_is_that_of_standard_output_or_another() {
        let broken = || io::Error::from(ErrorKind::BrokenPipe);
        assert!(is_unread(&named(broken())) && !is_unread(&broken()));
        assert!(!is_unread(&named(ErrorKind::StorageFull.into())));
    }

    #[test]
    fn messages_of_the_library_name_options() {
        for (message, said) in [
            (
                "LoadOptions::with_ignored(a.b) computes without it",
                "--ignore a.b computes without it",
            ),
            (
                "name them (TensorNames::with_gate_up_bias, TensorNames::with_gate; \
                 TensorNames::with_up)",
                "name them (--gate-up-bias-name, --gate-name; --up-name)",
            ),
            ("what LoadOptions::with_expert: 0 to 3", "what --expert: 0 to 3"),
            ("nothing of the kind (here)", "nothing of the kind (here)"),
        ] {
            assert_eq!(by_options(message), said);
        }
    }
}
