//! Readiness: what a run would need, and whether it is there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::case::DeviceKind;
use crate::definition::Experiment;
use crate::error::{LabError, Result};
use crate::files::read_if_there;
use crate::machine::cpu_mhz;
use crate::peer::protocol::{Reply, Request};
use crate::peer::{Limits, PeerCommands};
use crate::place::Place;
use crate::record::{Locks, Measured, Store, movable};
use crate::runner::peers::Peers;

const INSTALL_FILE: &str = "install.toml";
/// Records are small; what peers compile and keep is not.
const DISK_BYTES: u64 = 1 << 30;
/// Clocks that differ by more than this between two looks are not quiet.
const QUIET: f64 = 0.05;
/// Processors that others may keep busy, beside what looking takes.
const BUSY: f64 = 0.25;
/// Looks at the clock, and the pause between them.
const LOOKS: (usize, Duration) = (3, Duration::from_millis(100));

/// One thing that a run needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What is needed: `device cpu`, `peer torch on cpu`, `disk`.
    pub what: String,
    /// What was found; none if nothing was.
    pub found: Option<String>,
    /// Whether that is enough.
    pub ok: bool,
    /// What to do where it is not.
    pub advice: Option<String>,
}

impl Check {
    /// Something that is there.
    pub fn found(what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { what: what.into(), found: Some(found.into()), ok: true, advice: None }
    }

    /// Something that is not, and what to do about it.
    pub fn missing(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what: what.into(), found: None, ok: false, advice: Some(advice.into()) }
    }

    /// What was found, which is enough or not.
    fn of(ok: bool, what: &str, found: String, advice: &str) -> Self {
        if ok { Self::found(what, found) } else { Self::missing(what, advice).instead(found) }
    }

    /// The same with what was found instead.
    pub fn instead(self, found: impl Into<String>) -> Self {
        Self { found: Some(found.into()), ..self }
    }
}

/// Asks the processes, the machine and the disk that runs would have.
#[derive(Debug)]
pub struct Readiness<'a> {
    commands: &'a PeerCommands,
    install: BTreeMap<String, String>,
    /// By what is needed: asked once.
    peers: BTreeMap<String, Check>,
    place: Vec<Check>,
}

impl<'a> Readiness<'a> {
    /// Looks at the disk, the locks and the clocks; peers are asked when an experiment has them.
    ///
    /// # Errors
    /// [`LabError::Definition`] if the file that says how peers are installed is broken; [`LabError::Io`].
    pub fn new(commands: &'a PeerCommands, store: &Store, locks: &Locks) -> Result<Self> {
        let path = commands.dir.join(INSTALL_FILE);
        let text = read_if_there(&path)?.unwrap_or_default();
        let install = Place::new(&text, &path).toml()?;
        let place = vec![disk(store.root()), nobody_measures(locks)?, quiet()];
        Ok(Self { commands, install, peers: BTreeMap::new(), place })
    }

    /// What a run of an experiment needs here: its device and peers, disk, quiet.
    pub fn of(&mut self, experiment: &Experiment, device: &Check) -> Vec<Check> {
        let names: BTreeSet<&str> = experiment.profiles.iter().map(|p| p.peer.as_str()).collect();
        let mut checks = vec![device.clone()];
        checks.extend(names.into_iter().map(|name| self.peer(experiment.device, name)));
        checks.extend(self.place.iter().cloned());
        checks
    }

    fn peer(&mut self, device: DeviceKind, name: &str) -> Check {
        let what = format!("peer {name} on {device}");
        if let Some(known) = self.peers.get(&what) {
            return known.clone();
        }
        let mut peers = Peers::new(self.commands, device, Limits::default());
        let check = match peers.get(name) {
            Err(absent) => {
                let advice = self.install.get(name).map(String::as_str);
                let advice = advice.unwrap_or("see README.md beside the peers");
                Check::missing(&what, advice).instead(absent.reason)
            }
            Ok(process) => {
                let clock = match process.ask(&Request::Clocks) {
                    Ok(Reply::Clocks { sm_mhz: Some(mhz), .. }) => format!(", {mhz:.0} MHz"),
                    _ => String::new(),
                };
                let versions = peers.versions.get(name).into_iter().flatten();
                let parts: Vec<_> = versions.map(|(part, v)| format!("{part} {v}")).collect();
                Check::found(&what, format!("{}{clock}", parts.join(", ")))
            }
        };
        self.peers.insert(what, check.clone());
        check
    }
}

/// Room for records and what peers compile, where the records will be.
fn disk(records: &Path) -> Check {
    let there = records.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("."));
    let (what, gib) = ("disk", |bytes: u64| bytes as f64 / f64::from(1 << 30));
    let advice = format!("make room for {:.0} GiB in {}", gib(DISK_BYTES), there.display());
    match rustix::fs::statvfs(there) {
        Ok(s) => {
            let free = s.f_bavail.saturating_mul(s.f_frsize);
            Check::of(free >= DISK_BYTES, what, format!("{:.1} GiB free", gib(free)), &advice)
        }
        Err(error) => Check::missing(what, advice).instead(error.to_string()),
    }
}

fn nobody_measures(locks: &Locks) -> Result<Check> {
    match locks.take(Measured::Machine, "lab ready") {
        Ok(_) => Ok(Check::found("nobody measures", "no other run here")),
        Err(LabError::Busy { holder }) => {
            Ok(Check::missing("nobody measures", "wait for that run to end").instead(holder))
        }
        Err(other) => Err(movable(other)),
    }
}

/// Whether the processor does nothing else at this moment, by its clocks and its load.
pub fn quiet() -> Check {
    let (mut low, mut high) = (f64::INFINITY, 0.0f64);
    let (begun, before) = (Instant::now(), spent());
    for _ in 0..LOOKS.0 {
        thread::sleep(LOOKS.1);
        let mhz = cpu_mhz();
        (low, high) = (low.min(mhz), high.max(mhz));
    }
    let busy = before.zip(spent()).map(|(was, is)| (is - was) / begun.elapsed().as_secs_f64());
    let beside = busy.map_or(String::new(), |busy| format!(", {busy:.2} processors busy"));
    let found = format!("{low:.0} to {high:.0} MHz{beside}");
    let quiet = (high - low) <= QUIET * high && busy.is_none_or(|busy| busy < BUSY);
    Check::of(quiet, "quiet clocks", found, "end what else runs here, or wait")
}

/// Seconds that all processors were at work so far; none where the system does not say.
fn spent() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    // In hundredths: user, nice, system, idle, waiting, interrupts, soft ones, taken by other guests.
    let spent = text.lines().next()?.split_whitespace().skip(1).take(8).enumerate();
    let at_work = spent.filter(|(at, _)| ![3, 4].contains(at));
    at_work.map(|(_, n)| n.parse::<f64>().ok()).sum::<Option<f64>>().map(|sum| sum / 100.0)
}
