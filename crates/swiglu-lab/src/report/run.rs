//! The page of a run: where, when, with what, and every result.

use maud::{Markup, html};

use super::evidence::{Labels, cases, series};
use super::page::{FOLDER, columns, frame, key, or_dash, section, table};
use super::{Entry, experiment};
use crate::definition::Experiment;
use crate::files::file_stem;
use crate::format::{error, interval, number, si, time};
use crate::profile::KernelCounters;
use crate::record::{
    Clocks, Executed, Opened, Profiled, ProtocolUsed, QUICK, Record, ResultEntry, Status,
};

/// The record's file without its folder and extension, after the machine's name.
fn stem(opened: &Opened) -> String {
    format!("{}--{}", opened.record.machine.name, file_stem(&opened.path))
}

/// Its page lies here in the site as `html`, and the record itself as `json`.
pub(super) fn path(opened: &Opened, extension: &str) -> String {
    format!("runs/{}.{extension}", stem(opened))
}

/// Where it ran, beside the machine's name: here, or in a place with its job.
pub(super) fn place(record: &Record) -> String {
    let Some(e) = &record.executor else { return "local".into() };
    let job = e.job_id.as_ref().map(|id| format!(", job {id}")).unwrap_or_default();
    let nodes =
        if e.nodes.is_empty() { String::new() } else { format!(" on {}", e.nodes.join(", ")) };
    format!("{}{job}{nodes}", e.place)
}

/// What more is known of that place.
fn executed(e: &Executed) -> String {
    let others = e.other_jobs.as_ref().map(|jobs| match jobs.len() {
        0 => "no other job on its nodes".to_owned(),
        _ => format!("beside jobs {}", jobs.join(", ")),
    });
    let known = [
        e.host.as_ref().map(|host| format!("by ssh to {host}")),
        e.partition.as_ref().map(|partition| format!("partition {partition}")),
        e.gres.clone(),
        e.devices.as_ref().map(|devices| format!("devices {devices}")),
        e.exclusive.map(|yes| if yes { "exclusive" } else { "not exclusive" }.to_owned()),
        others,
        (e.resumed > 0).then(|| format!("resumed {}×", e.resumed)),
        Some(format!("bundle {}", e.bundle)),
    ];
    listed(known).unwrap_or_default()
}

/// This lists what is known of several things, if anything is.
fn listed(known: impl IntoIterator<Item = Option<String>>) -> Option<String> {
    let known: Vec<_> = known.into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(", "))
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
        (section("facts", "Where and how", Some(html! {
            (facts(r))
            p { "Everything is in " a href={ (stem(opened)) ".json" } { "the record" } "." }
        })))
        (section("results", "Results", Some(html! { div.dense { (results(e, r)) } })))
    };
    frame(FOLDER, &title, &main)
}

fn facts(r: &Record) -> Markup {
    let m = &r.machine;
    let ceilings = r.ceilings.iter().flat_map(|c| {
        let memory = c.memory.iter().map(|c| format!("{} {}", c.name, si(c.per_second, "B/s")));
        memory.chain(c.compute.iter().map(|c| format!("{} {}", c.name, si(c.per_second, "FLOP/s"))))
    });
    let ProtocolUsed { turns, budget_us, seed, preparations, pace, quick } = r.protocol;
    let pace = match (pace.rest_ms, pace.warm_ms) {
        (0, 0) => String::new(),
        (rest, warm) => format!(" after {rest} ms of rest and {warm} ms of its own calls"),
    };
    let quick = if quick { format!("{QUICK}; ") } else { String::new() };
    let protocol = format!(
        "{quick}{turns} turns of at most {budget_us} µs per profile{pace}, interleaved, over {preparations} \
         preparations; seed {seed:#x}"
    );
    let complete = if r.complete { "" } else { ", not complete" };
    let mut rows: Vec<(&str, Option<String>)> = vec![
        ("Machine", Some(format!("{}, {}", m.name, place(r)))),
        ("Executor", r.executor.as_ref().map(executed)),
        ("GPU", m.gpu.clone()),
        ("Driver", m.driver.clone()),
        ("CPU", Some(format!("{}, {} threads", m.cpu, m.threads))),
        ("Memory", Some(format!("{} GiB", number(m.memory_bytes as f64 / f64::from(1 << 30))))),
        ("System", Some(m.os.clone())),
        ("Time", Some(format!("{} to {}{complete}", r.started, r.finished))),
        ("Commit", r.code.commit.as_ref().map(|_| r.code.short())),
        ("Protocol", Some(protocol)),
        ("Clocks", clocks(r)),
        ("Ceilings", listed(ceilings.map(Some))),
        ("Definition", Some(r.definition_hash.clone())),
        ("Content", Some(r.content_hash.clone())),
    ];
    rows.extend(r.versions.iter().map(|(peer, parts)| {
        let parts = parts.iter().map(|(name, v)| Some(format!("{name} {v}")));
        (peer.as_str(), Some(listed(parts).unwrap_or_default()))
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
    listed([
        range("device", "MHz", |c| c.sm_mhz),
        range("power", "W", |c| c.power_w),
        range("CPU core", "MHz", |c| c.cpu_mhz),
    ])
}

/// Every result of a record, with everything that was worked out of its samples.
fn results(e: &Experiment, record: &Record) -> Markup {
    let labels = Labels::of(cases(record));
    let row = |r: &ResultEntry| {
        let (s, error_of) = (r.summary, r.error);
        let of = |p: &&Profiled| (&p.case_key, &p.profile) == (&r.case_key, &r.profile);
        let counters: Vec<_> = record.profiling.iter().filter(of).flat_map(counted).collect();
        let notes = r.reason.iter().chain(&r.plan).chain(&r.notes).chain(&counters);
        let notes = notes.map(String::as_str);
        let part = error_of.and_then(|e| Some(number(e.relative_frobenius? / e.frobenius_limit?)));
        vec![
            html! { (record.case_of(r).map_or(r.case_key.clone(), |case| labels.case(case))) },
            key(series(e, &r.profile), &r.profile),
            html! { span.wrong[r.status == Status::FailedVerification] { (r.status) } },
            or_dash(s.map(|s| time(s.median))),
            or_dash(s.map(|s| format!("{} – {}", time(s.q1), time(s.q3)))),
            or_dash(s.map(|s| time(s.min))),
            or_dash(s.map(|s| s.n.to_string())),
            or_dash(r.gbps().map(number)),
            or_dash(r.gflops().map(number)),
            or_dash(record.ratio_to_baseline(e, r).map(interval)),
            or_dash(error_of.and_then(|e| e.relative_frobenius).map(error)),
            or_dash(part),
            html! { span.sub { (notes.collect::<Vec<_>>().join(" · ")) } },
        ]
    };
    let heads = "case|profile|status|#median|#quartiles|#least|#samples|#GB/s|#GFLOP/s|#ratio|#error|#of limit|notes";
    let caption = format!(
        "Every result of {}. Ratios are relative to the baseline with their 95 % confidence interval; error is the \
         relative Frobenius error against float64, as a part of its limit too.",
        labels.common
    );
    table(&caption, &columns(heads), record.results.iter().map(row))
}

/// What a profiler counted in the last launch of each kernel, a line for each.
fn counted(profiled: &Profiled) -> Vec<String> {
    let line = |k: &KernelCounters| {
        let c = &k.counters;
        let class = c.class().map(|class| format!(": {class}")).unwrap_or_default();
        let values = [
            ("µs under the profiler", c.us),
            ("% DRAM", c.dram_percent),
            ("MB read", c.dram_read_bytes.map(|b| b / 1e6)),
            ("MB written", c.dram_written_bytes.map(|b| b / 1e6)),
            ("% tensor", c.tensor_percent),
            ("% SM", c.sm_percent),
            ("% occupancy", c.occupancy_percent),
            ("% L2 hits", c.l2_hit_percent),
            ("registers", c.registers),
        ];
        let known =
            values.iter().filter_map(|(what, x)| Some(format!(", {} {what}", number((*x)?))));
        format!("{}{class}{}", k.kernel, known.collect::<String>())
    };
    let nothing = profiled.reason.clone().filter(|_| profiled.kernels.is_empty());
    profiled.kernels.iter().map(line).chain(nothing).collect()
}
