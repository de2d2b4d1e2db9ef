// The first half of a feed-forward block's backward pass on every GPU from sm_80: dh = dy·Wdᵀ by the main loop of
// mma_gemm.cuh, and in its epilogue, from saved gate and up, ∂L/∂gate, ∂L/∂up and, where it has a place, h once more, which the
// gradient of Wd needs. dh is never in memory, and h need not be kept from the forward pass.
//
// The operands of the main loop are dy, for x, and Wd, whose outputs are here what is summed over. A warp puts its sums into
// shared memory, where the ring was, and goes through them along rows: fragments have two columns of a row, for which an
// access to gate, up and three results would each move a part of what memory moves at least. kAtOnce times 16 rows lie
// there at a time, for the sums of the tallest tile are more than its ring. A lane reads gate and up of an element before it
// writes, and no other reads them: the gradients may replace them in memory.
//
// Compile-time, besides what mma_gemm.cuh and gate.cuh name: ROW_SCALE, and ACCESS_BYTES per access to gate, up and results, 16, 8, 4 or 2:
// the widest that divides every base address and row stride of them. Where a row ends within an access, elements go one by
// one. With ROW_SCALE dh and h are multiplied with a factor of their row, and the sum of h·dh over a warp's columns of it,
// before that, goes to memory, for the gradient of that factor: lanes that have a row add theirs in one order.
//
// Floors as in sm90_dgated_gemm.cu, at the rate of mma.sync. What was measured: docs/kernels/mma_dgated_gemm.md.
#include "lib/gate.cuh"
#include "portable/mma_gemm.cuh"

static_assert(kOperands == 1, "a plain product");
constexpr bool kScaled = ROW_SCALE != 0;

struct Matrix {
  u64 data;
  i64 stride;

  INLINE u8* at(int row, int column) const { return (u8*)data + (row * stride + column) * kElementBytes; }
};

struct MmaDgatedGemmParams {
  Operands operands;
  Matrix gate, up, gate_grad, up_grad, h;
  Formula formula;
  // With ROW_SCALE: of each row, 1 at address 0, and for each kWarpColumns M sums of h·dh, none at address 0.
  u64 scale, dots;
};

// Eight columns of a row are a lane's at a time, in accesses of ACCESS_BYTES.
constexpr int kVector = 8;
constexpr int kAccess = ACCESS_BYTES / kElementBytes, kAccesses = kVector / kAccess;
constexpr int kVectorsOfRow = kWarpColumns / kVector;
// Vectors of gate and of up that a lane has under way.
constexpr int kUnderWay = 2;

// Sums of a row lie so far from those of the next that lanes of a fragment's rows store to different banks.
constexpr int kPitch = (kWarpColumns + 8) * 4;
// 16s of rows that lie in shared memory at a time.
constexpr int rows_at_once() {
  int n = kRowTiles;
  while (kWarpsM * kWarpsH * n * 16 * kPitch > SHARED_BYTES) n /= 2;
  return n;
}
constexpr int kAtOnce = rows_at_once();
constexpr int kRowsAtOnce = 16 * kAtOnce;
static_assert(kAtOnce > 0 && kRowTiles % kAtOnce == 0, "a warp's rows in equal parts");
constexpr int kTurns = kRowsAtOnce * kVectorsOfRow / 32;
static_assert(kRowsAtOnce * kVectorsOfRow % 32 == 0 && kTurns % kUnderWay == 0, "whole turns");

template <int BYTES>
INLINE Values<BYTES> load(const Matrix& m, int row, int column) {
  return unpack<BYTES>(ptx::load_global((const ptx::Raw<BYTES>*)m.at(row, column)));
}
template <int BYTES>
INLINE void store(const Matrix& m, int row, int column, const Values<BYTES>& v) {
  ptx::store_global((ptx::Raw<BYTES>*)m.at(row, column), pack<BYTES>(v));
}

// Sums from shared memory, as a linear map would leave them.
template <int BYTES>
INLINE Values<BYTES> sums_at(u32 address) {
  Values<BYTES> v;
  constexpr int kCount = Values<BYTES>::kCount;
  if constexpr (kCount >= 4) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const ptx::Raw<16> raw = ptx::load_shared_wide(address + 4 * i);
#pragma unroll
      for (int c = 0; c < 4; ++c) v.value[i + c] = ptx::as_float(raw.word[c]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v.value[i] = ptx::as_float(ptx::load_shared(address + 4 * i));
  }
  if constexpr (kPreRound) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v.value[i] = round_to_element(v.value[i]);
  }
  return v;
}

// What a lane knows of a row: its factor, and the sum of h·dh so far.
struct Row {
  float scale, dot;
};

// Writes gradients and h of an access.
template <int BYTES>
INLINE void differentiate(const MmaDgatedGemmParams& p, int row, int column, u32 sums,
                          const Values<BYTES>& gate, const Values<BYTES>& up, Row& of) {
  const Values<BYTES> dh = sums_at<BYTES>(sums);
  Values<BYTES> gate_grad, up_grad, h;
#pragma unroll
  for (int i = 0; i < dh.kCount; ++i) {
    const float scaled = kScaled ? __fmul_rn(dh.value[i], of.scale) : dh.value[i];
    const Gradients grad = gated_backward(scaled, gate.value[i], up.value[i], p.formula);
    gate_grad.value[i] = grad.gate;
    up_grad.value[i] = grad.up;
    h.value[i] = gated(gate.value[i], up.value[i], p.formula);
    if constexpr (kScaled) {
      of.dot = __fmaf_rn(h.value[i], dh.value[i], of.dot);
      h.value[i] = __fmul_rn(h.value[i], of.scale);
    }
  }
  store<BYTES>(p.gate_grad, row, column, gate_grad);
  store<BYTES>(p.up_grad, row, column, up_grad);
  if (p.h.data != 0) store<BYTES>(p.h, row, column, h);
}

class Dgated {
  // Of the warp's sums, in shared memory.
  static INLINE u32 staged(int row, int column) {
    const u32 warp = threadIdx.x / 32;
    return ptx::shared_address(ptx::dynamic_shared()) + warp * (kRowsAtOnce * kPitch) +
           row % kRowsAtOnce * kPitch + column * 4;
  }

 public:
  // Other warps may still read the ring.
  static INLINE void begin() { __syncthreads(); }

  static INLINE void take(const MmaDgatedGemmParams&, Part, Place place, const OutputPair& dh,
                          const OutputPair&) {
    const u32 to = staged(place.row, place.column);
    ptx::store_shared(to, ptx::as_bits(dh.value[0]));
    ptx::store_shared(to + 4, ptx::as_bits(dh.value[1]));
  }

  static INLINE void finish(const MmaDgatedGemmParams& p, Part part, int i) {
    if ((i + 1) % kAtOnce != 0) return;
    const int first_row = part.row + (i + 1 - kAtOnce) * 16;
    __syncwarp();
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn += kUnderWay) go_through(p, first_row, part.column, turn);
    // Before the next rows take the place of these.
    __syncwarp();
  }

 private:
  // kUnderWay vectors of each lane.
  static INLINE void go_through(const MmaDgatedGemmParams& p, int first_row, int first_column, int turn) {
    const Extents& e = p.operands.extents;
    const int lane = threadIdx.x % 32;
    Values<ACCESS_BYTES> gate[kUnderWay][kAccesses], up[kUnderWay][kAccesses];
    const auto place = [&](int n, int a) -> Place {
      const int vector = (turn + n) * 32 + lane;
      return {vector / kVectorsOfRow, vector % kVectorsOfRow * kVector + a * kAccess};
    };
#pragma unroll
    for (int n = 0; n < kUnderWay; ++n) {
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
        const int row = first_row + place(n, a).row, column = first_column + place(n, a).column;
        if (row >= e.m || column + kAccess > e.features) continue;
        gate[n][a] = load<ACCESS_BYTES>(p.gate, row, column);
        up[n][a] = load<ACCESS_BYTES>(p.up, row, column);
      }
    }
#pragma unroll
    for (int n = 0; n < kUnderWay; ++n) {
      const int row = first_row + place(n, 0).row;
      Row of = {1.0f, 0.0f};
      if (kScaled && p.scale != 0 && row < e.m) of.scale = ((const float*)p.scale)[row];
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
        const Place at = place(n, a);
        int column = first_column + at.column;
        if (row >= e.m) continue;
        u32 sums = staged(at.row, at.column);
        if (column + kAccess <= e.features) {
          differentiate<ACCESS_BYTES>(p, row, column, sums, gate[n][a], up[n][a], of);
          continue;
        }
#pragma unroll 1
        for (; column < e.features; ++column, sums += 4) {
          differentiate<kElementBytes>(p, row, column, sums, load<kElementBytes>(p.gate, row, column),
                                       load<kElementBytes>(p.up, row, column), of);
        }
      }
      if constexpr (kScaled) store_dot(p, row, first_column, of.dot);
    }
  }

  // Of all lanes, as many neighbours as a row has vectors with parts of one.
  static INLINE void store_dot(const MmaDgatedGemmParams& p, int row, int first_column, float dot) {
    static_assert(32 % kVectorsOfRow == 0, "lanes of a row are neighbours");
#pragma unroll
    for (int mask = 1; mask < kVectorsOfRow; mask *= 2) dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, mask));
    const Extents& e = p.operands.extents;
    if (threadIdx.x % kVectorsOfRow == 0 && p.dots != 0 && row < e.m && first_column < e.features)
      ((float*)p.dots)[(i64)(first_column / kWarpColumns) * e.m + row] = dot;
  }
};

KERNEL(kThreads, 1, mma_dgated_gemm)(KERNEL_PARAMS(MmaDgatedGemmParams) p) { gemm<Dgated>(p); }
