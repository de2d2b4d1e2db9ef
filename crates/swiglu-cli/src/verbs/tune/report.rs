//! What was measured, for people.

use std::io::Write;

use comfy_table::Cell;
use swiglu::cuda::tuning::{Entry, Outcome};

use super::Document;
use crate::table::{self, Column::Number, Column::Text};
use crate::terminal::Terminal;

pub(super) fn show(document: &Document, terminal: &mut Terminal) -> anyhow::Result<()> {
    for entry in &document.entries {
        writeln!(terminal, "{}", entry.problem)?;
        of_entry(entry, terminal)?;
    }
    if let Some(replaced) = &document.replaced {
        writeln!(terminal, "the record that was there is replaced: {replaced}")?;
    }
    writeln!(terminal, "kept in {}", document.record.display())?;
    Ok(())
}

fn of_entry(entry: &Entry, terminal: &mut Terminal) -> anyhow::Result<()> {
    let medians = entry.trials.iter().filter_map(|t| match t.outcome {
        Outcome::Measured { median_us, .. } => Some(median_us),
        _ => None,
    });
    let best = medians.fold(f64::INFINITY, f64::min);
    let columns = [
        Text("way"),
        Number("expected"),
        Number("measured"),
        Number("p10"),
        Number("p90"),
        Number("of best"),
        Text("remark"),
    ];
    let mut table = table::table(terminal, &columns);
    for trial in &entry.trials {
        let time = |us: Option<f64>| Cell::new(us.map(table::time).unwrap_or_default());
        let median = trial.outcome.median_us();
        let (p10, p90, remark) = match &trial.outcome {
            Outcome::Measured { p10_us, p90_us, median_us, .. } => {
                let remark = if *median_us == best { "fastest" } else { "" };
                (Some(*p10_us), Some(*p90_us), remark.to_owned())
            }
            Outcome::Compared { p10_p90_us, reason, .. } => {
                let [p10, p90] = p10_p90_us.map_or([None; 2], |spread| spread.map(Some));
                (p10, p90, format!("no choice: {reason}"))
            }
            Outcome::Refused { reason } => (None, None, reason.clone()),
            Outcome::Wrong { reason } => (None, None, format!("WRONG: {reason}")),
            Outcome::Failed { reason } => (None, None, format!("FAILED: {reason}")),
        };
        let ratio = median.map(|us| format!("{:.2}", us / best)).unwrap_or_default();
        table.add_row([
            Cell::new(&trial.way),
            time(trial.predicted_us),
            time(median),
            time(p10),
            time(p90),
            Cell::new(ratio),
            Cell::new(remark),
        ]);
    }
    writeln!(terminal, "{}", table::lines(&table))?;
    Ok(())
}
