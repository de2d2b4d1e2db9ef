//! What became of the kernels.

use std::io::Write;

use serde::Serialize;
use swiglu_cuda::Arch;
use swiglu_cuda::jit::cache::Origin;
use swiglu_cuda::jit::{CompileLog, EntryLog, Variant, Version};

use crate::table::{self, Table};
use crate::terminal::{Terminal, Verdict};

/// What became of one variant on one architecture.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    #[serde(skip)]
    pub(super) kernel: Variant,
    pub(super) file: &'static str,
    pub(super) variant: String,
    pub(super) arch: Arch,
    /// Where the module came from; nothing if it does not compile.
    pub(super) origin: Option<Origin>,
    pub(super) bytes: usize,
    pub(super) compile_ms: f64,
    pub(super) compiler: Option<Version>,
    #[serde(flatten)]
    pub(super) log: CompileLog,
    pub(super) complaints: Vec<String>,
    pub(super) error: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Warning {
    pub(super) path: String,
    pub(super) what: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) kernels: Vec<Row>,
    pub(super) compiled: usize,
    /// Those that were in the cache.
    pub(super) kept: usize,
    pub(super) failed: usize,
    pub(super) with_complaints: usize,
    /// Those that the program was stopped before.
    pub(super) left: usize,
    /// What kept a kernel from being read or kept: path and what happened.
    pub(super) cache_warnings: Vec<Warning>,
}

impl Report {
    /// Of all kernels; whoever is strict takes no complaint.
    pub(super) fn verdict(&self, strict: bool) -> Verdict {
        let clean = self.with_complaints == 0 || !strict;
        match self.left > 0 {
            true => Verdict::Unfinished,
            false => Verdict::from_passed(self.failed == 0 && clean),
        }
    }

    pub(super) fn show(&self, terminal: &mut Terminal) -> anyhow::Result<()> {
        // A module has several kernels: the most registers and shared memory of one, the spills of all.
        let most =
            |row: &Row, of: fn(&EntryLog) -> u32| row.log.entries.iter().map(of).max().unwrap_or(0);
        Table::of(&self.kernels)
            .text("file", |row| row.file)
            .text("variant", |row| &row.variant)
            .text("arch", |row| row.arch)
            .number("registers", |row| most(row, |e| e.registers))
            .number("shared", |row| most(row, |e| e.shared))
            .number("spills", |row| {
                row.log.entries.iter().map(|e| e.spill_stores + e.spill_loads).sum::<u32>()
            })
            .number("bytes", |row| row.bytes)
            .number("compile ms", |row| table::number(row.compile_ms))
            .text("from", |row| match row.origin {
                Some(Origin::Compiled) => "compiler",
                Some(Origin::Cache) => "cache",
                Some(Origin::ReadOnly) => "read-only cache",
                None => "",
            })
            .text("verdict", |row| table::verdict(row.error.is_none() && row.complaints.is_empty()))
            .print(terminal)?;
        for row in &self.kernels {
            for text in row.complaints.iter().chain(&row.error) {
                writeln!(terminal, "{} ({}) {}: {text}", row.file, row.variant, row.arch)?;
            }
        }
        let Report { kernels, compiled, kept, failed, with_complaints, left, .. } = self;
        let all = kernels.len() + left;
        let variants = if all == 1 { "variant" } else { "variants" };
        writeln!(
            terminal,
            "{all} {variants}: {compiled} compiled now, {kept} in the cache before, {failed} do not compile, \
             {with_complaints} with complaints"
        )?;
        if *left > 0 {
            writeln!(terminal, "stopped: {left} are left, and the same command goes on with them")?;
        }
        Ok(())
    }

    /// What the cache could not do, in one line: where one file cannot be kept, most cannot.
    pub(super) fn cache_warnings(&self) -> Option<String> {
        let (first, others) = self.cache_warnings.split_first()?;
        let more = match others.len() {
            0 => String::new(),
            n => format!(" (and {n} warnings more, which --json lists)"),
        };
        Some(format!("{}: {}{more}", first.path, first.what))
    }
}
