// What kernels that multiply in tiles share: the problem, the order of tiles, results next to each other.
#pragma once
#include "lib/element.cuh"

struct Extents {
  int m, features, k;
  int raster_rows;  // row tiles that share a column of weight tiles
};

constexpr INLINE int ceiling_divide(int a, int b) { return (a + b - 1) / b; }

// First row and column of a tile.
struct Tile {
  int row, column;
};

template <int TILE_ROWS, int TILE_COLUMNS>
INLINE int tile_count(const Extents& e) {
  return ceiling_divide(e.m, TILE_ROWS) * ceiling_divide(e.features, TILE_COLUMNS);
}

// The t-th tile: down a group of row tiles, then the next column of tiles. Blocks that run together
// so share few rows of x and few columns of the weights, and find them in L2.
template <int TILE_ROWS, int TILE_COLUMNS>
INLINE Tile tile_at(int t, const Extents& e) {
  const int rows = ceiling_divide(e.m, TILE_ROWS);
  const int per_group = e.raster_rows * ceiling_divide(e.features, TILE_COLUMNS);
  const int first = t / per_group * e.raster_rows, within = t % per_group;
  const int height = rows - first < e.raster_rows ? rows - first : e.raster_rows;
  return {(first + within % height) * TILE_ROWS, within / height * TILE_COLUMNS};
}

// Two values of a row that are next to each other, before their rounding to T.
struct OutputPair {
  float value[2];
};

// Adds the biases of a column and the next, elements of a caller's; none at address 0.
INLINE void add_biases(OutputPair& pair, u64 biases, int column, const Extents& extents) {
  if (biases == 0) return;
  const Element* bias = (const Element*)biases + column;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (column + c < extents.features) pair.value[c] = __fadd_rn(pair.value[c], element_to_float(bias[c]));
  }
}

// Stores what exists of a pair: in one access where the row allows it.
INLINE void store_pair(const OutputPair& pair, u64 matrix, i64 stride, const Extents& extents,
                       int row, int column) {
  if (row >= extents.m || column >= extents.features) return;
  u8* to = (u8*)matrix + (row * stride + column) * kElementBytes;
  constexpr int kPairBytes = 2 * kElementBytes;
  if (column + 1 < extents.features && (u64)to % kPairBytes == 0) {
    ptx::Raw<kPairBytes> raw;
    if constexpr (kIsF32) {
      raw.word[0] = ptx::as_bits(pair.value[0]);
      raw.word[1] = ptx::as_bits(pair.value[1]);
    } else {
      raw.word[0] = pack_elements(pair.value[0], pair.value[1]);
    }
    *(ptx::Raw<kPairBytes>*)to = raw;
  } else {
    ((Element*)to)[0] = float_to_element(pair.value[0]);
    if (column + 1 < extents.features) ((Element*)to)[1] = float_to_element(pair.value[1]);
  }
}
