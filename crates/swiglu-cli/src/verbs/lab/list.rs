//! `swiglu lab list`: every experiment with the verdict of its records.

use std::collections::BTreeSet;
use std::io::Write;

use anyhow::bail;
use clap::Args;
use comfy_table::{Attribute, Cell, Color};
use serde::Serialize;
use swiglu_lab::{Experiment, LabError, Source, Sources, Verdict as LabVerdict, VerdictState};

use super::{PlaceArgs, warn_of_strays};
use crate::Verdict;
use crate::table::{self, Column::Number, Column::Text};
use crate::terminal::{Shown, Terminal};

/// `YYYY-MM-DD`.
const DATE_LEN: usize = 10;

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    places: PlaceArgs,
}

#[derive(Debug, Serialize)]
struct Row {
    id: String,
    verdict: VerdictState,
    headline: String,
    /// How many there are.
    records: usize,
    title: String,
    /// Why it is not supported, or what to know about it, by machine.
    reasons: Vec<String>,
    stale: Option<String>,
    /// The day of the newest record.
    measured: Option<String>,
    /// Whether there is a repository to say if the code has changed since.
    source_known: bool,
    record_files: Vec<Shown>,
}

pub(super) fn list(args: &ListArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let dir = args.places.experiments()?;
    let sources = Sources::new(args.places.lab()?);
    let store = args.places.records()?;
    let (mut rows, mut broken) = (Vec::new(), Vec::new());
    let (mut counted, mut ids) = (BTreeSet::new(), Vec::new());
    for experiment in Experiment::read_dir(&dir)? {
        let experiment = match experiment {
            Ok(experiment) => experiment,
            Err(error) => {
                // Its records are not strange for that.
                if let LabError::Definition { path, .. } = &error {
                    ids.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
                }
                broken.push(error.to_string());
                continue;
            }
        };
        let (records, refused) = store.of_experiment(&experiment.id)?;
        broken.extend(refused.iter().map(|r| r.error.to_string()));
        counted.extend(refused.into_iter().map(|r| r.path));
        counted.extend(records.iter().map(|r| r.path.clone()));
        ids.push(experiment.id.clone());
        let verdict = LabVerdict::of(&experiment, &records, &sources);
        rows.push(Row {
            id: experiment.id,
            reasons: reasons(&verdict),
            verdict: verdict.state,
            headline: verdict.headline,
            records: records.len(),
            title: experiment.title,
            stale: verdict.stale,
            // Oldest first.
            measured: records.last().map(|r| r.record.finished.chars().take(DATE_LEN).collect()),
            source_known: *sources.of(experiment.device) != Source::Unknown,
            record_files: records.into_iter().map(|r| r.path.into()).collect(),
        });
    }
    if terminal.json() {
        terminal.print_json(&rows)?;
    } else {
        show(&rows, terminal)?;
    }
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    warn_of_strays(store.strays(&counted, &ids)?.iter().map(|stray| &stray.error));
    if !broken.is_empty() {
        // What could be read has been shown; what could not is an error all the same.
        bail!("{}", broken.join("\nerror: "));
    }
    Ok(Verdict::Passed)
}

fn show(rows: &[Row], terminal: &mut Terminal) -> anyhow::Result<()> {
    let columns = [
        Text("experiment"),
        Text("verdict"),
        Number("records"),
        Text("measured"),
        Text("headline"),
    ];
    let mut table = table::table(terminal, &columns);
    for row in rows {
        table.add_row(vec![
            Cell::new(&row.id),
            verdict_cell(row),
            Cell::new(row.records),
            Cell::new(row.measured.as_deref().unwrap_or("–")),
            Cell::new(&row.headline),
        ]);
    }
    terminal.write_all(table::lines(&table).as_bytes())?;
    for row in rows {
        for reason in &row.reasons {
            writeln!(terminal, "{}: {reason}", row.id)?;
        }
        if let Some(why) = &row.stale {
            writeln!(terminal, "{} is stale: {why}", row.id)?;
        }
    }
    if rows.iter().any(|row| row.measured.is_some() && !row.source_known) {
        writeln!(terminal, "no repository here: whether the code has changed since is not known")?;
    }
    Ok(())
}

fn reasons(verdict: &LabVerdict) -> Vec<String> {
    let of_machine = verdict
        .machines
        .iter()
        .flat_map(|m| m.reasons.iter().map(move |reason| format!("on {}, {reason}", m.machine)));
    of_machine.collect()
}

fn verdict_cell(row: &Row) -> Cell {
    let text = match row.stale {
        Some(_) if row.verdict != VerdictState::NotRun => format!("{}, stale", row.verdict),
        _ => row.verdict.to_string(),
    };
    let cell = Cell::new(text);
    match row.verdict {
        VerdictState::Supported => cell.fg(Color::Green),
        VerdictState::Refuted => cell.fg(Color::Red).add_attribute(Attribute::Bold),
        VerdictState::Inconclusive => cell.fg(Color::Yellow),
        VerdictState::NotRun => cell,
    }
}
