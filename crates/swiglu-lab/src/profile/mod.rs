//! Where the time of a call goes: its class against measured ceilings, counters where a profiler gives
//! them, and what would make it faster by how much.

mod analysis;
mod class;
mod ncu;
mod result;

pub use analysis::{Analysis, Step, Subject, analyse};
pub use class::{Ceiling, Ceilings, Class, Classified, Work, classify};
pub use ncu::{Counters, KernelCounters, Ncu, NcuError, parse_csv};
pub use result::{analyse_result, count};
