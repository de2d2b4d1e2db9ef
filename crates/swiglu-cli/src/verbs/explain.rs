//! `swiglu explain`: how a problem would be computed, and what it costs at least; with `--measure` where
//! the time of a call goes, and what would make it shorter.

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use serde::Serialize;
use swiglu::{
    Arrangement, DType, Device, Explanation, Op, Orientation, Pass, Problem, QuantizedType,
    WeightLayout, with_dtype,
};
use swiglu_lab::profile::{Analysis, Ceilings, KernelCounters, analyse_result, count};
use swiglu_lab::{Case, CaseOp, Heat, ProfileDef, ResultEntry, Role, SEED};

use crate::args::{self, DeviceArgs, MathArgs, extent, one_of};
use crate::ceilings::{self, Floor};
use crate::layer::Params;
use crate::table::{self, Table, number, or_dash};
use crate::terminal::{Terminal, Verdict};
use crate::verbs::lab::adhoc::{self, AdHocArgs};
use crate::verbs::lab::places::own_peer;
use crate::verbs::lab::run::counters_of;
use crate::weights::{WeightArgs, decoded};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("sizes").required(true).args(["intermediate", "weights"]))]
pub(crate) struct ExplainArgs {
    /// The operation
    #[arg(long, value_name = "NAME", default_value = "mlp",
        value_parser = one_of([CaseOp::Activation, CaseOp::GatedLinear, CaseOp::Mlp]))]
    op: CaseOp,
    /// Tokens
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = extent)]
    m: usize,
    /// K, input features
    #[arg(long, value_name = "K", conflicts_with = "weights", value_parser = extent)]
    hidden: Option<usize>,
    /// H, intermediate features
    #[arg(long, value_name = "H", value_parser = extent)]
    intermediate: Option<usize>,
    #[arg(long, value_name = "TYPE", conflicts_with = "weights", help = args::weights_types())]
    weights_type: Option<QuantizedType>,
    /// Decode quantised weights of the file instead of computing with them as they are
    #[arg(long, requires = "weights")]
    decode_weights: bool,
    /// Explain a training step: the forward pass that keeps gate and up, the backward pass, and what is kept between them
    #[arg(long, conflicts_with_all = ["measure", "weights_type"])]
    backward: bool,
    /// Measure a shape with random data: where the time goes, and what would make it shorter
    #[arg(long, conflicts_with = "weights")]
    measure: bool,
    /// Measured data stay in the caches, if they fit
    #[arg(long, requires = "measure")]
    hot: bool,
    /// Time to measure for
    #[arg(long, value_name = "S", default_value_t = 1.0, requires = "measure",
        value_parser = args::seconds)]
    seconds: f64,
    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    math: MathArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    lab: AdHocArgs,
}

/// An explanation, and the floor under its time by what this machine can do now.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    explanation: Explanation,
    /// The forward pass of the training step whose backward pass is explained.
    #[serde(skip_serializing_if = "Option::is_none")]
    saving: Option<Explanation>,
    floor: Option<Floor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Measured>,
}

#[derive(Serialize)]
struct Measured {
    case: String,
    ceilings: Ceilings,
    ways: Vec<Way>,
    no_counters: Option<String>,
}

#[derive(Serialize)]
struct Way {
    #[serde(flatten)]
    result: ResultEntry,
    analysis: Analysis,
    kernels: Vec<KernelCounters>,
}

pub(crate) fn explain(args: &ExplainArgs, terminal: &mut Terminal) -> Result<Verdict> {
    args.lab.expect_places(args.measure)?;
    let device = args.device.open()?;
    let weights = args.weights.load()?;
    let case = weights.is_none().then(|| args.case(&device)).transpose()?;
    let (problem, why_decoded) = match (weights, case.as_ref().and_then(Case::problem)) {
        (Some(weights), _) => of_file(args, weights, &device)?,
        (None, problem) => {
            (problem.with_context(|| format!("{}: nothing plans it", args.op))?, None)
        }
    };
    let explained = |problem: Problem| -> Result<Explanation> {
        let explanation = device.explain(problem, None)?;
        Ok(why_decoded.iter().fold(explanation, Explanation::with_decoded_weights))
    };
    let saving = args.backward.then(|| explained(problem.with_pass(Pass::Saving))).transpose()?;
    let pass = if args.backward { Pass::Backward } else { problem.pass };
    let explanation = explained(problem.with_pass(pass))?;
    let heat = case.as_ref().map_or(Heat::Cold, |case| case.heat);
    let mut limits =
        ceilings::of(&device, args.op, !args.measure || ceilings::is_quick(args.seconds))?;
    let mut measured = None;
    if let Some(case) = case.filter(|_| args.measure) {
        limits = ceilings::with_case(limits, &device, &case)?;
        measured = Some(args.measure(case, limits.clone(), terminal)?);
    }
    let passes = || saving.iter().chain([&explanation]);
    let bytes = passes().map(|pass| pass.compulsory_bytes).sum();
    let flops = passes().map(|pass| pass.flops).sum();
    let floor = Floor::of(&problem, [bytes, flops], heat, &limits);
    let document = Document { explanation, saving, floor, measured };
    terminal.print(&document, |Document { explanation, saving, measured, .. }, terminal| {
        if let Some(saving) = saving {
            writeln!(terminal, "{saving}\n")?;
        }
        writeln!(terminal, "{explanation}")?;
        if let Some(Floor { bound, us }) = floor {
            let cached = if heat == Heat::Hot { "everything" } else { "nothing" };
            let of = if saving.is_some() { " for both passes" } else { "" };
            let time = table::time(us) + of;
            writeln!(terminal, "floor       {time} on this machine, {bound}, {cached} in cache")?;
            let ways = measured.iter().flat_map(|measured| &measured.ways);
            let medians = ways.filter_map(|way| Some(way.result.summary?.median));
            let least = medians.min_by(f64::total_cmp);
            if let Some(least) = least.filter(|least| *least < us) {
                let least = table::time(least);
                let why = "the machine was slower when what it goes by was measured: repeat it";
                writeln!(terminal, "            {least} was measured, less than that: {why}")?;
            }
        }
        measured.iter().try_for_each(|measured| measured.show(terminal))
    })
}

/// The problem of a layer in a file, and why its weights are decoded if they are.
fn of_file(
    args: &ExplainArgs,
    weights: swiglu::MlpWeights,
    device: &Device,
) -> Result<(Problem, Option<swiglu::Error>)> {
    let dtype = args.math.dtype.unwrap_or(weights.resolved_dtype());
    let weights = decoded(args.decode_weights, args.math.layer(weights, dtype), args.op)?;
    with_dtype!(dtype, T => {
        let quantized = match args.op.has_weights() {
            true => Params::<T>::quantized_in(&weights, args.op, device)?,
            false => Err(None),
        };
        let mut problem = match &quantized {
            Ok(params) => params.problem(args.m),
            Err(_) => Params::elements(&weights.host::<T>()?, args.op)?.problem(args.m),
        };
        if !args.op.has_weights() {
            // The activation by itself, over separate gate and up.
            problem = problem.with_op(Op::Activation).with_hidden(0).with_bias(false);
            problem = problem.with_layout(WeightLayout::HF);
        }
        Ok((problem, quantized.err().flatten()))
    })
}

impl ExplainArgs {
    fn case(&self, device: &Device) -> Result<Case> {
        let of_a_file = self.decode_weights.then(|| "--decode-weights".to_owned());
        if let Some(option) = of_a_file.or_else(|| self.weights.of_a_file()) {
            bail!(
                "{option} is of a layer in a file: give --weights FILE instead of --hidden and \
                 --intermediate, or leave it out"
            );
        }
        args::expect_no_hidden(self.op, self.hidden)?;
        if self.hidden.is_none() && self.op.has_weights() {
            bail!("--hidden: expected K, the input features, or --weights FILE");
        }
        let shape = [self.m, self.hidden.unwrap_or(0), self.intermediate.unwrap_or(0)];
        let dtype = self.math.dtype.unwrap_or(DType::F32);
        let layout = self.layout(shape[2])?;
        let case = Case::new(args::kind(device), self.op, shape, dtype);
        let case = Case {
            orientation: layout.orientation,
            arrangement: layout.arrangement,
            weights: self.weights_type,
            heat: if self.hot { Heat::Hot } else { Heat::Cold },
            ..self.math.case(case)
        };
        if let Some(kind) = self.weights_type {
            args::expect_quantized(device, &case, kind)?;
        }
        Ok(case)
    }

    /// How gate and up lie, as it was given.
    fn layout(&self, intermediate: usize) -> Result<WeightLayout> {
        let (orientation, arrangement) = (self.weights.orientation, self.weights.arrangement);
        if let (Some(orientation), CaseOp::Activation) = (orientation, self.op) {
            bail!("--orientation {orientation}: the activation has no weights; leave it out");
        }
        let layout = WeightLayout {
            orientation: orientation.unwrap_or(WeightLayout::HF.orientation),
            arrangement: arrangement.unwrap_or(WeightLayout::HF.arrangement),
        };
        layout.arrangement.validate(intermediate)?;
        let split = matches!(layout.arrangement, Arrangement::Interleaved { .. })
            || layout.orientation == Orientation::InOut;
        if let Some(kind) = self.weights_type.filter(|_| split) {
            bail!(
                "--weights-type {kind} as {layout}: quantised weights run along the inputs, with gate and \
                 up each in one piece; expected --orientation out-in, and --arrangement separate, gate-first \
                 or up-first"
            );
        }
        Ok(layout)
    }

    /// Our ways in turns by the lab's protocol, and what the hardware counts in them.
    fn measure(&self, case: Case, ceilings: Ceilings, terminal: &Terminal) -> Result<Measured> {
        let ways = adhoc::own_ways(&case, &adhoc::graph(&case, self.device.peer_options()?));
        // Each is a subject of the analysis, none a baseline.
        let ways = ways.into_iter().map(|way| ProfileDef { role: Role::Ours, ..way }).collect();
        let experiment = adhoc::experiment(vec![case.clone()], ways);
        let record = self.lab.measure(&experiment, self.seconds, terminal)?;
        let (ncu, own) = (counters_of(experiment.device), own_peer()?);
        let no_counters = ncu.as_ref().err().map(ToString::to_string);
        let mut measured = Measured { case: case.key(), ceilings, ways: Vec::new(), no_counters };
        for (result, definition) in record.results.iter().zip(&experiment.profiles) {
            let analysis = analyse_result(&experiment, &case, result, &measured.ceilings);
            let Some(analysis) = analysis else {
                let reason = result.reason.as_deref().unwrap_or("no reason was given");
                bail!("{}: {}: {reason}", result.profile, result.status);
            };
            // Without the profiler, only the reason.
            let counted = count(&ncu, &own, &case, definition, SEED);
            measured.no_counters = measured.no_counters.or(counted.reason);
            measured.ways.push(Way { result: result.clone(), analysis, kernels: counted.kernels });
        }
        Ok(measured)
    }
}

impl Measured {
    fn show(&self, terminal: &mut Terminal) -> Result<()> {
        writeln!(terminal)?;
        Table::of(&self.ways)
            .text("way", |way| &way.result.profile)
            .number("median", |way| or_dash(way.result.summary.map(|t| table::time(t.median))))
            .number("quartiles", |way| or_dash(way.result.summary.map(table::quartiles)))
            .number("GB/s", |way| number(way.analysis.classified.gbps))
            .number("GFLOP/s", |way| number(way.analysis.classified.gflops))
            .number("floor", |way| or_dash(way.analysis.classified.floor_us().map(table::time)))
            .text("class", |way| or_dash(way.analysis.classified.class))
            .print(terminal)?;
        for way in &self.ways {
            writeln!(terminal, "\n{}: {}", way.result.profile, way.analysis.text)?;
            if let Some(plan) = &way.result.plan {
                writeln!(terminal, "  computed by {plan}")?;
            }
            writeln!(terminal, "  {}", way.result.notes.join(", "))?;
            for step in way.analysis.steps.iter().skip(1) {
                let (gain, because) = (table::time(step.gain_us), &step.because);
                writeln!(terminal, "  also: {} ({because}): {gain}", step.action)?;
            }
        }
        let counted = self.ways.iter().flat_map(|way| way.kernels.iter().map(move |k| (way, k)));
        let kernels: Vec<_> = counted.map(|(way, k)| (way, k, &k.counters)).collect();
        if !kernels.is_empty() {
            writeln!(terminal)?;
            let megabytes = |bytes: Option<f64>| or_dash(bytes.map(|b| number(b / 1e6)));
            Table::of(&kernels)
                .text("way", |(way, _, _)| &way.result.profile)
                .text("kernel", |(_, kernel, _)| &kernel.kernel)
                .text("class", |(_, _, c)| or_dash(c.class()))
                .number("time", |(_, _, c)| or_dash(c.us.map(table::time)))
                .number("DRAM %", |(_, _, c)| or_dash(c.dram_percent.map(number)))
                .number("tensor %", |(_, _, c)| or_dash(c.tensor_percent.map(number)))
                .number("occupancy %", |(_, _, c)| or_dash(c.occupancy_percent.map(number)))
                .number("L2 hit %", |(_, _, c)| or_dash(c.l2_hit_percent.map(number)))
                .number("read MB", |(_, _, c)| megabytes(c.dram_read_bytes))
                .number("written MB", |(_, _, c)| megabytes(c.dram_written_bytes))
                .print(terminal)?;
        }
        if let Some(reason) = &self.no_counters {
            writeln!(terminal, "\nno hardware counters: {reason}")?;
        }
        Ok(())
    }
}
