//! `swiglu lab report`: a static site of everything in the lab.

use std::io::Write;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use serde::Serialize;
use swiglu_lab::report::Site;

use super::places::{PlaceArgs, warn_of_strays};
use crate::terminal::{Shown, Terminal, Verdict};

#[derive(Debug, Args)]
pub(super) struct ReportArgs {
    /// Where to write the site: a new or empty directory, or an old report, which is replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    places: PlaceArgs,
}

#[derive(Serialize)]
struct Document {
    index: Shown,
    pages: usize,
    plots: usize,
    troubles: Vec<String>,
}

pub(super) fn report(args: &ReportArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let shown = args.out.display();
    if args.out.exists() && !args.out.is_dir() {
        bail!("--out {shown}: it is a file; expected a new or empty directory, or an old report");
    }
    let site = Site::gather(&args.places.lab()?, &args.places.records()?)?;
    let written = site.write(&args.out)?;
    let index = Shown::from(args.out.join("index.html"));
    let troubles: Vec<String> = site.troubles().into_iter().map(str::to_owned).collect();
    if terminal.json() {
        let (pages, plots) = (written.pages, written.plots);
        terminal.print_json(&Document { index, pages, plots, troubles: troubles.clone() })?;
    } else {
        let (pages, plots) = (written.pages, written.plots);
        writeln!(terminal, "{}: {pages} pages, {plots} plots", index.display())?;
    }
    warn_of_strays(&site.strays);
    if !troubles.is_empty() {
        // The site shows what could be read; what could not is an error all the same.
        bail!("{}", troubles.join("\nerror: "));
    }
    Ok(Verdict::Passed)
}
