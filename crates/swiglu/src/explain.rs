//! Why a problem is computed the way it is, and what it costs at least.

use std::fmt;

use serde::{Deserialize, Serialize};
use swiglu_core::{Op, Pass, Path, Plan, Problem, SavePolicy};
use swiglu_cpu::{Cpu, Isa};

use crate::device::Device;

/// One way of computing a problem, and why it was or was not chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Candidate {
    /// What it computes of a backward pass, for example `dx`; [`None`] where it computes all of the problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// The kernel or path.
    pub name: String,
    /// Whether the plan uses it.
    pub chosen: bool,
    /// Microseconds that a cost model expects, where there is one.
    pub predicted_us: Option<f64>,
    /// Microseconds that were measured on this kind of device, where there is a record.
    pub measured_us: Option<f64>,
    /// Why, or why not.
    pub reason: String,
}

/// What a policy keeps between the passes of a training step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Keeping {
    /// The policy.
    pub policy: SavePolicy,
    /// Bytes of gate and up that it keeps of a token, beside x.
    pub bytes_per_token: usize,
    /// The kernel that computes again what is not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again_by: Option<String>,
    /// Bytes that the backward pass takes meanwhile on a CUDA device, where all gradients are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_bytes: Option<usize>,
}

/// A plan with what it was chosen from and the floor under its time: data, like the plan itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// What is computed.
    pub problem: Problem,
    /// How.
    pub plan: Plan,
    /// Every kernel and path that was considered; of a backward pass on a CUDA device, for each of its steps.
    pub candidates: Vec<Candidate>,
    /// Of a backward pass what each policy keeps for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keeps: Vec<Keeping>,
    /// What was found of measurements, and why a record of them is not used; whether the rates of a CUDA device were measured;
    /// that kernels were compiled without optimisation, and what to do.
    pub notes: Vec<String>,
    /// Floating-point operations, a multiply-add counted as two.
    pub flops: f64,
    /// Bytes that must move: weights and inputs read once, the output written once.
    pub compulsory_bytes: f64,
    /// Operations per byte. Below a machine's ratio of the two rates, memory is the limit.
    pub arithmetic_intensity: f64,
}

impl Explanation {
    /// The explanation of a plan that `device` made, for the path that was asked for.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "the CPU has one choice"))]
    pub fn new(device: &Device, plan: Plan, path: Option<Path>) -> Self {
        let problem = plan.problem;
        let (flops, compulsory_bytes) = (problem.flops(), problem.compulsory_bytes());
        let candidates = match device {
            Device::Cpu(cpu) => {
                let mut candidates = facades(cpu, &plan);
                candidates.extend(paths(&plan));
                candidates.extend(weights(&problem));
                candidates
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let ways = cuda.candidates(&problem, path).into_iter().map(Candidate::from);
                ways.chain(weights(&problem)).collect()
            }
        };
        let notes = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.tuning_notes().to_vec(),
            Device::Cpu(_) => swiglu_cpu::UNOPTIMISED.map(str::to_owned).into_iter().collect(),
        };
        let keeps = match problem.pass {
            Pass::Backward => {
                SavePolicy::ALL.map(|policy| Keeping::new(device, &plan, path, policy)).into()
            }
            _ => Vec::new(),
        };
        Self {
            problem,
            candidates,
            keeps,
            notes,
            flops,
            compulsory_bytes,
            arithmetic_intensity: if compulsory_bytes > 0.0 {
                flops / compulsory_bytes
            } else {
                0.0
            },
            plan,
        }
    }
}

impl Keeping {
    #[cfg_attr(
        not(feature = "cuda"),
        allow(unused_variables, reason = "only a CUDA device says it")
    )]
    fn new(device: &Device, plan: &Plan, path: Option<Path>, policy: SavePolicy) -> Self {
        let problem = &plan.problem;
        let bytes_per_token = policy.kept_bytes(1, problem.intermediate, problem.dtype);
        let (again_by, scratch_bytes) = match device {
            Device::Cpu(_) => ((policy != SavePolicy::Save).then(|| plan.kernel.clone()), None),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => (
                cuda.computed_again_by(problem, policy, path),
                Some(cuda.backward_scratch_bytes(problem, policy, path)),
            ),
        };
        Self { policy, bytes_per_token, again_by, scratch_bytes }
    }
}

impl fmt::Display for Keeping {
    /// `save-gate  28.67 kB a token, up is computed again by cublaslt; 1.28 GB meanwhile`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let again = match self.policy {
            SavePolicy::Save => "nothing is",
            SavePolicy::SaveGate => "up is",
            _ => "gate and up are",
        };
        let kept = Bytes(self.bytes_per_token as f64);
        write!(f, "{:<9}  {kept} a token, {again} computed again", self.policy)?;
        if let Some(kernel) = &self.again_by {
            write!(f, " by {kernel}")?;
        }
        match self.scratch_bytes {
            Some(bytes) => write!(f, "; {} meanwhile", Bytes(bytes as f64)),
            None => Ok(()),
        }
    }
}

impl Explanation {
    /// Adds that quantised weights were decoded, and why.
    #[must_use]
    pub fn with_decoded_weights(mut self, why: &crate::Error) -> Self {
        let decoded = format!("weights as {}", self.problem.dtype);
        self.candidates.extend([
            of_weights("weights quantised".into(), false, why.to_string()),
            of_weights(decoded, true, "decoded once, when the layer was packed".into()),
        ]);
        self
    }
}

#[cfg(feature = "cuda")]
impl From<swiglu_cuda::Candidate> for Candidate {
    fn from(candidate: swiglu_cuda::Candidate) -> Self {
        let swiglu_cuda::Candidate {
            step, name, chosen, predicted_us, measured_us, reason, ..
        } = candidate;
        Self { step, name, chosen, predicted_us, measured_us, reason }
    }
}

/// The instruction sets: those the machine lacks, those passed over, and the one in use.
fn facades(cpu: &Cpu, plan: &Plan) -> Vec<Candidate> {
    let reason = |isa: Isa| {
        if isa == cpu.isa() {
            let detected = isa == Isa::detect();
            if detected { "the widest this processor has" } else { "asked for" }.to_owned()
        } else if !isa.is_available() {
            "this processor lacks it".to_owned()
        } else if isa < cpu.isa() {
            format!("narrower than {}", cpu.isa())
        } else {
            format!("{} was asked for", cpu.isa())
        }
    };
    Isa::ALL
        .into_iter()
        .rev()
        .map(|isa| Candidate {
            step: None,
            name: format!("{}/{isa}", plan.backend),
            chosen: isa == cpu.isa(),
            predicted_us: None,
            measured_us: None,
            reason: reason(isa),
        })
        .collect()
}

/// Fused or not: the difference is what the intermediates cost on their way through memory.
fn paths(plan: &Plan) -> Vec<Candidate> {
    let problem = &plan.problem;
    if problem.op == Op::Activation {
        return Vec::new();
    }
    // What is stored in any case is only read again; what is not is written first.
    let (what, passes) = match problem.pass {
        Pass::Saving => ("gate and up would be read again from where they are kept", 2.0),
        Pass::Backward => ("dh would pass through memory", 2.0),
        _ => ("gate and up would pass through memory", 4.0),
    };
    let elements = passes * problem.m as f64 * problem.intermediate as f64;
    let traffic = Bytes(elements * problem.dtype.size() as f64);
    let otherwise = [
        (Path::Fused, "gate and up stay in registers".to_owned()),
        (Path::Unfused, format!("{what}: {traffic} more")),
    ];
    let candidate = |(path, reason): (Path, String)| {
        let chosen = plan.path == path;
        let reason = if chosen && !plan.reason.is_empty() { plan.reason.clone() } else { reason };
        let name = path.to_string();
        Candidate { step: None, name, chosen, predicted_us: None, measured_us: None, reason }
    };
    otherwise.map(candidate).into()
}

/// A column of times: what kind of time, and it where there is one.
struct Time(&'static str, Option<f64>);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Time(kind, Some(us)) => write!(f, "{kind:<8} {us:>8.1} µs  "),
            Time(..) => write!(f, "{:22}", ""),
        }
    }
}

/// Quantised weights as they are or decoded: the difference is the bytes that a call reads.
fn weights(problem: &Problem) -> Vec<Candidate> {
    let Some(types) = problem.quantized else { return Vec::new() };
    let bytes = problem.weight_bytes();
    let decoded = problem.with_quantized(None).weight_bytes();
    let stored = format!("read as they are stored: {}", Bytes(bytes));
    let times = format!("decoded they would be {:.1} times the bytes", decoded / bytes);
    vec![
        of_weights(format!("weights as {types}"), true, stored),
        of_weights(format!("weights as {}", problem.dtype), false, times),
    ]
}

fn of_weights(name: String, chosen: bool, reason: String) -> Candidate {
    Candidate { step: None, name, chosen, predicted_us: None, measured_us: None, reason }
}

/// A number of bytes with a unit that keeps it readable.
struct Bytes(f64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
        match units.into_iter().find(|&(scale, _)| self.0 >= scale) {
            Some((scale, unit)) => write!(f, "{:.2} {unit}", self.0 / scale),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "problem     {}", self.problem)?;
        writeln!(f, "plan        {}", self.plan)?;
        let width = self.candidates.iter().map(|c| c.name.len()).max().unwrap_or(0);
        let steps = self.candidates.iter().filter_map(|c| c.step.as_ref());
        let step_width = steps.map(|step| step.len() + 2).max().unwrap_or(0);
        let predicted = self.candidates.iter().any(|c| c.predicted_us.is_some());
        let measured = self.candidates.iter().any(|c| c.measured_us.is_some());
        for (i, c) in self.candidates.iter().enumerate() {
            let head = if i == 0 { "candidates" } else { "" };
            let mark = if c.chosen { "✓" } else { "·" };
            let step = c.step.as_deref().unwrap_or_default();
            write!(f, "{head:<11} {mark} {step:<step_width$}{:<width$}  ", c.name)?;
            if predicted {
                write!(f, "{}", Time("expected", c.predicted_us))?;
            }
            if measured {
                write!(f, "{}", Time("measured", c.measured_us))?;
            }
            writeln!(f, "{}", c.reason)?;
        }
        for (i, keeping) in self.keeps.iter().enumerate() {
            writeln!(f, "{:<11} {keeping}", if i == 0 { "keeps" } else { "" })?;
        }
        for note in &self.notes {
            writeln!(f, "note        {note}")?;
        }
        writeln!(f, "work        {:.3} MFLOP", self.flops / 1e6)?;
        writeln!(f, "traffic     {} at least", Bytes(self.compulsory_bytes))?;
        write!(f, "intensity   {:.2} FLOP per byte", self.arithmetic_intensity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_readable_units() {
        let text = |b| Bytes(b).to_string();
        assert_eq!([text(12.0), text(1.5e6), text(2e9)], ["12 B", "1.50 MB", "2.00 GB"]);
    }
}
