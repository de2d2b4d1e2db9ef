//! Records: what was measured, as files that are only ever added to.

mod hash;
mod lock;
mod schema;
mod store;

pub(crate) use hash::hex;
pub use hash::{canonical, content_hash};
pub use lock::{Locks, Measured, RunLock};
pub use schema::{
    CaseFacts, Clocks, ErrorMetrics, Executed, Interval, Machine, Profiled, ProtocolUsed, QUICK,
    RECORD_SCHEMA, Record, ResultEntry, Status, Summary, Versus,
};
pub(crate) use store::entries;
pub use store::{Opened, Refused, Store};
