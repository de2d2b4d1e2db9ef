//! The page of a run: where, when, with what, and every result.

use maud::{Markup, html};

use super::evidence::ceilings;
use super::page::{Depth, frame, scroll};
use super::{Entry, ReportError, experiment, plots, tables};
use crate::format::{DASH, number, si};
use crate::profile::analyse_result;
use crate::record::{Clocks, Opened, Profiled, QUICK, Record};

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

pub(super) fn page(entry: &Entry, opened: &Opened) -> Result<String, ReportError> {
    let (e, r) = (&entry.experiment, &opened.record);
    let title = format!("Run {} of {}", r.run_id, e.title);
    let ceilings = ceilings(e, r);
    let roofline = plots::roofline(e, r, &ceilings)?;
    let analyses = r.results.iter().filter_map(|result| {
        let analysis = analyse_result(e, r.case_of(result)?, result, &ceilings)?;
        Some((format!("{}: {}", result.profile, result.case_key), analysis.text))
    });
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
        section aria-labelledby="versions" {
            h2 #versions { "Versions" }
            (versions(r))
        }
        @if r.cases.values().any(|c| c.clocks.is_some()) {
            section aria-labelledby="clocks" {
                h2 #clocks { "Clocks" }
                details {
                    summary { "At the begin and end of each case" }
                    (scroll("Clocks", &clocks(r)))
                }
            }
        }
        section aria-labelledby="results" {
            h2 #results { "Results" }
            (scroll("Every result", &tables::all_results(e, r)))
        }
        @if let Some(roofline) = roofline {
            section aria-labelledby="roofline" {
                h2 #roofline { "Against the machine" }
                (roofline)
            }
        }
        @if !r.profiling.is_empty() {
            section aria-labelledby="counters" {
                h2 #counters { "Hardware counters" }
                (scroll("Hardware counters", &counters(&r.profiling)))
            }
        }
        section aria-labelledby="analysis" {
            h2 #analysis { "What binds the results" }
            dl.analyses { @for (what, text) in analyses { dt { (what) } dd { (text) } } }
        }
    };
    Ok(frame(Depth::Folder, &title, &main))
}

fn facts(r: &Record) -> Markup {
    let m = &r.machine;
    let ceilings = r.ceilings.iter().flat_map(|c| {
        let memory = c.memory.iter().map(|c| format!("{} {}", c.name, si(c.per_second, "B/s")));
        memory.chain(c.compute.iter().map(|c| format!("{} {}", c.name, si(c.per_second, "FLOP/s"))))
    });
    let ceilings: Vec<_> = ceilings.collect();
    let rows: Vec<(&str, Option<String>)> = vec![
        ("Machine", Some(m.name.clone())),
        ("Device", Some(m.device.name().into())),
        ("GPU", m.gpu.clone()),
        ("Driver", m.driver.clone()),
        ("CPU", Some(format!("{}, {} threads", m.cpu, m.threads))),
        ("Memory", Some(format!("{} GiB", number(m.memory_bytes as f64 / f64::from(1 << 30))))),
        ("System", Some(m.os.clone())),
        ("Started", Some(r.started.clone())),
        ("Finished", Some(r.finished.clone())),
        ("Complete", Some(if r.complete { "yes" } else { "no" }.into())),
        (
            "Protocol",
            Some(format!(
                "{}{} turns of at most {} µs per profile{}, interleaved, over {}; seed {:#x}",
                if r.protocol.quick { format!("{QUICK}; ") } else { String::new() },
                r.protocol.turns,
                r.protocol.budget_us,
                match (r.protocol.pace.rest_ms, r.protocol.pace.warm_ms) {
                    (0, 0) => String::new(),
                    (0, warm) => format!(" after {warm} ms of its own calls"),
                    (rest, 0) => format!(" after {rest} ms of rest"),
                    (rest, warm) => {
                        format!(" after {rest} ms of rest and {warm} ms of its own calls")
                    }
                },
                match r.protocol.preparations {
                    1 => "one preparation".to_owned(),
                    n => format!("{n} preparations"),
                },
                r.protocol.seed,
            )),
        ),
        ("Measured ceilings", (!ceilings.is_empty()).then(|| ceilings.join(", "))),
        ("Definition", Some(r.definition_hash.clone())),
        (
            "Commit",
            r.code
                .commit
                .as_ref()
                .map(|c| format!("{c}{}", if r.code.dirty { ", with changes" } else { "" })),
        ),
        ("Content", Some(r.content_hash.clone())),
    ];
    html! {
        dl.facts {
            @for (name, value) in rows {
                @if let Some(value) = value { dt { (name) } dd { (value) } }
            }
        }
    }
}

fn clock(c: &Clocks) -> String {
    let parts = [
        c.sm_mhz.map(|f| format!("device {} MHz", number(f))),
        c.power_w.map(|p| format!("{} W", number(p))),
        c.cpu_mhz.map(|f| format!("CPU core {} MHz", number(f))),
    ];
    let known: Vec<_> = parts.into_iter().flatten().collect();
    if known.is_empty() { "not known".into() } else { known.join(", ") }
}

fn versions(r: &Record) -> Markup {
    html! {
        @if r.versions.is_empty() { p { "No peer said hello." } }
        dl.facts {
            @for (peer, parts) in &r.versions {
                dt { (peer) }
                dd {
                    @for (i, (name, version)) in parts.iter().enumerate() {
                        @if i > 0 { ", " } (name) " " (version)
                    }
                }
            }
        }
    }
}

fn clocks(r: &Record) -> Markup {
    html! {
        table {
            caption { span { "Clocks at the begin and end of each case" } }
            thead { tr { th scope="col" { "case" } th scope="col" { "begin" } th scope="col" { "end" } } }
            tbody {
                @for (case, [before, after]) in r.cases.iter().filter_map(|(key, c)| Some((key, c.clocks?))) {
                    tr { th.case scope="row" { (case) } td { (clock(&before)) } td { (clock(&after)) } }
                }
            }
        }
    }
}

fn counters(profiled: &[Profiled]) -> Markup {
    let or_dash = |x: Option<f64>| x.map_or(DASH.to_owned(), number);
    html! {
        table.dense {
            caption {
                span { "Counted by Nsight Compute in the last launch of each kernel, clocks as they were" }
            }
            thead {
                tr {
                    th scope="col" { "case" } th scope="col" { "profile" } th scope="col" { "kernel" }
                    @for name in ["class", "µs", "DRAM %", "read MB", "written MB", "tensor %", "SM %",
                        "occupancy %", "L2 hit %", "registers"]
                    {
                        th.n scope="col" { (name) }
                    }
                }
            }
            tbody {
                @for p in profiled {
                    @if p.kernels.is_empty() {
                        tr {
                            th.case scope="row" { (p.case_key) } td { (p.profile) }
                            td colspan="11" { (p.reason.as_deref().unwrap_or("nothing was counted")) }
                        }
                    }
                    @for k in &p.kernels {
                        @let c = &k.counters;
                        tr {
                            th.case scope="row" { (p.case_key) } td { (p.profile) } td { (k.kernel) }
                            td { (c.class().map_or(DASH.to_owned(), |c| c.to_string())) }
                            @for value in [c.us, c.dram_percent, c.dram_read_bytes.map(|b| b / 1e6),
                                c.dram_written_bytes.map(|b| b / 1e6), c.tensor_percent, c.sm_percent,
                                c.occupancy_percent, c.l2_hit_percent, c.registers]
                            {
                                td.n { (or_dash(value)) }
                            }
                        }
                    }
                }
            }
        }
    }
}
