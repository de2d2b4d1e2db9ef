//! `swiglu lab report`: a static site of everything in the lab, and the document of its figures.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{ArgGroup, Args};
use serde_json::json;
use swiglu_lab::History;
use swiglu_lab::report::Site;

use super::list::expect_whole;
use super::places::PlaceArgs;
use crate::terminal::{Terminal, Verdict, shown};

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

pub(super) fn report(args: &ReportArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    if let Some(out) = args.out.as_ref().filter(|out| out.exists() && !out.is_dir()) {
        let shown = out.display();
        bail!("--out {shown}: it is a file; expected a new or empty directory, or an old report");
    }
    let lab = args.places.lab()?;
    let site = Site::gather(&lab, &args.places.records()?, &History::around(&lab))?;
    let (mut said, mut index, mut measured, mut pages) = (String::new(), None, None, 0);
    let root = lab.parent().unwrap_or(Path::new(""));
    if let Some(file) = &args.measured {
        let file = file.clone().unwrap_or_else(|| root.join("MEASURED.md"));
        expect_ours(&file)?;
        std::fs::write(&file, site.measured(root))
            .with_context(|| format!("writing {}", file.display()))?;
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
    terminal.print(&document, |_, terminal| Ok(terminal.write_all(said.as_bytes())?))?;
    expect_whole(&site)
}

/// Refuses to write over a document that somebody else wrote. What is no regular file is not read: a pipe that leads to
/// whoever reads our output would be waited for without end.
fn expect_ours(file: &Path) -> anyhow::Result<()> {
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
