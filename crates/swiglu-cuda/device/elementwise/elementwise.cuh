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
// Why there are no hints to the caches, and so many threads: docs/kernels/elementwise.md.
#pragma once
#include "lib/gate.cuh"

// ARRANGEMENT: 0 = gate and up are addressed apart (separate tensors, packed halves);
//              1 = interleaved in groups of `group` features, whole vectors each;
//              2 = interleaved one by one: a vector of each is sorted out of two;
//              3 = apart, as f32: the sums of a linear map, which nothing rounds to a T of 16 bits. Forward only, with
//                  8 bytes of h per access at most: those of gate and up are 16, and a warp's are contiguous.
//                  16 of h, with two accesses to each of them, was not measured.
enum Arrangement { kApart, kGrouped, kAlternating, kSums };
constexpr Arrangement kArrangement = (Arrangement)ARRANGEMENT;
static_assert(kArrangement != kSums || !kIsF32, "sums of f32 are values of T");

constexpr int kMostThreads = 512;
// Vectors of BYTES that a thread has under way.
template <int BYTES>
constexpr int kUnroll = 16 / BYTES;

// A [rows, cols] tensor: `stride` elements from row to row.
struct Tensor {
  u64 data;
  i64 stride;
};

// How the [rows, cols] result is cut: into vectors, counted from the first row to the last, of which a block
// has kUnroll<BYTES> times as many as threads; those of a thread lie a block's threads apart, so that every
// access of a warp is contiguous. The host sees to it that columns and vectors are fewer than 2^31.
struct Tiling {
  u32 cols;
  u32 vectors;  // of a row; the last may be partial
  u32 total;    // of all rows
  u32 group;    // features per interleaving group
  // vector / vectors = (vector * multiplier) >> shift
  u32 multiplier, shift;
};

// Address of element (row, column) of a tensor.
INLINE u8* element_address(const Tensor& t, u32 row, u64 column) {
  return (u8*)t.data + (row * t.stride + column) * kElementBytes;
}

// Column of feature h of the gate in an interleaved tensor; up is `group` further.
INLINE u64 interleaved_column(u32 h, u32 group) {
  const u32 within = h % group;
  return 2 * (u64)(h - within) + within;
}

template <int BYTES>
INLINE Values<BYTES> load(const void* p) {
  return unpack<BYTES>(ptx::load_global((const ptx::Raw<BYTES>*)p));
}
template <int BYTES>
INLINE void store(void* p, const Values<BYTES>& v) {
  ptx::store_global((ptx::Raw<BYTES>*)p, pack<BYTES>(v));
}

// As many sums as BYTES hold values of T.
template <int BYTES>
INLINE Values<BYTES> load_sums(const Tensor& t, u32 row, u32 column) {
  constexpr int kCount = Values<BYTES>::kCount;
  const u64 offset = (row * t.stride + column) * sizeof(float);
  const auto raw = ptx::load_global((const ptx::Raw<4 * kCount>*)(t.data + offset));
  Values<BYTES> v;
#pragma unroll
  for (int i = 0; i < kCount; ++i) v.value[i] = ptx::as_float(raw.word[i]);
  return v;
}

// Gate and up of BYTES adjacent features.
template <int BYTES>
struct Pair {
  Values<BYTES> gate, up;
};

// Reads the features at `column`; where they are interleaved, `up` is not looked at.
template <int BYTES>
INLINE Pair<BYTES> load_pair(const Tensor& gate, const Tensor& up, const Tiling& tiling, u32 row,
                             u32 column) {
  if constexpr (kArrangement == kSums) {
    return {load_sums<BYTES>(gate, row, column), load_sums<BYTES>(up, row, column)};
  } else if constexpr (kArrangement == kApart) {
    return {load<BYTES>(element_address(gate, row, column)),
            load<BYTES>(element_address(up, row, column))};
  } else if constexpr (kArrangement == kGrouped) {
    const u8* first = element_address(gate, row, interleaved_column(column, tiling.group));
    return {load<BYTES>(first), load<BYTES>(first + (u64)tiling.group * kElementBytes)};
  } else {
    const u8* first = element_address(gate, row, 2 * (u64)column);
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
INLINE void store_pair(const Tensor& gate, const Tensor& up, const Tiling& tiling, u32 row,
                       u32 column, const Pair<BYTES>& pair) {
  if constexpr (kArrangement == kApart) {
    store<BYTES>(element_address(gate, row, column), pair.gate);
    store<BYTES>(element_address(up, row, column), pair.up);
  } else if constexpr (kArrangement == kGrouped) {
    u8* first = element_address(gate, row, interleaved_column(column, tiling.group));
    store<BYTES>(first, pair.gate);
    store<BYTES>(first + (u64)tiling.group * kElementBytes, pair.up);
  } else {
    u8* first = element_address(gate, row, 2 * (u64)column);
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

// For each of this thread's vectors: `load(row, column)` and, when all are under way, `store(row, column, what
// was loaded)`; where a row ends within a vector, `single(row, column)` for each of its elements that exists.
template <int BYTES, class Load, class Store, class Single>
INLINE void for_each_vector(const Tiling& tiling, Load load, Store store, Single single) {
  constexpr int kCount = BYTES / kElementBytes;
  const u32 first = blockIdx.x * (blockDim.x * kUnroll<BYTES>) + threadIdx.x;
  const auto place = [&](int i, u32& row, u32& column) {
    const u32 vector = first + i * blockDim.x;
    row = (u32)(((u64)vector * tiling.multiplier) >> tiling.shift);
    column = (vector - row * tiling.vectors) * kCount;
    return vector < tiling.total;
  };
  decltype(load(0u, 0u)) loaded[kUnroll<BYTES>];
#pragma unroll
  for (int i = 0; i < kUnroll<BYTES>; ++i) {
    u32 row, column;
    if (place(i, row, column) && column + kCount <= tiling.cols) loaded[i] = load(row, column);
  }
#pragma unroll
  for (int i = 0; i < kUnroll<BYTES>; ++i) {
    u32 row, column;
    if (!place(i, row, column)) return;
    if (column + kCount <= tiling.cols) {
      store(row, column, loaded[i]);
    } else {
      for (; column < tiling.cols; ++column) single(row, column);
    }
  }
}

// Threads that an SM holds: fewer in the desktop and embedded members of a generation.
constexpr bool kSmaller = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 ||
                          __CUDA_ARCH__ == 1100 || __CUDA_ARCH__ >= 1200;
constexpr int kResidentThreads = kSmaller ? 1536 : 2048;
