// Which tiles a block of Hopper's main loop computes, and in which order.
//
// A scheduler is a class, of which the producer and each consumer have an object; all of them see the same tiles:
//   Scheduler(operands)
//   int count             tiles of the launch; a block, or a cluster, takes every so many from its own number on
//   void with(t, work)    calls work(Constant<WIDTH>(), Tile) for the t-th of them
// It may read device memory, as how many rows the groups of a problem have: the grid before this one has been waited for.
//
// Whole waves of tiles rarely end where the features do. With TAIL_H > 0 the columns from `full_columns` on are
// cut into narrower tiles of TAIL_H, which come last: the host chooses both so that the fullest SM has the least to do.
#pragma once
#include "sm90/operands.cuh"

// The tiles of a cluster's blocks lie below each other.
template <int WIDTH>
INLINE Tile cluster_tile_at(int t, const Extents& e) {
  Tile tile = tile_at<kCluster * kTileM, WIDTH>(t, e);
  if constexpr (kCluster > 1) tile.row += ptx::cluster_rank() * kTileM;
  return tile;
}

// All tiles of a launch: `full` of TILE_H columns, then those of TAIL_H.
struct Tiles {
  Extents full_extents, tail_extents;
  int full, count;

  INLINE explicit Tiles(const Operands& p) : full_extents(p.extents), tail_extents(p.extents) {
    if constexpr (kTailH > 0) {
      full_extents.features = p.full_columns;
      tail_extents.features -= p.full_columns;
    }
    full = count = tile_count<kCluster * kTileM, kTileH>(full_extents);
    if constexpr (kTailH > 0) count += tile_count<kCluster * kTileM, kTailH>(tail_extents);
  }

  // Calls `work` with tile t, either way with its width at compile time.
  template <class Work>
  INLINE void with(int t, Work work) const {
    if (kTailH == 0 || t < full) {
      work(Constant<kTileH>(), cluster_tile_at<kTileH>(t, full_extents));
    } else if constexpr (kTailH > 0) {
      Tile tile = cluster_tile_at<kTailH>(t - full, tail_extents);
      tile.column += full_extents.features;
      work(Constant<kTailH>(), tile);
    }
  }
};
