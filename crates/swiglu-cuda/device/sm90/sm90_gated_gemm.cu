// h = act(x·Wg + bg, x·Wu + bu) on Hopper: the main loop of gemm.cuh over two matrices of weights, whose two
// pre-activations of an output meet in the same thread: the activation needs no exchange, and nothing but h is written.
//
// In ping-pong one consumer computes activations and stores while the other multiplies; cooperating tiles lose that
// time, about 2000 cycles per tile of 128 × 128.
//
// Compile-time, besides what shape.cuh and gate.cuh name: BIAS; SAVE;
// TENSOR_STORE 1 = output through the TMA, 0 = a row of a panel by a warp, for a base or row stride that is not a multiple of
// 16 bytes; OUT_PANELS, panels of a consumer's results that shared memory holds at a time, a divisor of all.
//
// Floors: 4·M·H·K FLOP at 4096 FLOP per cycle and SM, so a k-step of 64 in a 128 × 128 tile takes
// 1024 cycles while the ring takes in 48 KiB, 48 B per cycle and SM from L2. The raster walks
// groups of row tiles, so that a column of weight tiles is fetched from memory once per group. With
// CLUSTER = 2 each block loads one half of the weights for both: 32 B per cycle and SM from L2. In ping-pong 64 B with
// 64 columns, 48 in a cluster of 2, 53 with 96 columns.
//
// What was measured, and what was tried and refuted: docs/kernels/sm90_gated_gemm.md.
#include "lib/gated_gemm.cuh"
#include "sm90/gemm.cuh"

static_assert(kOperands == 2, "gate and up");
constexpr bool kTensorStore = TENSOR_STORE != 0;
constexpr int kOutPanels = OUT_PANELS;
static_assert(kTileH / kPanel % kOutPanels == 0 && kTailH / kPanel % kOutPanels == 0, "whole turns");
// Matrices that are written: h, and with SAVE gate and up.
constexpr int kResults = kSave ? 3 : 1;
constexpr int kPanelBytes = kRowsPerConsumer * kPitch;
constexpr int kConsumerOutBytes = kResults * kOutPanels * kPanelBytes;

struct alignas(64) Sm90GatedGemmParams {
  Operands operands;
  // Boxes of a consumer's rows of a panel, with TENSOR_STORE; of gate and up with SAVE too.
  ptx::TensorMap out, gate, up;
  EpilogueParams epilogue;
};

// In ping-pong sums begin at the biases of their columns, which come while the other consumer multiplies.
// Added behind the products they would take registers beside all sums: up to 200 bytes of spills with 96
// columns. Without biases they begin at zeros rather than nowhere, beside which the compiler keeps the sums of
// narrow tiles in memory.
constexpr bool kBeginsAtBiases = kPingPong;

// Whether a thread has so many sums that there are few registers beside them. Then branches keep the compiler from
// computing several results at a time: one for each pair of most activations, up to 28 bytes of spills otherwise.
[[maybe_unused]] constexpr bool kCrowded = kBlocks * kTileH >= 192;
[[maybe_unused]] constexpr bool kGuarded = kCrowded && (kGate != kSilu || !kFast || ROUNDING != 0 || CLAMP);

// The pre-activations of two adjacent columns.
struct GateUpPair {
  OutputPair gate, up;
};

class Gated {
  const Sm90GatedGemmParams& p;
  const u32 out;
  const int consumer;

 public:
  static constexpr int kBytes = kConsumers * kConsumerOutBytes, kBarriers = 0;

  INLINE static void initialise(const Sm90GatedGemmParams& p, u32) {
    if (!kTensorStore) return;
    ptx::prefetch_tensor_map(&p.out);
    if (!kSave) return;
    ptx::prefetch_tensor_map(&p.gate);
    ptx::prefetch_tensor_map(&p.up);
  }

  INLINE Gated(const Sm90GatedGemmParams& p, u32 shared, u32, int consumer)
      : p(p), out(shared + consumer * kConsumerOutBytes), consumer(consumer) {}

  template <int WIDTH>
  INLINE void begin(Sums<WIDTH>& d, Tile tile) const {
    if constexpr (!kBeginsAtBiases) return;
    const int column = tile.column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const BiasPair gate = load_biases(p.epilogue.gate_bias, column + 8 * j, p.operands.extents);
      const BiasPair up = load_biases(p.epilogue.up_bias, column + 8 * j, p.operands.extents);
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

  // Through shared memory: what is written are whole lines, clipped to the matrix.
  template <int WIDTH>
  INLINE void finish(const Sums<WIDTH>& d, Tile tile) const {
    const bool leader = threadIdx.x % 128 == 0;
    // Panel i of h, gate or up.
    const auto panel = [&](int result, int i) { return out + (result * kOutPanels + i) * kPanelBytes; };
#pragma unroll
    for (int turn = 0; turn < WIDTH / kPanel; turn += kOutPanels) {
      // What was there before must have left the buffer.
      if (kTensorStore && leader) ptx::bulk_wait_read<0>();
      consumer_barrier(consumer);
      // Columns outermost: rows share the biases of a column, and no others are kept.
#pragma unroll
      for (int j = turn * kPanel / 8; j < (turn + kOutPanels) * kPanel / 8; j += 2) {
        // What lies beyond is clipped. The branch keeps the compiler from computing the next columns too: beside 192 sums
        // there are not enough registers for that.
        if (kCrowded && tile.column + 8 * j >= p.operands.extents.features) continue;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          u32 r[kResults][4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int i = 4 * (j + q / 2) + 2 * (q % 2);
            const int column = tile.column + 8 * (j + q / 2) + 2 * (threadIdx.x % 4);
            OutputPair h = {};
            GateUpPair in = {};
            if (!kGuarded || column < p.operands.extents.features) {
              in = pre_activations(d[b], i, column);
              h = activate(in);
            }
            r[0][q] = pack_elements(h.value[0], h.value[1]);
            if constexpr (kSave) {
              r[1][q] = pack_elements(in.gate.value[0], in.gate.value[1]);
              r[2][q] = pack_elements(in.up.value[0], in.up.value[1]);
            }
          }
          const int within = j - turn * kPanel / 8;
#pragma unroll
          for (int result = 0; result < kResults; ++result) {
            ptx::store_matrix_x4(place_in_panel(panel(result, within / (kPanel / 8)), b, within % (kPanel / 8)),
                                 r[result]);
          }
        }
      }
      if constexpr (kTensorStore) ptx::fence_async_shared();
      consumer_barrier(consumer);
      if (kTensorStore && !leader) continue;
      const int row = consumer_row(tile, consumer);
#pragma unroll
      for (int i = 0; i < kOutPanels; ++i) {
        const int column = tile.column + (turn + i) * kPanel;
        write(p.out, panel(0, i), p.epilogue.h, p.epilogue.h_stride, row, column);
        if constexpr (kSave) {
          write(p.gate, panel(1, i), p.epilogue.gate, p.epilogue.gate_stride, row, column);
          write(p.up, panel(2, i), p.epilogue.up, p.epilogue.up_stride, row, column);
        }
      }
      if constexpr (kTensorStore) ptx::bulk_commit();
    }
  }

  INLINE void end() const {
    if (kTensorStore && threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
  }

 private:
  // The pre-activations of the two adjacent columns at accumulator i, 8·(i/4) + 2·(lane % 4) and the next.
  template <int WIDTH>
  INLINE GateUpPair pre_activations(const float (&d)[WIDTH], int i, int column) const {
    constexpr int kUp = WIDTH / 2;
    if constexpr (kBeginsAtBiases) {
      return {{pre_activation(d[i]), pre_activation(d[i + 1])},
              {pre_activation(d[i + kUp]), pre_activation(d[i + 1 + kUp])}};
    } else {
      const BiasPair gate = load_biases(p.epilogue.gate_bias, column, p.operands.extents);
      const BiasPair up = load_biases(p.epilogue.up_bias, column, p.operands.extents);
      return {{pre_activation(d[i], gate.value[0]), pre_activation(d[i + 1], gate.value[1])},
              {pre_activation(d[i + kUp], up.value[0]), pre_activation(d[i + 1 + kUp], up.value[1])}};
    }
  }

  INLINE OutputPair activate(const GateUpPair& in) const {
    return {gated(in.gate.value[0], in.up.value[0], p.epilogue.formula),
            gated(in.gate.value[1], in.up.value[1], p.epilogue.formula)};
  }

  // Writes a panel of this consumer's rows: through TMA by one thread, or two elements by each thread at a time, so that a
  // warp writes lines that lie next to each other.
  INLINE void write(const ptx::TensorMap& map, u32 panel, u64 matrix, i64 stride, int row, int column) const {
    if constexpr (kTensorStore) {
      ptx::tensor_store(&map, panel, column, row);
      return;
    }
    constexpr int kPairs = kPanel / 2, kRows = 128 / kPairs;
    const int thread = threadIdx.x % 128, pair = thread % kPairs;
    const Extents& e = p.operands.extents;
    const int left = e.features - column - 2 * pair;
#pragma unroll 4
    for (int r = thread / kPairs; r < kRowsPerConsumer; r += kRows) {
      if (row + r >= e.m || left <= 0) break;
      const u32 word = ptx::load_shared(panel + r * kPitch + swizzled_chunk(r, pair / 4) * 16 + pair % 4 * 4);
      Element* const to = (Element*)matrix + (row + r) * stride + column + 2 * pair;
      if (left > 1 && (u64)to % 4 == 0) {
        *(u32*)to = word;
      } else {
        to[0] = (Element)word;
        if (left > 1) to[1] = (Element)(word >> 16);
      }
    }
  }
};

KERNEL(kThreads, 1, sm90_gated_gemm)(KERNEL_PARAMS(Sm90GatedGemmParams) p) { gemm<Gated>(p); }
