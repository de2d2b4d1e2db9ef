//! Matrix products as cuBLASLt's algorithms are measured for them.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use swiglu_core::{DType, Orientation};

use crate::device::arch::Arch;

/// A matrix product y = x·W, as far as it tells how fast an algorithm of cuBLASLt computes it: of dense matrices, without a
/// bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gemm {
    /// Rows of y.
    pub m: usize,
    /// What is summed over.
    pub k: usize,
    /// Columns of y.
    pub n: usize,
    /// Whether x is given as `[k, m]`, as for gradients of weights.
    pub transposed: bool,
    /// How W lies: out-in is `[n, k]`.
    pub weights: Orientation,
    /// Whether it is added to what y holds.
    pub accumulate: bool,
    /// Of x and W: 16 bits.
    pub dtype: DType,
    /// Of y: the same, or f32.
    pub out: DType,
}

/// What a gradient of weights has at most of tokens, and at least of features on either side, for [`Gemm::prefers_short_tiles`].
const FEW_TOKENS: usize = 1024;
const MANY_FEATURES: usize = 1024;

impl Gemm {
    /// Whether tiles of 128 × 128 or 128 × 160 are taken where cuBLASLt proposes them and nothing was measured. Of gradients of
    /// weights of few tokens it proposes larger ones first, which end with more to write than such short sums hide
    /// (docs/kernels/own-products.txt). With more tokens it is less, and at the limit of power nothing.
    pub(super) fn prefers_short_tiles(&self, arch: Arch) -> bool {
        let Self { m, n, k, transposed, .. } = *self;
        arch == Arch::Sm90a && transposed && k <= FEW_TOKENS && m.min(n) >= MANY_FEATURES
    }

    /// The number of tokens: of a gradient of weights what is summed over, else the rows.
    fn tokens(&mut self) -> &mut usize {
        if self.transposed { &mut self.k } else { &mut self.m }
    }
}

impl fmt::Display for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, k, n, transposed, weights, accumulate, dtype, out } = *self;
        let (x, add) =
            (if transposed { "x^T" } else { "x" }, if accumulate { " added" } else { "" });
        write!(f, "{m}x{k}x{n} {x}*W {weights} {dtype} to {out}{add}")
    }
}

/// An algorithm of cuBLASLt, by what identifies it among those that it proposes: `CUBLASLT_ALGO_CONFIG_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmAlgorithm {
    /// `ID`.
    pub id: u32,
    /// `TILE_ID`.
    pub tile: u32,
    /// `STAGES_ID`.
    pub stages: u32,
    /// `CLUSTER_SHAPE_ID`.
    pub cluster: u16,
    /// `INNER_SHAPE_ID`.
    pub inner_shape: u16,
    /// `SPLITK_NUM`.
    pub split_k: u32,
    /// `REDUCTION_SCHEME`.
    pub reduction: u32,
    /// `CTA_SWIZZLING`.
    pub swizzling: u32,
    /// `CUSTOM_OPTION`.
    pub option: u32,
}

impl fmt::Display for GemmAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, tile, stages, cluster, split_k, option, .. } = self;
        write!(f, "{id}: tile {tile}, cluster {cluster}, stages {stages}, option {option}")?;
        if *split_k > 1 { write!(f, ", split-K {split_k}") } else { Ok(()) }
    }
}

/// The fastest algorithm, and the share that it takes of the time of what cuBLASLt proposes first.
pub(crate) type Fastest = (GemmAlgorithm, f64);

/// Numbers of tokens that are further apart than this say nothing of those between them.
const WIDEST: usize = 2;

/// The fastest algorithms of one version of cuBLASLt.
#[derive(Debug, PartialEq)]
pub(crate) struct Measured {
    /// Major and minor.
    pub(crate) version: (usize, usize),
    /// By the product without its number of tokens, in the order of these.
    by_tokens: HashMap<Gemm, Vec<(usize, Fastest)>>,
}

impl Measured {
    pub(crate) fn new(
        version: (usize, usize),
        all: impl IntoIterator<Item = (Gemm, Fastest)>,
    ) -> Self {
        let mut by_tokens: HashMap<Gemm, Vec<_>> = HashMap::new();
        for (mut gemm, fastest) in all {
            let tokens = std::mem::take(gemm.tokens());
            by_tokens.entry(gemm).or_default().push((tokens, fastest));
        }
        by_tokens.values_mut().for_each(|counts| counts.sort_by_key(|(tokens, _)| *tokens));
        Self { version, by_tokens }
    }

    /// How many products were measured.
    pub(crate) fn len(&self) -> usize {
        self.by_tokens.values().map(Vec::len).sum()
    }

    /// The numbers of tokens with which a product was measured, and that which it has.
    fn counts(&self, mut gemm: Gemm) -> Option<(&[(usize, Fastest)], usize)> {
        let tokens = std::mem::take(gemm.tokens());
        Some((self.by_tokens.get(&gemm)?, tokens))
    }

    /// The fastest algorithm for a product that was measured.
    pub(crate) fn exact(&self, gemm: &Gemm) -> Option<Fastest> {
        let (counts, tokens) = self.counts(*gemm)?;
        let at = counts.binary_search_by_key(&tokens, |(measured, _)| *measured).ok()?;
        Some(counts[at].1)
    }

    /// The algorithm for a product between two numbers of tokens for both of which it is the fastest, and not the first.
    pub(crate) fn between(&self, gemm: &Gemm) -> Option<Fastest> {
        let (counts, tokens) = self.counts(*gemm)?;
        let next = counts.partition_point(|(measured, _)| *measured < tokens);
        let (fewer, (algorithm, less)) = counts.get(next.checked_sub(1)?)?;
        let (more, (of_more, share)) = counts.get(next)?;
        let agree = algorithm == of_more && less.max(*share) < 1.0 && *more <= WIDEST * fewer;
        agree.then_some((*algorithm, share.max(*less)))
    }
}
