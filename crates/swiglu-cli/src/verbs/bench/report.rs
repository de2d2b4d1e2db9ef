//! What a benchmark found, for machines and for people.

use std::io::Write;

use comfy_table::Cell;
use serde::Serialize;
use swiglu::{DType, Problem, QuantizedType};
use swiglu_core::bounds::Judgement;

use super::cases::Case;
use crate::ceilings::Ceilings;
use crate::roofline::{Bound, Floor};
use crate::stats::Summary;
use crate::table::{self, Column::Number, Column::Text, number};
use crate::terminal::Terminal;

/// How fast one way of computing a case is.
pub(super) struct Speed {
    pub(super) time: Summary,
    /// The least time the machine could take, where that is the measure.
    pub(super) floor: Option<Floor>,
    /// Whether the machine's bandwidth stayed what it was.
    pub(super) steady: bool,
    /// Over the unfused way, of quantised weights over decoded ones.
    pub(super) speedup: Option<f64>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    case: String,
    profile: &'static str,
    dtype: DType,
    /// The type of the weights, where they are quantised.
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<QuantizedType>,
    threads: usize,
    median_us: f64,
    p10_us: f64,
    p90_us: f64,
    samples: usize,
    gflops: f64,
    gbytes_per_s: f64,
    /// `memory` or `compute`.
    bound: Option<Bound>,
    /// The floor under the time ÷ the median time.
    fraction: Option<f64>,
    /// Whether the bandwidth before and after was about the same.
    steady: bool,
    speedup: Option<f64>,
    relative_error: f64,
    limit: f64,
    pub(super) passed: bool,
}

impl Row {
    pub(super) fn new(
        case: &Case,
        problem: &Problem,
        profile: &'static str,
        threads: usize,
        Speed { time, floor, steady, speedup }: Speed,
        judgement: &Judgement,
    ) -> Self {
        Self {
            case: case.to_string(),
            profile,
            dtype: case.dtype,
            weights: case.weights,
            threads,
            median_us: time.median,
            p10_us: time.p10,
            p90_us: time.p90,
            samples: time.samples,
            gflops: time.giga_per_second(problem.flops()),
            gbytes_per_s: time.giga_per_second(problem.compulsory_bytes()),
            bound: floor.map(|f| f.bound),
            fraction: floor.map(|f| f.us / time.median),
            steady,
            speedup,
            relative_error: judgement.relative_frobenius,
            limit: judgement.frobenius_limit,
            passed: judgement.passed(),
        }
    }

    fn cells(&self) -> Vec<Cell> {
        let or_dash = |text: Option<String>| Cell::new(text.as_deref().unwrap_or("–"));
        vec![
            Cell::new(&self.case),
            Cell::new(self.profile),
            Cell::new(self.dtype),
            Cell::new(self.threads),
            Cell::new(table::time(self.median_us)),
            Cell::new(format!("{} – {}", table::time(self.p10_us), table::time(self.p90_us))),
            Cell::new(number(self.gflops)),
            Cell::new(number(self.gbytes_per_s)),
            or_dash(self.bound.map(|b| b.name().to_owned())),
            or_dash(self.fraction.map(|f| format!("{}{f:.2}", if self.steady { "" } else { "~" }))),
            or_dash(self.speedup.map(table::ratio)),
            Cell::new(table::error(self.relative_error)),
            table::verdict(self.passed),
        ]
    }
}

/// The limits that results are stated against.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Limits {
    Cpu(CpuLimits),
    Cuda(CudaLimits),
}

/// The limits of one number of threads.
#[derive(Debug, Serialize)]
pub(super) struct CpuLimits {
    pub(super) threads: usize,
    #[serde(flatten)]
    pub(super) ceilings: Ceilings,
}

/// The limits of one device.
#[derive(Debug, Serialize)]
pub(super) struct CudaLimits {
    pub(super) device: String,
    #[serde(flatten)]
    pub(super) ceilings: swiglu_cuda::ceilings::Ceilings,
}

#[derive(Debug, Serialize)]
struct Document {
    results: Vec<Row>,
    ceilings: Vec<Limits>,
}

pub(super) fn print(
    terminal: &mut Terminal,
    results: Vec<Row>,
    ceilings: Vec<Limits>,
) -> anyhow::Result<()> {
    if terminal.json() {
        return terminal.print_json(&Document { results, ceilings });
    }
    let columns = [
        Text("case"),
        Text("profile"),
        Text("dtype"),
        Number("threads"),
        Number("median"),
        Number("p10 – p90"),
        Number("GFLOP/s"),
        Number("GB/s"),
        Text("bound"),
        Number("fraction"),
        Number("speed-up"),
        Number("error"),
        Text(""),
    ];
    let mut table = table::table(terminal, &columns);
    for row in &results {
        table.add_row(row.cells());
    }
    let text = table::lines(&table) + &legend(&ceilings);
    Ok(terminal.write_all(text.as_bytes())?)
}

fn legend(ceilings: &[Limits]) -> String {
    let mut out = String::from("\nfraction of this machine's ceilings:\n");
    let mut cuda = false;
    for limits in ceilings {
        out += &match limits {
            Limits::Cpu(limits) => limits.line(),
            Limits::Cuda(limits) => limits.line(),
        };
        cuda |= matches!(limits, Limits::Cuda(_));
    }
    out += match cuda {
        true => {
            "Times are of the device's clock, on resident data; graph replays the same calls as one\n\
             captured graph. Cold cases rotate through data larger than the cache. Speed-up is over\n\
             the unfused way, errors are relative (Frobenius) against float64.\n"
        }
        false => {
            "Bandwidth is measured again right before and after each cold case, and ~ says that it\n\
             changed; hot cases are measured against arithmetic alone. Speed-up is over the\n\
             unfused way, of quantised weights over decoded ones; errors are relative (Frobenius)\n\
             against float64.\n"
        }
    };
    out
}

impl CpuLimits {
    fn line(&self) -> String {
        let Self { threads, ceilings: c } = self;
        let plural = if *threads == 1 { "" } else { "s" };
        let mut out =
            format!("  {threads} thread{plural}: FMA {} GFLOP/s", number(c.fma_f32 / 1e9));
        if let Some(dot) = c.dot_bf16 {
            out += &format!(", bf16 dot {} GFLOP/s", number(dot / 1e9));
        }
        let b = c.bandwidth;
        let [read, copy, triad] = [b.read, b.copy_nt, b.triad_nt].map(|x| number(x / 1e9));
        out += &format!("; read {read}, copy {copy}, two reads and a write {triad} GB/s\n");
        out
    }
}

impl CudaLimits {
    fn line(&self) -> String {
        let c = &self.ceilings;
        let mut out = format!("  {}: copy {} GB/s", self.device, number(c.copy / 1e9));
        for dtype in DType::ALL {
            match c.gemm(dtype) {
                Some(rate) => out += &format!(", {dtype} GEMM {} GFLOP/s", number(rate / 1e9)),
                None => out += &format!(", {dtype} GEMM unknown (no cuBLASLt)"),
            }
        }
        out + "\n"
    }
}
