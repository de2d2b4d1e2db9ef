//! Records: what was measured, as files that are only ever added to.

mod lock;
mod result;
mod rows;
mod schema;
mod store;

pub(crate) use lock::movable;
pub use lock::{Locks, Measured, RunLock};
pub use result::{ErrorMetrics, Interval, ResultEntry, Status, Summary, Versus};
pub use schema::{
    CaseFacts, Clocks, Executed, Machine, Profiled, ProtocolUsed, QUICK, RECORD_SCHEMA, Record,
};
pub use store::{Opened, Store, canonical, content_hash};
