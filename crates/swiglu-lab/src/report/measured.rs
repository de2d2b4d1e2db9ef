//! All figures in one document, as Markdown.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::evidence::{Labels, groups, median, opened_of, rivals};
use super::{Entry, Site};
use crate::case::Case;
use crate::error::{LabError, Result};
use crate::files::write_whole;
use crate::format::{DASH, interval};
use crate::record::{Opened, Record};
use crate::verdict::RecordVerdict;

/// So many sizes become columns of a table; more become rows.
const COLUMNS: usize = 6;

/// Of more cases than this, in rows, the least are shown.
const ROWS: usize = 100;
/// So many then.
const LEAST: usize = 6;

/// How the third line of the document begins.
const MARK: &str = "Written by `swiglu lab report --measured`";
/// How to read it.
const HEAD: &str = " from the definitions and records of the lab; not to be edited. A ratio is the \
time of the fastest of the others by that of ours, so above 1 ours is faster; \
[low, high] is its 95 % interval, and over several cases it is the geometric mean. An exception is a case below the \
floor that its claim sets. [METHODOLOGY.md](METHODOLOGY.md) says how this is measured and where it can mislead, \
[notes](docs/notes-on-measurements.md) what else was seen.
";

impl Site {
    /// Whether a document is one of figures, which may be replaced.
    pub fn is_measured(document: &[u8]) -> bool {
        document.split(|&b| b == b'\n').nth(2).is_some_and(|l| l.starts_with(MARK.as_bytes()))
    }

    /// Writes [`Self::measured`] to a file, which is as it was until all of it is there.
    ///
    /// # Errors
    /// [`LabError::Io`].
    pub fn write_measured(&self, root: &Path, file: &Path) -> Result<()> {
        let text = self.measured(root);
        match file.metadata() {
            // A device or a pipe is not replaced.
            Ok(found) if !found.is_file() => {
                fs::write(file, text).map_err(LabError::io("write", file))
            }
            _ => write_whole(file, text.as_bytes(), ".measured-", 0o644),
        }
    }

    /// The figures of all experiments: a table, then a section for each. Links lead from the directory `root`.
    pub fn measured(&self, root: &Path) -> String {
        let mut out = format!("# Measured\n\n{MARK}{HEAD}");
        let heads = "experiment|question|verdict|ratio|cases|exceptions|machine|commit";
        let summary = self.experiments.iter().flat_map(|e| summary(root, e));
        push_table(&mut out, heads, summary);
        self.experiments.iter().for_each(|entry| section(&mut out, root, self, entry));
        out
    }
}

/// A row for each machine, the first with the question.
fn summary(root: &Path, entry: &Entry) -> Vec<Vec<String>> {
    let (e, verdict) = (&entry.experiment, &entry.verdict);
    let asked = [format!("[{0}](#{0})", e.id), e.question.clone()];
    let row = |(i, found): (usize, &RecordVerdict)| {
        let opened = opened_of(entry, found);
        let link = |o: &Opened| link(&found.machine, root, &o.path);
        let found = [
            found.state.to_string(),
            found.aggregate.map_or(DASH.into(), interval),
            found.cases.len().to_string(),
            found.exceptions.len().to_string(),
            opened.map_or(found.machine.clone(), link),
            opened.map_or(DASH.into(), |o| o.record.code.short()),
        ];
        let asked = if i == 0 { asked.clone() } else { Default::default() };
        asked.into_iter().chain(found).collect()
    };
    if verdict.machines.is_empty() {
        let found = [verdict.state.name(), DASH, DASH, DASH, &verdict.headline, DASH];
        return vec![asked.into_iter().chain(found.map(str::to_owned)).collect()];
    }
    verdict.machines.iter().enumerate().map(row).collect()
}

fn section(out: &mut String, root: &Path, site: &Site, entry: &Entry) {
    let e = &entry.experiment;
    let labels = Labels::of(e.cases.iter());
    let decisive = entry.verdict.decisive();
    *out += &format!("\n## {}\n\n{}", e.id, link(&e.title, root, &e.path));
    *out += &format!(": {}, {}. ", entry.verdict.state, entry.verdict.headline);
    if let Some(undecided) = decisive.and_then(|d| d.undecided.as_ref()) {
        *out += &format!("To decide it: {}. ", undecided.text);
    }
    *out += &format!("Ours is `{}`, beside {}", e.claim.subject, rivals(e));
    *out += &decisive.map_or(String::new(), |d| format!(", on {}", d.machine));
    if let Some(records) = &e.records {
        *out += &format!(", by the records of [{records}](#{records})");
    }
    *out += &format!("; {}. Not covered: {}", labels.common, first_sentence(&e.boundary));
    for id in &e.decisions {
        if let Some(decision) = site.decisions.iter().find(|d| d.id == *id) {
            *out += &format!(" Decision: {}.", link(&decision.title, root, &decision.path));
        }
    }
    *out += "\n";
    let judged = decisive.and_then(|verdict| Some((verdict, opened_of(entry, verdict)?)));
    let Some((verdict, Opened { record, .. })) = judged else { return };
    let figures = |case: &Case| figures(&e.claim.subject, verdict, record, case);
    let groups = groups(&labels, e.cases.iter());
    let sizes: BTreeSet<usize> = e.cases.iter().map(|case| case.m).collect();
    if (2..=COLUMNS).contains(&sizes.len()) && groups.len() < e.cases.len() {
        let heads: String = sizes.iter().map(|m| format!("|M = {m}")).collect();
        let row = |(label, cases): &(String, Vec<&Case>)| {
            let cell = |m: &usize| {
                let cases = cases.iter().filter(|case| case.m == *m);
                cases.map(|case| figures(case).join(" · ")).collect::<Vec<_>>().join("; ")
            };
            let name = if label.is_empty() { "all" } else { label };
            std::iter::once(name.to_owned()).chain(sizes.iter().map(cell)).collect()
        };
        push_table(out, &format!("case{heads}"), groups.iter().map(row));
    } else {
        let row = |case: &Case| [labels.case(case)].into_iter().chain(figures(case)).collect();
        let mut cases: Vec<&Case> = e.cases.iter().collect();
        if cases.len() > ROWS {
            let ratio = |case: &Case| verdict.case(&case.key()).map_or(0.0, |c| c.ratio.value);
            cases.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
            cases.truncate(LEAST);
            *out += &format!("\nOf {} cases the {LEAST} with the least ratios:\n", e.cases.len());
        }
        push_table(out, "case|ours|best of the others|ratio", cases.into_iter().map(row));
    }
}

/// Ours, the best of the others, the ratio.
fn figures(subject: &str, verdict: &RecordVerdict, record: &Record, case: &Case) -> [String; 3] {
    let key = case.key();
    let ours = median(record, &key, subject);
    match verdict.case(&key) {
        Some(found) => {
            let rival = format!("{} {}", found.against, median(record, &key, &found.against));
            [ours, rival, interval(found.ratio)]
        }
        None => [ours, DASH.into(), DASH.into()],
    }
}

/// This adds a table, whose heads have `|` between them.
fn push_table(out: &mut String, heads: &str, rows: impl Iterator<Item = Vec<String>>) {
    let rule = "---|".repeat(heads.split('|').count());
    *out += &format!("\n| {} |\n|{rule}\n", heads.replace('|', " | "));
    for row in rows {
        let cells: Vec<_> = row.iter().map(|c| c.replace('|', "\\|").replace('\n', " ")).collect();
        *out += &format!("| {} |\n", cells.join(" | "));
    }
}

/// A link where the file lies below `root`, else its text.
fn link(text: &str, root: &Path, path: &Path) -> String {
    match path.strip_prefix(root) {
        Ok(below) => format!("[{text}]({})", below.display()),
        Err(_) => text.to_owned(),
    }
}

fn first_sentence(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.split_once(". ") {
        Some((first, _)) => format!("{first}."),
        None => text,
    }
}
