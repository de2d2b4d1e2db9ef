//! `swiglu bench --backend`: the activation by every backend there is, by the lab's protocol, as a
//! table and a plot.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use comfy_table::Cell;
use serde::Serialize;
use serde_json::json;
use swiglu::{Activation, Arrangement, DType, Device, Orientation};
use swiglu_lab::report::chart::{Bar, Bars, Width, standalone};
use swiglu_lab::{
    Case, CaseOp, DeviceKind, Experiment, Heat, ProfileDef, Record, ResultEntry, Role, Status,
};

use crate::Verdict;
use crate::args::MathArgs;
use crate::table::{self, Column::Number, Column::Text, number};
use crate::terminal::{Shown, Terminal};
use crate::verbs::lab::adhoc::{self, AdHocArgs};

/// The row of this program.
const OURS: &str = "swiglu";
/// Rows and columns where none are given: large enough for memory to be the limit.
const SIDE: usize = 4096;

/// Which backends, and on what.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Other backends")]
pub(super) struct BackendArgs {
    /// Compare the activation with other libraries: all, or some of them, separated by commas. If any
    /// of them was measured, a plot is written here: swiglu-bench-ROWSxCOLS-TYPE-DEVICE.svg
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with_all = ["op", "suite"])]
    pub(super) backend: Vec<Backend>,
    /// Rows of gate and up [default: 4096]
    #[arg(long, value_name = "R", requires = "backend", conflicts_with_all = ["op", "suite"],
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    rows: Option<usize>,
    /// Columns of gate and up [default: 4096]
    #[arg(long, value_name = "C", requires = "backend", conflicts_with_all = ["op", "suite"],
        value_parser = crate::args::extent, allow_negative_numbers = true)]
    cols: Option<usize>,
    /// Replace a plot that exists
    #[arg(long, requires = "backend", conflicts_with_all = ["op", "suite"])]
    force: bool,
    #[command(flatten)]
    lab: AdHocArgs,
}

/// A backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    /// Every one; those that are not installed say so
    All,
    /// This program
    Swiglu,
    /// PyTorch, as users write it and compiled
    Torch,
    /// A kernel in Triton (CUDA)
    Triton,
    /// Liger's kernel (CUDA)
    Liger,
    /// A copy of the same bytes: the limit
    Copy,
}

#[derive(Serialize)]
struct Document {
    case: String,
    results: Vec<ResultEntry>,
    plot: Option<Shown>,
}

pub(super) fn compare(
    args: &BackendArgs,
    math: &MathArgs,
    device: (&Device, serde_json::Value),
    terminal: &mut Terminal,
) -> anyhow::Result<Verdict> {
    let (device, own_options) = device;
    let device = match device {
        Device::Cuda(_) => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    };
    let dtype = math.dtype.unwrap_or(DType::F32);
    let case = Case {
        device,
        op: CaseOp::Activation,
        m: args.rows.unwrap_or(SIDE),
        hidden: 0,
        intermediate: args.cols.unwrap_or(SIDE),
        model: None,
        dtype,
        activation: math.activation.unwrap_or(Activation::SWIGLU),
        numerics: math.numerics(dtype),
        arrangement: Arrangement::Separate,
        weights: None,
        orientation: Orientation::OutIn,
        bias: false,
        heat: Heat::Cold,
    };
    let plot = PathBuf::from(file_name(&case));
    if !args.force && plot.exists() {
        bail!("{}: exists already; remove it or give --force", plot.display());
    }
    let experiment = adhoc::experiment(case.clone(), args.profiles(&case, &own_options));
    let record = args.lab.measure(&experiment, false, terminal)?;
    let title = format!(
        "{} × {} {dtype} on {}",
        case.m,
        case.intermediate,
        record.machine.gpu.as_deref().unwrap_or(&record.machine.cpu)
    );
    // Ours is measured in any case; alone it is a comparison only if it was asked for.
    let compared = args.wants(Backend::Swiglu)
        && record.results.iter().any(|r| r.summary.is_some())
        || record.results.iter().any(|r| r.profile != OURS && r.summary.is_some());
    let chart = chart(&title, &record.results, &experiment.profiles);
    let written = match chart.svg(Width::Wide)?.filter(|_| compared) {
        Some(svg) => {
            write(&plot, &standalone(&svg, &title), args.force)?;
            Some(Shown::from(plot))
        }
        None => None,
    };
    let wrong = record.results.iter().any(|r| {
        let ours = experiment.profile(&r.profile).is_some_and(|p| p.role == Role::Ours);
        ours && r.status != Status::Ok
    });
    if terminal.json() {
        let results = record.results;
        terminal.print_json(&Document { case: case.key(), results, plot: written })?;
    } else {
        writeln!(terminal, "{title}\n")?;
        show(&experiment, &record, terminal)?;
        match written {
            Some(plot) => writeln!(terminal, "\nplot: {}", plot.display())?,
            None => writeln!(terminal, "\nno plot: nothing that was asked for was measured")?,
        }
    }
    Ok(Verdict::from_passed(!wrong))
}

impl BackendArgs {
    fn wants(&self, backend: Backend) -> bool {
        self.backend.contains(&backend) || self.backend.contains(&Backend::All)
    }

    fn profiles(&self, case: &Case, own_options: &serde_json::Value) -> Vec<ProfileDef> {
        let wanted = |b: Backend| self.wants(b);
        let way = |id, peer, role, way: Option<&str>| {
            let options = way.map_or(json!({}), |way| json!({ "way": way }));
            adhoc::way(id, peer, role, adhoc::options(case, options))
        };
        let cuda = case.device == DeviceKind::Cuda;
        let mut profiles = Vec::new();
        if wanted(Backend::Torch) {
            let eager = way("torch-eager", "torch", Role::Baseline, Some("eager"));
            profiles.push(eager);
            let role = Role::Peer;
            profiles.push(way("torch-composed", "torch", role, Some("eager_composed")));
            profiles.push(way("torch-compile", "torch", role, Some("compile")));
            if !cuda {
                profiles.push(way("torch-compile-into", "torch", role, Some("compile_into")));
            }
        }
        // Those that never run on a CPU have a row there too, in which they say so.
        if wanted(Backend::Triton) {
            profiles.push(way("triton", "triton", Role::Peer, None));
        }
        if wanted(Backend::Liger) {
            profiles.push(way("liger", "liger", Role::Peer, None));
        }
        if wanted(Backend::Copy) {
            profiles.push(way("copy", "copy", Role::Ceiling, None));
        }
        // Ours comes first, and is always there to compare with.
        let options = adhoc::options(case, own_options.clone());
        profiles.insert(0, adhoc::way(OURS, "swiglu", Role::Ours, options));
        profiles
    }
}

/// `swiglu-bench-4096x4096-f32-cuda.svg`.
fn file_name(case: &Case) -> String {
    let Case { m, intermediate, dtype, device, activation, .. } = case;
    let activation = match *activation {
        Activation::SWIGLU => String::new(),
        other => {
            let kept =
                |c: char| if c.is_ascii_alphanumeric() || ".-".contains(c) { c } else { '-' };
            format!("-{}", other.to_string().chars().map(kept).collect::<String>())
        }
    };
    format!("swiglu-bench-{m}x{intermediate}-{dtype}{activation}-{device}.svg")
}

fn chart(title: &str, results: &[ResultEntry], profiles: &[ProfileDef]) -> Bars {
    let mut measured: Vec<&ResultEntry> = results.iter().filter(|r| r.summary.is_some()).collect();
    let median = |r: &ResultEntry| r.summary.map_or(f64::INFINITY, |s| s.median);
    measured.sort_by(|a, b| median(a).total_cmp(&median(b)));
    let bar = |r: &&ResultEntry| {
        let s = r.summary?;
        let rate = r.gbps().map(|g| format!(" · {} GB/s", number(g)));
        let wrong = if r.status == Status::FailedVerification { " (wrong result)" } else { "" };
        Some(Bar {
            label: format!("{}{wrong}", r.profile),
            value: format!("{}{}", table::time(s.median), rate.unwrap_or_default()),
            median: s.median,
            q1: s.q1,
            q3: s.q3,
            series: profiles.iter().position(|p| p.id == r.profile).unwrap_or_default(),
        })
    };
    let bars: Vec<Bar> = measured.iter().filter_map(bar).collect();
    let said: Vec<_> = bars.iter().map(|b| format!("{} {}", b.label, b.value)).collect();
    Bars {
        title: format!("Time of one activation, {title}"),
        description: format!("Fastest first: {}.", said.join("; ")),
        bars,
    }
}

/// Writes beside, then renames; one that appeared meanwhile is kept unless `force`.
fn write(path: &Path, text: &str, force: bool) -> anyhow::Result<()> {
    let failed = || format!("writing {}", path.display());
    let mut file = tempfile::NamedTempFile::new_in(".").with_context(failed)?;
    file.write_all(text.as_bytes()).with_context(failed)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::Permissions::from_mode(0o644);
        file.as_file().set_permissions(mode).with_context(failed)?;
    }
    let done = if force { file.persist(path) } else { file.persist_noclobber(path) };
    done.map_err(|e| e.error).with_context(failed)?;
    Ok(())
}

fn show(experiment: &Experiment, record: &Record, terminal: &mut Terminal) -> anyhow::Result<()> {
    let columns = [
        Text("backend"),
        Number("median"),
        Number("quartiles"),
        Number("GB/s"),
        Number("of torch eager"),
        Number("error"),
        Text(""),
    ];
    let mut table = table::table(terminal, &columns);
    for r in &record.results {
        let or_dash = |text: Option<String>| Cell::new(text.unwrap_or_else(|| "–".into()));
        let spread = |s: swiglu_lab::record::Summary| {
            format!("{} – {}", table::time(s.q1), table::time(s.q3))
        };
        table.add_row(vec![
            Cell::new(&r.profile),
            or_dash(r.summary.map(|s| table::time(s.median))),
            or_dash(r.summary.map(spread)),
            or_dash(r.gbps().map(number)),
            or_dash(record.ratio_to_baseline(experiment, r).map(|i| table::ratio(i.value))),
            or_dash(r.error.and_then(|e| e.relative_frobenius).map(table::error)),
            match (r.status, &r.reason) {
                (Status::Ok, _) => table::verdict(true),
                (status, Some(reason)) => Cell::new(format!("{status}: {reason}")),
                (status, None) => Cell::new(status),
            },
        ]);
    }
    Ok(terminal.write_all(table::lines(&table).as_bytes())?)
}
