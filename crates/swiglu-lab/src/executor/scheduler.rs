//! How a script becomes a job: what submits it, what is known of it, what ends it.

use std::fmt;

use super::job::Job;
use super::spec::ExecutorKind;
use super::transport::Script;
use crate::error::Result;

/// The program stopped early, and goes on when it is started again: EX_TEMPFAIL.
pub const STOPPED: u8 = 75;

const SUBMIT: Script = Script {
    what: "submitting the job",
    text: include_str!("sh/submit.sh"),
    advice: "once the reason is gone the same command goes on; `swiglu lab cancel` removes what was copied",
};
const POLL: Script = Script {
    what: "asking for the job",
    text: include_str!("sh/poll.sh"),
    advice: "`swiglu lab status` asks again",
};
const CANCEL: Script = Script {
    what: "cancelling the job",
    text: include_str!("sh/cancel.sh"),
    advice: "`swiglu lab status` says whether it has ended",
};

/// What becomes of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobState {
    /// It is in the queue, for this reason.
    Waiting(String),
    /// It runs on these nodes, as the scheduler names them; empty without one.
    Running(String),
    /// Its script has ended with this exit code.
    Ended(i32),
    /// Somebody ended it.
    Cancelled,
    /// It was ended, and not by itself; what is known of that.
    Lost(String),
    /// Nobody could be asked, and why.
    Unknown(String),
}

impl JobState {
    /// Whether it has come to an end.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Ended(_) | Self::Cancelled | Self::Lost(_))
    }

    /// Whether another start goes on where this one was ended.
    pub(super) fn is_cut_short(&self) -> bool {
        matches!(self, Self::Lost(_)) || *self == Self::Ended(STOPPED.into())
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting(reason) => write!(f, "waits ({reason})"),
            Self::Running(nodes) if nodes.is_empty() => f.write_str("runs"),
            Self::Running(nodes) => write!(f, "runs on {nodes}"),
            state if *state == Self::Ended(STOPPED.into()) => f.write_str("stopped early"),
            Self::Ended(code) => write!(f, "ended with exit code {code}"),
            Self::Cancelled => f.write_str("was cancelled"),
            Self::Lost(why) => f.write_str(why),
            Self::Unknown(why) => write!(f, "cannot be asked for: {why}"),
        }
    }
}

/// What is known of a job at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Polled {
    /// As the scheduler calls it.
    pub id: Option<String>,
    /// What becomes of it.
    pub state: JobState,
    /// The last lines of its log.
    pub log: Vec<String>,
}

impl Job {
    /// Slurm, or nobody but the system.
    fn scheduler(&self) -> &'static str {
        if self.spec.kind == ExecutorKind::Slurm { "slurm" } else { "process" }
    }

    /// Submits a script; what the job is called from now on.
    pub(super) fn submit_script(&self, script: &str) -> Result<String> {
        let (dir, options) = (self.dir(), self.spec.sbatch(self.device));
        let mut args = vec![self.scheduler(), &dir, &self.far_name];
        args.extend(options.iter().map(String::as_str));
        let id = self.spec.transport().send(SUBMIT, &args, script.as_bytes())?;
        Ok(id.trim().to_owned())
    }

    pub(super) fn ask(&self) -> Result<Polled> {
        let args = [self.scheduler(), &self.dir(), &self.far_name];
        let said = self.spec.transport().run(POLL, &args)?;
        Ok(Polled::read(self.scheduler(), &said))
    }

    pub(super) fn end(&self, id: &str) -> Result<()> {
        self.spec.transport().run(CANCEL, &[self.scheduler(), id]).map(drop)
    }
}

impl Polled {
    fn read(scheduler: &str, said: &str) -> Self {
        let (facts, log) = said.split_once("@log\n").unwrap_or((said, ""));
        let fact = |name: &str| {
            let found = facts.lines().find_map(|line| line.strip_prefix(name));
            found.map(str::trim).filter(|value| !value.is_empty())
        };
        let exit = fact("@exit").and_then(|code| code.parse().ok());
        let state = match (scheduler, exit) {
            ("slurm", _) => slurm(fact("@queue"), fact("@job"), exit),
            _ if facts.lines().any(|line| line == "@alive") => JobState::Running(String::new()),
            (_, Some(code)) => JobState::Ended(code),
            (_, None) => JobState::Lost("was killed before it could say how it ended".into()),
        };
        let log = log.lines().map(str::trim_end).filter(|line| !line.is_empty());
        Self { id: fact("@id").map(str::to_owned), state, log: log.map(str::to_owned).collect() }
    }
}

/// What Slurm says: `squeue` of a job in the queue, `scontrol` of one that left it some minutes ago, the
/// file with its exit code ever after.
fn slurm(queue: Option<&str>, job: Option<&str>, exit: Option<i32>) -> JobState {
    // It complains of a job that it does not know any more; any other complaint is its own trouble.
    let unknown = |said: &&str| said.to_ascii_lowercase().contains("invalid job id");
    if let Some(said) = queue.filter(|said| !unknown(said)) {
        return match said.split('|').collect::<Vec<_>>()[..] {
            ["RUNNING" | "COMPLETING" | "STAGE_OUT" | "SIGNALING", nodes, _] => {
                JobState::Running(nodes.to_owned())
            }
            [state, _, reason] => {
                JobState::Waiting(format!("{}, {reason}", state.to_ascii_lowercase()))
            }
            _ => JobState::Unknown(said.to_owned()),
        };
    }
    let field = |name: &str| job.and_then(|job| value(job, name));
    match (field("JobState"), exit) {
        (Some("CANCELLED"), _) => JobState::Cancelled,
        (_, Some(code)) => JobState::Ended(code),
        // What a signal ended has no code, and did not end by itself.
        (Some("COMPLETED" | "FAILED"), None) => {
            let code = field("ExitCode").and_then(|code| code.split_once(':'));
            match code.map(|(code, signal)| (code.parse(), signal)) {
                Some((Ok(code), "0")) => JobState::Ended(code),
                Some((_, signal)) => JobState::Lost(format!("was killed by signal {signal}")),
                None => JobState::Unknown(job.unwrap_or_default().to_owned()),
            }
        }
        (Some(state), None) => {
            JobState::Lost(format!("was ended by Slurm ({})", state.to_ascii_lowercase()))
        }
        (None, None) => match job.filter(|said| !unknown(said)) {
            Some(said) => JobState::Unknown(said.to_owned()),
            None => JobState::Lost("is not known to Slurm, and left no exit code".into()),
        },
    }
}

/// A value in what `scontrol show -o` prints.
pub(super) fn value<'a>(shown: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = shown.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_slurm_says_is_understood() {
        let of = |said: &str| Polled::read("slurm", said);
        let running = of(
            "@queue RUNNING|n[1-2]|None\n@job JobState=RUNNING\n@id 7\n@exit 75\n@log\n1\n\n2\n",
        );
        assert_eq!(running.state, JobState::Running("n[1-2]".into()));
        assert_eq!((running.id.as_deref(), running.log.len()), (Some("7"), 2));
        let gone = "slurm_load_jobs error: Invalid job id specified";
        let down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)";
        let failed = "JobId=7 JobName=a UserId=root(0) JobState=FAILED Requeue=1 ExitCode=7:0";
        let lost = |state: &str| JobState::Lost(format!("was ended by Slurm ({state})"));
        for (queue, job, exit, expected) in [
            ("PENDING||Resources", "", "", JobState::Waiting("pending, Resources".into())),
            ("", failed, "", JobState::Ended(7)),
            // Its own word counts more, and lasts longer.
            ("", failed, "2", JobState::Ended(2)),
            (gone, gone, "75", JobState::Ended(75)),
            (
                "",
                "JobState=FAILED ExitCode=0:9",
                "",
                JobState::Lost("was killed by signal 9".into()),
            ),
            ("", "JobState=COMPLETED ExitCode=0:0", "", JobState::Ended(0)),
            ("", "JobState=CANCELLED ExitCode=0:15", "75", JobState::Cancelled),
            ("", "JobState=NODE_FAIL ExitCode=0:0", "", lost("node_fail")),
            (gone, "JobState=PREEMPTED", "", lost("preempted")),
            ("", "JobState=TIMEOUT", "", lost("timeout")),
            (gone, gone, "", JobState::Lost("is not known to Slurm, and left no exit code".into())),
            // A controller that does not answer says nothing of the job.
            (down, down, "75", JobState::Unknown(down.into())),
            ("", down, "", JobState::Unknown(down.into())),
        ] {
            let exit = if exit.is_empty() { String::new() } else { format!("@exit {exit}\n") };
            let said = format!("@queue {queue}\n@job {job}\n@id 7\n{exit}@log\n");
            assert_eq!(of(&said).state, expected, "{said}");
        }
    }

    #[test]
    fn a_process_runs_has_ended_or_was_killed() {
        let state = |said: &str| Polled::read("process", said).state;
        assert_eq!(state("@alive\n@id 9\n@log\n"), JobState::Running(String::new()));
        assert_eq!(state("@id 9\n@exit 1\n@log\n@alive\n"), JobState::Ended(1));
        assert!(state("@id 9\n@log\n").is_cut_short());
    }
}
