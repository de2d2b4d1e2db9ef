//! Where the time of a call goes: its class against measured ceilings, counters where a profiler gives
//! them, and what would make it faster by how much.

mod bottleneck;
mod ceilings;
mod class;
mod counters;
mod ncu;
mod result;

pub use bottleneck::{Analysis, Habit, Step, Subject, analyse};
pub use ceilings::{Ceiling, Ceilings};
pub use class::{Class, Classified, Work, classify};
pub use counters::{Counters, KernelCounters};
pub use ncu::{CsvError, METRICS, Ncu, NcuError, parse_csv};
pub use result::{analyse_result, count};
