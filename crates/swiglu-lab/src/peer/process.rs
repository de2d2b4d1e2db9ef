//! A peer's process: started, spoken to under time limits, and always ended.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::protocol::{Reply, Request, type_and_id};
use crate::error::{LabError, Result};

/// A longer line is no reply: four times what the largest `verified` takes.
const MAX_LINE: u64 = 2 << 20;
/// Lines that wait to be read. There is one reply to a request, so a peer that says more has to wait
/// in its own memory until the next request finds it out.
const WAITING: usize = 1;
/// How much of a peer's standard error a message quotes.
const TAIL: u64 = 400;
/// How long a peer may take to end after `quit`.
const GRACE: Duration = Duration::from_secs(2);

/// A peer may be silent so long after requests whose limit is not the same for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Importing a framework takes long.
    pub hello: Duration,
    /// Beyond the budget of the turn.
    pub sample: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { hello: Duration::from_secs(60), sample: Duration::from_secs(30) }
    }
}

impl Limits {
    fn of(&self, request: &Request) -> Duration {
        match request {
            Request::Hello { .. } => self.hello,
            // Compiling and tuning takes longer.
            Request::Prepare { .. } => Duration::from_secs(300),
            Request::Verify { .. } => Duration::from_secs(60),
            Request::Sample { turns, budget_us, .. } => {
                self.sample + Duration::from_micros(budget_us.saturating_mul((*turns).into()))
            }
            Request::Release { .. } | Request::Clocks | Request::Quit => Duration::from_secs(30),
        }
    }
}

/// A peer ends with the thread that started it, which is that of the run, however that ends: nobody
/// else would stop a peer that is busy and does not look at its input.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn end_with_parent(command: &mut Command) {
    // SAFETY: between fork and exec this makes one system call and allocates nothing.
    unsafe {
        command
            .pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

/// How peers are started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCommands {
    /// The command of the peer `swiglu`; with `read` behind it that of the peer `read`.
    pub own: Vec<OsString>,
    /// What runs `*_peer.py`.
    pub python: PathBuf,
    /// Where peers are: `<name>_peer.py`, or an executable `<name>`.
    pub dir: PathBuf,
    /// Where each peer's standard error is kept, as `<name>.log`.
    pub logs: PathBuf,
}

impl PeerCommands {
    /// The command of a peer.
    ///
    /// # Errors
    /// [`LabError::Name`] if there is none of this name, or the name is no file name.
    pub fn command(&self, peer: &str) -> Result<Vec<OsString>> {
        LabError::expect_name("peer", peer)?;
        let program = self.dir.join(peer);
        let script = self.dir.join(format!("{}_peer.py", peer.replace('-', "_")));
        let expected =
            "`swiglu`, `read`, or a program <name> or <name>_peer.py in the directory of peers";
        match peer {
            "swiglu" => Ok(self.own.clone()),
            "read" => Ok(self.own.iter().cloned().chain([peer.into()]).collect()),
            _ if program.is_file() => Ok(vec![program.into()]),
            _ if script.is_file() => Ok(vec![self.python.clone().into(), script.into()]),
            _ => Err(LabError::name("peer", peer, expected)),
        }
    }
}

#[derive(Debug)]
pub(crate) struct PeerProcess {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Vec<u8>>,
    log: PathBuf,
    limits: Limits,
}

impl PeerProcess {
    /// Starts a peer. Its standard error is appended to the log.
    pub(crate) fn start(
        name: &str,
        command: &[OsString],
        log: &Path,
        limits: Limits,
    ) -> io::Result<Self> {
        let stderr = File::options().create(true).append(true).open(log)?;
        let mut command_line = Command::new(command.first().cloned().unwrap_or_default());
        command_line
            .args(command.get(1..).unwrap_or_default())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr);
        // A group of its own: compilers and pools that it starts end with it.
        command_line.process_group(0);
        #[cfg(target_os = "linux")]
        end_with_parent(&mut command_line);
        let mut child = command_line.spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Self {
            name: name.to_owned(),
            child,
            stdin: Some(stdin),
            lines: read_lines(stdout),
            log: log.to_path_buf(),
            limits,
        })
    }

    /// Sends a request and waits for its reply, or says why the peer was given up. It is killed by then.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Reply, String> {
        self.try_ask(request).map_err(|fault| {
            self.kill();
            format!("peer `{}` {fault}", self.name)
        })
    }

    fn try_ask(&mut self, asked: &Request) -> Result<Reply, String> {
        let ((request, replies), limit) = (asked.types(), self.limits.of(asked));
        if let Ok(line) = self.lines.try_recv() {
            return Err(format!(
                "spoke before `{request}` was asked: `{}`: expected one reply to each request; it was killed",
                beginning(&line)
            ));
        }
        let sent = match (&mut self.stdin, serde_json::to_string(asked)) {
            (Some(stdin), Ok(line)) => writeln!(stdin, "{line}").and_then(|()| stdin.flush()).ok(),
            _ => None,
        };
        if sent.is_none() {
            return Err(self.died(request));
        }
        let line = self.lines.recv_timeout(limit).map_err(|e| match e {
            RecvTimeoutError::Disconnected => self.died(request),
            RecvTimeoutError::Timeout => {
                let (limit, tail) = (limit.as_secs_f64(), self.tail());
                format!("did not answer `{request}` within {limit} s and was killed{tail}")
            }
        })?;
        let reply: Reply = serde_json::from_slice(&line).map_err(|why| {
            let line = beginning(&line);
            format!("answered `{request}` with what is no reply ({why}): `{line}`; it was killed")
        })?;
        let ((name, id), (_, own)) = (type_and_id(&reply), type_and_id(asked));
        let given = match (replies.contains(&name.as_str()), id == own) {
            (true, true) => return Ok(reply),
            (false, _) => format!("with `{name}`"),
            (true, false) => format!("of id {own:?} with id {id:?}"),
        };
        let expected = match replies.split_last() {
            None => "nothing".to_owned(),
            Some((only, [])) => (*only).to_owned(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
        };
        Err(format!("answered `{request}` {given}: expected {expected}; it was killed"))
    }

    fn died(&mut self, request: &str) -> String {
        // Its output is closed; the process itself may take a moment longer.
        let status = match wait(&mut self.child, GRACE) {
            Ok(Some(status)) => status.to_string(),
            _ => "its output is closed".to_owned(),
        };
        format!("ended on `{request}` ({status}){}", self.tail())
    }

    /// The last line of its standard error, as part of a message.
    fn tail(&self) -> String {
        let read = || -> io::Result<String> {
            let mut file = File::open(&self.log)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_default();
        match text.lines().rev().find(|line| !line.trim().is_empty()) {
            Some(line) => format!("; it last said: {}", line.trim()),
            None => String::new(),
        }
    }

    /// Ends it with everything it started.
    fn kill(&mut self) {
        self.stdin = None;
        // It fails only if nothing of the group is left.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            // A peer that ended by itself does not read it.
            let _ = stdin.write_all(b"{\"type\":\"quit\"}\n");
            drop(stdin);
            // Whether it ended or not, it is killed.
            let _ = wait(&mut self.child, GRACE);
        }
        self.kill();
    }
}

/// How a process ended, if it did so in time.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        match child.try_wait()? {
            None if start.elapsed() < limit => thread::sleep(Duration::from_millis(5)),
            status => return Ok(status),
        }
    }
}

/// As much of a line as a message quotes.
fn beginning(line: &[u8]) -> String {
    String::from_utf8_lossy(line.get(..200).unwrap_or(line)).trim_end().to_owned()
}

/// Lines as they come; the channel closes with the stream, or with a line that is too long.
fn read_lines(stdout: ChildStdout) -> Receiver<Vec<u8>> {
    let (sender, receiver) = sync_channel(WAITING);
    // Ends when the peer's output is closed, which its death does, or when nobody reads any more.
    thread::spawn(move || {
        let mut stdout = BufReader::new(stdout);
        let mut line = Vec::new();
        let mut next = |line: &mut _| (&mut stdout).take(MAX_LINE).read_until(b'\n', line);
        while next(&mut line).is_ok_and(|read| read > 0) {
            let whole = line.ends_with(b"\n");
            if sender.send(std::mem::take(&mut line)).is_err() || !whole {
                break;
            }
        }
    });
    receiver
}
