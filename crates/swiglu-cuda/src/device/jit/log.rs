//! What the compiler says about a kernel.

use serde::{Deserialize, Serialize};

/// What the compiler said about a module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CompileLog {
    /// The kernels, in the order in which they were compiled.
    pub entries: Vec<EntryLog>,
    /// Warnings and advisories, as the compiler words them.
    pub notes: Vec<String>,
}

/// What one kernel uses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EntryLog {
    /// The kernel's name.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack of a thread.
    pub stack: u32,
    /// Bytes of registers written to memory because there are too few.
    pub spill_stores: u32,
    /// Bytes read back.
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
    /// Barriers of a block.
    pub barriers: u32,
}

impl CompileLog {
    /// Reads the text that `--ptxas-options=-v` makes. Lines that are not known are ignored, except
    /// those with a warning or an advisory.
    pub fn parse(text: &str) -> Self {
        let mut log = CompileLog::default();
        // Properties of functions that are not kernels are printed in the same form.
        let mut of_entry = false;
        for line in text.lines() {
            if let Some(name) = between(line, "Compiling entry function '", "'") {
                log.entries.push(EntryLog { name: name.to_owned(), ..EntryLog::default() });
                of_entry = true;
            } else if let Some(name) = between(line, "Function properties for ", "") {
                of_entry = log.entries.last().is_some_and(|e| e.name == name.trim());
            } else if line.contains("bytes stack frame") && of_entry {
                if let Some(entry) = log.entries.last_mut() {
                    entry.stack = before(line, " bytes stack frame");
                    entry.spill_stores = before(line, " bytes spill stores");
                    entry.spill_loads = before(line, " bytes spill loads");
                }
            } else if line.contains(" registers") && line.contains("Used ") {
                if let Some(entry) = log.entries.last_mut() {
                    entry.registers = before(line, " registers");
                    entry.shared = before(line, " bytes smem");
                    entry.barriers = before(line, " barriers");
                }
            } else if is_note(line) {
                log.notes.push(line.trim().to_owned());
            }
        }
        log
    }

    /// Everything that makes a kernel slower than it was written to be: spills, stack frames,
    /// advisories (`C75…`) and warnings; and that nothing was said, which says nothing of these.
    pub fn complaints(&self) -> Vec<String> {
        let silent = "the compiler said nothing of the kernels".to_owned();
        let silent = self.entries.is_empty().then_some(silent);
        let of_entry = |e: &EntryLog| {
            let mut out = Vec::new();
            if e.spill_stores + e.spill_loads > 0 {
                let (name, stores, loads) = (&e.name, e.spill_stores, e.spill_loads);
                out.push(format!("{name} spills: {stores} bytes of stores, {loads} of loads"));
            }
            if e.stack > 0 {
                out.push(format!("{} has a stack frame of {} bytes", e.name, e.stack));
            }
            out
        };
        let of_entries = self.entries.iter().flat_map(of_entry);
        silent.into_iter().chain(of_entries).chain(self.notes.iter().cloned()).collect()
    }
}

fn is_note(line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    lower.contains("warning") || lower.contains("(c7") || lower.contains("potential performance")
}

/// The text between two others; to the end of the line if `end` is empty.
fn between<'a>(line: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let rest = &line[line.find(start)? + start.len()..];
    if end.is_empty() { Some(rest) } else { rest.split(end).next() }
}

/// The number right before `unit`; 0 if there is none.
fn before(line: &str, unit: &str) -> u32 {
    let Some(end) = line.find(unit) else { return 0 };
    let digits = line[..end].bytes().rev().take_while(u8::is_ascii_digit).count();
    line[end - digits..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compile time = 262.000 ms
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers
ptxas info    : Function properties for helper
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
a.cu(3): warning #177-D: variable \"x\" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
";

    #[test]
    fn the_text_of_ptxas_is_read() {
        let log = CompileLog::parse(TEXT);
        let [gemm, other] = &log.entries[..] else { panic!("{log:?}") };
        assert_eq!((gemm.registers, gemm.shared, gemm.barriers, gemm.stack), (168, 1024, 9, 0));
        assert_eq!((other.registers, other.stack), (32, 16));
        assert_eq!((other.spill_stores, other.spill_loads), (8, 12));
        let complaints = log.complaints();
        assert_eq!(complaints.len(), 4, "{complaints:?}");
        assert!(complaints[0].contains("spills") && complaints[3].contains("C7510"));
        let nothing = CompileLog::parse("");
        assert_eq!(nothing, CompileLog::default());
        assert_eq!(nothing.complaints(), ["the compiler said nothing of the kernels"]);
    }
}
