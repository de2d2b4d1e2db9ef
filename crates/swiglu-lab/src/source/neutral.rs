//! Changes of files that count, after which some results are still what they would be.
//!
//! A file is the smallest thing whose change is noticed by itself: a candidate more in a planner, an arm more in a `match`
//! would make every record of a device stale. A change that was shown to leave results alone is listed here with the code
//! before and after it, so that it says nothing of any other change, and with what shows it.

use sha2::{Digest, Sha256};

use super::Kind;
use crate::definition::Experiment;
use crate::record::hex;

/// A change of one file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    path: &'static str,
    /// [`fingerprint`]s.
    before: &'static str,
    after: &'static str,
    /// What may have another result since; nothing else does.
    concerns: Kind,
}

/// Those of this repository. What shows that launches for other weights are the same is
/// `lab/logs/nvidia-h200/2026-11-24-held-weights.txt`, of held weights in the shapes of experiments `2026-11-25-held-warps.txt`
/// beside it, of few tokens on the CPU `lab/logs/amd-zen4-2c/2026-11-25-first-calls.txt`.
pub(super) const CHANGES: [Change; 6] = [
    // `sm90_held_mlp`, which refuses weights that are not quantised.
    Change {
        path: "crates/swiglu-cuda/src/kernels/decode_mlp/config.rs",
        before: "daf28bd80f8ba856",
        after: "96e8c0128f4f7365",
        concerns: Kind::QuantizedWeights,
    },
    Change {
        path: "crates/swiglu-cuda/src/kernels/decode_mlp/mod.rs",
        before: "898c1257b8929363",
        after: "7b1e4a55c8b41819",
        concerns: Kind::QuantizedWeights,
    },
    Change {
        path: "crates/swiglu-cuda/src/kernels/decode_mlp/variants.rs",
        before: "8f4bb07d39437e0e",
        after: "7c61547d5e42e3ec",
        concerns: Kind::QuantizedWeights,
    },
    // At most 24 warps in place of 25 with sixteen tokens; shapes of experiments have 24.
    Change {
        path: "crates/swiglu-cuda/src/kernels/decode_mlp/sm90_held_mlp.rs",
        before: "94c5bd2dad11d77c",
        after: "323a516d0b22e667",
        concerns: Kind::Unmeasured,
    },
    // Every copy of cold data has had a call before one is timed.
    Change {
        path: "crates/swiglu-cli/src/verbs/lab/peer/cpu.rs",
        before: "8b4f66657bfcee55",
        after: "0e8606441c0595da",
        concerns: Kind::ManyColdTokens,
    },
    Change {
        path: "crates/swiglu-cuda/src/layers/cost.rs",
        before: "6bbfe4733f0cff59",
        after: "8950a1f1b3b57a3e",
        concerns: Kind::QuantizedWeights,
    },
];

/// Identity of the code of a file.
pub(super) fn fingerprint(code: &[u8]) -> String {
    hex(&Sha256::digest(code)[..8])
}

/// Whether changes that do not concern an experiment lead from one code of a file to another.
pub(super) fn lead(
    changes: &[Change],
    experiment: &Experiment,
    path: &str,
    [then, now]: [&[u8]; 2],
) -> bool {
    let of_path = |change: &&Change| change.path == path && !change.concerns.is_in(experiment);
    let (mut at, now) = (fingerprint(then), fingerprint(now));
    // No longer way repeats none of them.
    for _ in 0..changes.len() {
        let next = changes.iter().filter(of_path).find(|change| change.before == at);
        match next {
            Some(change) if change.after == now => return true,
            Some(change) => at = change.after.to_owned(),
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests;
