// The main loop of Hopper's GEMM kernels: persistent and warp-specialised, with what becomes of the sums left to an
// epilogue.
//
// One producer thread feeds a ring of STAGES tiles of x and of OPERANDS matrices of weights through TMA; CONSUMERS
// warpgroups multiply with wgmma. Those of a team share the rows of a tile: all of them, or in ping-pong (PING_PONG = 1)
// half, of which one team runs its epilogue while the other multiplies the next tile. The tiles of a stage's weights lie
// behind each other, so one instruction of N = OPERANDS·TILE_H columns multiplies all of them, and what belongs to an
// output meets in the same thread, registers d[i] and d[i + TILE_H/2].
//
// Whole waves of tiles rarely end where the features do. With TAIL_H > 0 the columns from `full_columns` on are
// cut into narrower tiles of TAIL_H, which come last: the host chooses both so that the fullest SM has the least to do.
//
// Compile-time: ELEMENT 1|2; ORIENTATION 0 = weights [out, in], 1 = [in, out]; OPERANDS 1|2; TILE_H output columns per
// tile; CLUSTER blocks, 1 or 2, that compute tiles below each other and share the weights; STAGES; TAIL_H as above or 0;
// SHARED_BYTES as the host computed them; CONSUMERS 2|4, by default 2. M, H and K are run-time values, K > 0; TMA fills what
// lies outside with zeros, so that no extent needs padding.
//
// An epilogue is a class, of which each consumer thread has an object:
//   kBytes of shared memory behind the ring, from a multiple of 1024 on, and kBarriers behind the ring's: of the block
//   static void initialise(params, barriers)   one thread, first of all: its barriers, prefetches of its maps
//   Epilogue(params, shared, barriers, consumer)
//   void begin<WIDTH>(Sums<WIDTH>&, Tile)      before the tile is multiplied; in ping-pong it sets the sums
//   void finish<WIDTH>(const Sums<WIDTH>&, Tile)
//   void end()                                 after the last tile
#pragma once
#include "tiles.cuh"

#ifndef CONSUMERS
#define CONSUMERS 2
#endif

constexpr int kTileM = 128;
constexpr int kTileK = 64;                 // 128 bytes: one row of the 128-byte swizzle
constexpr int kTileH = TILE_H;
constexpr int kOperands = OPERANDS;
constexpr int kCluster = CLUSTER;
static_assert(kCluster == 1 || kCluster == kOperands, "each block of a cluster loads one operand for all");
constexpr bool kPingPong = PING_PONG != 0;
constexpr bool kMajorN = ORIENTATION == 1;  // of the B operand

// Columns of a tile that are a row of the swizzle: of the result, and of weights [in, out].
constexpr int kPanel = kTileH % 64 == 0 ? 64 : kTileH % 32 == 0 ? 32 : 16;
constexpr int kPitch = kPanel * 2;  // bytes of that row
static_assert(kTileH % 16 == 0 && kOperands * kTileH <= 256, "whole panels; one instruction has 256 columns");

constexpr int kTailH = TAIL_H;
static_assert(kTailH == 0 || (kTailH < kTileH && kTailH % kPanel == 0), "whole panels, as those of full tiles");

constexpr int kConsumers = CONSUMERS;  // warpgroups
constexpr int kConsumersPerTile = kPingPong ? kConsumers / 2 : kConsumers;  // those of a team
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowsPerConsumer = kTileM / kConsumersPerTile;
constexpr int kBlocks = kRowsPerConsumer / 64;  // of the rows of one instruction
static_assert(kBlocks > 0 && kRowsPerConsumer % 64 == 0, "rows of whole instructions");

constexpr int kXBytes = kTileM * kTileK * 2;
constexpr int kOperandBytes = kTileH * kTileK * 2;
constexpr int kStageBytes = kXBytes + kOperands * kOperandBytes;
constexpr int kStages = STAGES;

static_assert(kStages >= 2, "a stage is given back while the next one is multiplied");

// Shared memory: the ring, the epilogue's, the barriers.
constexpr int kEpilogueAt = kStages * kStageBytes;
template <class Epilogue>
struct Ring : StageRing<kStages, kStageBytes, kEpilogueAt + Epilogue::kBytes> {
  using StageRing<kStages, kStageBytes, kEpilogueAt + Epilogue::kBytes>::StageRing;
  INLINE u32 epilogue() const { return this->base + kEpilogueAt; }
  INLINE u32 epilogue_barriers() const { return this->full_barrier(0) + 2 * 8 * kStages; }
};

struct alignas(64) Operands {
  ptx::TensorMap x;       // boxes of one stage, see `produce`
  ptx::TensorMap last_x;  // of the last rows, which may be fewer than a tile's
  ptx::TensorMap w[kOperands];
  // Boxes of a narrow tile, with TAIL_H; and where these tiles begin: a multiple of TILE_H, or all features.
  ptx::TensorMap tail_w[kOperands];
  int full_columns;
  Extents extents;
};

template <int N>
struct Constant {
  static constexpr int value = N;
};

INLINE int k_steps(const Extents& e) { return ceiling_divide(e.k, kTileK); }

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

template <class Ring>
INLINE void produce(const Operands& p, const Ring& ring) {
  u32 step = 0;
  const Tiles tiles(p);
  const int steps = k_steps(p.extents);
  const u32 rank = kCluster > 1 ? ptx::cluster_rank() : 0;
  for (int t = blockIdx.x / kCluster; t < tiles.count; t += gridDim.x / kCluster) {
    tiles.with(t, [&](auto width, Tile tile) {
      constexpr int kWidth = decltype(width)::value, kBytes = kWidth * kTileK * 2;
      constexpr bool kTail = kWidth != kTileH;
      const int rows = copied_rows<kTileM>(p.extents, tile.row);
      const ptx::TensorMap& x = rows == kTileM ? p.x : p.last_x;
      for (int i = 0; i < steps; ++i, ++step) {
        // Free in every block that the copies go to: their consumers all arrive here.
        ptx::barrier_wait(ring.empty_barrier(step), Ring::parity(step) ^ 1);
        const u32 full = ring.full_barrier(step), to = ring.stage(step);
        ptx::barrier_arrive_expect(full, rows * (kTileK * 2) + kOperands * kBytes);
        // In a cluster the last tile may lie below all rows.
        if (kCluster == 1 || rows > 0) ptx::tensor_load(to, &x, full, i * kTileK, tile.row);
        // A loop that is unrolled costs spills in a cluster.
        const auto load = [&](auto operand) {
          constexpr int o = decltype(operand)::value;
          if (kCluster > 1 && rank != o) return;
          load_weights<kWidth>(kTail ? p.tail_w[o] : p.w[o], to + kXBytes + o * kBytes, full, tile.column, i * kTileK);
        };
        load(Constant<0>());
        if constexpr (kOperands > 1) load(Constant<1>());
      }
    });
  }
}

// Descriptor units are 16 bytes. 16 k are 32 bytes along a swizzled row of a K-major operand, or 16
// rows of a panel of an MN-major one.
constexpr u32 kXStep = 32 / 16;
constexpr u32 kXBlock = 64 * 128 / 16;  // the next 64 rows of x
constexpr u32 kWeightStep = kMajorN ? 16 * kPitch / 16 : 32 / 16;

// Gives a stage back to every producer that writes to it: one thread of a consumer for each.
template <class Ring>
INLINE void release_stage(const Ring& ring, u32 step) {
  const u32 thread = threadIdx.x % 128;
  if constexpr (kCluster > 1) {
    if (thread < kCluster) {
      ptx::barrier_arrive_cluster(ptx::cluster_address(ring.empty_barrier(step), thread));
    }
  } else {
    if (thread == 0) ptx::barrier_arrive(ring.empty_barrier(step));
  }
}

// Which team a consumer is of, and which part of the rows is its own.
INLINE int team_of(int consumer) { return kPingPong ? consumer / kConsumersPerTile : 0; }
INLINE int part_of(int consumer) { return kPingPong ? consumer % kConsumersPerTile : consumer; }

// Ping-pong: a team multiplies when the other has taken the last stage of its tile. Without this
// it would see the barriers of stages that are not its own: they tell only odd rounds from even ones.
constexpr int kTurns = 1 + kConsumers;  // the first id behind those of `consumer_barrier`
INLINE void wait_for_turn(int team) {
  if (team == 0) {
    ptx::named_barrier<kTurns>(128 * kConsumers);
  } else {
    ptx::named_barrier<kTurns + 1>(128 * kConsumers);
  }
}
INLINE void give_turn(int team) {
  if (team == 0) {
    ptx::named_barrier_arrive<kTurns>(128 * kConsumers);
  } else {
    ptx::named_barrier_arrive<kTurns + 1>(128 * kConsumers);
  }
}

// Accumulators of a consumer's part of a tile, 64 rows each, of the columns of every operand.
template <int WIDTH>
using Sums = float[kBlocks][kOperands * WIDTH / 2];

// Multiplies one tile; stages are given back one step late, when their instructions have retired.
// `more`: whether the other team has a tile after this one.
template <int WIDTH, class Ring>
INLINE void multiply(Sums<WIDTH>& d, const Ring& ring, u32& step, int steps, int consumer, bool more) {
  if constexpr (kPingPong) wait_for_turn(team_of(consumer));
  const int first_row = part_of(consumer) * kRowsPerConsumer;
  for (int i = 0; i < steps; ++i, ++step) {
    ptx::barrier_wait(ring.full_barrier(step), Ring::parity(step));
    const u32 stage = ring.stage(step);
    const u64 x = ptx::swizzled_operand(stage + first_row * 128, 0);
    const u64 w = kMajorN ? ptx::swizzled_operand<kPitch>(stage + kXBytes, kTileK * kPitch)
                                : ptx::swizzled_operand(stage + kXBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTileK / 16; ++j) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const u64 rows = operand_further(x, j * kXStep + b * kXBlock);
        const u64 columns = operand_further(w, j * kWeightStep);
        ptx::wgmma<kOperands * WIDTH, kIsBf16, kMajorN>(d[b], rows, columns, kPingPong || (i | j) != 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (i > 0) release_stage(ring, step - 1);
  }
  if (kPingPong && more) give_turn(1 - team_of(consumer));
  ptx::wgmma_wait<0>();
  release_stage(ring, step - 1);
}

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

template <class Ring, class Epilogue>
INLINE void consume(const Operands& p, const Ring& ring, int consumer, Epilogue& epilogue) {
  const Tiles tiles(p);
  const int steps = k_steps(p.extents), stride = gridDim.x / kCluster;
  // In ping-pong every other tile of the block, and of its stages those of that tile.
  const int first = kPingPong ? team_of(consumer) : 0;
  u32 step = first * steps;
  if (kPingPong && first == 1) give_turn(0);
  for (int t = blockIdx.x / kCluster + first * stride; t < tiles.count;
       t += (kPingPong ? 2 : 1) * stride) {
    tiles.with(t, [&](auto width, Tile tile) {
      constexpr int kWidth = decltype(width)::value;
      Sums<kWidth> d;
      epilogue.template begin<kWidth>(d, tile);
      multiply<kWidth>(d, ring, step, steps, consumer, t + stride < tiles.count);
      if (kPingPong) step += steps;
      epilogue.template finish<kWidth>(d, tile);
    });
  }
  epilogue.end();
}

// The kernel: `Params` has `operands`, and makes an `Epilogue` for a consumer.
template <class Epilogue, class Params>
INLINE void gemm(const Params& p) {
  constexpr u32 kShared = 1024 + kEpilogueAt + Epilogue::kBytes + 8 * (2 * kStages + Epilogue::kBarriers);
  static_assert(kShared == SHARED_BYTES, "the host and the kernel disagree about shared memory");
  static_assert(kShared <= 232448, "the stages do not fit");
  const Ring<Epilogue> ring(ptx::shared_address(ptx::dynamic_shared()));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(ring.full_barrier(s), 1);
      ptx::barrier_init(ring.empty_barrier(s), kConsumersPerTile * kCluster);
    }
    Epilogue::initialise(p, ring.epilogue_barriers());
    ptx::barrier_init_fence();
    ptx::prefetch_tensor_map(&p.operands.x);
    ptx::prefetch_tensor_map(&p.operands.last_x);
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
      ptx::prefetch_tensor_map(&p.operands.w[o]);
      if (kTailH > 0) ptx::prefetch_tensor_map(&p.operands.tail_w[o]);
    }
  }
  if constexpr (kCluster > 1) {
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }
  ptx::grid_dependency_wait();
  // Of two consumers 40 + 2·232 registers are the 504 that three warpgroups of 168 start with, of four 24 + 4·112 fit into the
  // 480 of five of 96.
  const u32 warpgroup = warpgroup_number();
  if (warpgroup == 0) {
    ptx::registers_release<kConsumers == 2 ? 40 : 24>();
    if (threadIdx.x < 32 && ptx::elect()) {
      produce(p.operands, ring);
      ptx::grid_dependency_launch();
    }
  } else {
    ptx::registers_request<kConsumers == 2 ? 232 : 112>();
    Epilogue epilogue(p, ring.epilogue(), ring.epilogue_barriers(), warpgroup - 1);
    consume(p.operands, ring, warpgroup - 1, epilogue);
  }
  // No block may end while another still copies to it or arrives at its barriers.
  if constexpr (kCluster > 1) ptx::cluster_barrier();
}
