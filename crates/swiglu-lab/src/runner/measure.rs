//! One case: every profile is prepared and verified, then they take turns; several times over,
//! because a preparation decides something too, as where data lie.
//!
//! A peer that breaks loses what its other profiles had prepared. So the profile at fault is marked
//! and the case begins again without it: the others are still measured as neighbours in time.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use super::peers::{Absent, Peers};
use super::{Event, RunOptions};
use crate::case::{Case, DeviceKind};
use crate::definition::ProfileDef;
use crate::error::Result;
use crate::machine::cpu_mhz;
use crate::peer::PeerError;
use crate::peer::protocol::{ProfileRef, Reply, Request};
use crate::record::{Clocks, ResultEntry, Status, Summary};
use crate::stats;
use crate::verify::{self, Oracle};

/// A turn is shortened to about this many calls: more add nothing to a median but size.
const CALLS_PER_TURN: f64 = 32.0;
/// Turns of each preparation before those that count: under load an accelerator's clock falls to
/// what its power allows, and a run that begins at another clock than it ends compares nothing.
const LEAD_TURNS: usize = 2;
/// No turn gives more samples than this.
const MAX_SAMPLES: usize = 1 << 16;

/// One case of a run.
pub(super) struct CaseRun<'a> {
    pub(super) case: &'a Case,
    pub(super) profiles: &'a [&'a ProfileDef],
    pub(super) options: &'a RunOptions,
}

/// What came of a case.
pub(super) struct Outcome {
    pub(super) results: Vec<ResultEntry>,
    pub(super) clocks: Option<[Clocks; 2]>,
    /// Whether a peer broke.
    pub(super) broken: bool,
}

/// A profile that broke its peer.
struct Broken {
    profile: usize,
    reason: String,
}

/// A prepared profile.
struct Contender {
    /// Index among the profiles.
    profile: usize,
    id: u64,
    budget_us: u64,
    entry: ResultEntry,
    /// Microseconds per call, of this preparation.
    samples: Vec<f64>,
}

/// What is known of a profile so far.
struct Measured {
    entry: ResultEntry,
    /// Of all preparations.
    samples: Vec<f64>,
}

type Watch<'w> = dyn FnMut(Event<'_>) + 'w;

impl CaseRun<'_> {
    pub(super) fn run(&self, peers: &mut Peers<'_>, watch: &mut Watch<'_>) -> Result<Outcome> {
        let mut oracle = Oracle::new(self.case, self.options.protocol.seed);
        let mut done: Vec<Option<ResultEntry>> = vec![None; self.profiles.len()];
        for (slot, profile) in done.iter_mut().zip(self.profiles) {
            *slot = peers.given_up(&profile.id).map(|why| self.failed(profile, why));
        }
        let mut broken = false;
        let clocks = loop {
            match self.attempt(peers, &mut oracle, &mut done, watch) {
                Ok(clocks) => break clocks,
                Err(Broken { profile, reason }) => {
                    broken = true;
                    let at_fault = self.profiles[profile];
                    watch(Event::Trouble { profile: &at_fault.id, reason: &reason });
                    peers.crashed(&at_fault.peer, &at_fault.id, &reason);
                    done[profile] = Some(self.failed(at_fault, reason));
                }
            }
        };
        Ok(Outcome { results: done.into_iter().flatten().collect(), clocks, broken })
    }

    fn failed(&self, profile: &ProfileDef, reason: String) -> ResultEntry {
        ResultEntry::without_times(self.case, &profile.id, Status::Failed, Some(reason))
    }

    /// Measures all profiles that have no result yet, over all preparations.
    fn attempt(
        &self,
        peers: &mut Peers<'_>,
        oracle: &mut Oracle,
        done: &mut [Option<ResultEntry>],
        watch: &mut Watch<'_>,
    ) -> Result<Option<[Clocks; 2]>, Broken> {
        let mut measured: Vec<Option<Measured>> = done.iter().map(|_| None).collect();
        let mut clocks: Option<[Clocks; 2]> = None;
        for (preparation, turns) in self.preparations().enumerate() {
            let mut contenders = Vec::new();
            for profile in self.order(preparation) {
                if done[profile].is_some() {
                    continue;
                }
                match self.prepare(peers, profile, oracle, watch)? {
                    Ok(contender) => contenders.push(contender),
                    Err(entry) => {
                        if let Some(reason) = &entry.reason {
                            watch(Event::Trouble { profile: &entry.profile, reason });
                        }
                        done[profile] = Some(*entry);
                    }
                }
            }
            // Turns count on through the preparations, so who begins a turn moves on by itself;
            // another order here would shift that, and some profile would never begin.
            contenders.sort_by_key(|contender| contender.profile);
            let now = self.take_turns(peers, &mut contenders, turns.clone(), watch)?;
            clocks =
                clocks.zip(now).map(|([before, _], [_, after])| [before, after]).or(clocks).or(now);
            for contender in contenders {
                let release = Request::Release { id: contender.id };
                self.ask(peers, contender.profile, &release)?;
                let profile = contender.profile;
                match joined(measured[profile].take(), contender) {
                    Measured { entry, .. } if entry.status == Status::Failed => {
                        done[profile] = Some(entry);
                    }
                    joined => measured[profile] = Some(joined),
                }
            }
        }
        for (slot, measured) in done.iter_mut().zip(measured) {
            if let (None, Some(Measured { entry, samples })) = (&slot, measured) {
                *slot = Some(ResultEntry { summary: Summary::of(&samples), ..entry });
            }
        }
        Ok(clocks)
    }

    /// The turns of each preparation: about as many of each.
    fn preparations(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let turns = self.options.protocol.turns;
        let count = self.options.protocol.preparations.clamp(1, turns.max(1));
        (0..count).map(move |i| i * turns / count..(i + 1) * turns / count)
    }

    /// All profiles, as they are prepared; which comes first moves on, so that it is not always the
    /// same one that finds memory as the last case left it.
    fn order(&self, preparation: usize) -> impl Iterator<Item = usize> + use<> {
        let count = self.profiles.len();
        (0..count).map(move |i| (preparation + i) % count)
    }

    /// Asks the peer of a profile. The inner error is of a peer that is not there.
    fn ask_if_there(
        &self,
        peers: &mut Peers<'_>,
        profile: usize,
        request: &Request,
    ) -> Result<Result<Reply, Absent>, Broken> {
        let process = match peers.get(&self.profiles[profile].peer) {
            Ok(process) => process,
            Err(absent) => return Ok(Err(absent)),
        };
        let broken = |e: PeerError| Broken { profile, reason: e.to_string() };
        process.ask(request).map(Ok).map_err(broken)
    }

    fn ask(
        &self,
        peers: &mut Peers<'_>,
        profile: usize,
        request: &Request,
    ) -> Result<Reply, Broken> {
        let absent = |a: Absent| Broken { profile, reason: a.reason };
        self.ask_if_there(peers, profile, request)?.map_err(absent)
    }

    /// Prepares, verifies and warms up one profile; or says what became of it.
    fn prepare(
        &self,
        peers: &mut Peers<'_>,
        profile: usize,
        oracle: &mut Oracle,
        watch: &mut Watch<'_>,
    ) -> Result<Result<Contender, Box<ResultEntry>>, Broken> {
        let definition = self.profiles[profile];
        let refused = |status, reason| {
            let id = &definition.id;
            Ok(Err(Box::new(ResultEntry::without_times(self.case, id, status, Some(reason)))))
        };
        watch(Event::Profile { id: &definition.id, what: "preparing" });
        let id = peers.fresh_id();
        let request = Request::Prepare {
            id,
            case: Box::new(self.case.clone()),
            profile: ProfileRef { id: definition.id.clone(), options: definition.options.clone() },
            seed: self.options.protocol.seed,
            rotations: "auto".into(),
        };
        let mut entry = ResultEntry::without_times(self.case, &definition.id, Status::Ok, None);
        match self.ask_if_there(peers, profile, &request)? {
            Ok(Reply::Prepared { bytes, flops, plan, variants, notes, .. }) => {
                let usable = |x: &f64| x.is_finite() && *x >= 0.0;
                entry.bytes = bytes.filter(usable).unwrap_or(entry.bytes);
                entry.flops = flops.filter(usable).unwrap_or(entry.flops);
                (entry.plan, entry.variants, entry.notes) = (plan, variants, notes);
            }
            Ok(Reply::Unsupported { reason, .. }) => return refused(Status::Unsupported, reason),
            Ok(other) => return refused(Status::Failed, failure(other)),
            Err(Absent { status, reason }) => return refused(status, reason),
        }
        if definition.role.is_verified() {
            watch(Event::Profile { id: &definition.id, what: "verifying" });
            let request = Request::Verify { id, rows: oracle.rows().to_vec() };
            match self.ask(peers, profile, &request)? {
                Reply::Verified { shape, dtype, rows, data, .. } => {
                    let told = (shape, dtype, rows.as_slice());
                    match oracle.judge(definition, told, &data) {
                        Ok(judgement) => {
                            entry.error = Some(verify::metrics(&judgement));
                            if !judgement.passed() {
                                entry.status = Status::FailedVerification;
                                entry.reason = Some(verify::complaint(&judgement, &rows));
                            }
                        }
                        Err(reason) => {
                            entry.status = Status::FailedVerification;
                            entry.reason = Some(reason);
                        }
                    }
                }
                other => return refused(Status::Failed, failure(other)),
            }
        }
        watch(Event::Profile { id: &definition.id, what: "warming up" });
        let budget_us = self.options.protocol.budget_us;
        match self.sample(peers, profile, id, budget_us)? {
            Ok(mut warm) => {
                let call = stats::median(&mut warm).unwrap_or(1.0);
                let enough = (call * CALLS_PER_TURN).ceil() as u64;
                let budget_us = enough.clamp(1, budget_us);
                Ok(Ok(Contender { profile, id, budget_us, entry, samples: Vec::new() }))
            }
            Err(reason) => refused(Status::Failed, reason),
        }
    }

    /// One turn of samples; the inner error is what the peer says went wrong.
    fn sample(
        &self,
        peers: &mut Peers<'_>,
        profile: usize,
        id: u64,
        budget_us: u64,
    ) -> Result<Result<Vec<f64>, String>, Broken> {
        match self.ask(peers, profile, &Request::Sample { id, turns: 1, budget_us })? {
            Reply::Samples { us, .. } => {
                let bad = us.iter().find(|t| !t.is_finite() || **t <= 0.0);
                let reason = match bad {
                    Some(time) => format!("a sample is {time} µs: expected a positive time"),
                    None if us.is_empty() => "no samples: expected at least one".into(),
                    None if us.len() > MAX_SAMPLES => {
                        format!("{} samples in one turn: expected at most {MAX_SAMPLES}", us.len())
                    }
                    None => return Ok(Ok(us)),
                };
                Ok(Err(reason))
            }
            other => Ok(Err(failure(other))),
        }
    }

    /// What comes before a turn that counts; the inner error is what the peer says went wrong.
    fn pace(
        &self,
        peers: &mut Peers<'_>,
        profile: usize,
        id: u64,
    ) -> Result<Result<(), String>, Broken> {
        let pace = self.options.protocol.pace;
        thread::sleep(Duration::from_millis(pace.rest_ms));
        let (start, warm) = (Instant::now(), Duration::from_millis(pace.warm_ms));
        // A peer ends a request of short calls before its time.
        while let Some(left) = warm.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            let budget_us = left.as_micros().clamp(1, u128::from(u32::MAX)) as u64;
            if let Err(reason) = self.sample(peers, profile, id, budget_us)? {
                return Ok(Err(reason));
            }
        }
        Ok(Ok(()))
    }

    /// A-B-A-B: in each turn every contender is measured once, in an order of that turn.
    fn take_turns(
        &self,
        peers: &mut Peers<'_>,
        contenders: &mut [Contender],
        turns: Range<usize>,
        watch: &mut Watch<'_>,
    ) -> Result<Option<[Clocks; 2]>, Broken> {
        if contenders.is_empty() {
            return Ok(None);
        }
        for turn in 0..LEAD_TURNS {
            self.turn(peers, contenders, turn, watch)?;
        }
        contenders.iter_mut().for_each(|contender| contender.samples.clear());
        let before = self.clocks(peers, contenders)?;
        for turn in turns {
            self.turn(peers, contenders, turn, watch)?;
        }
        let after = self.clocks(peers, contenders)?;
        Ok(Some([before, after]))
    }

    fn turn(
        &self,
        peers: &mut Peers<'_>,
        contenders: &mut [Contender],
        turn: usize,
        watch: &mut Watch<'_>,
    ) -> Result<(), Broken> {
        let count = contenders.len();
        let mut last_peer = None;
        for position in 0..count {
            let contender = &mut contenders[nth(turn, position, count)];
            if contender.entry.status == Status::Failed {
                continue;
            }
            let definition = self.profiles[contender.profile];
            watch(Event::Profile { id: &definition.id, what: "measuring" });
            if self.case.device == DeviceKind::Cpu
                && last_peer.replace(&definition.peer) != Some(&definition.peer)
            {
                thread::sleep(self.options.settle);
            }
            let (profile, id) = (contender.profile, contender.id);
            let paced = self.pace(peers, profile, id)?;
            let sampled = match paced {
                Ok(()) => self.sample(peers, profile, id, contender.budget_us)?,
                Err(reason) => Err(reason),
            };
            match sampled {
                Ok(us) => contender.samples.extend(us),
                Err(reason) => {
                    watch(Event::Trouble { profile: &definition.id, reason: &reason });
                    contender.entry = self.failed(definition, reason);
                }
            }
        }
        Ok(())
    }

    /// How fast the device runs right now: the accelerator is asked through the first contender
    /// that can tell.
    fn clocks(&self, peers: &mut Peers<'_>, contenders: &[Contender]) -> Result<Clocks, Broken> {
        let mut clocks = Clocks::default();
        if self.case.device == DeviceKind::Cuda {
            // At once: an idle device changes its clock.
            for contender in contenders {
                let reply = self.ask(peers, contender.profile, &Request::Clocks)?;
                if let Reply::Clocks { sm_mhz: Some(mhz), power_w } = reply {
                    (clocks.sm_mhz, clocks.power_w) = (Some(mhz), power_w);
                    break;
                }
            }
        }
        clocks.cpu_mhz = Some(cpu_mhz().round());
        Ok(clocks)
    }
}

/// Who is measured at a place of a turn: one of `count`. The places of a turn zigzag away from the one who
/// begins, who moves on from turn to turn, and every other round of turns goes backwards: over 2 · `count` turns
/// each of them is measured behind every other equally often (E. J. Williams, Aust. J. Sci. Res. A 2, 149, 1949).
/// With a fixed order each would always inherit clocks and caches from the same one.
fn nth(turn: usize, position: usize, count: usize) -> usize {
    let position = if (turn / count).is_multiple_of(2) { position } else { count - 1 - position };
    let away = position.div_ceil(2);
    let offset = if position % 2 == 1 { away } else { count - away };
    (turn + offset) % count
}

/// What is known of a profile with one preparation more.
fn joined(before: Option<Measured>, mut now: Contender) -> Measured {
    let median = stats::median(&mut now.samples.clone());
    now.entry.preparations.extend(median.map(|us| stats::rounded(us, stats::TIME_DIGITS)));
    let Some(mut all) = before.filter(|_| now.entry.status != Status::Failed) else {
        return Measured { entry: now.entry, samples: now.samples };
    };
    all.entry.extend(now.entry);
    all.samples.extend(now.samples);
    all
}

/// What the peer says went wrong; any other reply was refused before.
fn failure(reply: Reply) -> String {
    match reply {
        Reply::Failed { reason, .. } => reason,
        other => format!("answered with {}", other.type_and_id().0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_is_measured_behind_everybody_else_equally_often() {
        for count in 1..10 {
            let mut behind = vec![vec![0; count]; count];
            let mut begins = vec![0; count];
            for turn in 0..2 * count {
                let order: Vec<_> = (0..count).map(|position| nth(turn, position, count)).collect();
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>());
                begins[order[0]] += 1;
                order.windows(2).for_each(|pair| behind[pair[1]][pair[0]] += 1);
            }
            assert_eq!(begins, vec![2; count]);
            for (i, row) in behind.into_iter().enumerate() {
                let expected: Vec<_> = (0..count).map(|j| if i == j { 0 } else { 2 }).collect();
                assert_eq!(row, expected, "behind {i} of {count}");
            }
        }
    }
}
