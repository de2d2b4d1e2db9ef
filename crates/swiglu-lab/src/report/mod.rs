//! The static site: what was asked, what was measured, what it says. It opens from disk, needs no
//! network and no scripts, and is a function of definitions, records, decisions and their place in the
//! history: the same evidence gives the same bytes. Beside it the document of all figures (`measured`).

pub mod chart;
mod decision;
mod evidence;
mod experiment;
mod index;
mod measured;
mod page;
mod plots;
mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::code::History;
use crate::decision::Decision;
use crate::definition::Experiment;
use crate::error::{LabError, Result};
use crate::files::{entries, file_stem};
use crate::record::{Opened, Store};
use crate::verdict::Verdict;

/// Says that a directory is a report of ours, which may be replaced.
const MARK: &str = ".swiglu-lab-report";
const STYLE: &str = include_str!("style.css");

/// An experiment with all its evidence.
#[derive(Debug)]
pub struct Entry {
    /// The definition.
    pub experiment: Experiment,
    /// What the records say.
    pub verdict: Verdict,
    /// All of them, oldest first.
    pub records: Vec<Opened>,
    /// Of each record, how many commits to the backend came after it; none where nobody knows.
    pub ages: Vec<Option<u64>>,
    /// These say which files are no believable records.
    pub refused: Vec<LabError>,
}

impl Entry {
    /// An experiment with its records, and the files that are none.
    pub fn of(experiment: Experiment, store: &Store, history: &History) -> Result<Self> {
        let (records, refused) = store.of_experiment(experiment.measured_as())?;
        let verdict = Verdict::of(&experiment, &records);
        let age = |o: &Opened| history.age(&o.record.code, experiment.device);
        let ages = records.iter().map(age).collect();
        Ok(Self { experiment, verdict, records, ages, refused })
    }

    /// The age of the record that the verdict is of.
    pub fn age(&self) -> Option<u64> {
        let place = evidence::place_of(self, self.verdict.decisive()?)?;
        self.ages.get(place).copied().flatten()
    }
}

/// Commits to the backend since a record was taken.
pub fn age_in_words(age: Option<u64>) -> String {
    match age {
        Some(1) => "1 commit to this backend since".into(),
        Some(n) => format!("{n} commits to this backend since"),
        None => "age not known".into(),
    }
}

/// Everything that the site shows.
#[derive(Debug, Default)]
pub struct Site {
    /// In the order of their ids.
    pub experiments: Vec<Entry>,
    /// In the order of their numbers.
    pub decisions: Vec<Decision>,
    /// Definitions and decisions that cannot be read, each with the reason.
    pub broken: Vec<String>,
    /// Records that no experiment counts, each with the reason: they are not shown.
    pub strays: Vec<String>,
}

/// Files of the site by their path in it.
pub type Files = BTreeMap<String, Vec<u8>>;

impl Site {
    /// Everything in a lab: definitions, their records with their age, decisions. What cannot be read is
    /// listed.
    pub fn gather(lab: &Path, store: &Store, history: &History) -> Result<Self> {
        let mut site = Self::default();
        let definitions = lab.join("experiments");
        let (mut counted, mut ids) = (BTreeSet::new(), Vec::new());
        for definition in Experiment::read_dir(&definitions)? {
            match definition {
                Ok(experiment) => {
                    let entry = Entry::of(experiment, store, history)?;
                    ids.push(entry.experiment.measured_as().to_owned());
                    counted.extend(entry.records.iter().map(|r| r.path.clone()));
                    counted.extend(
                        entry.refused.iter().filter_map(LabError::path).map(Path::to_path_buf),
                    );
                    site.experiments.push(entry);
                }
                Err(error) => {
                    // Its records are not strange for that.
                    ids.extend(error.path().map(file_stem));
                    site.broken.push(error.to_string());
                }
            }
        }
        for decision in Decision::read_dir(&lab.join("decisions"))? {
            match decision {
                Ok(decision) => site.decisions.push(decision),
                Err(error) => site.broken.push(error.to_string()),
            }
        }
        site.strays = store.strays(&counted, &ids)?.iter().map(LabError::to_string).collect();
        Ok(site)
    }

    /// Everything that could not be read: definitions, decisions, records.
    pub fn troubles(&self) -> Vec<String> {
        // Experiments that share records share what is refused among them.
        let own = self.experiments.iter().filter(|e| e.experiment.records.is_none());
        let refused = own.flat_map(|e| &e.refused).map(LabError::to_string);
        self.broken.iter().cloned().chain(refused).collect()
    }

    /// All files: pages, the stylesheet, and copies of the records that pages link to.
    pub fn files(&self) -> Result<Files> {
        let mut files = Files::new();
        let style = format!("{}\n{STYLE}", chart::PALETTE);
        files.insert("style.css".into(), style.into_bytes());
        files.insert("index.html".into(), index::page(self).into_bytes());
        for entry in &self.experiments {
            let html = experiment::page(self, entry);
            files.insert(experiment::path(&entry.experiment.id), html.into_bytes());
            // The pages of its runs are those of the experiment that was measured.
            let own = entry.experiment.records.is_none();
            for opened in entry.records.iter().filter(|_| own) {
                let html = run::page(entry, opened);
                files.insert(run::path(opened, "html"), html.into_bytes());
                let record = fs::read(&opened.path).map_err(LabError::io("read", &opened.path))?;
                files.insert(run::path(opened, "json"), record);
            }
        }
        let verdicts = self.verdicts();
        for decision in &self.decisions {
            let html = decision::page(self, decision, &verdicts);
            files.insert(decision::path(&decision.id), html.into_bytes());
        }
        Ok(files)
    }

    fn verdicts(&self) -> BTreeMap<String, Verdict> {
        let pair = |e: &Entry| (e.experiment.id.clone(), e.verdict.clone());
        self.experiments.iter().map(pair).collect()
    }

    /// Writes the site to a directory: an empty one, a new one, or a report to be replaced. Files of
    /// the old report that are not in the new one go. The number of pages.
    ///
    /// # Errors
    /// [`LabError::Refused`], [`LabError::Io`]; the old report is complete until all pages are made.
    pub fn write(&self, out: &Path) -> Result<usize> {
        let old = listed(out)?;
        let mut files = self.files()?;
        let names: String = files.keys().flat_map(|name| [name.as_str(), "\n"]).collect();
        files.insert(MARK.into(), names.into_bytes());
        for (name, content) in &files {
            let path = out.join(name);
            let dir = path.parent().unwrap_or(out);
            fs::create_dir_all(dir).map_err(LabError::io("create directory", dir))?;
            fs::write(&path, content).map_err(LabError::io("write", &path))?;
        }
        for name in old.iter().filter(|name| !files.contains_key(*name)) {
            // Gone already is as good.
            let _ = fs::remove_file(out.join(name));
        }
        Ok(files.keys().filter(|name| name.ends_with(".html")).count())
    }
}

/// The files of a report that is in a directory; none if it is empty or not there.
fn listed(out: &Path) -> Result<Vec<String>> {
    let mark = out.join(MARK);
    if let Ok(names) = fs::read_to_string(&mark) {
        // Names come from a file: nothing outside the directory is ever removed.
        let inside = |name: &&str| {
            let mut parts = Path::new(name).components();
            !name.is_empty() && parts.all(|p| matches!(p, std::path::Component::Normal(_)))
        };
        return Ok(names.lines().filter(inside).map(str::to_owned).collect());
    }
    if entries(out)?.is_empty() {
        return Ok(Vec::new());
    }
    Err(LabError::Refused {
        place: out.display().to_string(),
        what: "writing a report there",
        why: "it is not empty and not a report of this program".into(),
        advice: "choose another directory, or empty it",
    })
}
