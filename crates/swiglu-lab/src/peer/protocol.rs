//! What host and peer say to each other: one JSON object per line, on the peer's standard input and
//! output. Every request is answered by one reply before the next is sent, except `quit`.
//!
//! Inputs are derived on both sides from `swiglu_core::random`: element i of the row-major
//! `[rows, cols]` matrix (weights `[out, in]`) is `normal(stream, i) · scale`, rounded to the
//! dtype; layouts are arranged afterwards. Streams are the seed xor [`STREAM_X`] and so on.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use swiglu_core::random::normal;
use swiglu_core::{DType, Element, Matrix};

use crate::case::{Case, DeviceKind};
use crate::definition::ProfileDef;

/// The version of the protocol.
pub const PROTOCOL: u32 = 1;
/// Elements that one `verified` may carry.
pub const MAX_VERIFIED: usize = 1 << 16;
/// As many rows it may carry however long they are: one of each matrix of a training step.
pub const MIN_VERIFIED_ROWS: usize = 5;

/// Stream of x, of scale 1.
pub const STREAM_X: u64 = 0x78;
/// Stream of the gate weight, of scale 1/√K; of an activation's gate, of scale 2.
pub const STREAM_GATE: u64 = 0x67;
/// Stream of the up weight, of scale 1/√K; of an activation's up, of scale 2.
pub const STREAM_UP: u64 = 0x75;
/// Stream of ∂L/∂h, of scale 1.
pub const STREAM_OUT_GRAD: u64 = 0x6f;
/// Stream of the down weight, of scale 1/√H.
pub const STREAM_DOWN: u64 = 0x64;
/// Streams of the biases of gate, up and down, of scale 1, in f32.
pub const STREAM_BIAS: [u64; 3] = [1, 2, 3];
/// Scale of an activation's inputs.
pub const ACTIVATION_SCALE: f32 = 2.0;

/// Chosen rows of a stream's matrix.
///
/// # Errors
/// If there is no memory for them.
pub fn normal_rows<T: Element>(
    stream: u64,
    rows: impl IndexedParallelIterator<Item = usize>,
    cols: usize,
    scale: f32,
) -> swiglu_core::Result<Matrix<T>> {
    let mut m = Matrix::zeros(rows.len(), cols)?;
    m.as_mut_slice().par_chunks_mut(cols.max(1)).zip(rows).for_each(|(row, r)| {
        for (c, v) in row.iter_mut().enumerate() {
            *v = T::from_f32(normal(stream, (r * cols + c) as u64) * scale);
        }
    });
    Ok(m)
}

/// The scale of weights with so many inputs: pre-activations of normal inputs are about normal.
pub fn scale(inputs: usize) -> f32 {
    1.0 / (inputs.max(1) as f32).sqrt()
}

/// bg, bu and bd of a case that has them.
pub fn biases(case: &Case, seed: u64) -> [Option<Vec<f32>>; 3] {
    let lengths = [case.intermediate, case.intermediate, case.hidden];
    std::array::from_fn(|which| {
        let stream = seed ^ STREAM_BIAS[which];
        case.bias.then(|| (0..lengths[which] as u64).map(|i| normal(stream, i)).collect())
    })
}

/// What the host asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Request {
    /// Who are you? The first request.
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// Where the cases will run.
        device: DeviceKind,
    },
    /// Make everything ready that one profile needs for a case.
    Prepare {
        /// Names the pair from here on.
        id: u64,
        /// What is computed.
        case: Box<Case>,
        /// In which way.
        profile: ProfileRef,
        /// Seed of the inputs.
        seed: u64,
        /// `auto`: as many copies of the data as exceed the caches, where the case is cold.
        rotations: String,
    },
    /// Compute once and show whole rows of the output.
    Verify {
        /// Of which pair.
        id: u64,
        /// Which rows.
        rows: Vec<usize>,
    },
    /// Measure.
    Sample {
        /// Of which pair.
        id: u64,
        /// How many times the budget may be spent.
        turns: u32,
        /// How long one turn may take; at least one call is measured.
        budget_us: u64,
    },
    /// Free what a pair holds.
    Release {
        /// Of which pair.
        id: u64,
    },
    /// How fast does the device run right now?
    Clocks,
    /// End. Not answered.
    Quit,
}

/// A profile as a peer sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfileRef {
    /// Its name, for messages.
    pub id: String,
    /// What the definition says to the peer.
    pub options: Map<String, Value>,
}

/// What a peer answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Reply {
    /// To `hello`.
    Hello {
        /// The peer's name.
        name: String,
        /// Versions of what it is made of.
        #[serde(default)]
        versions: BTreeMap<String, String>,
        /// The device as its driver calls it.
        device: Option<String>,
    },
    /// To `hello`: it cannot work here. The peer then ends.
    Unavailable {
        /// What is missing.
        reason: String,
    },
    /// To `prepare`.
    Prepared {
        /// Of which pair.
        id: u64,
        /// Bytes that one call moves at least.
        bytes: Option<f64>,
        /// Floating-point operations of one call.
        flops: Option<f64>,
        /// The plan that computes it, where the peer makes one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        plan: Option<String>,
        /// The hash of each compiled variant or CPU façade that it uses, by its name.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        variants: BTreeMap<String, String>,
        /// What else to know about it, for people.
        #[serde(default)]
        notes: Vec<String>,
    },
    /// To `prepare`: the peer does not do this case this way.
    Unsupported {
        /// Of which pair.
        id: u64,
        /// Why not.
        reason: String,
    },
    /// To anything with an id: it was tried and failed. The pair is gone, the peer goes on.
    Failed {
        /// Of which pair.
        id: u64,
        /// What happened.
        reason: String,
    },
    /// To `verify`.
    Verified {
        /// Of which pair.
        id: u64,
        /// Of the whole output, as [`Case::output_shape`] says.
        shape: [usize; 2],
        /// Of the data.
        dtype: DType,
        /// Which rows these are, as requested.
        rows: Vec<usize>,
        /// Base64 of their elements, little endian, row after row.
        data: String,
    },
    /// To `sample`.
    Samples {
        /// Of which pair.
        id: u64,
        /// Microseconds per call, in the order they were measured.
        us: Vec<f64>,
    },
    /// To `release`.
    Released {
        /// Of which pair.
        id: u64,
    },
    /// To `clocks`.
    Clocks {
        /// Clock of the device's cores.
        sm_mhz: Option<f64>,
        /// Power drawn.
        power_w: Option<f64>,
    },
}

impl Request {
    pub(crate) fn prepare(id: u64, case: &Case, profile: &ProfileDef, seed: u64) -> Self {
        let ProfileDef { id: name, options, .. } = profile.clone();
        Request::Prepare {
            id,
            case: Box::new(case.clone()),
            profile: ProfileRef { id: name, options },
            seed,
            rotations: "auto".into(),
        }
    }

    /// Its type, and the types of the replies to it.
    pub(crate) const fn types(&self) -> (&'static str, &'static [&'static str]) {
        match self {
            Request::Hello { .. } => ("hello", &["hello", "unavailable"]),
            Request::Prepare { .. } => ("prepare", &["prepared", "unsupported", "failed"]),
            Request::Verify { .. } => ("verify", &["verified", "failed"]),
            Request::Sample { .. } => ("sample", &["samples", "failed"]),
            Request::Release { .. } => ("release", &["released", "failed"]),
            Request::Clocks => ("clocks", &["clocks"]),
            Request::Quit => ("quit", &[]),
        }
    }
}

/// The type of a message, and the pair it is about.
pub(crate) fn type_and_id(message: &impl Serialize) -> (String, Option<u64>) {
    let message = serde_json::to_value(message).unwrap_or_default();
    (message["type"].as_str().unwrap_or_default().to_owned(), message["id"].as_u64())
}

/// Answers requests on standard input, a line each: until the input ends or `answer` has none.
///
/// # Errors
/// What reading or writing failed with; [`io::ErrorKind::InvalidData`] for a line that is no request.
pub fn serve(
    out: &mut impl Write,
    mut answer: impl FnMut(&Request) -> Option<Reply>,
) -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        let request = serde_json::from_str(&line).map_err(|e| {
            io::Error::new(io::ErrorKind::InvalidData, format!("request `{line}`: {e}"))
        })?;
        let Some(reply) = answer(&request) else { return Ok(()) };
        writeln!(out, "{}", serde_json::to_string(&reply)?)?;
        out.flush()?;
    }
    Ok(())
}
