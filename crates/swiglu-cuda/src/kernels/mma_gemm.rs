//! What launchers of the main loop in `device/portable/mma_gemm.cuh` share.

use swiglu_core::DType;

use super::elementwise::{Tensor, signed};
use super::gated_gemm::{Extents, Form, Multiplier};
use crate::device::jit::{Define, define};
use crate::device::launch::LaunchConfig;

/// A tile of two operands, how many warps share it along each side, and the ring. One operand of twice as many columns is
/// the same work, in the same memory and registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    tile: [usize; 2],
    warps: [usize; 2],
    stages: usize,
    /// Bytes of k per stage. The more, the fewer times warps meet; 128 are a whole line of the cache of each row.
    k_bytes: usize,
}

impl Config {
    /// The most arithmetic per byte, and eight warps where one block has an SM to itself.
    pub(crate) const TALL: Config =
        Config { tile: [256, 64], warps: [4, 2], stages: 4, k_bytes: 64 };
    /// Two blocks on the SMs of an H200, of which one multiplies while the other activates.
    pub(crate) const LARGE: Config =
        Config { tile: [128, 64], warps: [2, 2], stages: 3, k_bytes: 128 };
    /// Up to 64 tokens, and few tiles.
    pub(crate) const MEDIUM: Config =
        Config { tile: [64, 64], warps: [1, 4], stages: 3, k_bytes: 128 };
    /// The same with half of the features.
    pub(crate) const SMALL: Config =
        Config { tile: [64, 32], warps: [1, 2], stages: 3, k_bytes: 128 };
    /// A single fragment of rows.
    pub(crate) const FLAT: Config =
        Config { tile: [16, 32], warps: [1, 2], stages: 4, k_bytes: 128 };
    /// All of them.
    pub(crate) const ALL: [Config; 5] =
        [Self::TALL, Self::LARGE, Self::MEDIUM, Self::SMALL, Self::FLAT];

    /// Rows, and columns of each of two operands.
    pub(crate) fn tile(self) -> [usize; 2] {
        self.tile
    }

    /// Rows and columns of one operand.
    pub(super) fn wide_tile(self) -> [usize; 2] {
        let [rows, columns] = self.tile;
        [rows, 2 * columns]
    }

    pub(super) fn warps(self) -> usize {
        self.warps[0] * self.warps[1]
    }

    /// Along the rows, and along the columns.
    pub(super) fn warps_along(self) -> [usize; 2] {
        self.warps
    }

    pub(crate) fn stages(self) -> usize {
        self.stages
    }

    /// k of a stage.
    pub(super) fn step(self, dtype: DType) -> usize {
        self.k_bytes / dtype.size()
    }

    /// Blocks on an SM are those of an H200, as registers and its shared memory allow. The shares of mma.sync's
    /// rate are of it too, in bf16 with 4096 rows of 4096, 14336 features: 369, 404, 376, 349 and, of a tile twice as
    /// wide as the flat one, 165 TFLOP/s in one run; with few tokens, which it is for, that is better than it says.
    pub(crate) fn form(self) -> Form {
        let (share, blocks_per_sm) = match self {
            Self::TALL => (0.92, 1),
            Self::LARGE => (0.98, 2),
            Self::MEDIUM => (0.90, 3),
            Self::SMALL => (0.82, 4),
            _ => (0.5, 5),
        };
        Form {
            tile: self.tile,
            share: 1,
            split: 1,
            blocks_per_sm,
            hides_epilogue: false,
            narrow_last: false,
            multiplier: Multiplier::Mma {
                share,
                warps: self.warps(),
                shared: self.shared_bytes() as usize,
            },
        }
    }

    /// A launch of a block for each tile.
    pub(super) fn launch(self, tiles: usize) -> LaunchConfig {
        LaunchConfig {
            grid: [tiles as u32, 1, 1],
            block: (32 * self.warps()) as u32,
            dynamic_shared: self.shared_bytes(),
            ..LaunchConfig::default()
        }
    }

    /// What the main loop reads at compile time, but for the element type and the weights' orientation; of one operand or two.
    pub(super) fn defines(self, operands: usize, copy_bytes: usize) -> [Define; 9] {
        let [tile_m, columns] = self.wide_tile();
        [
            ("OPERANDS", operands),
            ("TILE_M", tile_m),
            ("TILE_H", columns / operands),
            ("WARPS_M", self.warps[0]),
            ("WARPS_H", self.warps[1]),
            ("STAGES", self.stages),
            ("TILE_K_BYTES", self.k_bytes),
            ("COPY_BYTES", copy_bytes),
            ("SHARED_BYTES", self.shared_bytes() as usize),
        ]
        .map(|(name, value)| define(name, value))
    }

    /// A stage has rows of x and of the weights; `[in, out]` these take the same space the other way round.
    pub(super) fn shared_bytes(self) -> u32 {
        let [tile_m, columns] = self.wide_tile();
        (self.stages * self.k_bytes * (tile_m + columns)) as u32
    }
}

/// As in the device file, with `N` matrices of weights.
#[repr(C)]
pub(super) struct Operands<const N: usize> {
    x: u64,
    weights: [u64; N],
    x_stride: i64,
    weight_stride: i64,
    extents: Extents,
}

impl<const N: usize> Operands<N> {
    /// Weights have the same row stride.
    pub(super) fn new(x: Tensor, weights: [u64; N], row_stride: usize, extents: Extents) -> Self {
        let (x_stride, weight_stride) = (x.stride, signed(row_stride));
        Self { x: x.data, weights, x_stride, weight_stride, extents }
    }
}

/// The widest access, of 16 bytes at most, that these addresses and row strides in bytes are multiples of.
pub(super) fn widest(addresses_and_strides: impl IntoIterator<Item = u64>) -> usize {
    1 << addresses_and_strides.into_iter().fold(16, |bits, next| bits | next).trailing_zeros()
}

/// What [`widest`] looks at of a matrix of so many rows.
pub(super) fn bits(matrix: Tensor, rows: usize, dtype: DType) -> u64 {
    let stride = if rows > 1 { matrix.stride.cast_unsigned() * dtype.size() as u64 } else { 0 };
    matrix.data | stride
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_fits_the_smallest_device() {
        assert!(Config::ALL.iter().all(|config| config.shared_bytes() <= 99 * 1024));
    }
}
