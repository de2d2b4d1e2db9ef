// What Hopper's main loop multiplies, x and OPERANDS matrices of weights: how they are copied, and lie in a stage.
#pragma once
#include "sm90/shape.cuh"

struct alignas(64) Operands {
  ptx::TensorMap x;       // boxes of one stage
  ptx::TensorMap last_x;  // of the last rows, which may be fewer than a tile's
  ptx::TensorMap w[kOperands];
  // Boxes of a narrow tile, with TAIL_H; and where these tiles begin: a multiple of TILE_H, or all features.
  ptx::TensorMap tail_w[kOperands];
  int full_columns;
  Extents extents;
};

// Copies a box of weights to this block or, in a cluster, to all of it.
INLINE void load_box(const ptx::TensorMap& map, u32 to, u32 barrier, int column, int row) {
  if constexpr (kCluster > 1) {
    ptx::tensor_load_multicast(to, &map, barrier, column, row, (1 << kCluster) - 1);
  } else {
    ptx::tensor_load(to, &map, barrier, column, row);
  }
}

// One matrix of the B operand. [out, in]: 64 k of TILE_H features are one box. [in, out]: 64 k of a panel's
// features are one box.
template <int WIDTH>
INLINE void load_weights(const ptx::TensorMap& map, u32 to, u32 barrier, int feature, int k) {
  if constexpr (kMajorN) {
#pragma unroll
    for (int i = 0; i < WIDTH / kPanel; ++i) {
      load_box(map, to + i * (kTileK * kPitch), barrier, feature + i * kPanel, k);
    }
  } else {
    load_box(map, to, barrier, k, feature);
  }
}

// Descriptor units are 16 bytes. 16 k are 32 bytes along a swizzled row of a K-major operand, or 16
// rows of a panel of an MN-major one.
constexpr u32 kXStep = 32 / 16;
constexpr u32 kXBlock = 64 * 128 / 16;  // the next 64 rows of x
constexpr u32 kWeightStep = kMajorN ? 16 * kPitch / 16 : 32 / 16;
