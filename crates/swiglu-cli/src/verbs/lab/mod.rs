//! `swiglu lab`: experiments, their runs, and what the records say.

pub(crate) mod adhoc;
mod gate;
mod list;
mod on;
pub(crate) mod peer;
pub(crate) mod places;
mod ready;
mod request;
pub(crate) mod run;
mod session;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::terminal::{Terminal, Verdict};
use places::{LabDirArgs, PlaceArgs};
use request::RunArgs;

#[derive(Debug, Args)]
pub(crate) struct LabArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show every experiment with the verdict of its records, a line each
    List(PlaceArgs),
    /// Show what an experiment asks, what its records say, and why
    Show {
        /// The experiment's id
        experiment: String,
        #[command(flatten)]
        places: PlaceArgs,
    },
    /// Show what a run would need and whether it is there: exit code 1 if something is missing
    Ready(ready::ReadyArgs),
    /// Run an experiment and record it; the same run id goes on with a run that was ended
    Run(Box<RunArgs>),
    /// Show the runs that happen elsewhere
    Status {
        /// Those that are done and fetched, too
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        places: LabDirArgs,
    },
    /// Bring back the records of runs that happen elsewhere: exit code 75 if one is not done
    Fetch {
        /// The job [default: every one that is not done and fetched]
        job: Option<String>,
        #[command(flatten)]
        places: LabDirArgs,
    },
    /// End a run that happens elsewhere; finished cases are kept
    Cancel {
        /// The job
        job: String,
        #[command(flatten)]
        places: LabDirArgs,
    },
    /// Measure again and compare with a record: exit code 1 on a regression beyond noise, 75 where noise
    /// hides whether there is one
    Gate(gate::GateArgs),
    /// Write a static site: every experiment, its evidence and plots, and the decisions
    Report(list::ReportArgs),
    /// Compute cases for a run: requests on standard input, replies on standard output
    #[command(hide = true)]
    Peer {
        /// Which of the peers that this program is
        #[arg(value_enum, default_value_t)]
        name: peer::OwnPeer,
    },
}

pub(crate) fn lab(args: &LabArgs, terminal: &mut Terminal) -> Result<Verdict> {
    match &args.action {
        Action::List(places) => list::list(places, terminal),
        Action::Show { experiment, places } => list::show(experiment, places, terminal),
        Action::Ready(args) => ready::ready(args, terminal),
        Action::Run(args) => run::run(args, terminal),
        Action::Status { all, places } => on::status(*all, &places.jobs()?, terminal),
        Action::Fetch { job, places } => on::fetch(job.as_deref(), &places.jobs()?, terminal),
        Action::Cancel { job, places } => on::cancel(job, places, terminal),
        Action::Gate(args) => gate::gate(args, terminal),
        Action::Report(args) => list::report(args, terminal),
        Action::Peer { name } => peer::serve(*name, terminal),
    }
}
