// The ring of stages that Hopper's GEMM kernels share, what comes into it and how it is read. Who multiplies waits for a
// stage's full barrier, who asks for copies for its empty one; a barrier tells odd rounds from even ones only, so nobody may be
// two rounds ahead.
#pragma once
#include "lib/tiles.cuh"

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

// The calling warpgroup's number, from one lane: of what follows from threadIdx the compiler does not know that a warp
// agrees on it, and computes descriptors in vector registers, to move each word of them to a uniform one.
INLINE u32 warpgroup_number() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// A descriptor of an operand so many units of 16 bytes further. The address is its lowest field, which never carries:
// one word changes.
INLINE u64 operand_further(u64 operand, u32 units) {
  return (operand & 0xFFFFFFFF00000000u) | ((u32)operand + units);
}
