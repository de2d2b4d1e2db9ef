// What becomes of the sums of Hopper's main loop, and what its epilogues share: rows, barriers and panels of a consumer.
//
// An epilogue is a class, of which each consumer thread has an object:
//   kBytes of shared memory behind the ring, from a multiple of 1024 on, and kBarriers behind the ring's: of the block
//   static void initialise(params, barriers)   one thread, first of all: its barriers, prefetches of its maps
//   Epilogue(params, shared, barriers, consumer)
//   void begin<WIDTH>(Sums<WIDTH>&, Tile)      before the tile is multiplied; in ping-pong it sets the sums
//   void finish<WIDTH>(const Sums<WIDTH>&, Tile)
//   void end()                                 after the last tile
#pragma once
#include "sm90/shape.cuh"

// First row of a tile that is the consumer's.
INLINE int consumer_row(Tile tile, int consumer) {
  return tile.row + part_of(consumer) * kRowsPerConsumer;
}

// The consumer's own barrier, with an immediate id.
template <int FIRST = 0>
INLINE void consumer_barrier(int consumer) {
  if constexpr (FIRST + 1 < kConsumers) {
    if (consumer != FIRST) return consumer_barrier<FIRST + 1>(consumer);
  }
  ptx::named_barrier<1 + FIRST>(128);
}

// Where 16 bytes of a panel's row lie in it, in units of as many: the swizzle exchanges them by lines of 128 bytes.
INLINE u32 swizzled_chunk(u32 row, u32 chunk) {
  constexpr u32 kChunks = kPitch / 16;
  return chunk % kChunks ^ (row * kPitch / 128 % kChunks);
}

// Where a thread of the consumer finds its four pairs of sums of 16 columns, j / 8 from the first on, in a panel of the
// consumer's rows: the address that it gives to `store_matrix_x4` and `load_matrix_x4`. Matrices 0 and 2 are rows 0 to
// 7 of its warp's sixteen, 1 and 3 rows 8 to 15. `block`: of 64 rows.
INLINE u32 place_in_panel(u32 panel, int block, int j) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const u32 row = block * 64 + warp * 16 + lane % 16;
  return panel + row * kPitch + swizzled_chunk(row, j + lane / 16) * 16;
}
