//! What a benchmark found: rows for machines, a table for people, and a plot.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use comfy_table::{Cell, Color};
use serde::Serialize;
use swiglu::Arrangement;
use swiglu_lab::profile::{Ceiling, Ceilings, Class};
use swiglu_lab::record::Record;
use swiglu_lab::report::chart::{Bar, Bars, Width, standalone};
use swiglu_lab::{Case, Experiment, Heat, Role, Status};

use crate::ceilings::Floor;
use crate::table::{self, number, or_dash, row};
use crate::terminal::Terminal;
use crate::verbs::lab::beside::OWN;

/// One way of computing a case.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    case: String,
    way: String,
    role: Role,
    status: Status,
    reason: Option<String>,
    median_us: Option<f64>,
    q1_us: Option<f64>,
    q3_us: Option<f64>,
    samples: usize,
    gbytes_per_s: Option<f64>,
    gflops: Option<f64>,
    /// What binds the case: `memory`, `cache` or `compute`.
    bound: Option<Class>,
    /// The least time that the ceilings allow ÷ the median time.
    fraction: Option<f64>,
    /// How often the way's median fits into that of the baseline.
    ratio: Option<f64>,
    relative_error: Option<f64>,
    limit: Option<f64>,
    plan: Option<String>,
    /// What else the peer says about how it computes the case.
    notes: Vec<String>,
    #[serde(skip)]
    ours: bool,
}

/// `mlp 1x896x4864 f32 Q4_0`: a case, with what is not as usual.
pub(super) fn name(case: &Case) -> String {
    let mut name = format!("{} {}x", case.op, case.m);
    if case.op.has_weights() {
        name += &format!("{}x", case.hidden);
    }
    name += &format!("{} {}", case.intermediate, case.dtype);
    if let Some(weights) = case.weights {
        name += &format!(" {weights}");
    }
    if case.arrangement != Arrangement::Separate {
        name += " packed";
    }
    if case.heat == Heat::Hot {
        name += " hot";
    }
    name
}

/// The rows of one case. Where reading the same bytes took its turns, that is the limit of memory.
pub(super) fn rows<'c>(
    experiment: &Experiment,
    record: &Record,
    case: &Case,
    limits: impl Fn(&str) -> &'c Ceilings,
) -> Vec<Row> {
    let key = case.key();
    let results = || record.results.iter().filter(|r| r.case_key == key);
    let role = |id: &str| experiment.profile(id).map_or(Role::Peer, |p| p.role);
    let median = |wanted: &dyn Fn(Role) -> bool| {
        let of = |r: &&swiglu_lab::ResultEntry| wanted(role(&r.profile)) && r.status == Status::Ok;
        results().find(of).and_then(|r| r.summary).map(|s| s.median)
    };
    let baseline = median(&|role| role == Role::Baseline);
    let floor = |id: &str| {
        // The ceiling of a way with as many threads.
        let threads = |id: &str| experiment.profile(id).and_then(|p| p.options.get("threads"));
        let same = |r: &&swiglu_lab::ResultEntry| {
            role(&r.profile) == Role::Ceiling && threads(&r.profile) == threads(id)
        };
        let mut ceilings = limits(id).clone();
        let read = results().find(same).and_then(|r| r.summary).filter(|_| case.heat == Heat::Cold);
        if let Some(read) = read {
            let per_second = case.compulsory_bytes() / read.median * 1e6;
            ceilings.memory = Some(Ceiling { name: "read".into(), per_second });
        }
        Floor::of(&case.problem()?, case.heat, &ceilings)
    };
    let row = |r: &swiglu_lab::ResultEntry| {
        let floor = floor(&r.profile).filter(|_| role(&r.profile) != Role::Ceiling);
        let us = r.summary.map(|s| s.median);
        let ranked = r.status == Status::Ok && role(&r.profile).is_ranked();
        Row {
            case: name(case),
            way: r.profile.clone(),
            role: role(&r.profile),
            status: r.status,
            reason: r.reason.clone(),
            median_us: us,
            q1_us: r.summary.map(|s| s.q1),
            q3_us: r.summary.map(|s| s.q3),
            samples: r.summary.map_or(0, |s| s.n),
            gbytes_per_s: r.gbps(),
            gflops: r.gflops(),
            bound: floor.map(|f| f.bound),
            fraction: floor.zip(us).map(|(f, us)| f.us / us),
            ratio: baseline.zip(us).filter(|_| ranked).map(|(base, us)| base / us),
            relative_error: r.error.and_then(|e| e.relative_frobenius),
            limit: r.error.and_then(|e| e.frobenius_limit),
            plan: r.plan.clone(),
            notes: r.notes.clone(),
            ours: experiment.profile(&r.profile).is_some_and(|p| p.peer == OWN),
        }
    };
    results().map(row).collect()
}

impl Row {
    /// Whether this program computes so.
    pub(super) fn is_ours(&self) -> bool {
        self.ours
    }

    pub(super) fn is_ok(&self) -> bool {
        self.status == Status::Ok
    }

    /// Why there is no result, or a wrong one.
    pub(super) fn complaint(&self) -> Option<String> {
        let reason = self.reason.as_deref().filter(|_| !self.is_ok())?;
        Some(format!("{}, {}: {}: {reason}", self.case, self.way, self.status))
    }

    fn cells(&self, case: &str) -> Vec<Cell> {
        let range = self.q1_us.zip(self.q3_us).zip(self.median_us);
        // Operations where these bind, and bytes everywhere else, also of what reads alone.
        let rate = match self.bound {
            Some(Class::Compute) => self.gflops.map(|rate| format!("{} GFLOP/s", number(rate))),
            _ => self.gbytes_per_s.map(|rate| format!("{} GB/s", number(rate))),
        };
        let bound = self.bound.map(|bound| match bound {
            Class::Compute => "arithmetic",
            Class::Cache => "caches",
            _ => "memory",
        });
        let part = |(fraction, bound)| format!("{:.0} % {bound}", 100.0 * fraction);
        let status = match self.status {
            Status::Ok => table::verdict(true),
            Status::FailedVerification => table::verdict(false),
            other => Cell::new(other).fg(Color::Yellow),
        };
        row![
            case,
            &self.way,
            or_dash(self.median_us.map(table::time)),
            or_dash(range.map(|((low, high), median)| table::range(low, high, median))),
            or_dash(rate),
            or_dash(self.fraction.zip(bound).map(part)),
            match self.role {
                Role::Baseline if self.ratio == Some(1.0) => Cell::new("base"),
                _ => or_dash(self.ratio.map(table::ratio)),
            },
            or_dash(self.relative_error.map(table::error)),
            status,
        ]
    }
}

const COLUMNS: &[&str] =
    &["case", "way", ">median", ">quartiles", ">rate", ">of ceiling", ">ratio", ">error", ""];

/// The table, and under it what is missing or wrong.
pub(super) fn show(rows: &[Row], terminal: &mut Terminal) -> anyhow::Result<()> {
    let mut last = "";
    let cells = rows.iter().map(|row| {
        let case = if row.case == last { "" } else { row.case.as_str() };
        last = &row.case;
        row.cells(case)
    });
    table::print(terminal, COLUMNS, cells)?;
    for complaint in rows.iter().filter_map(Row::complaint) {
        writeln!(terminal, "{complaint}")?;
    }
    Ok(())
}

/// Draws the times of one case; written beside, then renamed, and one that appeared meanwhile is kept
/// unless `force`.
pub(super) fn plot(rows: &[Row], path: &Path, force: bool) -> anyhow::Result<()> {
    let mut measured: Vec<(usize, &Row)> =
        rows.iter().enumerate().filter(|(_, r)| r.median_us.is_some()).collect();
    measured.sort_by(|(_, a), (_, b)| {
        a.median_us.partial_cmp(&b.median_us).unwrap_or_else(|| 0.cmp(&0))
    });
    let bar = |&(series, r): &(usize, &Row)| {
        let (median, rate) = (r.median_us?, r.gbytes_per_s);
        let wrong = if r.is_ok() { "" } else { " (wrong result)" };
        let rate = rate.map(|g| format!(" · {} GB/s", number(g))).unwrap_or_default();
        Some(Bar {
            label: format!("{}{wrong}", r.way),
            value: table::time(median) + &rate,
            median,
            q1: r.q1_us?,
            q3: r.q3_us?,
            series,
        })
    };
    let bars: Vec<Bar> = measured.iter().filter_map(bar).collect();
    let said: Vec<_> = bars.iter().map(|b| format!("{} {}", b.label, b.value)).collect();
    let title = rows.first().map(|r| r.case.clone()).unwrap_or_default();
    let description = format!("Fastest first: {}.", said.join("; "));
    let chart = Bars { title: format!("Time of one call, {title}"), description, bars };
    let Some(svg) = chart.svg(Width::Wide) else {
        bail!("--plot {}: nothing was measured that could be drawn", path.display());
    };
    let failed = || format!("writing {}", path.display());
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(dir).with_context(failed)?;
    file.write_all(standalone(&svg, &title).as_bytes()).with_context(failed)?;
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
