//! The page of a run: where, when, with what, and every result. And what a run needs.

use maud::{Markup, html};

use super::evidence::series;
use super::page::{Depth, frame, key, numbers, section, table, words};
use super::{Entry, experiment};
use crate::definition::Experiment;
use crate::format::{DASH, error, interval, number, si, time};
use crate::ready::Check;
use crate::record::{Clocks, Opened, Profiled, QUICK, Record, ResultEntry, Status};

/// The record's file without its folder and extension, after the machine's name.
fn stem(opened: &Opened) -> String {
    let stem = opened.path.file_stem().unwrap_or_default().to_string_lossy();
    format!("{}--{stem}", opened.record.machine.name)
}

/// Its place in the site.
pub(super) fn path(opened: &Opened) -> String {
    format!("runs/{}.html", stem(opened))
}

/// The place of the record itself.
pub(super) fn data_path(opened: &Opened) -> String {
    format!("runs/{}.json", stem(opened))
}

/// Where it ran, beside the machine.
pub(super) fn place(_record: &Record) -> String {
    "local".into()
}

/// The commit that was measured.
pub(super) fn commit(record: &Record) -> String {
    let commit = record.code.commit.as_deref();
    let short = commit.map_or("not known", |c| c.get(..9).unwrap_or(c));
    format!("{short}{}", if record.code.dirty { ", with changes" } else { "" })
}

pub(super) fn page(entry: &Entry, opened: &Opened) -> String {
    let (e, r) = (&entry.experiment, &opened.record);
    let title = format!("Run {} of {}", r.run_id, e.title);
    let main = html! {
        header.page {
            p.meta { a href={ "../" (experiment::path(&e.id)) } { "← " (e.title) } }
            h1 { "Run " (r.run_id) }
            p.lead { (e.question) }
        }
        section aria-labelledby="facts" {
            h2 #facts { "Where and how" }
            (facts(r))
            p {
                "Everything is in "
                a href=(format!("{}.json", stem(opened))) { "the record" }
                "."
            }
        }
        (section("results", "Results", Some(html! { div.dense { (results(e, r)) } })))
        (section("counters", "Hardware counters", counters(&r.profiling)))
    };
    frame(Depth::Folder, &title, &main)
}

fn facts(r: &Record) -> Markup {
    let m = &r.machine;
    let ceilings = r.ceilings.iter().flat_map(|c| {
        let memory = c.memory.iter().map(|c| format!("{} {}", c.name, si(c.per_second, "B/s")));
        memory.chain(c.compute.iter().map(|c| format!("{} {}", c.name, si(c.per_second, "FLOP/s"))))
    });
    let pace = match (r.protocol.pace.rest_ms, r.protocol.pace.warm_ms) {
        (0, 0) => String::new(),
        (rest, warm) => format!(" after {rest} ms of rest and {warm} ms of its own calls"),
    };
    let protocol = format!(
        "{}{} turns of at most {} µs per profile{pace}, interleaved, over {} preparations; seed {:#x}",
        if r.protocol.quick { format!("{QUICK}; ") } else { String::new() },
        r.protocol.turns,
        r.protocol.budget_us,
        r.protocol.preparations,
        r.protocol.seed,
    );
    let complete = if r.complete { "" } else { ", not complete" };
    let mut rows: Vec<(&str, Option<String>)> = vec![
        ("Machine", Some(format!("{}, {}", m.name, place(r)))),
        ("GPU", m.gpu.clone()),
        ("Driver", m.driver.clone()),
        ("CPU", Some(format!("{}, {} threads", m.cpu, m.threads))),
        ("Memory", Some(format!("{} GiB", number(m.memory_bytes as f64 / f64::from(1 << 30))))),
        ("System", Some(m.os.clone())),
        ("Time", Some(format!("{} to {}{complete}", r.started, r.finished))),
        ("Commit", r.code.commit.as_ref().map(|_| commit(r))),
        ("Protocol", Some(protocol)),
        ("Clocks", clocks(r)),
        ("Ceilings", Some(ceilings.collect::<Vec<_>>().join(", ")).filter(|c| !c.is_empty())),
        ("Definition", Some(r.definition_hash.clone())),
        ("Content", Some(r.content_hash.clone())),
    ];
    rows.extend(r.versions.iter().map(|(peer, parts)| {
        let parts: Vec<_> = parts.iter().map(|(name, v)| format!("{name} {v}")).collect();
        (peer.as_str(), Some(parts.join(", ")))
    }));
    html! {
        dl.facts {
            @for (name, value) in rows {
                @if let Some(value) = value { dt { (name) } dd { (value) } }
            }
        }
    }
}

/// Over all cases, before and after each.
fn clocks(r: &Record) -> Option<String> {
    let range = |what: &str, unit: &str, of: fn(&Clocks) -> Option<f64>| {
        let all = || r.cases.values().filter_map(|c| c.clocks).flatten().filter_map(|c| of(&c));
        let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
        low.is_finite().then(|| format!("{what} {} to {} {unit}", number(low), number(high)))
    };
    let known = [
        range("device", "MHz", |c| c.sm_mhz),
        range("power", "W", |c| c.power_w),
        range("CPU core", "MHz", |c| c.cpu_mhz),
    ];
    let known: Vec<_> = known.into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(", "))
}

fn or_dash(text: Option<String>) -> Markup {
    html! { (text.unwrap_or_else(|| DASH.into())) }
}

/// Every result of a record, with everything that was worked out of its samples.
fn results(e: &Experiment, record: &Record) -> Markup {
    let row = |r: &ResultEntry| {
        let (s, error_of) = (r.summary, r.error);
        let part = error_of.and_then(|e| Some(number(e.relative_frobenius? / e.frobenius_limit?)));
        vec![
            html! { (r.case_key) },
            key(series(e, &r.profile), &r.profile),
            html! {
                span.wrong[r.status == Status::FailedVerification] { (r.status) }
                @for note in r.reason.iter().chain(&r.plan).chain(&r.notes) { span.sub { (note) } }
            },
            or_dash(s.map(|s| time(s.median))),
            or_dash(s.map(|s| format!("{} – {}", time(s.q1), time(s.q3)))),
            or_dash(s.map(|s| time(s.min))),
            or_dash(s.map(|s| s.n.to_string())),
            or_dash(r.gbps().map(number)),
            or_dash(r.gflops().map(number)),
            or_dash(record.ratio_to_baseline(e, r).map(interval)),
            or_dash(error_of.and_then(|e| e.relative_frobenius).map(error)),
            or_dash(part),
        ]
    };
    let rows: Vec<_> = record.results.iter().map(row).collect();
    let heads = [
        "median",
        "quartiles",
        "least",
        "samples",
        "GB/s",
        "GFLOP/s",
        "ratio",
        "error",
        "of limit",
    ];
    let columns = [words("case"), words("profile"), words("status")];
    let columns: Vec<_> = columns.into_iter().chain(heads.map(numbers)).collect();
    let caption = "Every result. Ratios are relative to the baseline with their 95 % confidence interval; \
                   error is the relative Frobenius error against float64, as a part of its limit too.";
    table(caption, &columns, &rows)
}

fn counters(profiled: &[Profiled]) -> Option<Markup> {
    const HEADS: [&str; 10] = [
        "class",
        "µs",
        "DRAM %",
        "read MB",
        "written MB",
        "tensor %",
        "SM %",
        "occupancy %",
        "L2 hit %",
        "registers",
    ];
    let mut rows = Vec::new();
    for p in profiled {
        let names = || [html! { (p.case_key) }, html! { (p.profile) }].into_iter();
        if p.kernels.is_empty() {
            let reason = p.reason.as_deref().unwrap_or("nothing was counted");
            let none = HEADS.map(|_| or_dash(None));
            rows.push(names().chain([html! { (reason) }]).chain(none).collect());
        }
        for k in &p.kernels {
            let c = &k.counters;
            let class = html! { (c.class().map_or(DASH.to_owned(), |c| c.to_string())) };
            let values = [
                c.us,
                c.dram_percent,
                c.dram_read_bytes.map(|b| b / 1e6),
                c.dram_written_bytes.map(|b| b / 1e6),
                c.tensor_percent,
                c.sm_percent,
                c.occupancy_percent,
                c.l2_hit_percent,
                c.registers,
            ];
            let values = values.map(|x| or_dash(x.map(number)));
            rows.push(names().chain([html! { (k.kernel) }, class]).chain(values).collect());
        }
    }
    let columns = [words("case"), words("profile"), words("kernel")];
    let columns: Vec<_> = columns.into_iter().chain(HEADS.map(numbers)).collect();
    let caption =
        "Counted by Nsight Compute in the last launch of each kernel, clocks as they were";
    let table = html! { div.dense { (table(caption, &columns, &rows)) } };
    (!profiled.is_empty()).then_some(table)
}

/// What a run needs and whether it is here; what is missing comes first, with what to do.
pub(super) fn readiness(checks: &[Check]) -> Markup {
    let row = |c: &Check| {
        vec![
            html! { (c.what) },
            html! { @if c.ok { span.good { "✓ yes" } } @else { span.bad { "✕ no" } } },
            html! {
                (c.found.as_deref().unwrap_or(DASH))
                @if let Some(advice) = c.advice.as_ref().filter(|_| !c.ok) { span.sub { (advice) } }
            },
        ]
    };
    let rows: Vec<_> = checks.iter().map(row).collect();
    let missing: Vec<_> = checks.iter().filter(|c| !c.ok).collect();
    let columns = [words("needed"), words("here"), words("found, or what to do")];
    html! {
        h3 { "Here" }
        @if missing.is_empty() { p { "Everything that a run needs is here." } }
        @else {
            p { "A run is not possible here as it is:" }
            ul {
                @for c in missing {
                    li { (c.what) @if let Some(advice) = &c.advice { ": " (advice) } }
                }
            }
        }
        details { summary { "All that a run needs" } (table("What a run needs", &columns, &rows)) }
    }
}
