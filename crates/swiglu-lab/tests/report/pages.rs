use std::collections::BTreeSet;
use std::path::Path;

use scraper::{ElementRef, Html, Selector};

use swiglu_lab::record::Store;
use swiglu_lab::report::{Entry, Files, Site};
use swiglu_lab::{Experiment, History, LabError, Verdict};

use super::made_up::{HOSTILE, site};

fn select<'a>(html: &'a Html, selector: &str) -> Vec<ElementRef<'a>> {
    html.select(&Selector::parse(selector).unwrap()).collect()
}

fn made() -> (tempfile::TempDir, Files) {
    let dir = tempfile::tempdir().unwrap();
    let files = site(dir.path()).files().unwrap();
    (dir, files)
}

fn pages(files: &Files) -> Vec<(&str, Html, &str)> {
    let html = files.iter().filter(|(name, _)| name.ends_with(".html"));
    html.map(|(name, content)| {
        let text = std::str::from_utf8(content).unwrap();
        (name.as_str(), Html::parse_document(text), text)
    })
    .collect()
}

#[test]
fn every_kind_of_page_is_there() {
    let (_dir, files) = made();
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    for name in [
        "decisions/0001-plan.html",
        "decisions/0002-doubted.html",
        "experiments/cpu-mlp-decode.html",
        "experiments/gated-linear-sweep.html",
        "experiments/hostile.html",
        "index.html",
        "runs/imaginary-cpu--2026-11-19-cpu-mlp-decode-first.html",
        "runs/imaginary-gpu--2026-11-19-gated-linear-sweep-two.html",
        "runs/imaginary-gpu--2026-11-19-gated-linear-sweep-two.json",
        "style.css",
    ] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
}

#[test]
fn pages_are_well_formed_and_have_landmarks() {
    let (_dir, files) = made();
    for (name, html, text) in pages(&files) {
        assert!(html.errors.is_empty(), "{name}: {:?}", html.errors);
        for landmark in
            ["html[lang]", "head > title", "header nav[aria-label]", "main#main", "h1", "footer"]
        {
            assert_eq!(select(&html, landmark).len(), 1, "{landmark} in {name}");
        }
        assert_eq!(select(&html, "a.skip[href='#main']").len(), 1, "{name}");
        assert!(
            select(&html, "script, iframe, img, [onclick], [style*='url(']").is_empty(),
            "{name}"
        );
        assert!(!text.contains("NaN") || name.contains("gated-linear"), "{name}");
        let headings: Vec<u32> = select(&html, "h1, h2, h3, h4")
            .iter()
            .map(|h| h.value().name()[1..].parse().unwrap())
            .collect();
        assert!(headings.windows(2).all(|w| w[1] <= w[0] + 1), "{name}: levels {headings:?}");
        let mut ids = BTreeSet::new();
        for element in select(&html, "[id]") {
            assert!(
                ids.insert(element.value().id().unwrap()),
                "{name}: id twice {:?}",
                element.value()
            );
        }
        for element in select(&html, "[aria-labelledby]") {
            let by = element.value().attr("aria-labelledby").unwrap();
            assert!(ids.contains(by), "{name}: nothing has the id {by}");
        }
    }
}

/// A run has one page, of the experiment that was measured, whoever else has its records.
#[test]
fn runs_are_of_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let mut site = site(dir.path());
    let (id, title) = ("z-goal".to_owned(), "What it is to reach".to_owned());
    let measured = &site.experiments[0];
    let of = Some(measured.experiment.id.clone());
    let experiment = Experiment { id, title, records: of, ..measured.experiment.clone() };
    let (records, ages) = (measured.records.clone(), measured.ages.clone());
    let verdict = Verdict::of(&experiment, &records);
    site.experiments.push(Entry { experiment, verdict, records, ages, refused: Vec::new() });
    let files = site.files().unwrap();
    let of = format!(
        "The records are those of <a href=\"../experiments/{}",
        site.experiments[0].experiment.id
    );
    for (name, _, text) in pages(&files) {
        assert!(!name.starts_with("runs/") || !text.contains("What it is to reach"), "{name}");
        assert_eq!(name == "experiments/z-goal.html", text.contains(&of), "{name}");
    }
}

#[test]
fn tables_say_what_they_hold() {
    let (_dir, files) = made();
    let mut tables = 0;
    for (name, html, _) in pages(&files) {
        for table in select(&html, "table") {
            let in_it = |s: &str| table.select(&Selector::parse(s).unwrap()).count();
            assert_eq!(in_it("caption"), 1, "{name}");
            assert!(in_it("thead th[scope=col]") > 0 && in_it("th:not([scope])") == 0, "{name}");
            let columns = in_it("thead th");
            for row in table.select(&Selector::parse("tbody tr").unwrap()) {
                let span = |cell: ElementRef<'_>| {
                    cell.value().attr("colspan").map_or(1, |c| c.parse::<usize>().unwrap())
                };
                let cells = row.child_elements().map(span).sum::<usize>();
                assert_eq!(cells, columns, "{name}: {}", row.html());
            }
            tables += 1;
        }
        // What scrolls can be reached and has a name.
        for scroll in select(&html, ".scroll") {
            assert_eq!(scroll.value().attr("tabindex"), Some("0"), "{name}");
            assert!(scroll.value().attr("aria-label").is_some(), "{name}");
        }
    }
    assert!(tables > 8, "{tables}");
}

/// A page of this repository's lab begins with its answer: of hundreds of cases the lists are closed until somebody asks.
#[test]
fn long_lists_are_folded() {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab");
    let site =
        Site::gather(&lab, &Store::new(lab.join("records")), &History::around(&lab)).unwrap();
    let files = site.files().unwrap();
    let mut folded = 0;
    for (name, page, _) in pages(&files) {
        if !name.starts_with("experiments/") {
            continue;
        }
        for list in select(&page, "table, ul") {
            let lines = list.select(&Selector::parse("tbody tr, li").unwrap()).count();
            let mut around = list.ancestors().filter_map(ElementRef::wrap);
            let is_folded = around.any(|element| element.value().name() == "details");
            assert!(lines <= 60 || is_folded, "{name}: {lines} lines of a {}", list.value().name());
            folded += usize::from(lines > 60);
        }
    }
    // Cases and exceptions of the sweep over numbers of tokens.
    assert!(folded >= 2, "{folded}");
}

#[test]
fn every_link_resolves() {
    let (_dir, files) = made();
    let mut links = 0;
    for (name, html, _) in pages(&files) {
        for element in select(&html, "[href], [src]") {
            let target = element.value().attr("href").or(element.value().attr("src")).unwrap();
            if target.starts_with("https://") {
                continue;
            }
            links += 1;
            assert!(!target.contains(':') && !target.starts_with('/'), "{name}: {target}");
            let (path, fragment) = target.split_once('#').unwrap_or((target, ""));
            let folder = Path::new(name).parent().unwrap();
            let mut full = Vec::new();
            let joined = folder.join(path);
            for part in joined.iter().map(|p| p.to_str().unwrap()) {
                if part == ".." {
                    assert!(full.pop().is_some(), "{name}: {target} leaves the site");
                } else {
                    full.push(part);
                }
            }
            let full = if path.is_empty() { name.to_owned() } else { full.join("/") };
            let content = files.get(&full);
            let content = content.unwrap_or_else(|| panic!("{name}: {target} is no file"));
            if !fragment.is_empty() {
                let page = Html::parse_document(std::str::from_utf8(content).unwrap());
                assert_eq!(
                    select(&page, &format!("[id='{fragment}']")).len(),
                    1,
                    "{name}: {target}"
                );
            }
        }
    }
    assert!(links > 60, "{links}");
}

#[test]
fn plots_are_named_and_drawn_from_numbers() {
    let (_dir, files) = made();
    let mut figures = 0;
    for (name, html, text) in pages(&files) {
        for figure in select(&html, "figure") {
            figures += 1;
            let count = |s: &str| figure.select(&Selector::parse(s).unwrap()).count();
            assert!(count("figcaption") == 1 && count("svg") > 0, "{name}");
            assert_eq!(count("svg"), count("svg[role=img][aria-label] > title"), "{name}");
            assert!(count("rect, polyline, circle, polygon") > 2, "{name}: {}", figure.html());
        }
        for svg in text.split("<svg").skip(1) {
            let svg = format!("<svg{}</svg>", svg.split("</svg>").next().unwrap());
            let document =
                roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{e}: {svg}"));
            for node in document.descendants() {
                for attribute in node.attributes().filter(|a| a.name() != "aria-label") {
                    let value = attribute.value();
                    assert!(!value.contains("NaN") && !value.contains("inf"), "{name}: {value}");
                }
            }
        }
    }
    assert_eq!(figures, 5, "two answers, two sweeps, a roofline");
}

#[test]
fn text_from_outside_stays_text() {
    let (_dir, files) = made();
    let mut seen = 0;
    for (name, _, text) in pages(&files) {
        assert!(!text.contains("<script"), "{name}");
        assert!(!text.contains("javascript:"), "{name}");
        seen += text.matches("&lt;script&gt;alert(1)").count();
    }
    assert!(seen > 4, "{seen}");
    let page = Html::parse_document(
        std::str::from_utf8(&files["experiments/gated-linear-sweep.html"]).unwrap(),
    );
    assert!(select(&page, "strong").iter().any(|s| s.inner_html() == "1"), "Markdown is read");
    assert_eq!(select(&page, "a[href^='https:']").len(), 1);
    let hostile =
        Html::parse_document(std::str::from_utf8(&files["experiments/hostile.html"]).unwrap());
    assert_eq!(select(&hostile, "h1")[0].text().collect::<String>(), HOSTILE);
}

#[test]
fn pages_say_what_the_records_say() {
    let (_dir, files) = made();
    let text = |name: &str| {
        let page = Html::parse_document(std::str::from_utf8(&files[name]).unwrap());
        page.root_element()
            .text()
            .collect::<String>()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    let sweep = text("experiments/gated-linear-sweep.html");
    for expected in [
        "Is the fused kernel faster",
        "as fast as the fastest of ",
        "Ours is ours-planned; the figure is the geometric mean of all cases",
        "age not known",
        "no case is below 0.97",
        "quack (not available): no module named quack – 7 cases",
        "wrong result",
        "swiglu lab run gated-linear-sweep --run-id NAME",
        "M above 16384 was not measured",
        "0009-missing, which is not written",
        "What binds ours-planned",
        "predicted gain",
        "largest error, of its limit",
        "imaginary-gpu, local",
        "imaginary-gpu, slurm:gpu, job 4711 on node7",
        "does not count",
    ] {
        assert!(sweep.contains(expected), "{expected}: {sweep}");
    }
    let run = text("runs/imaginary-gpu--2026-11-19-gated-linear-sweep-two.html");
    for expected in [
        "Imaginary GPU 141 GB",
        "999.1",
        "device 1755 to 1755 MHz",
        "imaginary-gpu, slurm:gpu, job 4711 on node7",
        "partition gpu, not exclusive, beside jobs 4712, resumed 1×, bundle b0d1",
        "torch 2.11.0",
        "abcdef012",
        "22.0 % DRAM, 240 MB read, 88.0 % tensor",
        "no ncu",
        "row 3",
    ] {
        assert!(run.contains(expected), "{expected}: {run}");
    }
    let index = text("index.html");
    for expected in [
        "not run 1",
        "Plan by cost",
        "imaginary-gpu · 2026-11-20 · age not known",
        "17 commits to this backend since",
        "not measured yet",
        "no record",
        "claimed: at least 1×",
        "doubted",
    ] {
        assert!(index.contains(expected), "{expected}: {index}");
    }
    let doubted = text("decisions/0002-doubted.html");
    for expected in ["gone: there is no such experiment", "gone, which is not defined", "doubted"] {
        assert!(doubted.contains(expected), "{expected}: {doubted}");
    }
    assert!(!text("decisions/0001-plan.html").contains("does not carry it"));
}

#[test]
fn a_quick_record_is_called_no_evidence_wherever_it_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut site = site(dir.path());
    for entry in &mut site.experiments {
        entry.records.iter_mut().for_each(|opened| opened.record.protocol.quick = true);
        entry.verdict = Verdict::of(&entry.experiment, &entry.records);
    }
    let files = site.files().unwrap();
    let said = |name: &str| {
        std::str::from_utf8(&files[name]).unwrap().matches("quick: not evidence").count()
    };
    assert!(said("index.html") > 0);
    // In the headline, of the results shown, and in the list of runs.
    assert!(said("experiments/gated-linear-sweep.html") >= 4);
    assert_eq!(said("runs/imaginary-gpu--2026-11-19-gated-linear-sweep-two.html"), 1);
}

#[test]
fn the_same_evidence_gives_the_same_bytes_and_an_old_report_is_replaced() {
    let records = tempfile::tempdir().unwrap();
    let site = site(records.path());
    let out = tempfile::tempdir().unwrap();
    let target = out.path().join("new/report");
    assert_eq!(site.write(&target).unwrap(), 9);
    let read = |name: &str| std::fs::read(target.join(name)).unwrap();
    let first = read("experiments/gated-linear-sweep.html");
    // A page of the old report that the new one does not have goes, what else is there stays.
    std::fs::write(target.join("notes.txt"), "mine").unwrap();
    let smaller = Site { decisions: Vec::new(), ..site };
    assert_eq!(smaller.write(&target).unwrap(), 7);
    assert!(!target.join("decisions/0001-plan.html").exists());
    assert_eq!(std::fs::read_to_string(target.join("notes.txt")).unwrap(), "mine");
    assert_ne!(read("index.html").len(), 0);
    let again = tempfile::tempdir().unwrap();
    super::made_up::site(again.path()).write(&target).unwrap();
    assert_eq!(first, read("experiments/gated-linear-sweep.html"));
}

#[test]
fn a_directory_with_other_things_is_refused() {
    let out = tempfile::tempdir().unwrap();
    std::fs::write(out.path().join("thesis.tex"), "years of work").unwrap();
    let error = Site::default().write(out.path()).unwrap_err();
    assert!(
        matches!(error, LabError::Refused { .. }) && error.to_string().contains("choose"),
        "{error}"
    );
    // A list of files that leads outside removes nothing outside.
    let inside = out.path().join("report");
    Site::default().write(&inside).unwrap();
    std::fs::write(
        inside.join(".swiglu-lab-report"),
        "../thesis.tex\n/etc/hostname\n\nindex.html\n",
    )
    .unwrap();
    Site::default().write(&inside).unwrap();
    assert!(out.path().join("thesis.tex").exists() && inside.join("index.html").exists());
    let file = out.path().join("thesis.tex");
    assert!(matches!(Site::default().write(&file), Err(LabError::Io { .. })));
}

#[test]
fn an_empty_lab_has_a_page() {
    let files = Site::default().files().unwrap();
    assert_eq!(files.keys().collect::<Vec<_>>(), ["index.html", "style.css"]);
    assert!(std::str::from_utf8(&files["index.html"]).unwrap().contains("There are none"));
}
