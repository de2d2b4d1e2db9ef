// h = act(x·Wg + bg, x·Wu + bu) on Hopper: one persistent, warp-specialised kernel.
//
// One producer thread feeds a ring of STAGES tiles of x, Wg and Wu through TMA; two
// consumer warpgroups multiply with wgmma. Cooperating they take 64 rows of a tile each; in ping-pong
// (PING_PONG = 1) they take whole tiles in turn, and one computes activations and stores while the
// other multiplies. A stage's B operand is the gate tile with
// the up tile behind it, so one instruction of N = 2·TILE_H columns computes both, and the two
// pre-activations of an output meet in the same thread, registers d[i] and d[i + TILE_H/2]: the
// activation needs no exchange and nothing but h is written.
//
// Whole waves of tiles rarely end where the features do. With TAIL_H > 0 the columns from `full_columns` on are
// cut into narrower tiles of TAIL_H, which come last: the host chooses both so that the fullest
// SM has the least to do.
//
// Compile-time: ELEMENT 1|2; ORIENTATION 0 = weights [out, in], 1 = [in, out]; TILE_H output
// columns per tile; CLUSTER blocks, 1 or 2, that compute tiles below each other and share the
// weights; STAGES; SHARED_BYTES as the host computed them; BIAS; TENSOR_STORE 1 = output through the
// TMA, 0 = from registers, for a base or row stride that is not a multiple of 16 bytes; TAIL_H as
// above or 0; and what gate.cuh names. M, H and K are run-time values, K > 0; TMA fills
// what lies outside with zeros, so that no extent needs padding.
//
// Floors: 4·M·H·K FLOP at 4096 FLOP per cycle and SM, so a k-step of 64 in a 128 × 128 tile takes
// 1024 cycles while the ring takes in 48 KiB, 48 B per cycle and SM from L2. The raster walks
// groups of row tiles, so that a column of weight tiles is fetched from memory once per group. With
// CLUSTER = 2 each block loads one half of the weights for both: 32 B per cycle and SM from L2.
//
// Cooperating tiles lose the epilogue, about 2000 cycles per tile of 128 × 128; ping-pong hides it, but reads
// more from L2: 64 B per cycle and SM with 64 columns, 48 in a cluster of 2, 53 with 96 columns.
//
// Measured on an H200, bf16, weights [out, in], µs of launches without pause at the limit of power (medians,
// spread up to 10 %), M × K × H:
//                      cuBLAS,    cooperating 128 ×                   ping-pong 128 ×
//                      product    128     112     112 pair   96      64      96
//   16384×2048×4096    853        853                                849     767
//   4096×4096×14336    1414       1434                               1483    1390
//   8192×4096×4096     819        783                                846     795
//   2048×4096×14336    706        711     736     721                753     721
//   4096×896×4864      122        119                                109     107
//   1024×1024×4096     28.2       29.4    37.6    37.5       33.8    28.9    30.5
//   512×4096×14336     174        209     192     189        212     195     187
//   256×4096×14336     109        106     101     98.5       127     113     120
//   512×896×4864       16.9       23.8    22.0    22.5       20.1    18.4    18.3
//   256×896×4864       10.8       13.9    12.9    13.5       11.8    13.6    12.0
// 128 × 96 in ping-pong multiplies in 0.97 to 0.99 of its cycles in the first three (128 × 128: 0.90 to 0.93),
// in 0.87 at K = 896. Where there are few waves, what fits the number of SMs wins.
// Programmatic launch, in the last column but one: 28.9 to 28.2, 195 to 186, 113 to 114, 18.4 to 17.6, 13.6
// to 12.8; with 128 × 128 no difference beyond the spread from 30 µs on. Letting the next grid go when the
// blocks start was no better.
// Since then 128 × 96 in ping-pong has narrow tiles and sends its results off one panel at a time. Narrow tiles, in
// one run of each (µs without them, with): 2048×4096×14336 713, 681; 1024×4096×14336 380, 348; 512×4096×14336 192,
// 178; 777×4096×13696 291, 281; 16384×2048×4096 820, 806; 4096×4096×14336 1395, 1376; 8192×4096×4096 796, 798;
// 1024×1024×4096 30.7, 30.4; 256×896×4864 11.4, 12.1, hence what the host charges for narrow tiles. Of less than one
// wave, all of these changes together gain 11 and 25 % with 128 tokens (896×4864, 4096×14336) and lose 4 to 31 % with
// up to 64, where other kernels are faster: those are not cut since. Their widths were 80, 64, 56 and 32 there and
// their results went straight from registers; those of whole panels are left, 64 and 32, and through TMA
// 1024×1024×4096 takes 26.9 (128 × 64: 27.2), 4096×896×4864 101 (106), 512×896×4864 16.0 (17.5), 16384×2048×4096 769
// (814), in one run again.
// Beside cuBLAS's product alone, in turns, it takes 0.93 to 0.98 of the time in bursts, 0.94 to 1.03 at the limit of
// power, beside quack's kernel 0.94 to 0.99 and 0.98 to 1.02 (records h200f). Before, it was 0.95 to 1.00 and 1.00 to
// 1.02 beside quack's: at the limit of power quack drew less. Nsight Compute says why: at 4096×4096×14336 ours took 2
// % fewer cycles but executed 33 % more instructions, and at 16384×2048×4096 it read 1.7 times the bytes from memory.
// So descriptors are computed in uniform registers now (53 instructions of a warp for 64 of k instead of 90), and
// groups of the raster are taller where x stays in the cache (on the host): predicted 1 to 3 % and 1 to 2 %; measured
// 1 to 4 % and 0.7 to 1.3 %. What was predicted before these counters were read, clusters of two that share weights,
// with the fifth stage that smaller buffers leave room for, and cooperating tiles of 256 rows, both with a third less
// from L2, was refuted, in µs at the limit of power and in bursts, of 16384×2048×4096 and 4096×4096×14336: as it is
// 804, 678, 1410, 1180; a fifth stage alone 831, 693, 1450, 1230; with clusters 842, 709, 1480, 1250; 256 × 96 812,
// 691, 1420, 1230; 256 × 80 857, 726, 1450, 1220. Why a fifth stage costs 2 to 4 %, but nothing in 8192×4096×4096,
// was not counted.
// Predicted and refuted (µs at 16384×2048×4096 and 4096×4096×14336): clusters that share weights or x, with 96
// columns in ping-pong 785 and 806, 1426 and 1415, with 128 × 128 857 and 858, 1466 and 1480; one output
// buffer for both consumers and a fifth stage 811, 1449. With 128 × 128, that is against 853 and 1434: a
// consumer one or two steps ahead 844 and 856, 1439 and 1438; every other exponential by a polynomial 844, 1466
// (no activation at all: 787, 1428); hints to L2 to keep x or weights or to drop either or the output 833 to
// 852, 1438 to 1479; groups of 8, 32 or 64 row tiles 850 to 880, 1427 to 1477; groups along H 819 to 838, 1462
// to 1477; three stages 869, 1499. Other tiles: 256 × 64 848, 1467; 256 × 96 866, 1544; three consumers with
// 192 × 96 901, 1547 and with 192 × 128 873.
// Not measured: [in, out] weights in tiles of 96 and 112 columns, whose boxes are 64 and 32 bytes wide.
// Tried and refuted: rows outermost in the epilogue (the compiler keeps the biases of all columns: up
// to 900 bytes of spills); 24 registers for the producer (36 bytes of spills in its loop).
#include "gated_gemm.cuh"

constexpr int kTileM = 128;
constexpr int kTileK = 64;                 // 128 bytes: one row of the 128-byte swizzle
constexpr int kTileH = TILE_H;
constexpr bool kTensorStore = TENSOR_STORE != 0;
constexpr int kCluster = CLUSTER;
static_assert(kCluster == 1 || kCluster == 2, "one block loads the gate's weights, one the up's");
constexpr bool kPingPong = PING_PONG != 0;

// Columns of a tile that are a row of the swizzle: of the result, and of weights [in, out].
constexpr int kPanel = kTileH % 64 == 0 ? 64 : kTileH % 32 == 0 ? 32 : 16;
constexpr int kPitch = kPanel * 2;  // bytes of that row
static_assert(kTileH % 16 == 0 && kTileH <= 128, "whole panels; one instruction has 256 columns");

constexpr int kTailH = TAIL_H;
static_assert(kTailH == 0 || (kTailH < kTileH && kTailH % kPanel == 0), "whole panels, as those of full tiles");

constexpr int kConsumers = 2;  // warpgroups
constexpr int kConsumersPerTile = kPingPong ? 1 : kConsumers;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowsPerConsumer = kTileM / kConsumersPerTile;
constexpr int kBlocks = kRowsPerConsumer / 64;  // of the rows of one instruction

constexpr int kXBytes = kTileM * kTileK * 2;
constexpr int kHalfBytes = kTileH * kTileK * 2;
constexpr int kStageBytes = kXBytes + 2 * kHalfBytes;
// Panels of a consumer's results that shared memory holds at a time: OUT_PANELS, a divisor of all.
constexpr int kOutPanels = OUT_PANELS;
static_assert(kTileH / kPanel % kOutPanels == 0 && kTailH / kPanel % kOutPanels == 0, "whole turns");
constexpr int kPanelBytes = kRowsPerConsumer * kPitch;
constexpr int kConsumerOutBytes = kOutPanels * kPanelBytes;
constexpr int kOutBytes = kConsumers * kConsumerOutBytes;
constexpr int kStages = STAGES;
constexpr u32 kSharedBytes =
    1024 + kStages * (kStageBytes + 16) + (kTensorStore ? kOutBytes : 0);
static_assert(kSharedBytes == SHARED_BYTES, "the host and the kernel disagree about shared memory");
static_assert(kSharedBytes <= 232448 && kStages >= 2, "the stages do not fit");

struct alignas(64) Sm90GatedGemmParams {
  ptx::TensorMap x, gate, up;  // boxes of one stage, see `produce`
  ptx::TensorMap last_x;       // of the last rows, which may be fewer than a tile's
  ptx::TensorMap out;          // boxes of a consumer's rows of a panel, with TENSOR_STORE
  // Boxes of a narrow tile, with TAIL_H; and where these tiles begin: a multiple of TILE_H, or all features.
  ptx::TensorMap tail_gate, tail_up;
  int full_columns;
  Extents extents;
  Epilogue epilogue;
};

template <int W>
struct Width {
  static constexpr int value = W;
};

INLINE int k_steps(const Extents& e) { return ceiling_divide(e.k, kTileK); }

// Shared memory: the ring, the output tile, the barriers.
constexpr int kOutAt = kStages * kStageBytes;
struct Ring : StageRing<kStages, kStageBytes, kOutAt + (kTensorStore ? kOutBytes : 0)> {
  using StageRing::StageRing;
  INLINE u32 out() const { return base + kOutAt; }
};

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

  INLINE explicit Tiles(const Sm90GatedGemmParams& p) : full_extents(p.extents), tail_extents(p.extents) {
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
      work(Width<kTileH>(), cluster_tile_at<kTileH>(t, full_extents));
    } else if constexpr (kTailH > 0) {
      Tile tile = cluster_tile_at<kTailH>(t - full, tail_extents);
      tile.column += full_extents.features;
      work(Width<kTailH>(), tile);
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

// One half of the B operand. [out, in]: 64 k of TILE_H features are one box. [in, out]: 64 k of a panel's
// features are one box.
template <int WIDTH>
INLINE void load_weights(const ptx::TensorMap& map, u32 to, u32 barrier, int feature, int k) {
  if constexpr (kInOut) {
#pragma unroll
    for (int i = 0; i < WIDTH / kPanel; ++i) {
      load_box(map, to + i * (kTileK * kPitch), barrier, feature + i * kPanel, k);
    }
  } else {
    load_box(map, to, barrier, k, feature);
  }
}

INLINE void produce(const Sm90GatedGemmParams& p, const Ring& ring) {
  u32 step = 0;
  const Tiles tiles(p);
  const int steps = k_steps(p.extents);
  const u32 rank = kCluster > 1 ? ptx::cluster_rank() : 0;
  for (int t = blockIdx.x / kCluster; t < tiles.count; t += gridDim.x / kCluster) {
    tiles.with(t, [&](auto width, Tile tile) {
      constexpr int kWidth = decltype(width)::value, kBytes = kWidth * kTileK * 2;
      constexpr bool kTail = kWidth != kTileH;
      const ptx::TensorMap& gate = kTail ? p.tail_gate : p.gate;
      const ptx::TensorMap& up = kTail ? p.tail_up : p.up;
      const int rows = copied_rows<kTileM>(p.extents, tile.row);
      const ptx::TensorMap& x = rows == kTileM ? p.x : p.last_x;
      for (int i = 0; i < steps; ++i, ++step) {
        // Free in every block that the copies go to: their consumers all arrive here.
        ptx::barrier_wait(ring.empty_barrier(step), Ring::parity(step) ^ 1);
        const u32 full = ring.full_barrier(step), to = ring.stage(step);
        ptx::barrier_arrive_expect(full, rows * (kTileK * 2) + 2 * kBytes);
        // In a cluster the last tile may lie below all rows.
        if (kCluster == 1 || rows > 0) ptx::tensor_load(to, &x, full, i * kTileK, tile.row);
        if (kCluster == 1 || rank == 0) {
          load_weights<kWidth>(gate, to + kXBytes, full, tile.column, i * kTileK);
        }
        if (kCluster == 1 || rank == 1) {
          load_weights<kWidth>(up, to + kXBytes + kBytes, full, tile.column, i * kTileK);
        }
      }
    });
  }
}

// Descriptor units are 16 bytes. 16 k are 32 bytes along a swizzled row of a K-major operand, or 16
// rows of a panel of an MN-major one.
constexpr u32 kXStep = 32 / 16;
constexpr u32 kXBlock = 64 * 128 / 16;  // the next 64 rows of x
constexpr u32 kWeightStep = kInOut ? 16 * kPitch / 16 : 32 / 16;

// Gives a stage back to every producer that writes to it: one thread of a consumer for each.
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

// Ping-pong: a consumer multiplies when the other has taken the last stage of its tile. Without this
// it would see the barriers of stages that are not its own: they tell only odd rounds from even ones.
INLINE void wait_for_turn(int consumer) {
  if (consumer == 0) {
    ptx::named_barrier<3>(256);
  } else {
    ptx::named_barrier<4>(256);
  }
}
INLINE void give_turn(int consumer) {
  if (consumer == 0) {
    ptx::named_barrier_arrive<3>(256);
  } else {
    ptx::named_barrier_arrive<4>(256);
  }
}

// Accumulators of a consumer's part of a tile, 64 rows each, of the gate's columns and the up's.
template <int WIDTH>
using Sums = float[kBlocks][WIDTH];

// In ping-pong sums begin at the biases of their columns, which come while the other consumer multiplies.
// Added behind the products they would take registers beside all sums: up to 200 bytes of spills with 96
// columns. Without biases they begin at zeros rather than nowhere, beside which the compiler keeps the sums of
// narrow tiles in memory.
constexpr bool kBeginsAtBiases = kPingPong;
template <int WIDTH>
INLINE void begin_sums(Sums<WIDTH>& d, const Epilogue& e, const Extents& extents, int column) {
  column += threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j) {
    const BiasPair gate = load_biases(e.gate_bias, column + 8 * j, extents);
    const BiasPair up = load_biases(e.up_bias, column + 8 * j, extents);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d[b][4 * j + i] = gate.value[i % 2];
        d[b][WIDTH / 2 + 4 * j + i] = up.value[i % 2];
      }
    }
  }
}

// Multiplies one tile; stages are given back one step late, when their instructions have retired.
// `more`: whether the other consumer has a tile after this one.
template <int WIDTH>
INLINE void multiply(Sums<WIDTH>& d, const Ring& ring, u32& step, int steps, int consumer, bool more) {
  if constexpr (kPingPong) wait_for_turn(consumer);
  const int first_row = kPingPong ? 0 : consumer * kRowsPerConsumer;
  for (int i = 0; i < steps; ++i, ++step) {
    ptx::barrier_wait(ring.full_barrier(step), Ring::parity(step));
    const u32 stage = ring.stage(step);
    const u64 x = ptx::swizzled_operand(stage + first_row * 128, 0);
    const u64 w = kInOut ? ptx::swizzled_operand<kPitch>(stage + kXBytes, kTileK * kPitch)
                         : ptx::swizzled_operand(stage + kXBytes, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTileK / 16; ++j) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const u64 rows = operand_further(x, j * kXStep + b * kXBlock);
        const u64 columns = operand_further(w, j * kWeightStep);
        ptx::wgmma<2 * WIDTH, kIsBf16, kInOut>(d[b], rows, columns, kBeginsAtBiases || (i | j) != 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (i > 0) release_stage(ring, step - 1);
  }
  if (kPingPong && more) give_turn(1 - consumer);
  ptx::wgmma_wait<0>();
  release_stage(ring, step - 1);
}

// First row of a tile that is the consumer's.
INLINE int consumer_row(Tile tile, int consumer) {
  return tile.row + (kPingPong ? 0 : consumer * kRowsPerConsumer);
}

// h of the two adjacent columns at accumulator i, 8·(i/4) + 2·(lane % 4) and the next.
template <int WIDTH>
INLINE OutputPair output_pair(const float (&d)[WIDTH], int i, const Sm90GatedGemmParams& p, int row,
                              int column) {
  constexpr int kUp = WIDTH / 2;
  if constexpr (kBeginsAtBiases) {
    const OutputPair gate = {pre_activation(d[i]), pre_activation(d[i + 1])};
    const OutputPair up = {pre_activation(d[i + kUp]), pre_activation(d[i + 1 + kUp])};
    return activate_pair(gate, up, p.epilogue, p.extents, row, column);
  } else {
    return activate_pair(d[i], d[i + 1], d[i + kUp], d[i + 1 + kUp], p.epilogue, p.extents, row,
                         column);
  }
}

// The consumer's own barrier, with an immediate id.
INLINE void consumer_barrier(int consumer) {
  if (consumer == 0) {
    ptx::named_barrier<1>(128);
  } else {
    ptx::named_barrier<2>(128);
  }
}

// Whether a thread has so many sums that there are few registers beside them. Then branches keep the compiler from
// computing several results at a time: one for each pair of most activations, up to 28 bytes of spills otherwise.
[[maybe_unused]] constexpr bool kCrowded = kBlocks * kTileH >= 192;
[[maybe_unused]] constexpr bool kGuarded = kCrowded && (kGate != kSilu || !kFast || ROUNDING != 0 || CLAMP);

// Through shared memory and TMA: whole lines, clipped to the tensor.
template <int WIDTH>
INLINE void store_tile(const Sums<WIDTH>& d, const Sm90GatedGemmParams& p, const Ring& ring, Tile tile,
                       int consumer) {
  constexpr u32 kChunks = kPitch / 16;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const bool leader = threadIdx.x % 128 == 0;
  const u32 out = ring.out() + consumer * kConsumerOutBytes;
  // Of this thread; only read where the pre-activations are saved.
  const int first = consumer_row(tile, consumer) + warp * 16 + lane / 4;
#pragma unroll
  for (int turn = 0; turn < WIDTH / kPanel; turn += kOutPanels) {
    // What was there before must have left the buffer.
    if (leader) ptx::bulk_wait_read<0>();
    consumer_barrier(consumer);
    // Columns outermost: rows share the biases of a column, and no others are kept.
#pragma unroll
    for (int j = turn * kPanel / 8; j < (turn + kOutPanels) * kPanel / 8; j += 2) {
      // What lies beyond is clipped. The branch keeps the compiler from computing the next columns too: beside 192 sums
      // there are not enough registers for that.
      if (kCrowded && tile.column + 8 * j >= p.extents.features) continue;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        u32 r[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int i = 4 * (j + q / 2) + 2 * (q % 2);
          const int column = tile.column + 8 * (j + q / 2) + 2 * (lane % 4);
          const int row = first + b * 64 + q % 2 * 8;
          OutputPair h = {};
          if (!kGuarded || column < p.extents.features) h = output_pair(d[b], i, p, row, column);
          r[q] = pack_elements(h.value[0], h.value[1]);
        }
        const u32 row = b * 64 + warp * 16 + lane % 16;  // matrices 0, 2: rows 0-7; 1, 3: rows 8-15
        // Of 16 bytes in the row of the buffer's columns.
        const u32 chunk = j - turn * kPanel / 8 + lane / 16;
        const u32 panel = out + chunk / kChunks * kPanelBytes;
        const u32 line = row * kPitch / 128 % kChunks;  // the swizzle exchanges chunks by lines of 128 bytes
        ptx::store_matrix_x4(panel + row * kPitch + ((chunk % kChunks ^ line) * 16), r);
      }
    }
    ptx::fence_async_shared();
    consumer_barrier(consumer);
    if (leader) {
      const int row = consumer_row(tile, consumer);
#pragma unroll
      for (int i = 0; i < kOutPanels; ++i) {
        ptx::tensor_store(&p.out, out + i * kPanelBytes, tile.column + (turn + i) * kPanel, row);
      }
      ptx::bulk_commit();
    }
  }
}

// Straight from registers.
template <int WIDTH>
INLINE void store_elements(const Sums<WIDTH>& d, const Sm90GatedGemmParams& p, Tile tile, int consumer) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int first = consumer_row(tile, consumer) + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; i += 2) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int row = first + b * 64 + i / 2 % 2 * 8;
      const int column = tile.column + i / 4 * 8 + lane % 4 * 2;
      store_pair(output_pair(d[b], i, p, row, column), p.epilogue, p.extents, row, column);
    }
  }
}

INLINE void consume(const Sm90GatedGemmParams& p, const Ring& ring, int consumer) {
  const Tiles tiles(p);
  const int steps = k_steps(p.extents), stride = gridDim.x / kCluster;
  // In ping-pong every other tile of the block, and of its stages those of that tile.
  const int first = kPingPong ? consumer : 0;
  u32 step = first * steps;
  if (kPingPong && consumer == 1) give_turn(0);
  for (int t = blockIdx.x / kCluster + first * stride; t < tiles.count;
       t += (kPingPong ? 2 : 1) * stride) {
    tiles.with(t, [&](auto width, Tile tile) {
      constexpr int kWidth = decltype(width)::value;
      Sums<kWidth> d;
      if constexpr (kBeginsAtBiases) begin_sums<kWidth>(d, p.epilogue, p.extents, tile.column);
      multiply<kWidth>(d, ring, step, steps, consumer, t + stride < tiles.count);
      if (kPingPong) step += steps;
      if constexpr (kTensorStore) {
        store_tile<kWidth>(d, p, ring, tile, consumer);
      } else {
        store_elements<kWidth>(d, p, tile, consumer);
      }
    });
  }
  if (kTensorStore && threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

KERNEL(kThreads, 1, sm90_gated_gemm)(KERNEL_PARAMS(Sm90GatedGemmParams) p) {
  const Ring ring(ptx::shared_address(ptx::dynamic_shared()));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(ring.full_barrier(s), 1);
      ptx::barrier_init(ring.empty_barrier(s), kConsumersPerTile * kCluster);
    }
    ptx::barrier_init_fence();
    ptx::prefetch_tensor_map(&p.x);
    ptx::prefetch_tensor_map(&p.last_x);
    ptx::prefetch_tensor_map(&p.gate);
    ptx::prefetch_tensor_map(&p.up);
    if (kTensorStore) ptx::prefetch_tensor_map(&p.out);
    if (kTailH > 0) {
      ptx::prefetch_tensor_map(&p.tail_gate);
      ptx::prefetch_tensor_map(&p.tail_up);
    }
  }
  if constexpr (kCluster > 1) {
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }
  ptx::grid_dependency_wait();
  // 40 + 2·232 registers per thread triple are the 504 that three warpgroups of 168 start with.
  const u32 warpgroup = warpgroup_number();
  if (warpgroup == 0) {
    ptx::registers_release<40>();
    if (threadIdx.x < 32 && ptx::elect()) {
      produce(p, ring);
      ptx::grid_dependency_launch();
    }
  } else {
    ptx::registers_request<232>();
    consume(p, ring, warpgroup - 1);
  }
  // No block may end while another still copies to it or arrives at its barriers.
  if constexpr (kCluster > 1) ptx::cluster_barrier();
}
