//! What the check found, by kernel, operation and element type.

use std::io::Write;

use serde::Serialize;
use swiglu::DType;
use swiglu_core::conformance::Outcome;

use crate::table::{self, Table};
use crate::terminal::Terminal;

/// How one case ended.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Finding {
    worst_element: f64,
    relative_error: f64,
    fault: Option<String>,
}

impl Finding {
    pub(super) fn of(outcome: &Outcome) -> Self {
        let j = &outcome.judgement;
        let outside = || {
            let overflow = j.overflow.map_or(String::new(), |o| format!("; {o}"));
            format!(
                "element {:?} is {:.2} × its bound away; relative error {:.2e}, limit {:.2e}{overflow}",
                j.worst_at, j.worst_ratio, j.relative_frobenius, j.frobenius_limit
            )
        };
        let fault = || outcome.fault.clone().unwrap_or_else(outside);
        let fault = (!outcome.passed()).then(fault);
        Self { worst_element: j.worst_ratio, relative_error: j.relative_frobenius, fault }
    }

    /// Wrong in a way that has no size.
    pub(super) fn fault(text: String) -> Self {
        Self { fault: Some(text), ..Self::default() }
    }

    #[cfg(test)]
    pub(super) fn passed(&self) -> bool {
        self.fault.is_none()
    }
}

/// What is checked: the kernel it is shown under, and its full name.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) kernel: String,
    pub(super) name: String,
}

/// All cases of one kernel, operation and element type, over its numbers of threads or tiles.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    kernel: String,
    op: &'static str,
    dtype: DType,
    cases: usize,
    failed: usize,
    /// The largest |error| of an element ÷ its bound; above 1 it is wrong.
    worst_element: f64,
    /// The largest relative Frobenius error.
    worst_relative_error: f64,
}

impl Row {
    fn new(kernel: &str, op: &'static str, dtype: DType) -> Self {
        let (kernel, cases, failed) = (kernel.to_owned(), 0, 0);
        Self { kernel, op, dtype, cases, failed, worst_element: 0.0, worst_relative_error: 0.0 }
    }
}

#[derive(Debug, Clone, Serialize)]
struct Failure {
    backend: String,
    case: String,
    what: String,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    passed: usize,
    failed: usize,
    cases: usize,
    rows: Vec<Row>,
    failures: Vec<Failure>,
}

/// More failures than this are counted, not listed.
const LISTED: usize = 20;

impl Report {
    pub(super) fn passed(&self) -> bool {
        self.failed == 0
    }

    pub(super) fn add(
        &mut self,
        subject: &Subject,
        op: &'static str,
        dtype: DType,
        case: String,
        finding: Finding,
    ) {
        self.cases += 1;
        let of = |r: &Row| r.kernel == subject.kernel && r.op == op && r.dtype == dtype;
        let at = self.rows.iter().position(of).unwrap_or_else(|| {
            self.rows.push(Row::new(&subject.kernel, op, dtype));
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.cases += 1;
        // Overflow that the bounds admit has no size; `max` leaves NaN out.
        row.worst_element = row.worst_element.max(finding.worst_element);
        if finding.relative_error.is_finite() {
            row.worst_relative_error = row.worst_relative_error.max(finding.relative_error);
        }
        let Some(what) = finding.fault else {
            self.passed += 1;
            return;
        };
        row.failed += 1;
        self.failed += 1;
        if self.failures.len() < LISTED {
            self.failures.push(Failure { backend: subject.name.clone(), case, what });
        }
    }

    pub(super) fn show(&self, on: &str, terminal: &mut Terminal) -> anyhow::Result<()> {
        Table::of(&self.rows)
            .text("kernel", |r| &r.kernel)
            .text("op", |r| r.op)
            .text("dtype", |r| r.dtype)
            .number("cases", |r| r.cases)
            .number("failed", |r| r.failed)
            .number("worst element", |r| format!("{:.2}", r.worst_element))
            .number("worst error", |r| table::error(r.worst_relative_error))
            .text("", |r| table::verdict(r.failed == 0))
            .print(terminal)?;
        for f in &self.failures {
            writeln!(terminal, "\nFAILED {} on {}:\n       {}", f.case, f.backend, f.what)?;
        }
        let unlisted = self.failed - self.failures.len();
        if unlisted > 0 {
            writeln!(terminal, "\nand {unlisted} more")?;
        }
        let Self { passed, cases, .. } = self;
        let said = "elements as a fraction of their bound";
        Ok(writeln!(terminal, "\n{passed} of {cases} cases passed, {on}; {said}")?)
    }
}
