// What the element-wise kernels share: how a tensor is cut into vectors, and where gate and up lie.
//
// BYTES per access are 16, 8, 4 or 2: the widest that divides every base address and row stride,
// chosen at launch. A row's last vector may be partial; its elements are then read one by one.
//
// Floors: bytes / memory bandwidth; forward reads 2 and writes 1 value per element, backward reads
// 3 and writes 2. Arithmetic is 20 to 40 instructions per element, so 16-bit types at full width
// need about half of the issue slots: memory is the limit as long as enough loads are in flight.
// A thread has 16 bytes of each operand under way, in one vector or, where addresses allow only
// narrower ones, in several; more threads do better than more vectors in each.
//
// Measured on an H200, 4096 × 4096, forward, graph replay, as a fraction of a copy of the same bytes:
// 0.97 in f32 and 0.96 in bf16, one vector a thread, read-only loads past the first-level cache.
// Predicted and refuted: that registers, a loop over the grid or the kind of load explain the rest.
#pragma once
#include "gate.cuh"

// ARRANGEMENT: 0 = gate and up are addressed apart (separate tensors, packed halves);
//              1 = interleaved in groups of `group` features, whole vectors each;
//              2 = interleaved one by one: a vector of each is sorted out of two.
enum Arrangement { kApart, kGrouped, kAlternating };
constexpr Arrangement kArrangement = (Arrangement)ARRANGEMENT;

constexpr int kThreads = 256;
// Vectors of BYTES that a thread has under way.
template <int BYTES>
constexpr int kUnroll = 16 / BYTES;

// A [rows, cols] tensor: `stride` elements from row to row.
struct Tensor {
  u64 data;
  i64 stride;
};

// How the [rows, cols] result is cut into tiles: 256 threads are 2^lane_bits lanes along a row by
// 256/lanes rows; a lane handles kUnroll<BYTES> vectors that are `lanes` apart, so that every access of a
// warp is contiguous. Blocks walk over tiles in both directions: no division finds a tile.
struct Tiling {
  i64 rows, cols;
  i64 tile_rows, tile_cols;
  u32 lane_bits;
  u32 group;  // features per interleaving group
};

// Address of element (row, column) of a tensor.
INLINE u8* element_address(const Tensor& t, i64 row, i64 column) {
  return (u8*)t.data + (row * t.stride + column) * kElementBytes;
}

// Column of feature h of the gate in an interleaved tensor; up is `group` further.
INLINE i64 interleaved_column(i64 h, u32 group) {
  const u32 within = (u32)(h % group);
  return 2 * (h - within) + within;
}

template <int BYTES>
INLINE Values<BYTES> load(const void* p) {
  return unpack<BYTES>(ptx::load_streaming((const ptx::Raw<BYTES>*)p));
}
template <int BYTES>
INLINE void store(void* p, const Values<BYTES>& v) {
  ptx::store_streaming((ptx::Raw<BYTES>*)p, pack<BYTES>(v));
}

// Gate and up of BYTES adjacent features.
template <int BYTES>
struct Pair {
  Values<BYTES> gate, up;
};

// Reads the features at `column`; where they are interleaved, `up` is not looked at.
template <int BYTES>
INLINE Pair<BYTES> load_pair(const Tensor& gate, const Tensor& up, const Tiling& tiling, i64 row,
                             i64 column) {
  if constexpr (kArrangement == kApart) {
    return {load<BYTES>(element_address(gate, row, column)),
            load<BYTES>(element_address(up, row, column))};
  } else if constexpr (kArrangement == kGrouped) {
    const u8* first = element_address(gate, row, interleaved_column(column, tiling.group));
    return {load<BYTES>(first), load<BYTES>(first + (u64)tiling.group * kElementBytes)};
  } else {
    const u8* first = element_address(gate, row, 2 * column);
    const Values<BYTES> half[2] = {load<BYTES>(first), load<BYTES>(first + BYTES)};
    Pair<BYTES> pair;
    constexpr int kCount = Values<BYTES>::kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      pair.gate.value[i] = half[2 * i / kCount].value[2 * i % kCount];
      pair.up.value[i] = half[(2 * i + 1) / kCount].value[(2 * i + 1) % kCount];
    }
    return pair;
  }
}

// The inverse of `load_pair`.
template <int BYTES>
INLINE void store_pair(const Tensor& gate, const Tensor& up, const Tiling& tiling, i64 row,
                       i64 column, const Pair<BYTES>& pair) {
  if constexpr (kArrangement == kApart) {
    store<BYTES>(element_address(gate, row, column), pair.gate);
    store<BYTES>(element_address(up, row, column), pair.up);
  } else if constexpr (kArrangement == kGrouped) {
    u8* first = element_address(gate, row, interleaved_column(column, tiling.group));
    store<BYTES>(first, pair.gate);
    store<BYTES>(first + (u64)tiling.group * kElementBytes, pair.up);
  } else {
    u8* first = element_address(gate, row, 2 * column);
    Values<BYTES> half[2];
    constexpr int kCount = Values<BYTES>::kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      half[2 * i / kCount].value[2 * i % kCount] = pair.gate.value[i];
      half[(2 * i + 1) / kCount].value[(2 * i + 1) % kCount] = pair.up.value[i];
    }
    store<BYTES>(first, half[0]);
    store<BYTES>(first + BYTES, half[1]);
  }
}

// Calls `whole(row, column, step)` where this thread's vectors, `step` elements apart, are
// complete, else `single(row, column)` for each of their elements that exists.
template <int BYTES, class Whole, class Single>
INLINE void for_each_vector(const Tiling& tiling, Whole whole, Single single) {
  constexpr int kCount = BYTES / kElementBytes;
  const u32 lanes = 1u << tiling.lane_bits;
  const u32 lane = threadIdx.x & (lanes - 1), row_in_tile = threadIdx.x >> tiling.lane_bits;
  const u32 rows_per_tile = kThreads >> tiling.lane_bits;
  const i64 step = (i64)lanes * kCount;
  for (i64 tile_row = blockIdx.y; tile_row < tiling.tile_rows; tile_row += gridDim.y) {
    const i64 row = tile_row * rows_per_tile + row_in_tile;
    if (row >= tiling.rows) break;
    for (i64 tile_col = blockIdx.x; tile_col < tiling.tile_cols; tile_col += gridDim.x) {
      const i64 first = tile_col * (kUnroll<BYTES> * step) + lane * kCount;
      if (first + (kUnroll<BYTES> - 1) * step + kCount <= tiling.cols) {
        whole(row, first, step);
        continue;
      }
      for (int i = 0; i < kUnroll<BYTES>; ++i) {
        const i64 begin = first + i * step;
        const i64 end = begin + kCount < tiling.cols ? begin + kCount : tiling.cols;
        for (i64 column = begin; column < end; ++column) single(row, column);
      }
    }
  }
}

// The same for one long row that has a block for each tile of 256 whole 16-byte vectors, as dense tensors
// do: nothing to loop over and no row to find, so that 32 registers are enough and all threads that a
// multiprocessor can have are there at once.
template <class Whole, class Single>
INLINE void for_each_vector_dense(const Tiling& tiling, Whole whole, Single single) {
  constexpr int kCount = 16 / kElementBytes;
  const i64 first = (i64)blockIdx.x * (kThreads * kCount) + threadIdx.x * kCount;
  if (first + kCount <= tiling.cols) {
    whole(first);
  } else {
    for (i64 column = first; column < tiling.cols; ++column) single(column);
  }
}
