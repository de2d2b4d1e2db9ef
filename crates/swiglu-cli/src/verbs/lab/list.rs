//! `swiglu lab list`, `show` and `report`: what experiments ask, what their records say, and why; a static site of everything
//! in the lab, and the document of its figures.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use serde_json::{Value, json};
use swiglu_lab::record::{Interval, Opened};
use swiglu_lab::report::{Entry, Site, age_in_words};
use swiglu_lab::{Experiment, History, LabError, RecordVerdict, VerdictState};

use super::places::PlaceArgs;
use crate::table::{self, Table, or_dash};
use crate::terminal::{Terminal, Verdict, say, shown};

/// What is decisive, with the claim's statistic: the geometric mean over the cases; none where no case could be compared.
fn headline(entry: &Entry) -> Option<(&RecordVerdict, Interval)> {
    entry.verdict.decisive().and_then(|decisive| Some((decisive, decisive.aggregate?)))
}

fn document(entry: &Entry) -> Value {
    let headline = headline(entry).map(|(of, Interval { value: ratio, ci95: [low, high] })| {
        let (cases, exceptions) = (of.cases.len(), of.exceptions.len());
        json!({
            "ratio": ratio, "low": low, "high": high, "cases": cases, "exceptions": exceptions,
        })
    });
    let decisive = entry.verdict.decisive();
    json!({
        "id": entry.experiment.id,
        "verdict": entry.verdict.state,
        "why": headline.is_none().then_some(&entry.verdict.headline),
        "headline": headline,
        "machine": decisive.map(|d| &d.machine),
        "age_commits": entry.age(),
        // What would decide it, where it is inconclusive.
        "undecided": decisive.and_then(|d| d.undecided.as_ref()),
    })
}

pub(super) fn list(places: &PlaceArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let lab = places.dir.lab()?;
    let site = Site::gather(&lab, &places.records()?, &History::around(&lab))?;
    let document: Vec<Value> = site.experiments.iter().map(document).collect();
    terminal.print(&document, |_, terminal| table_of(&site.experiments, terminal))?;
    expect_whole(&site)
}

/// Says what is strange. What could be read has been shown; what could not is an error all the same.
fn expect_whole(site: &Site) -> Result<Verdict> {
    site.strays.iter().for_each(|stray| say(format!("warning: {stray}")));
    let troubles = site.troubles();
    if !troubles.is_empty() {
        bail!("{}", troubles.join("\nerror: "));
    }
    Ok(Verdict::Passed)
}

fn table_of(entries: &[Entry], terminal: &mut Terminal) -> Result<()> {
    let figure = |entry, of: fn(&RecordVerdict, Interval) -> String| {
        headline(entry).map(|(decisive, ratio)| of(decisive, ratio)).unwrap_or_default()
    };
    Table::of(entries)
        .text("experiment", |r| &r.experiment.id)
        .text("verdict", |r| match r.verdict.state {
            state @ VerdictState::Supported => table::good(state),
            state @ VerdictState::Refuted => table::bad(state),
            state @ VerdictState::Inconclusive => table::open(state),
            state @ VerdictState::NotRun => state.into(),
        })
        .number("ratio", |r| figure(r, |_, ratio| table::ratio(ratio.value)))
        .number("interval", |r| {
            figure(r, |_, Interval { ci95: [low, high], .. }| format!("{low:.2} – {high:.2}"))
        })
        .number("cases", |r| figure(r, |d, _| d.cases.len().to_string()))
        .number("below", |r| {
            figure(r, |d, _| match d.exceptions.len() {
                0 => String::new(),
                n => n.to_string(),
            })
        })
        .text("machine", |r| r.verdict.decisive().map_or(&r.verdict.headline, |d| &d.machine))
        .number("commits since", |r| or_dash(r.age()))
        .print(terminal)
}

/// Refuses to go on with records of which some cannot be believed.
pub(super) fn expect_none(refused: Vec<LabError>) -> Result<()> {
    refused.into_iter().try_for_each(|refused| Err(refused.into()))
}

pub(super) fn show(id: &str, places: &PlaceArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let experiment = Experiment::find(&places.experiments()?, id)?;
    let entry = Entry::of(experiment, &places.records()?, &History::around(&places.dir.lab()?))?;
    let Entry { experiment, verdict, records, ages, refused } = entry;
    expect_none(refused)?;
    let kept = |(opened, age): (&Opened, &Option<u64>)| {
        let record = &opened.record;
        json!({
            "file": shown(&opened.path), "finished": record.finished, "commit": record.code.commit,
            "age_commits": age, "complete": record.complete, "quick": record.protocol.quick,
        })
    };
    let (claim, boundary) = (&experiment.claim.text, &experiment.boundary);
    let document = json!({
        "id": experiment.id, "title": experiment.title, "question": experiment.question,
        "records_of": experiment.measured_as(), "claim": claim,
        "verdict": verdict.state, "headline": verdict.headline,
        "machines": verdict.machines, "boundary": boundary,
        "records": records.iter().zip(&ages).map(kept).collect::<Vec<_>>(),
    });
    terminal.print(&document, |_, terminal| {
        writeln!(terminal, "{}: {}", verdict.state, verdict.headline)?;
        writeln!(terminal, "question  {}\nclaim     {claim}", experiment.question)?;
        if let Some(records) = &experiment.records {
            writeln!(terminal, "records   those of {records}")?;
        }
        for machine in &verdict.machines {
            writeln!(terminal, "\n{} ({}): {}", machine.machine, machine.run_id, machine.state)?;
            machine.reasons.iter().try_for_each(|reason| writeln!(terminal, "  {reason}"))?;
            if let Some(undecided) = &machine.undecided {
                writeln!(terminal, "  to decide it: {}", undecided.text)?;
            }
            for exception in &machine.exceptions {
                writeln!(terminal, "  exception: {exception}")?;
            }
            machine.marks.iter().try_for_each(|mark| writeln!(terminal, "  mark: {mark}"))?;
        }
        writeln!(terminal)?;
        for (Opened { path, record }, &age) in records.iter().zip(&ages) {
            let (commit, age) = (record.code.short(), age_in_words(age));
            let state = match (record.protocol.quick, record.complete) {
                (true, _) => ", quick: not evidence",
                (false, false) => ", not complete",
                (false, true) => "",
            };
            writeln!(terminal, "record {} at {commit}, {age}{state}", path.display())?;
        }
        writeln!(terminal, "\nnot covered: {}", boundary.replace('\n', " "))
    })
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true))]
pub(super) struct ReportArgs {
    /// Where to write the site: a new or empty directory, or an old report, which is replaced
    #[arg(long, value_name = "DIR", group = "what")]
    out: Option<PathBuf>,
    /// Write all figures as one Markdown document [default: MEASURED.md beside the lab]
    #[arg(long, value_name = "FILE", group = "what", num_args = 0..=1)]
    measured: Option<Option<PathBuf>>,
    #[command(flatten)]
    places: PlaceArgs,
}

pub(super) fn report(args: &ReportArgs, terminal: &mut Terminal) -> Result<Verdict> {
    if let Some(out) = args.out.as_ref().filter(|out| out.exists() && !out.is_dir()) {
        let shown = out.display();
        bail!("--out {shown}: it is a file; expected a new or empty directory, or an old report");
    }
    let lab = args.places.dir.lab()?;
    let site = Site::gather(&lab, &args.places.records()?, &History::around(&lab))?;
    let (mut said, mut index, mut measured, mut pages) = (String::new(), None, None, 0);
    let root = lab.parent().unwrap_or(Path::new(""));
    if let Some(file) = &args.measured {
        let file = file.clone().unwrap_or_else(|| root.join("MEASURED.md"));
        expect_ours(&file)?;
        site.write_measured(root, &file)?;
        let count = site.experiments.len();
        said = format!("{}: figures of {count} experiments\n", file.display());
        measured = Some(shown(file));
    }
    if let Some(out) = &args.out {
        pages = site.write(out)?;
        let path = shown(out.join("index.html"));
        said = format!("{path}: {pages} pages\n{said}");
        index = Some(path);
    }
    let document = json!({
        "index": index, "pages": pages, "measured": measured, "troubles": site.troubles(),
    });
    terminal.print(&document, |_, terminal| write!(terminal, "{said}"))?;
    expect_whole(&site)
}

/// Refuses to write over a document that somebody else wrote. What is no regular file is not read: a pipe that leads to
/// whoever reads our output would be waited for without end.
fn expect_ours(file: &Path) -> Result<()> {
    if !file.is_file() {
        return Ok(());
    }
    let there = std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    if there.is_empty() || Site::is_measured(&there) {
        return Ok(());
    }
    let file = file.display();
    bail!(
        "--measured {file}: it is not a document of figures; expected one, which is replaced, or a new file"
    )
}
