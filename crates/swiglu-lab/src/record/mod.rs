//! Records: what was measured, as files that are only ever added to.

mod hash;
mod schema;
mod store;

pub(crate) use hash::hex;
pub use hash::{canonical, content_hash};
pub use schema::{
    Clocks, ErrorMetrics, Interval, Machine, Profiled, ProtocolUsed, QUICK, RECORD_SCHEMA, Record,
    ResultEntry, Status, Summary,
};
pub use store::{Measured, Opened, Refused, RunLock, Store};
