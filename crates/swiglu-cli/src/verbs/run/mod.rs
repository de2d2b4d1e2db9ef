//! `swiglu run`: a layer, its result proved and its time compared with the unfused way.

mod args;
mod backward;
mod measure;
mod report;
mod subject;

use std::io::Write as _;

use swiglu::with_dtype;

use crate::terminal::{Terminal, Verdict};
pub(crate) use args::RunArgs;
use measure::Measurement;
use report::Report;
use subject::Subject;

pub(crate) fn run(args: &RunArgs, terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    args.expect_random_input()?;
    args.expect_free_output()?;
    let device = args.device.open()?;
    let subject = Subject::open(args)?;
    let dtypes = args.dtypes(subject.weights.resolved_dtype());
    let bar = terminal.bar(dtypes.len() as u64);
    let mut measurement = Measurement::new(args, &subject, &device);
    let mut reports: Vec<Report> = Vec::new();
    for (i, &dtype) in dtypes.iter().enumerate() {
        bar.set_message(format!("{dtype}: computing, verifying, timing"));
        let output = args.output.as_deref().filter(|_| i == 0);
        reports.push(with_dtype!(dtype, T => measurement.report::<T>(output))?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    report::print(terminal, &subject, &device, &reports)?;
    if let (Some(path), Some(first), false) = (&args.output, dtypes.first(), terminal.json()) {
        let written = format!("output    {}: the result in {first}\n", path.display());
        terminal.write_all(written.as_bytes())?;
    }
    Ok(Verdict::from_passed(reports.iter().all(|r| r.passed)))
}
