use super::*;
use crate::case::{CaseOp, Heat};
