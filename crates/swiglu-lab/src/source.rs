//! Identity of the code that a record measured: a hash of what no comment, test or spacing changes.

mod code;
mod git;
mod history;
mod neutral;

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use serde::Serialize;

use self::code::{Language, is_test};
use self::history::Checkout;
use crate::case::{CaseOp, DeviceKind, Heat};
use crate::definition::Experiment;

/// The code as it is now: what a result depends on, and no more.
///
/// As text: `tree:HASH` for committed code, `dirty:HASH` where there are changes, `unknown` outside
/// a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Source {
    /// Everything relevant is committed.
    Tree(String),
    /// Something relevant is not.
    Dirty(String),
    /// There is no repository to ask.
    Unknown,
}

/// What any result depends on: files and directories.
const COMMON: [&str; 10] = [
    "crates/swiglu-core/src",
    "crates/swiglu/src",
    "crates/swiglu-cli/src/verbs/lab/peer",
    // What our own peer is made of besides: inputs, packing, copies in rotation.
    "crates/swiglu-cli/src/gpu.rs",
    "crates/swiglu-cli/src/layer.rs",
    "crates/swiglu-cli/src/quantized.rs",
    "crates/swiglu-cli/src/random.rs",
    OF_A_PEER[0].1,
    OF_A_PEER[1].1,
    PEERS,
];

/// Of these, programs count that are no tests.
const PEERS: &str = "lab/peers";

/// Our peers that only some experiments have: that which reads alone, and that of quantised blocks on a CUDA device.
const OF_A_PEER: [(&str, &str); 2] = [
    ("read", "crates/swiglu-cli/src/verbs/lab/read.rs"),
    ("blocks", "crates/swiglu-cli/src/verbs/lab/blocks.rs"),
];

/// Peers that are no programs of Python: our own.
const OWN: [&str; 3] = ["swiglu", "read", "blocks"];

/// Of our own peer, what results on one device alone depend on.
const OF_A_DEVICE: [(DeviceKind, &str); 2] = [
    (DeviceKind::Cpu, "crates/swiglu-cli/src/verbs/lab/peer/cpu.rs"),
    (DeviceKind::Cuda, "crates/swiglu-cli/src/verbs/lab/peer/cuda.rs"),
];

/// What a result on a device depends on besides.
fn paths(device: DeviceKind) -> Vec<&'static str> {
    let own: &[&str] = match device {
        DeviceKind::Cpu => &["crates/swiglu-cpu/src"],
        DeviceKind::Cuda => &["crates/swiglu-cuda/src", "crates/swiglu-cuda/device"],
    };
    COMMON.iter().chain(own).copied().collect()
}

/// Whether a result on a device depends on a file of the repository.
fn counts(device: DeviceKind, path: &str) -> bool {
    let listed = paths(device).into_iter().any(|listed| is_at(path, listed));
    let peer = Language::of(path) == Language::Python && !is_at(path, "lab/peers/tests");
    listed && !is_test(path) && (!is_at(path, PEERS) || peer)
}

/// What an experiment has that the results of some code are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A case with quantised weights.
    QuantizedWeights,
    /// A case that is a feed-forward block.
    Block,
    /// A case of a layer on the CPU with more than 16 tokens and weights that are in no cache.
    ManyColdTokens,
    /// What no case of an experiment has.
    Unmeasured,
}

impl Kind {
    fn is_in(self, experiment: &Experiment) -> bool {
        experiment.cases.iter().any(|case| match self {
            Kind::QuantizedWeights => case.weights.is_some(),
            Kind::Block => case.op == CaseOp::Mlp,
            Kind::ManyColdTokens => {
                let of_layer = matches!(case.op, CaseOp::GatedLinear | CaseOp::Mlp);
                let cold = case.device == DeviceKind::Cpu && case.heat == Heat::Cold;
                of_layer && cold && case.m > 16
            }
            Kind::Unmeasured => false,
        })
    }
}

/// Files and directories of those that [`counts`] has on which only results of one kind depend; of several the first. Which way a plan takes also
/// depends on what `swiglu tune` measured, whose records have an identity of their own.
const OF_A_KIND: [(Kind, &str); 12] = [
    (Kind::QuantizedWeights, "crates/swiglu-core/src/bounds/quantized.rs"),
    (Kind::QuantizedWeights, "crates/swiglu-cpu/src/quant"),
    (Kind::QuantizedWeights, "crates/swiglu-cuda/src/layers/quantized.rs"),
    (Kind::QuantizedWeights, "crates/swiglu-cuda/src/kernels/decode_mlp/sm90_held_mlp.rs"),
    (Kind::QuantizedWeights, "crates/swiglu-cuda/device/sm90_held_mlp.cu"),
    (Kind::Block, "crates/swiglu-cuda/src/kernels/decode_mlp"),
    (Kind::Block, "crates/swiglu-cuda/device/decode_formats.cuh"),
    (Kind::Block, "crates/swiglu-cuda/device/decode_mlp.cu"),
    (Kind::Block, "crates/swiglu-cuda/device/decode_mlp.cuh"),
    (Kind::Block, "crates/swiglu-cuda/device/decode_tiles.cuh"),
    (Kind::Block, "crates/swiglu-cuda/device/sequential_mlp.cu"),
    (Kind::Block, "crates/swiglu-cuda/device/sm90_decode_mlp.cu"),
];

/// Of those that [`counts`] has, what no result depends on: cases and backends of tests and of `swiglu check`.
const OF_NONE: [&str; 4] = [
    "crates/swiglu-core/src/conformance",
    "crates/swiglu-core/src/conformance.rs",
    "crates/swiglu-cpu/src/conformance.rs",
    "crates/swiglu-cuda/src/conformance.rs",
];

/// Whether a path is `listed` or in it.
fn is_at(path: &str, listed: &str) -> bool {
    path.strip_prefix(listed).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether results of an experiment depend on a file, of those that [`counts`] has:
///
/// | file                            | if an experiment has            |
/// |---------------------------------|---------------------------------|
/// | of [`OF_NONE`]                  | never                           |
/// | of [`OF_A_KIND`]                | a case of that kind             |
/// | of [`OF_A_DEVICE`]              | that device                     |
/// | of [`OF_A_PEER`]                | that peer                       |
/// | `lab/peers/NAME_peer.py`        | that peer                       |
/// | `lab/peers/weight_only_ways`    | the peer `weight-only`          |
/// | `lab/peers/triton_ways`         | that peer, or `triton`          |
/// | `lab/peers/torch_ways`          | any of Python's but `ggml`      |
/// | `lab/peers/common/ggml.py`      | the peer `ggml`                 |
/// | the rest of `lab/peers`         | any of Python's                 |
/// | everything else                 | anything                        |
fn matters(experiment: &Experiment, path: &str) -> bool {
    if OF_NONE.iter().any(|listed| is_at(path, listed)) {
        return false;
    }
    if let Some((kind, _)) = OF_A_KIND.iter().find(|(_, listed)| is_at(path, listed)) {
        return kind.is_in(experiment);
    }
    if let Some((device, _)) = OF_A_DEVICE.iter().find(|(_, listed)| is_at(path, listed)) {
        return experiment.device == *device;
    }
    let mut peers = experiment.profiles.iter().map(|profile| profile.peer.as_str());
    if let Some((name, _)) = OF_A_PEER.iter().find(|(_, listed)| is_at(path, listed)) {
        return peers.any(|peer| peer == *name);
    }
    let Some(path) = path.strip_prefix(PEERS).and_then(|path| path.strip_prefix('/')) else {
        return true;
    };
    if let Some(name) = path.strip_suffix("_peer.py") {
        return peers.any(|peer| peer.replace('-', "_") == name);
    }
    match path.split_once('/') {
        Some(("weight_only_ways", _)) => peers.any(|peer| peer == "weight-only"),
        Some(("triton_ways", _)) => peers.any(|peer| ["triton", "weight-only"].contains(&peer)),
        // Its base is under every peer that computes with torch.
        Some(("torch_ways", _)) => peers.any(|peer| peer != "ggml" && !OWN.contains(&peer)),
        Some(("common", "ggml.py")) => peers.any(|peer| peer == "ggml"),
        _ => peers.any(|peer| !OWN.contains(&peer)),
    }
}

const CHANGED: &str = "the code has changed since";
const UNCOMMITTED: &str = "the code has uncommitted changes";

/// Where a copy of the lab without its repository keeps what [`Source::detect`] said when it was made:
/// a JSON object with `cpu` and `cuda`.
const SOURCE_FILE: &str = "source.json";

impl Source {
    /// What was noted in the lab `dir`, where it is such a copy, else what git says of the repository
    /// around it.
    pub fn detect(dir: &Path, device: DeviceKind) -> Self {
        Known::new(dir, device).source().clone()
    }

    fn noted(dir: &Path, device: DeviceKind) -> Option<Self> {
        let text = std::fs::read_to_string(dir.join(SOURCE_FILE)).ok()?;
        let noted: serde_json::Value = serde_json::from_str(&text).ok()?;
        let key = match device {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        };
        match noted.get(key)?.as_str()?.split_once(':')? {
            ("tree", hash) => Some(Source::Tree(hash.to_owned())),
            ("dirty", hash) => Some(Source::Dirty(hash.to_owned())),
            _ => None,
        }
    }

    /// Why a record of `recorded` is not of this code, whatever it was that changed; none if it is, or
    /// if nobody can tell.
    pub fn staleness(&self, recorded: &str) -> Option<String> {
        match self {
            Source::Unknown => None,
            _ if recorded == self.to_string() && recorded.starts_with("tree:") => None,
            _ if recorded.starts_with("dirty") => {
                Some("it was measured with uncommitted changes of the code".into())
            }
            _ if recorded == "unknown" => Some("it is not known which code was measured".into()),
            Source::Dirty(_) => Some(UNCOMMITTED.into()),
            Source::Tree(_) => Some(CHANGED.into()),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Tree(hash) => write!(f, "tree:{hash}"),
            Source::Dirty(hash) => write!(f, "dirty:{hash}"),
            Source::Unknown => f.write_str("unknown"),
        }
    }
}

/// What can say whether a record is of the present code.
pub trait Code {
    /// Why a record of an experiment is not, where the code that it measured is `recorded`; none if it is,
    /// or if nobody can tell.
    fn why_stale(&self, experiment: &Experiment, recorded: &str) -> Option<String>;
}

/// Without a repository: any other code counts.
impl Code for Source {
    fn why_stale(&self, _: &Experiment, recorded: &str) -> Option<String> {
        self.staleness(recorded)
    }
}

/// What there is to know of the present code.
#[derive(Debug)]
enum Known {
    /// Alone what it is.
    Source(Source),
    /// All.
    Checkout(Box<Checkout>),
}

impl Known {
    fn new(dir: &Path, device: DeviceKind) -> Self {
        match Source::noted(dir, device) {
            Some(noted) => Known::Source(noted),
            None => Checkout::read(dir, device)
                .map_or(Known::Source(Source::Unknown), |read| Known::Checkout(read.into())),
        }
    }

    fn source(&self) -> &Source {
        match self {
            Known::Source(source) => source,
            Known::Checkout(checkout) => &checkout.source,
        }
    }
}

/// What [`Source::detect`] says of each device, and what has changed since a commit: asked once.
#[derive(Debug)]
pub struct Sources {
    dir: PathBuf,
    known: [OnceCell<Known>; 2],
}

impl Sources {
    /// Of the code around the lab `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), known: Default::default() }
    }

    /// The code that results on a device depend on.
    pub fn of(&self, device: DeviceKind) -> &Source {
        self.known(device).source()
    }

    fn known(&self, device: DeviceKind) -> &Known {
        let known = &self.known[usize::from(device == DeviceKind::Cuda)];
        known.get_or_init(|| Known::new(&self.dir, device))
    }
}

/// Where a commit has the code that was measured, only changes since count that results of the experiment
/// depend on.
impl Code for Sources {
    fn why_stale(&self, experiment: &Experiment, recorded: &str) -> Option<String> {
        let known = self.known(experiment.device);
        let stale = known.source().staleness(recorded)?;
        match (known, recorded.strip_prefix("tree:")) {
            (Known::Checkout(checkout), Some(hash)) => checkout.why_stale(experiment, hash),
            _ => Some(stale),
        }
    }
}

#[cfg(test)]
mod tests;
