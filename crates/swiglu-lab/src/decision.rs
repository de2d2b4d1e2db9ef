//! Decisions: Markdown with front matter, resting on experiments.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where a decision stands, as its authors say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecisionStatus {
    /// Not yet acted on.
    Proposed,
    /// Acted on.
    Accepted,
    /// Another decision replaced it.
    Superseded,
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
