// The main loop of Hopper's GEMM kernels: persistent and warp-specialised. Which tiles there are is left to a scheduler
// (scheduler.cuh), what becomes of the sums to an epilogue (epilogue.cuh).
//
// One producer thread feeds a ring of STAGES tiles of x and of OPERANDS matrices of weights through TMA; CONSUMERS
// warpgroups multiply with wgmma. Those of a team share the rows of a tile: all of them, or in ping-pong (PING_PONG = 1)
// half, of which one team runs its epilogue while the other multiplies the next tile. The tiles of a stage's weights lie
// behind each other, so one instruction of N = OPERANDS·TILE_H columns multiplies all of them, and what belongs to an
// output meets in the same thread, registers d[i] and d[i + TILE_H/2].
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/scheduler.cuh"

// Shared memory: the ring, the epilogue's, the barriers.
constexpr int kEpilogueAt = kStages * kStageBytes;
template <class Epilogue>
struct Ring : StageRing<kStages, kStageBytes, kEpilogueAt + Epilogue::kBytes> {
  using StageRing<kStages, kStageBytes, kEpilogueAt + Epilogue::kBytes>::StageRing;
  INLINE u32 epilogue() const { return this->base + kEpilogueAt; }
  INLINE u32 epilogue_barriers() const { return this->full_barrier(0) + 2 * 8 * kStages; }
};

INLINE int k_steps(const Extents& e) { return ceiling_divide(e.k, kTileK); }

template <class Scheduler, class Ring>
INLINE void produce(const Operands& p, const Ring& ring) {
  u32 step = 0;
  const Scheduler tiles(p);
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
        // A loop that is unrolled costs spills in a cluster, and a function of its own other instructions.
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

// Multiplies one tile; stages are given back one step late, when their instructions have retired. The compiler unrolls it where
// there is no ping-pong, as `multiply_stages` must not be: docs/kernels/sm90_gated_gemm.md, one loop for both.
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

template <class Scheduler, class Ring, class Epilogue>
INLINE void consume(const Operands& p, const Ring& ring, int consumer, Epilogue& epilogue) {
  const Scheduler tiles(p);
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
template <class Epilogue, class Scheduler = Tiles, class Params>
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
      produce<Scheduler>(p.operands, ring);
      ptx::grid_dependency_launch();
    }
  } else {
    ptx::registers_request<kConsumers == 2 ? 232 : 112>();
    Epilogue epilogue(p, ring.epilogue(), ring.epilogue_barriers(), warpgroup - 1);
    consume<Scheduler>(p.operands, ring, warpgroup - 1, epilogue);
  }
  // No block may end while another still copies to it or arrives at its barriers.
  if constexpr (kCluster > 1) ptx::cluster_barrier();
}
