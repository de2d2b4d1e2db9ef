//! One module per verb.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod explain;
pub(crate) mod info;
pub(crate) mod inspect;
pub(crate) mod kernels;
pub(crate) mod lab;
pub(crate) mod run;
pub(crate) mod tune;
