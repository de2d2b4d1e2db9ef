//! The written analysis: what binds a call, and which change would gain how much.

use serde::{Deserialize, Serialize};
use swiglu_core::{Op, Path, Problem};

use super::class::{Ceiling, Ceilings, Class, Classified, Work, classify};
use crate::case::{DeviceKind, Heat};
use crate::format::{number, si, time};

/// What enqueuing one kernel costs a device at least, in microseconds: the gap between two dependent
/// kernels on current NVIDIA devices, call by call and as nodes of a graph.
const LAUNCH_US: f64 = 2.0;
const GRAPH_NODE_US: f64 = 1.0;
/// Less than this fraction of the time is not worth a sentence.
const WORTH: f64 = 0.01;
/// A time is not just noise below its floor if it is by more than this.
const ABOVE: f64 = 1.05;

/// What was measured, and how it is computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Subject {
    /// What is computed.
    pub problem: Problem,
    /// Where.
    pub device: DeviceKind,
    /// Whether pre-activations reach memory.
    pub path: Path,
    /// Kernels that a call starts; on a CPU the steps between which threads meet.
    pub launches: usize,
    /// Whether the calls are replayed as a graph.
    pub graph: bool,
    /// Whether the data comes from memory.
    pub heat: Heat,
}

/// A change and what it would gain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What to do, as a sentence without its full stop.
    pub action: String,
    /// Where the figure comes from.
    pub because: String,
    /// Microseconds that it saves at most.
    pub gain_us: f64,
    /// The time that remains.
    pub predicted_us: f64,
}

/// What binds a call and what to do about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Analysis {
    /// The time against the ceilings.
    pub classified: Classified,
    /// A paragraph for people.
    pub text: String,
    /// Changes, the one that gains most first; better tuning of what there is comes last.
    pub steps: Vec<Step>,
}

impl Subject {
    /// Bytes that have to move: those of the problem, and those of pre-activations that are written and
    /// read again. From and to memory, or the caches where data are hot.
    pub fn bytes(&self) -> f64 {
        self.problem.compulsory_bytes() + self.intermediate_bytes()
    }

    /// Gate and up, written by one kernel and read by the next.
    fn intermediate_bytes(&self) -> f64 {
        let p = &self.problem;
        match (p.op, self.path) {
            (Op::Activation, _) | (_, Path::Fused) => 0.0,
            (_, Path::Unfused) => 4.0 * (p.m * p.intermediate * p.dtype.size()) as f64,
        }
    }
}

/// Analyses a median time.
pub fn analyse(subject: &Subject, us: f64, ceilings: &Ceilings) -> Analysis {
    let memory = ceilings.traffic(subject.heat).map(|c| c.per_second);
    let compute = ceilings.arithmetic(&subject.problem).map(|c| c.per_second);
    let work = Work { us, bytes: subject.bytes(), flops: subject.problem.flops() };
    let mut classified = classify(work, memory, compute);
    classified.class = match classified.class {
        Some(Class::Memory) if subject.heat == Heat::Hot => Some(Class::Cache),
        // What is left may be traffic, if nobody knows how long that takes.
        Some(Class::Latency) if memory.is_none() => None,
        class => class,
    };
    let mut steps = steps(subject, us, &classified, memory);
    steps.sort_by(|a, b| b.gain_us.total_cmp(&a.gain_us));
    // What remains after every named change is for the kernel itself to gain: least specific, so last.
    steps.extend(tuning(us, &classified));
    Analysis { text: paragraph(subject, us, &classified, ceilings, &steps), classified, steps }
}

fn steps(subject: &Subject, us: f64, at: &Classified, memory: Option<f64>) -> Vec<Step> {
    let floor = at.floor_us().unwrap_or(0.0);
    let moved = |bytes: f64| memory.filter(|b| *b > 0.0).map_or(0.0, |b| bytes / b * 1e6);
    let between = subject.intermediate_bytes();
    let (cuda, graph) = (subject.device == DeviceKind::Cuda, subject.graph);
    // With what is known today.
    let fewest = if subject.problem.op == Op::Mlp { 2 } else { 1 };
    let spare = subject.launches.saturating_sub(fewest);
    let kernels = if spare == 1 { "kernel" } else { "kernels" };
    let each = if graph { GRAPH_NODE_US } else { LAUNCH_US };
    let saved = LAUNCH_US - GRAPH_NODE_US;
    let mut steps = Vec::new();
    let mut propose = |action: String, because: String, gain: f64| {
        // No change takes the time below what the ceilings allow.
        let gain_us = gain.min(us - floor.min(us));
        if gain_us > 0.0 && gain_us >= WORTH * us {
            steps.push(Step { action, because, gain_us, predicted_us: us - gain_us });
        }
    };
    propose(
        "keep gate and up in registers: the fused path".into(),
        format!("{} written and read again, at the measured bandwidth", si(between, "B")),
        moved(between),
    );
    if cuda {
        let action = format!("start {spare} {kernels} fewer: {fewest} do");
        propose(action, format!("about {each} µs each"), spare as f64 * each);
    }
    if cuda && !graph {
        let because = format!("about {saved} µs for each launch");
        let gain = subject.launches as f64 * saved;
        propose("replay the calls as a captured graph".into(), because, gain);
    }
    steps
}

/// What the kernel would gain if it reached the ceiling that binds it.
fn tuning(us: f64, at: &Classified) -> Option<Step> {
    let floor = at.floor_us()?;
    let (action, what) = match at.class? {
        Class::Memory | Class::Cache => (
            "close the gap to the measured bandwidth: more bytes in flight, wider and aligned accesses",
            "bytes",
        ),
        Class::Compute => (
            "close the gap to the measured rate of arithmetic: larger tiles, a deeper pipeline",
            "operations",
        ),
        // What hides latency is not one change, and its gain not a division.
        Class::Latency => return None,
    };
    let gain_us = us - floor;
    (gain_us >= WORTH * us).then(|| Step {
        action: action.into(),
        because: format!("the {what} alone take {}", time(floor)),
        gain_us,
        predicted_us: floor,
    })
}

fn paragraph(
    subject: &Subject,
    us: f64,
    at: &Classified,
    ceilings: &Ceilings,
    steps: &[Step],
) -> String {
    let mut out = format!("A call takes {}", time(us));
    let part = |floor: Option<f64>| floor.map(|f| 100.0 * f / us);
    let (memory, compute) = (part(at.memory_us), part(at.compute_us));
    let (traffic, arithmetic) =
        (ceilings.traffic(subject.heat), ceilings.arithmetic(&subject.problem));
    let amount = |x: f64, per: &str| match subject.problem.op {
        Op::Activation => format!("{} results{per}", si(x, "").trim_end()),
        _ => si(x, &format!("FLOP{per}")),
    };
    out += &match (at.class, memory, compute) {
        (Some(class @ (Class::Memory | Class::Cache)), Some(percent), _) => format!(
            " and is {class}: {} move at {} GB/s, {percent:.0} % of the {}.",
            si(subject.bytes(), "B"),
            number(at.gbps),
            ceiling_of(traffic),
        ),
        (Some(Class::Compute), _, Some(percent)) => format!(
            " and is compute-bound: {} at {}, {percent:.0} % of the {}.",
            amount(subject.problem.flops(), ""),
            amount(at.gflops * 1e9, "/s"),
            ceiling_of(arithmetic),
        ),
        (Some(Class::Latency), bytes, arithmetic) => format!(
            " and is latency-bound: the bytes explain {:.0} %{} of it; the rest is starting, \
             waiting, and units without work.",
            bytes.unwrap_or(0.0),
            arithmetic.map_or(String::new(), |c| format!(" and the arithmetic {c:.0} %")),
        ),
        (_, None, arithmetic) if subject.heat == Heat::Hot => format!(
            ". What bounds it is not known: {}how fast the caches deliver was not measured.",
            arithmetic.map_or(String::new(), |c| {
                format!("the arithmetic explains {c:.0} % of it, and ")
            }),
        ),
        _ => ". No ceiling of this machine is known, so nothing bounds it here.".into(),
    };
    if at.floor_us().is_some_and(|floor| floor > ABOVE * us) {
        out += " That is above the ceiling: a cache held part of the data, or the machine gave more \
                 then than when the ceiling was measured.";
    }
    if subject.heat == Heat::Hot {
        out += " Its data was in the caches.";
    }
    out += &match steps.first() {
        Some(Step { action, because, gain_us, predicted_us }) => format!(
            " Next: {action} ({because}); predicted gain {}, to {}.",
            time(*gain_us),
            time(*predicted_us)
        ),
        None => match at.class {
            Some(Class::Latency) => {
                " Next: give each call more work (more tokens, several layers in one graph); no \
                 single change is known whose gain can be stated."
                    .into()
            }
            Some(_) => " No change is known that would gain more than 1 %.".into(),
            None => String::new(),
        },
    };
    out
}

fn ceiling_of(ceiling: Option<&Ceiling>) -> String {
    match ceiling {
        Some(c) => format!("measured ceiling ({})", c.name),
        None => "ceiling".into(),
    }
}
