// What kernels that multiply in tiles share: the problem, the order of tiles, operands, results next to each other.
#pragma once
#include "element.cuh"

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

// The calling warpgroup's number, from one lane: of what follows from threadIdx the compiler does not know that a warp
// agrees on it, and computes descriptors in vector registers, to move each word of them to a uniform one.
INLINE u32 warpgroup_number() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// A descriptor of an operand so many units of 16 bytes further. The address is its lowest field, which never carries:
// one word changes.
INLINE u64 operand_further(u64 operand, u32 units) {
  return (operand & 0xFFFFFFFF00000000u) | ((u32)operand + units);
}

// A ring of stages in shared memory, from a multiple of 1024 bytes on, where the swizzle's pattern begins. Of each stage
// two barriers lie so many bytes behind that: one for what has come, one for what has been multiplied.
template <int COUNT, int BYTES, int BARRIERS_AT>
struct StageRing {
  // One register: everything else is a constant distance away.
  u32 base;
  INLINE explicit StageRing(u32 start) : base((start + 1023) & ~1023u) {}
  INLINE u32 stage(u32 step) const { return base + step % COUNT * BYTES; }
  INLINE u32 full_barrier(u32 step) const { return base + BARRIERS_AT + 8 * (step % COUNT); }
  INLINE u32 empty_barrier(u32 step) const { return full_barrier(step) + 8 * COUNT; }
  // Parity of the ring's round that `step` belongs to.
  static INLINE u32 parity(u32 step) { return step / COUNT & 1; }
};

// Rows of x that TMA brings for a tile: all of them, or of the last tile those there are, in whole eights.
// Beyond these shared memory is as it was: rows, or columns, of products do not depend on each other.
template <int TILE_ROWS>
INLINE int copied_rows(const Extents& e, int row) {
  const int left = e.m - row;
  return left >= TILE_ROWS ? TILE_ROWS : left > 0 ? ceiling_divide(left, 8) * 8 : 0;
}

// Copies rows of 16-bit elements into panels of lines of the 128-byte swizzle, 64 of k each, by THREADS threads, eight for
// a line: all of them under way at once, where TMA takes 30 to 50 cycles for each copy of a thread, and its
// answer longer. Elements behind the end of k are zeros, lines of rows that there are not are left as they were.
template <int THREADS>
class LineCopies {
  static constexpr int kPiece = 8, kPieces = 8;  // elements of a copy, and copies of a line
  static constexpr int kLines = THREADS / kPieces;
  u64 from;
  i64 stride;
  int rows, k;
  int piece, first_panel, first_row, further_panels, further_rows;

 public:
  // For `rows` rows from `matrix` on, `k` elements of them, `stride` from one to the next. Divides: best done early.
  INLINE LineCopies(u64 matrix, i64 stride, int rows, int k, u32 thread)
      : from(matrix), stride(stride), rows(rows), k(k), piece(thread % kPieces) {
    const int line = thread / kPieces;
    first_panel = line / rows, first_row = line % rows;
    further_panels = kLines / rows, further_rows = kLines % rows;
  }

  // Asks for `panels` panels from the `first`-th on; `place(i)` is where the i-th of these goes, at a multiple of 1024.
  template <class Place>
  INLINE void copy(int first, int panels, Place place) const {
    int panel = first_panel, row = first_row;
#pragma unroll 1
    while (panel < panels) {
      const int column = (first + panel) * (kPieces * kPiece) + piece * kPiece, exist = k - column;
      const u64 at = from + (row * stride + column) * 2;
      const u32 to = place(panel) + row * (kPieces * kPiece * 2) + (piece ^ row % 8) * 16;
      if (exist <= 0 || exist >= kPiece) {
        ptx::copy_async<16>(to, (const void*)at, exist > 0);
      } else {
        // Nothing is read behind a row's last element.
        for (int i = 0; i < kPiece; ++i) ptx::store_shared(to + 2 * i, i < exist ? ((const u16*)at)[i] : (u16)0);
      }
      panel += further_panels;
      row += further_rows;
      if (row >= rows) {
        row -= rows;
        ++panel;
      }
    }
  }
};

// Two values of a row that are next to each other, before their rounding to T.
struct OutputPair {
  float value[2];
};

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
