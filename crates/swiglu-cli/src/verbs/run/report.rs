//! What a run found, for machines and for people.

use anyhow::Result;
use serde::Serialize;
use swiglu::{Activation, DType, Device, Op, RowSteps};

use super::Subject;
use super::backward::TrainingReport;
use crate::table::{self, Table, number};
use crate::terminal::{Terminal, Verdict, by_options};
use crate::timing::Summary;

#[derive(Debug, Clone, Serialize)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct ErrorReport {
    pub(super) relative_frobenius: f64,
    pub(super) max_abs: f64,
    /// `file` or `oracle`.
    pub(super) reference: &'static str,
    /// What `relative_frobenius` may be.
    pub(super) limit: f64,
    /// The largest |error| of an element ÷ its bound, against the oracle; at most 1.
    pub(super) worst_element: f64,
    pub(super) rows_checked: usize,
    /// That the result cannot be held in the element type, and where.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) overflow: Option<String>,
    /// The first element that is NaN or infinite, here or in the reference file, but not in both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unlike: Option<String>,
    /// The bound that is exceeded, and where.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) exceeded: Option<String>,
    pub(super) passed: bool,
}

impl ErrorReport {
    /// Adds a bound that is exceeded; what failed before is the cause.
    pub(super) fn fail(&mut self, why: String) {
        self.passed = false;
        self.exceeded.get_or_insert(why);
    }
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Report {
    pub(super) device: &'static str,
    pub(super) plan: String,
    pub(super) op: Op,
    pub(super) dtype: DType,
    pub(super) numerics: String,
    pub(super) activation: Activation,
    /// Where the model says so; none if the caller chose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) activation_source: Option<String>,
    /// The file does not name it and neither did the caller.
    pub(super) activation_assumed: bool,
    /// What is computed from whole rows between the products.
    #[serde(skip_serializing_if = "RowSteps::is_none")]
    pub(super) row_steps: RowSteps,
    pub(super) shape: Shape,
    pub(super) layer: String,
    pub(super) input: String,
    /// The type of the weights as they are computed with: `Q4_0`, or the element type.
    pub(super) weights: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) decoded_because: Option<String>,
    pub(super) time_us: Summary,
    /// What the time is compared with: the unfused path, which computes with elements.
    pub(super) unfused_time_us: Summary,
    pub(super) speedup: f64,
    pub(super) gflops: f64,
    pub(super) gbytes_per_s: f64,
    pub(super) error: ErrorReport,
    pub(super) passed: bool,
    /// How much was verified, where it was not everything.
    #[serde(skip)]
    pub(super) extent: Option<String>,
    /// With `--backward`: then the times are those of a step.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) training: Option<TrainingReport>,
}

/// One object: the first report, with all of them beside it where there are several.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    first: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    all: Option<&'a [Report]>,
}

pub(super) fn print(
    terminal: &mut Terminal,
    subject: &Subject,
    device: &Device,
    reports: &[Report],
) -> Result<Verdict> {
    let Some(first) = reports.first() else { return Ok(Verdict::Passed) };
    let all = (reports.len() > 1).then_some(reports);
    terminal.print(&Document { first, all }, |_, terminal| {
        head(subject, device, first, terminal)?;
        // A GPU may plan the unfused path itself.
        let ours = if matches!(device, Device::Cuda(_)) { "planned" } else { "fused" };
        Table::of(reports)
            .text("dtype", |r| r.dtype)
            .text("weights", |r| &r.weights)
            .text("numerics", |r| &r.numerics)
            .number(ours, |r| table::time(r.time_us.median))
            .number("unfused", |r| table::time(r.unfused_time_us.median))
            .number("speed-up", |r| table::ratio(if r.shape.m == 0 { f64::NAN } else { r.speedup }))
            .number("GFLOP/s", |r| number(r.gflops))
            .number("GB/s", |r| number(r.gbytes_per_s))
            .number("error", |r| table::error(r.error.relative_frobenius))
            .number("limit", |r| table::error(r.error.limit))
            .text("", |r| table::verdict(r.passed))
            .print(terminal)?;
        foot(reports, terminal)
    })
}

fn head(subject: &Subject, device: &Device, first: &Report, terminal: &mut Terminal) -> Result<()> {
    let Shape { m, hidden, intermediate } = first.shape;
    let back = if first.op == Op::Mlp { format!(" → {hidden}") } else { String::new() };
    let steps = match first.row_steps {
        steps if steps.is_none() => String::new(),
        steps => format!(", {steps}"),
    };
    let source = match (&first.activation_source, first.activation_assumed) {
        (Some(source), true) => format!(" ({source}; --activation chooses)"),
        (Some(source), false) => format!(" ({source})"),
        (None, _) => String::new(),
    };
    let tokens = if m == 1 { "token" } else { "tokens" };
    let against = subject.reference.as_ref().map_or("the float64 oracle", |r| &r.source);
    let (op, activation) = (first.op, first.activation);
    writeln!(terminal, "layer     {}", subject.title)?;
    writeln!(
        terminal,
        "work      {op} {hidden} → {intermediate}{back}, {activation}{source}{steps}, {m} {tokens}"
    )?;
    writeln!(terminal, "input     {}", subject.input.source)?;
    writeln!(terminal, "device    {device}\ncompared  with {against}")?;
    for note in subject.weights.stored().notes() {
        writeln!(terminal, "note      {}", by_options(note))?;
    }
    writeln!(terminal)
}

/// What the table leaves out: plans, the worst element, and what was not checked.
fn foot(reports: &[Report], terminal: &mut Terminal) -> Result<()> {
    writeln!(terminal)?;
    for r in reports {
        let ErrorReport { worst_element, overflow, unlike, exceeded, passed, .. } = &r.error;
        write!(terminal, "{:<5} {}", r.dtype, r.plan)?;
        if *passed {
            write!(terminal, "; worst element {worst_element:.2} of its bound")?;
        }
        // Also where the exact result overflows too, which is no fault: the table then has no error.
        for why in [overflow, unlike, exceeded].into_iter().flatten() {
            write!(terminal, "; {why}")?;
        }
        if let Some(extent) = &r.extent {
            write!(terminal, "; verified {extent}")?;
        }
        if let Some(why) = &r.decoded_because {
            write!(terminal, "; weights decoded: {why}")?;
        }
        writeln!(terminal)?;
        if let Some(training) = &r.training {
            training.show(r.shape.m, terminal)?;
        }
    }
    Ok(())
}
