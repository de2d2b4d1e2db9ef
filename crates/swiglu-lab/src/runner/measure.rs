//! One case: every profile is prepared and verified, then they take turns; several times over,
//! because a preparation decides something too, as where data lie.
//!
//! A peer that breaks loses what its other profiles had prepared. So the profile at fault is marked
//! and the case begins again without it: the others are still measured as neighbours in time.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use super::peers::{Absent, Peers};
use super::{Event, RunOptions, ways};
use crate::case::{Case, DeviceKind};
use crate::definition::{ProfileDef, Role};
use crate::machine::cpu_mhz;
use crate::peer::protocol::{Reply, Request, type_and_id};
use crate::record::{Clocks, ProtocolUsed, ResultEntry, Status, Summary};
use crate::stats;
use crate::verify::{self, Oracle};

/// A turn is shortened to about this many calls: more add nothing to a median but size.
const CALLS_PER_TURN: f64 = 32.0;
/// Turns of each preparation before those that count: under load an accelerator's clock falls to
/// what its power allows, and a run that begins at another clock than it ends compares nothing.
const LEAD_TURNS: usize = 2;
/// No turn gives more samples than this.
const MAX_SAMPLES: usize = 1 << 16;

pub(super) struct CaseRun<'a, 'p> {
    case: &'a Case,
    profiles: &'a [&'a ProfileDef],
    /// These are all ways of all profiles.
    ways: Vec<ProfileDef>,
    protocol: &'a ProtocolUsed,
    settle: Duration,
    peers: &'a mut Peers<'p>,
    watch: &'a mut dyn FnMut(Event<'_>),
    oracle: Oracle,
}

pub(super) struct Outcome {
    pub(super) results: Vec<ResultEntry>,
    pub(super) clocks: Option<[Clocks; 2]>,
    pub(super) broken: bool,
}

/// This is why a way was not measured.
struct Fault {
    profile: usize,
    /// What becomes of it; none where its peer is gone, and with it what its other profiles had.
    status: Option<Status>,
    reason: String,
}

impl Fault {
    /// What the peer says went wrong; any other reply was refused before.
    fn of(profile: usize, reply: Reply) -> Self {
        let (status, reason) = match reply {
            Reply::Unsupported { reason, .. } => (Status::Unsupported, reason),
            Reply::Failed { reason, .. } => (Status::Failed, reason),
            other => (Status::Failed, format!("answered with {}", type_and_id(&other).0)),
        };
        Self { profile, status: Some(status), reason }
    }
}

struct Contender {
    /// Index among the ways.
    profile: usize,
    id: u64,
    budget_us: u64,
    entry: ResultEntry,
    /// Microseconds per call, of this preparation.
    samples: Vec<f64>,
}

impl<'a, 'p> CaseRun<'a, 'p> {
    pub(super) fn new(
        case: &'a Case,
        profiles: &'a [&'a ProfileDef],
        options: &'a RunOptions,
        peers: &'a mut Peers<'p>,
        watch: &'a mut dyn FnMut(Event<'_>),
    ) -> Self {
        let (protocol, settle) = (&options.protocol, options.settle);
        let oracle = Oracle::new(case, protocol.seed);
        let ways = profiles.iter().flat_map(|profile| profile.ways()).collect();
        Self { case, profiles, ways, protocol, settle, peers, watch, oracle }
    }

    pub(super) fn run(&mut self) -> Outcome {
        let given_up = |ProfileDef { id, .. }: &ProfileDef| {
            let why = self.peers.given_up(id)?;
            Some(ResultEntry::without_times(self.case, id, Status::Failed, Some(why)))
        };
        let mut done: Vec<Option<ResultEntry>> = self.ways.iter().map(given_up).collect();
        let mut broken = false;
        let clocks = loop {
            match self.attempt(&mut done) {
                Ok(clocks) => break clocks,
                Err(Fault { profile, reason, .. }) => {
                    broken = true;
                    let at_fault = &self.ways[profile];
                    self.peers.crashed(&at_fault.peer, &at_fault.id, &reason);
                    done[profile] = Some(self.trouble(profile, Status::Failed, reason));
                }
            }
        };
        let results = ways::fastest(self.profiles, done.into_iter().flatten().collect());
        Outcome { results, clocks, broken }
    }

    /// What becomes of a profile that was given up, which whoever watches is told.
    fn trouble(&mut self, profile: usize, status: Status, reason: String) -> ResultEntry {
        let ProfileDef { id, best_of, .. } = &self.ways[profile];
        // A case has as many ways as it has.
        if best_of.is_none() || status != Status::Unsupported {
            (self.watch)(Event::Trouble { profile: id, reason: &reason });
        }
        ResultEntry::without_times(self.case, id, status, Some(reason))
    }

    /// Measures all ways that have no result yet, over all preparations.
    fn attempt(&mut self, done: &mut [Option<ResultEntry>]) -> Result<Option<[Clocks; 2]>, Fault> {
        // With the samples of all preparations.
        let mut measured: Vec<Option<(ResultEntry, Vec<f64>)>> = vec![None; done.len()];
        let mut clocks: Option<[Clocks; 2]> = None;
        let (turns, ways) = (self.protocol.turns, self.ways.len());
        let count = self.protocol.preparations.clamp(1, turns.max(1));
        for preparation in 0..count {
            let mut contenders = Vec::new();
            // Who comes first moves on, so that it is not always the same one that finds memory as the last
            // case left it.
            for profile in (0..ways).map(|i| (preparation + i) % ways) {
                if done[profile].is_some() {
                    continue;
                }
                match self.prepare(profile) {
                    Ok(contender) => contenders.push(contender),
                    Err(Fault { status: Some(status), reason, .. }) => {
                        done[profile] = Some(self.trouble(profile, status, reason));
                    }
                    Err(gone) => return Err(gone),
                }
            }
            // Turns count on through the preparations, so who begins a turn moves on by itself;
            // another order here would shift that, and some profile would never begin.
            contenders.sort_by_key(|contender| contender.profile);
            let turns = preparation * turns / count..(preparation + 1) * turns / count;
            let now = self.take_turns(&mut contenders, turns)?;
            clocks =
                clocks.zip(now).map(|([before, _], [_, after])| [before, after]).or(clocks).or(now);
            for Contender { profile, id, mut entry, samples, .. } in contenders {
                self.ask(profile, &Request::Release { id })?;
                let median = stats::median(&mut samples.clone());
                entry.preparations.extend(median.map(|us| stats::rounded(us, stats::TIME_DIGITS)));
                match &mut measured[profile] {
                    _ if entry.status == Status::Failed => done[profile] = Some(entry),
                    Some((before, all)) => {
                        before.extend(entry);
                        all.extend(samples);
                    }
                    none => *none = Some((entry, samples)),
                }
            }
        }
        for (slot, measured) in done.iter_mut().zip(measured) {
            if let (None, Some((entry, samples))) = (&slot, measured) {
                *slot = Some(ResultEntry { summary: Summary::of(&samples), ..entry });
            }
        }
        Ok(clocks)
    }

    fn ask(&mut self, profile: usize, request: &Request) -> Result<Reply, Fault> {
        let refused = |a: Absent| Fault { profile, status: Some(a.status), reason: a.reason };
        let process = self.peers.get(&self.ways[profile].peer).map_err(refused)?;
        process.ask(request).map_err(|reason| Fault { profile, status: None, reason })
    }

    fn prepare(&mut self, profile: usize) -> Result<Contender, Fault> {
        let definition = &self.ways[profile].clone();
        (self.watch)(Event::Profile { id: &definition.id, what: "preparing" });
        let id = self.peers.fresh_id();
        let request = Request::prepare(id, self.case, definition, self.protocol.seed);
        let mut entry = ResultEntry::without_times(self.case, &definition.id, Status::Ok, None);
        match self.ask(profile, &request)? {
            Reply::Prepared { bytes, flops, plan, variants, notes, .. } => {
                let usable = |x: &f64| x.is_finite() && *x >= 0.0;
                entry.bytes = bytes.filter(usable).unwrap_or(entry.bytes);
                entry.flops = flops.filter(usable).unwrap_or(entry.flops);
                (entry.plan, entry.notes) = (plan, notes);
                entry.variants = variants.into_iter().map(shortened).collect();
            }
            other => return Err(Fault::of(profile, other)),
        }
        if definition.role != Role::Ceiling {
            (self.watch)(Event::Profile { id: &definition.id, what: "verifying" });
            let request = Request::Verify { id, rows: self.oracle.rows.clone() };
            let reply = self.ask(profile, &request)?;
            let Reply::Verified { shape, dtype, rows, data, .. } = reply else {
                return Err(Fault::of(profile, reply));
            };
            let judged = self.oracle.judge(definition, (shape, dtype, &rows), &data);
            let judged = judged.and_then(|judgement| {
                entry.error = Some(verify::metrics(&judgement));
                if judgement.passed() { Ok(()) } else { Err(verify::complaint(&judgement, &rows)) }
            });
            if let Err(reason) = judged {
                (entry.status, entry.reason) = (Status::FailedVerification, Some(reason));
            }
        }
        (self.watch)(Event::Profile { id: &definition.id, what: "warming up" });
        let budget_us = self.protocol.budget_us;
        let mut warm = self.sample(profile, id, budget_us)?;
        let call = stats::median(&mut warm).unwrap_or(1.0);
        let budget_us = ((call * CALLS_PER_TURN).ceil() as u64).clamp(1, budget_us);
        Ok(Contender { profile, id, budget_us, entry, samples: Vec::new() })
    }

    fn sample(&mut self, profile: usize, id: u64, budget_us: u64) -> Result<Vec<f64>, Fault> {
        let reply = self.ask(profile, &Request::Sample { id, turns: 1, budget_us })?;
        let Reply::Samples { us, .. } = reply else { return Err(Fault::of(profile, reply)) };
        let bad = us.iter().find(|t| !t.is_finite() || **t <= 0.0);
        let reason = match bad {
            Some(time) => format!("a sample is {time} µs: expected a positive time"),
            None if us.is_empty() => "no samples: expected at least one".into(),
            None if us.len() > MAX_SAMPLES => {
                format!("{} samples in one turn: expected at most {MAX_SAMPLES}", us.len())
            }
            None => return Ok(us),
        };
        Err(Fault { profile, status: Some(Status::Failed), reason })
    }

    /// A turn that counts, after its pace.
    fn paced_sample(&mut self, contender: &Contender) -> Result<Vec<f64>, Fault> {
        let (profile, id) = (contender.profile, contender.id);
        let pace = self.protocol.pace;
        thread::sleep(Duration::from_millis(pace.rest_ms));
        let (start, warm) = (Instant::now(), Duration::from_millis(pace.warm_ms));
        // A peer ends a request of short calls before its time.
        while let Some(left) = warm.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            let budget_us = left.as_micros().clamp(1, u128::from(u32::MAX)) as u64;
            self.sample(profile, id, budget_us)?;
        }
        self.sample(profile, id, contender.budget_us)
    }

    /// A-B-A-B: in each turn every contender is measured once, in an order of that turn.
    fn take_turns(
        &mut self,
        contenders: &mut [Contender],
        turns: Range<usize>,
    ) -> Result<Option<[Clocks; 2]>, Fault> {
        if contenders.is_empty() {
            return Ok(None);
        }
        for turn in 0..LEAD_TURNS {
            self.turn(contenders, turn)?;
        }
        contenders.iter_mut().for_each(|contender| contender.samples.clear());
        let before = self.clocks(contenders)?;
        for turn in turns {
            self.turn(contenders, turn)?;
        }
        let after = self.clocks(contenders)?;
        Ok(Some([before, after]))
    }

    fn turn(&mut self, contenders: &mut [Contender], turn: usize) -> Result<(), Fault> {
        let count = contenders.len();
        let mut last_peer = None;
        for position in 0..count {
            let contender = &mut contenders[nth(turn, position, count)];
            if contender.entry.status == Status::Failed {
                continue;
            }
            let definition = &self.ways[contender.profile];
            (self.watch)(Event::Profile { id: &definition.id, what: "measuring" });
            if self.case.device == DeviceKind::Cpu
                && last_peer.replace(definition.peer.clone()).as_ref() != Some(&definition.peer)
            {
                thread::sleep(self.settle);
            }
            match self.paced_sample(contender) {
                Ok(us) => contender.samples.extend(us),
                Err(Fault { status: Some(_), reason, .. }) => {
                    contender.entry = self.trouble(contender.profile, Status::Failed, reason);
                }
                Err(gone) => return Err(gone),
            }
        }
        Ok(())
    }

    /// How fast the device runs right now: the accelerator is asked through the first contender
    /// that can tell.
    fn clocks(&mut self, contenders: &[Contender]) -> Result<Clocks, Fault> {
        let mut clocks = Clocks::default();
        if self.case.device == DeviceKind::Cuda {
            // At once: an idle device changes its clock.
            for contender in contenders {
                let reply = self.ask(contender.profile, &Request::Clocks)?;
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

/// A variant as records have it: `file (defines)` is long, and its hash tells it from others of the file.
fn shortened((name, hash): (String, String)) -> (String, String) {
    match name.split_once(" (") {
        Some((file, _)) => (format!("{file} {}", hash.get(..6).unwrap_or(&hash)), hash),
        None => (name, hash),
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
