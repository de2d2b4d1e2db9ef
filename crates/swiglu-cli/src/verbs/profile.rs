//! `swiglu profile`: where the time of a call goes, and what would make it shorter.

use std::io::Write;

use anyhow::bail;
use clap::{Args, ValueEnum};
use comfy_table::Cell;
use serde::Serialize;
use serde_json::json;
use swiglu::{Activation, Arrangement, DType, Device, Orientation, Rounding};
use swiglu_lab::profile::{Analysis, Ceilings, KernelCounters, analyse_result, count};
use swiglu_lab::record::Summary;
use swiglu_lab::{Case, CaseOp, DeviceKind, Heat, ProfileDef, Role, SEED};

use crate::Verdict;
use crate::args::{DeviceArgs, MathArgs};
use crate::table::{self, Column::Number, Column::Text, number};
use crate::terminal::Terminal;
use crate::verbs::lab::adhoc::{self, AdHocArgs};
use crate::verbs::lab::{beside, own_peer};

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// The operation
    #[arg(default_value = "mlp")]
    op: ProfiledOp,
    /// Tokens
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = crate::args::extent, allow_negative_numbers = true)]
    m: usize,
    /// K, input features
    #[arg(long, value_name = "K", default_value_t = 896, value_parser = crate::args::extent, allow_negative_numbers = true)]
    hidden: usize,
    /// H, intermediate features
    #[arg(long, value_name = "H", default_value_t = 4864, value_parser = crate::args::extent, allow_negative_numbers = true)]
    intermediate: usize,
    /// Data stays in the caches, if it fits
    #[arg(long)]
    hot: bool,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    lab: AdHocArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ProfiledOp {
    /// gate, up → h = act(gate, up)
    Activation,
    /// x → h = act(x·Wg, x·Wu)
    GatedLinear,
    /// x → y = h·Wd
    Mlp,
}

/// One way of computing the case.
#[derive(Serialize)]
struct Way {
    profile: String,
    plan: Vec<String>,
    time_us: Summary,
    analysis: Analysis,
    kernels: Vec<KernelCounters>,
}

#[derive(Serialize)]
struct Document {
    case: String,
    ceilings: Ceilings,
    ways: Vec<Way>,
    /// Why there are no hardware counters.
    no_counters: Option<String>,
}

pub(crate) fn profile(args: &ProfileArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let device = args.device.open()?;
    let (case, of_device) = (args.case(&device), args.device.peer_options()?);
    let way = |path: &str| {
        let options = adhoc::with(json!({ "path": path }), &of_device);
        let options = adhoc::options(&case, options);
        adhoc::way(path, "swiglu", Role::Ours, options)
    };
    let mut ways = vec![way("planned")];
    if case.op.has_weights() {
        // Gate and up lie in memory, rounded; on a device the plan may be that path too.
        let mut stored = case.numerics;
        if stored.rounding == Rounding::Fused {
            stored.rounding = Rounding::PreRound;
        }
        if case.device == DeviceKind::Cuda {
            ways[0].numerics = Some(stored);
        }
        ways.push(ProfileDef { numerics: Some(stored), ..way("unfused") });
    }
    let experiment = adhoc::experiment(case.clone(), ways);
    let ceilings = beside::ceilings_of_case(&experiment, &case, &device)?;
    let record = args.lab.measure(&experiment, false, terminal)?;
    let (ncu, own) = (beside::counters_of(experiment.device), own_peer()?);
    let mut document = Document {
        case: experiment.title.clone(),
        ceilings,
        ways: Vec::new(),
        no_counters: ncu.as_ref().err().map(ToString::to_string),
    };
    for (result, definition) in record.results.iter().zip(&experiment.profiles) {
        let analysis = analyse_result(&experiment, &case, result, &document.ceilings);
        let (Some(analysis), Some(time_us)) = (analysis, result.summary) else {
            let reason = result.reason.as_deref().unwrap_or("no reason was given");
            bail!("{}: {}: {reason}", result.profile, result.status);
        };
        let kernels = match &ncu {
            Ok(_) => {
                let counted = count(&ncu, &own, &case, definition, SEED);
                document.no_counters = document.no_counters.or(counted.reason);
                counted.kernels
            }
            Err(_) => Vec::new(),
        };
        let (profile, plan) = (result.profile.clone(), result.notes.clone());
        document.ways.push(Way { profile, plan, time_us, analysis, kernels });
    }
    if terminal.json() {
        terminal.print_json(&document)?;
    } else {
        show(&document, terminal)?;
    }
    Ok(Verdict::Passed)
}

impl ProfileArgs {
    fn case(&self, device: &Device) -> Case {
        let device = match device {
            Device::Cuda(_) => DeviceKind::Cuda,
            _ => DeviceKind::Cpu,
        };
        let op = match self.op {
            ProfiledOp::Activation => CaseOp::Activation,
            ProfiledOp::GatedLinear => CaseOp::GatedLinear,
            ProfiledOp::Mlp => CaseOp::Mlp,
        };
        let dtype = self.math.dtype.unwrap_or(DType::Bf16);
        Case {
            device,
            op,
            m: self.m,
            hidden: if op.has_weights() { self.hidden } else { 0 },
            intermediate: self.intermediate,
            model: None,
            dtype,
            activation: self.math.activation.unwrap_or(Activation::SWIGLU),
            numerics: self.math.numerics(dtype),
            arrangement: Arrangement::Separate,
            weights: None,
            orientation: Orientation::OutIn,
            bias: false,
            heat: if self.hot { Heat::Hot } else { Heat::Cold },
        }
    }
}

fn show(document: &Document, terminal: &mut Terminal) -> anyhow::Result<()> {
    let columns = [
        Text("way"),
        Number("median"),
        Number("quartiles"),
        Number("GB/s"),
        Number("GFLOP/s"),
        Number("floor"),
        Text("class"),
    ];
    let mut table = table::table(terminal, &columns);
    for way in &document.ways {
        let (t, c) = (&way.time_us, &way.analysis.classified);
        table.add_row(vec![
            Cell::new(&way.profile),
            Cell::new(table::time(t.median)),
            Cell::new(format!("{} – {}", table::time(t.q1), table::time(t.q3))),
            Cell::new(number(c.gbps)),
            Cell::new(number(c.gflops)),
            Cell::new(c.floor_us().map_or("–".into(), table::time)),
            Cell::new(c.class.map_or("–".into(), |c| c.to_string())),
        ]);
    }
    writeln!(terminal, "{}\n", document.case)?;
    terminal.write_all(table::lines(&table).as_bytes())?;
    for way in &document.ways {
        writeln!(terminal, "\n{}: {}", way.profile, way.analysis.text)?;
        for note in &way.plan {
            writeln!(terminal, "  computed by {note}")?;
        }
        for step in way.analysis.steps.iter().skip(1) {
            let (gain, because) = (table::time(step.gain_us), &step.because);
            writeln!(terminal, "  also: {} ({because}): {gain}", step.action)?;
        }
    }
    if document.ways.iter().any(|w| !w.kernels.is_empty()) {
        writeln!(terminal)?;
        terminal.write_all(table::lines(&counters(document, terminal)).as_bytes())?;
    }
    if let Some(reason) = &document.no_counters {
        writeln!(terminal, "\nno hardware counters: {reason}")?;
    }
    Ok(())
}

fn counters(document: &Document, terminal: &Terminal) -> comfy_table::Table {
    let columns = [
        Text("way"),
        Text("kernel"),
        Text("class"),
        Number("time"),
        Number("DRAM %"),
        Number("tensor %"),
        Number("occupancy %"),
        Number("L2 hit %"),
        Number("read MB"),
        Number("written MB"),
    ];
    let mut table = table::table(terminal, &columns);
    let or_dash = |x: Option<f64>| x.map_or("–".into(), number);
    for way in &document.ways {
        for kernel in &way.kernels {
            let c = &kernel.counters;
            table.add_row(vec![
                Cell::new(&way.profile),
                Cell::new(&kernel.kernel),
                Cell::new(c.class().map_or("–".into(), |c| c.to_string())),
                Cell::new(c.us.map_or("–".into(), table::time)),
                Cell::new(or_dash(c.dram_percent)),
                Cell::new(or_dash(c.tensor_percent)),
                Cell::new(or_dash(c.occupancy_percent)),
                Cell::new(or_dash(c.l2_hit_percent)),
                Cell::new(or_dash(c.dram_read_bytes.map(|b| b / 1e6))),
                Cell::new(or_dash(c.dram_written_bytes.map(|b| b / 1e6))),
            ]);
        }
    }
    table
}
