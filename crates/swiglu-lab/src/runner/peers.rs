//! The processes of a run: started when first needed, shared by the profiles of one peer, started
//! again after a crash.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use crate::case::DeviceKind;
use crate::peer::protocol::{PROTOCOL, Reply, Request, type_and_id};
use crate::peer::{Limits, PeerCommands, PeerProcess};
use crate::record::Status;

/// A profile that ended its peer this often is not tried in further cases.
const MAX_CRASHES: u32 = 2;

/// Why a peer cannot be used, as a result has it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Absent {
    pub(crate) status: Status,
    pub(crate) reason: String,
}

#[derive(Debug)]
pub(crate) struct Peers<'a> {
    commands: &'a PeerCommands,
    device: DeviceKind,
    limits: Limits,
    states: BTreeMap<String, Result<PeerProcess, Absent>>,
    crashes: BTreeMap<String, (u32, String)>,
    pub(crate) versions: BTreeMap<String, BTreeMap<String, String>>,
    /// A peer calls the accelerator so; of the CPU the machine's own facts are better.
    pub(crate) device_name: Option<String>,
    next_id: u64,
}

impl<'a> Peers<'a> {
    pub(crate) fn new(commands: &'a PeerCommands, device: DeviceKind, limits: Limits) -> Self {
        Self {
            commands,
            device,
            limits,
            states: BTreeMap::new(),
            crashes: BTreeMap::new(),
            versions: BTreeMap::new(),
            device_name: None,
            next_id: 1,
        }
    }

    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    pub(crate) fn get(&mut self, peer: &str) -> Result<&mut PeerProcess, Absent> {
        let state = self.states.remove(peer).unwrap_or_else(|| self.start(peer));
        let state = self.states.entry(peer.to_owned()).or_insert(state);
        state.as_mut().map_err(|absent| absent.clone())
    }

    fn start(&mut self, peer: &str) -> Result<PeerProcess, Absent> {
        let absent = |status| move |reason: String| Absent { status, reason };
        let (missing, failed) = (absent(Status::NotAvailable), absent(Status::Failed));
        let command = self.commands.command(peer).map_err(|e| missing(e.to_string()))?;
        let log = self.commands.logs.join(format!("{peer}.log"));
        let mut process = PeerProcess::start(peer, &command, &log, self.limits).map_err(|e| {
            let program = command.first().map_or("".into(), |p| p.to_string_lossy());
            let why = format!("peer `{peer}` cannot be started as {program}: {e}");
            if e.kind() == ErrorKind::NotFound { missing(why) } else { failed(why) }
        })?;
        let hello = Request::Hello { protocol: PROTOCOL, device: self.device };
        match process.ask(&hello) {
            Ok(Reply::Hello { versions, device, .. }) => {
                self.versions.insert(peer.to_owned(), versions);
                let device = device.filter(|_| self.device == DeviceKind::Cuda);
                self.device_name = self.device_name.take().or(device);
                Ok(process)
            }
            Ok(Reply::Unavailable { reason }) => Err(missing(reason)),
            Ok(other) => Err(failed(format!("answered with {}", type_and_id(&other).0))),
            Err(error) => Err(failed(error)),
        }
    }

    /// A profile ended its peer: the next use starts it again.
    pub(crate) fn crashed(&mut self, peer: &str, profile: &str, reason: &str) {
        self.states.remove(peer);
        let entry = self.crashes.entry(profile.to_owned()).or_default();
        *entry = (entry.0 + 1, reason.to_owned());
    }

    pub(crate) fn given_up(&self, profile: &str) -> Option<String> {
        let (count, reason) = self.crashes.get(profile)?;
        (*count >= MAX_CRASHES)
            .then(|| format!("not tried again after {count} crashes, the last: {reason}"))
    }
}
