// The main loop of the GEMM kernels for every GPU from sm_80, by cp.async, ldmatrix and mma.sync, with what becomes of the
// sums left to an epilogue.
//
// A block multiplies a tile of TILE_M rows of x with TILE_H columns of each of OPERANDS matrices of weights; its
// WARPS_M × WARPS_H warps each hold the sums of their part of it, so that what belongs to an output meets in one thread.
// A ring of STAGES tiles, TILE_K_BYTES of k wide, hides the latency of memory, and fragments that are read
// one k-step ahead, over the end of a stage too, that of shared memory. The tensor cores see
// every element type with the same bytes: a k-step of 32 bytes is 16 elements of 16 bits or 8 of
// tf32, and `ldmatrix` moves 16-byte rows whatever they hold.
//
// Compile-time: ELEMENT (0 multiplies in tf32: 10 bits of each factor, sums in f32); ORIENTATION 0 = weights [out, in],
// 1 = [in, out]; COPY_BYTES per copy (16, 8, 4, or 2 through registers), the widest that divides every base
// address and row stride of what is multiplied; SHARED_BYTES as the host computed them. M, H and
// K are run-time values; what lies outside is read as zeros.
//
// An epilogue is a class of static functions, which all threads call when the sums are complete:
//   begin()                                     first of all
//   take(params, Part, Place, first, second)    the sums of an even column of the warp's part and the next, of each operand
//   finish(params, Part, i)                     after those of the i-th 16 rows
// Once the block's threads have met, nobody reads the ring's shared memory any more.
//
// What was measured and tried: docs/kernels/mma_gemm.md.
#pragma once
#include "lib/tiles.cuh"

constexpr int kOperands = OPERANDS;
constexpr bool kMajorN = ORIENTATION == 1;  // of the weights

constexpr int kTileM = TILE_M, kTileH = TILE_H;
constexpr int kWarpsM = WARPS_M, kWarpsH = WARPS_H;
constexpr int kThreads = 32 * kWarpsM * kWarpsH;
constexpr int kStages = STAGES;
constexpr int kWarpRows = kTileM / kWarpsM, kWarpColumns = kTileH / kWarpsH;
constexpr int kRowTiles = kWarpRows / 16, kColumnTiles = kWarpColumns / 8;
static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "a warp's part is whole fragments");

// A stage: x as TILE_M rows of k, each operand's weights as TILE_H rows of k or, [in, out], as
// rows of TILE_H features.
constexpr int kTileKBytes = TILE_K_BYTES;
constexpr int kTileK = kTileKBytes / kElementBytes;
constexpr int kSteps = kTileKBytes / 32;
static_assert(kSteps % 2 == 0, "the fragments of a stage's first k-step are always the same ones of two");
constexpr int kWeightRows = kMajorN ? kTileK : kTileH;
constexpr int kWeightRowBytes = kMajorN ? kTileH * kElementBytes : kTileKBytes;
constexpr int kXBytes = kTileM * kTileKBytes;
constexpr int kOperandBytes = kWeightRows * kWeightRowBytes;
constexpr int kStageBytes = kXBytes + kOperands * kOperandBytes;
static_assert(kStages * kStageBytes == SHARED_BYTES, "the host and the kernel disagree");

// Where 16 bytes of a row lie in it: such that eight rows, or four of unpaired 32-bit reads down a column ([in, out]
// in tf32), spread over all banks.
template <int ROW_BYTES>
INLINE u32 swizzled(u32 row, u32 chunk) {
  static_assert(ROW_BYTES == 64 || ROW_BYTES % 128 == 0 && (ROW_BYTES & (ROW_BYTES - 1)) == 0, "a power of two");
  if constexpr (ROW_BYTES == 64) return chunk ^ (row / 2 % 4);
  if constexpr (kMajorN && kIsF32) return chunk ^ (row % 4 * 2);
  return chunk ^ (row % 8);
}

// A thread's share of a tile: every so many rows of a [rows, columns] matrix the same COPY_BYTES, which move along k from
// stage to stage. k runs along the rows, or with DOWN down the columns. What a stage costs beside its copies is an addition
// for each and little more: as loops that computed addresses, this took four of five instructions.
template <int ROWS, int ROW_BYTES, bool DOWN>
struct Share {
  static constexpr int kCopies = ROW_BYTES / COPY_BYTES;
  // Where there are fewer copies than threads, some have none.
  static constexpr int kRounds = ROWS * kCopies < kThreads ? 1 : ROWS * kCopies / kThreads;
  static constexpr int kRoundRows = kThreads / kCopies;
  static_assert(ROWS * kCopies % kThreads == 0 || kRounds == 1, "whole rounds");
  static_assert(kThreads % kCopies == 0, "rounds of whole rows");

  int row, byte;  // within the tile
  u64 from;       // the next stage's first copy
  i64 round_bytes, stage_bytes;
  int left;  // what the matrix has beyond the first copy across k: rows or, with DOWN, bytes

  INLINE Share(u64 matrix, i64 stride, int rows, int columns, int first_row, int first_column) {
    row = threadIdx.x / kCopies;
    byte = threadIdx.x % kCopies * COPY_BYTES;
    from = matrix + ((first_row + row) * stride + first_column) * kElementBytes + byte;
    round_bytes = kRoundRows * stride * kElementBytes;
    stage_bytes = DOWN ? kTileK * stride * kElementBytes : kTileKBytes;
    left = DOWN ? (columns - first_column) * kElementBytes - byte : rows - first_row - row;
  }

  // Whether rows of the stage's tile, of which `k` elements of k exist, end within a copy: the same for all threads.
  static INLINE bool ends_within_a_copy(int columns, int first_column, int k) {
    const int bytes = (DOWN ? columns - first_column : k) * kElementBytes;
    return bytes < ROW_BYTES && bytes % COPY_BYTES != 0;
  }

  INLINE u32 place(u32 tile, int round) const {
    const int r = row + round * kRoundRows;
    return tile + r * ROW_BYTES + swizzled<ROW_BYTES>(r, byte / 16) * 16 + byte % 16;
  }

  // Copies the tile of a stage, zeros for all that does not exist, and moves on.
  INLINE void copy(u32 to, int k) {
    if (ROWS * kCopies < kThreads && threadIdx.x >= ROWS * kCopies) return;
    const int rows = DOWN ? k - row : left, bytes = DOWN ? left : k * kElementBytes - byte;
    u64 at = from;
    // All of the many narrow ones at once would leave too few registers for the sums.
#pragma unroll(kRounds > 8 ? 4 : kRounds)
    for (int n = 0; n < kRounds; ++n) {
      const bool exists = bytes > 0 && n * kRoundRows < rows;
      if constexpr (COPY_BYTES >= 4) {
        ptx::copy_async<COPY_BYTES>(place(to, n), (const void*)at, exists);
      } else {
        ptx::store_shared(place(to, n), exists ? *(const u16*)at : (u16)0);
      }
      at += round_bytes;
    }
    from += stage_bytes;
  }

  // The same where rows end within a copy, which the copy must not read beyond: element by element. As with copies of two
  // bytes, a barrier is between this and whoever reads it.
  INLINE void copy_elements(u32 to, int k) {
    if (ROWS * kCopies < kThreads && threadIdx.x >= ROWS * kCopies) return;
    const int rows = DOWN ? k - row : left, bytes = DOWN ? left : k * kElementBytes - byte;
#pragma unroll 1
    for (int n = 0; n < kRounds; ++n) {
#pragma unroll 1
      for (int b = 0; b < COPY_BYTES; b += kElementBytes) {
        const u64 at = from + n * round_bytes + b;
        const bool exists = b < bytes && n * kRoundRows < rows;
        if constexpr (kIsF32) {
          ptx::store_shared(place(to, n) + b, exists ? *(const u32*)at : 0u);
        } else {
          ptx::store_shared(place(to, n) + b, exists ? *(const u16*)at : (u16)0);
        }
      }
    }
    from += stage_bytes;
  }
};

typedef Share<kTileM, kTileKBytes, false> ShareOfX;
typedef Share<kWeightRows, kWeightRowBytes, kMajorN> ShareOfWeights;

INLINE ShareOfWeights share_of(u64 weights, i64 stride, const Extents& e, int feature) {
  return kMajorN ? ShareOfWeights(weights, stride, e.k, e.features, 0, feature)
                : ShareOfWeights(weights, stride, e.features, e.k, feature, 0);
}

// Factors as the tensor cores read them.
template <int N>
INLINE void round_factors(u32 (&r)[N]) {
  if constexpr (kIsF32) {
#pragma unroll
    for (int i = 0; i < N; ++i) r[i] = ptx::tf32_bits(ptx::as_float(r[i]));
  }
}

INLINE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kIsF32) {
    ptx::mma_tf32(d, a, b0, b1);
  } else if constexpr (kIsF16) {
    ptx::mma_f16(d, a, b0, b1);
  } else {
    ptx::mma_bf16(d, a, b0, b1);
  }
}

// What a warp multiplies in one k-step: fragments of 16 rows of x, and of each operand's weights pairs of fragments
// of 8 features.
struct Fragments {
  u32 x[kRowTiles][4];
  u32 weights[kOperands][kColumnTiles / 2][4];
};

// Where in a stage a lane reads its first fragments, of x and of one operand's weights. Others are constants away, added
// or, along a swizzled row, by an exclusive or.
struct Lanes {
  u32 x, weights;

  INLINE Lanes(int warp_row, int warp_column) {
    const u32 lane = threadIdx.x % 32;
    const u32 x_row = warp_row + lane % 16;
    x = x_row * kTileKBytes + swizzled<kTileKBytes>(x_row, lane / 16) * 16;
    u32 row, chunk, byte = 0;
    if constexpr (!kMajorN) {
      row = warp_column + lane % 8 + lane / 16 * 8;
      chunk = lane / 8 % 2;
    } else if constexpr (!kIsF32) {
      row = lane % 16;
      chunk = warp_column / 8 + lane / 16;
    } else {
      row = lane % 4;
      chunk = (warp_column + lane / 4) / 4;
      byte = lane / 4 % 4 * 4;
    }
    weights = row * kWeightRowBytes + swizzled<kWeightRowBytes>(row, chunk) * 16 + byte;
  }
};
static_assert(!kMajorN || (kWarpColumns & (kWarpColumns - 1)) == 0, "a warp's columns are bits of their own");

// Weights of the warp's j-th 16 features at k-step `s` (32 bytes): two fragments of two words.
INLINE void load_weights(u32 (&b)[4], u32 operand, u32 lane_at, int j, int s) {
  if constexpr (!kMajorN) {
    ptx::load_matrix_x4(b, operand + (lane_at ^ s * 32) + j * 16 * kWeightRowBytes);
  } else if constexpr (!kIsF32) {
    ptx::load_matrix_x4_transposed(b, operand + (lane_at ^ j * 32) + s * 16 * kWeightRowBytes);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i] = ptx::load_shared(operand + (lane_at ^ (j * 64 + i / 2 * 32)) + (s * 8 + i % 2 * 4) * kWeightRowBytes);
    }
  }
  round_factors(b);
}

INLINE void load_fragments(Fragments& f, u32 stage, const Lanes& lanes, int s) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    ptx::load_matrix_x4(f.x[i], stage + (lanes.x ^ s * 32) + i * 16 * kTileKBytes);
    round_factors(f.x[i]);
  }
#pragma unroll
  for (int o = 0; o < kOperands; ++o) {
#pragma unroll
    for (int j = 0; j < kColumnTiles / 2; ++j) {
      load_weights(f.weights[o][j], stage + kXBytes + o * kOperandBytes, lanes.weights, j, s);
    }
  }
}

// Of a warp's part: fragments of 16 rows and 8 columns, of which a lane has two columns in rows `lane / 4` and 8 further.
typedef float Sums[kRowTiles][kColumnTiles][4];

template <int OPERAND>
INLINE void multiply(Sums& sums, const Fragments& f) {
  if constexpr (OPERAND < kOperands) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const u32(&b)[4] = f.weights[OPERAND][j / 2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add(sums[i][j], f.x[i], b[j % 2 * 2], b[j % 2 * 2 + 1]);
      }
    }
  }
}

// What the main loop reads.
struct Operands {
  u64 x, weights[kOperands];
  i64 x_stride, weight_stride;
  Extents extents;
};

// A warp's part of the result: its first row and column.
typedef Tile Part;
// A row and column of it.
typedef Tile Place;

// What is of the two operands has names of its own, the second's unused where there is one: of arrays of both the compiler
// made other instructions than those that were measured (sm_90a).

template <class Epilogue, class Params>
INLINE void gemm(const Params& p) {
  const Operands& operands = p.operands;
  const u32 ring = ptx::shared_address(ptx::dynamic_shared());
  const Extents& e = operands.extents;
  const Tile tile = tile_at<kTileM, kTileH>(blockIdx.x, e);
  const int steps = ceiling_divide(e.k, kTileK);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % kWarpsM * kWarpRows, warp_column = warp / kWarpsM * kWarpColumns;

  ShareOfX x(operands.x, operands.x_stride, e.m, e.k, tile.row, 0);
  ShareOfWeights first = share_of(operands.weights[0], operands.weight_stride, e, tile.column);
  ShareOfWeights second =
      share_of(operands.weights[kOperands - 1], operands.weight_stride, e, tile.column);
  int k = e.k;  // elements that are still to be copied
  const auto copy_stage = [&](u32 stage) {
    const bool parts = ShareOfX::ends_within_a_copy(e.k, 0, k) ||
                       ShareOfWeights::ends_within_a_copy(e.features, tile.column, k);
    if (k > 0 && !parts) {
      x.copy(stage, k);
      first.copy(stage + kXBytes, k);
      if constexpr (kOperands == 2) second.copy(stage + kXBytes + kOperandBytes, k);
    } else if (k > 0) {
      x.copy_elements(stage, k);
      first.copy_elements(stage + kXBytes, k);
      if constexpr (kOperands == 2) second.copy_elements(stage + kXBytes + kOperandBytes, k);
    }
    k -= kTileK;
    // One group per stage, also where nothing is left to copy: the count of groups is the clock.
    ptx::copy_async_commit();
  };
  const auto after = [&](u32 stage) {
    return stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
  };

  for (int s = 0; s < kStages - 1; ++s) copy_stage(ring + s * kStageBytes);
  Sums first_sums = {}, second_sums = {};
  Fragments fragments[2];
  const Lanes lanes(warp_row, warp_column);
  ptx::copy_async_wait<kStages - 2>();
  __syncthreads();
  u32 stage = ring, freed = ring + (kStages - 1) * kStageBytes;
  load_fragments(fragments[0], stage, lanes, 0);
  for (int step = 0; step < steps; ++step) {
    // The last barrier has freed it: all loads of its fragments were before that.
    copy_stage(freed);
    freed = stage;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool more = s + 1 < kSteps;
      if (!more) {
        stage = after(stage);
        ptx::copy_async_wait<kStages - 2>();
        __syncthreads();
      }
      // Behind the last stage these are of one that nobody multiplies.
      load_fragments(fragments[(s + 1) % 2], stage, lanes, more ? s + 1 : 0);
      multiply<0>(first_sums, fragments[s % 2]);
      multiply<1>(second_sums, fragments[s % 2]);
    }
  }

  const Part part = {tile.row + warp_row, tile.column + warp_column};
  Epilogue::begin();
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0-7 and 8-15 of the fragment
        const int c = 2 * half;
        Epilogue::take(p, part, {i * 16 + half * 8 + lane / 4, j * 8 + lane % 4 * 2},
                       {first_sums[i][j][c], first_sums[i][j][c + 1]},
                       {second_sums[i][j][c], second_sums[i][j][c + 1]});
      }
    }
    Epilogue::finish(p, part, i);
  }
}
