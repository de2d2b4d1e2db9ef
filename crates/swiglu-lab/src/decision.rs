//! Decisions: Markdown with front matter, resting on experiments.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::error::Result;
use crate::files::{entries, file_name, file_stem};
use crate::place::{Place, text_of};
use crate::text::named;
use crate::verdict::{Verdict, VerdictState};

const FENCE: &str = "+++";

named! {
    /// Where a decision stands, as its authors say.
    pub enum DecisionStatus {
        /// Not yet acted on.
        Proposed = "proposed",
        /// Acted on.
        Accepted = "accepted",
        /// Another decision replaced it.
        Superseded = "superseded",
    }
}

/// A decision: `NNNN-*.md`, TOML between two lines of `+++`, then Markdown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// The stem of its file, for example `0001-fused-on-cpu`.
    pub id: String,
    /// One line.
    pub title: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
    /// Where it stands.
    pub status: DecisionStatus,
    /// Ids of the experiments it rests on.
    pub experiments: Vec<String>,
    /// What was decided, in one sentence.
    pub claim: String,
    /// The text, Markdown.
    pub body: String,
    /// The file it was read from.
    pub path: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontMatter {
    id: Spanned<String>,
    title: Spanned<String>,
    date: Spanned<toml::value::Datetime>,
    status: DecisionStatus,
    experiments: Spanned<Vec<String>>,
    claim: Spanned<String>,
}

impl Decision {
    /// Reads one decision.
    ///
    /// # Errors
    /// [`LabError::Definition`](crate::LabError::Definition) with line and column, [`LabError::Io`](crate::LabError::Io).
    pub fn read(path: &Path) -> Result<Self> {
        let text = text_of(path)?;
        Self::parse(&text, path)
    }

    /// Reads every `*.md` of a directory whose name begins with a digit, sorted; none if there is
    /// no directory. A broken one does not hide the others.
    pub fn read_dir(dir: &Path) -> Result<Vec<Result<Self>>> {
        let mut paths = entries(dir)?;
        paths.retain(|path| {
            let name = file_name(path);
            name.ends_with(".md") && name.starts_with(|c: char| c.is_ascii_digit())
        });
        Ok(paths.iter().map(|path| Self::read(path)).collect())
    }

    /// Reads a decision from text; `path` names it in errors and fixes its id.
    ///
    /// # Errors
    /// [`LabError::Definition`](crate::LabError::Definition).
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let whole = Place::new(text, path);
        let expected = "expected front matter: a line +++, TOML, a line +++";
        // It begins with the end of the first line, so that lines count as in the file.
        let rest = text.strip_prefix(FENCE).filter(|rest| rest.starts_with('\n'));
        let rest = rest.ok_or_else(|| whole.at(0..0, expected))?;
        let end = rest.find("\n+++\n").ok_or_else(|| {
            whole.at(text.len()..text.len(), format!("the front matter does not end: {expected}"))
        })?;
        let (front, body) = (&rest[..=end], &rest[end + "\n+++\n".len()..]);
        let place = Place::new(front, path);
        let front: FrontMatter = place.toml()?;
        let stem = file_stem(path);
        let id = front.id.get_ref();
        let message = format!("id `{id}`: expected the name of the file, `{stem}`");
        place.expect(*id == stem, &front.id, message)?;
        let date = front.date.get_ref().date;
        place.expect(date.is_some(), &front.date, "expected a date such as 2026-01-31")?;
        let message = "no experiments: expected the ids of those it rests on";
        place.expect(!front.experiments.get_ref().is_empty(), &front.experiments, message)?;
        Ok(Self {
            id: stem,
            title: place.sentence("title", &front.title)?,
            date: date.map(|d| d.to_string()).unwrap_or_default(),
            status: front.status,
            experiments: front.experiments.into_inner(),
            claim: place.sentence("claim", &front.claim)?,
            body: body.trim().to_owned(),
            path: path.to_path_buf(),
        })
    }

    /// Why its evidence no longer carries it, one reason per experiment; empty if it does.
    pub fn doubts(&self, verdicts: &BTreeMap<String, Verdict>) -> Vec<String> {
        let doubt = |id: &String| match verdicts.get(id) {
            None => Some(format!("{id}: there is no such experiment")),
            Some(v) if v.state == VerdictState::NotRun => Some(format!("{id}: {}", v.headline)),
            Some(v) if v.state == VerdictState::Refuted => Some(format!("{id} is refuted")),
            Some(_) => None,
        };
        self.experiments.iter().filter_map(doubt).collect()
    }
}
