// What kernels share that stream the weights of a feed-forward block in tiles of 16 rows, for a few
// tokens: the part of a lane in the products, sums, rows of tokens in shared memory,
// the barrier of the grid.
//
// Compile-time: TENSOR 1 = tensor cores (16-bit types), TOKENS 8 or 16, 0 = FMA, TOKENS 1, 2, 4 or 8.
#pragma once
#include "decode/decode_mlp.cuh"

constexpr bool kTensor = TENSOR != 0;
constexpr int kTokens = TOKENS;
static_assert(!kTensor || (!kIsF32 && kTokens % 8 == 0), "fragments are 16-bit, of 8 tokens");

constexpr int kUnitBytes = 64;  // of a row
constexpr int kUnitRows = 16, kUnitPairs = 8;
constexpr u32 kLaneBytes = 16;

// A slot: sums of 16 rows for every token. Without padding four lanes meet in a bank when a fragment is
// stored, once for a tile; with it x would leave room for half of the ring only, at M = 16, K = 4096.
constexpr int kSlotFloats = kTokens * kUnitRows;

constexpr INLINE int ceiling_divide(int a, int b) { return (a + b - 1) / b; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }

struct Range {
  int first, last;
  INLINE int count() const { return last - first; }
};

// Where a lane stands in the fragments: its row, its 16 bytes of the 64, and its warp.
struct Place {
  int warp, row, offset;
  INLINE Place()
      : warp(threadIdx.x / 32), row(threadIdx.x % 32 / 4), offset(threadIdx.x % 4 * kLaneBytes) {}
};

// x or h, [tokens, k], of which a lane reads 16 bytes of a block of some tokens: of token `row` of each eight
// for tensor cores, of every token for FMA.
constexpr int kVectors = kTensor ? kTokens / 8 : kTokens;
typedef ptx::Raw<16> Vectors[kVectors];

struct Tokens {
  u64 data;
  i64 stride;  // bytes
  int m, bytes;

  INLINE void load(Vectors& v, const Place& place, int block) const {
    const int at = block * kUnitBytes + place.offset;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int token = kTensor ? 8 * i + place.row : i;
      v[i] = {};
      if (token < m && at < bytes) {
        v[i] = ptx::load_global((const ptx::Raw<16>*)(data + token * stride + at));
      }
    }
  }
};

struct StagedTokens {
  const u8* data;
  u32 pitch;
  int m;

  INLINE void load(Vectors& v, const Place& place, int block) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int token = kTensor ? 8 * i + place.row : i;
      v[i] = {};
      if (token < m) {
        v[i] = *(const ptx::Raw<16>*)(data + token * pitch + block * kUnitBytes + place.offset);
      }
    }
  }
};

// Sums of a lane. Tensor cores: the fragments of eight tokens each; FMA: rows `row` and `row + 8`
// over this lane's part of k.
constexpr int kSums = kTensor ? kTokens / 8 * 4 : 2 * kTokens;
typedef float Sums[kSums];

INLINE void multiply_fragments(float (&d)[4], const u32 (&low)[4], const u32 (&high)[4],
                               const ptx::Raw<16>& v) {
  // k-slots 2t, 2t + 1 of a fragment are this lane's first word, 2t + 8, 2t + 9 its second; then the
  // same with the third and the fourth.
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const u32 a[4] = {low[j], high[j], low[j + 1], high[j + 1]};
    if constexpr (kIsF16) {
      ptx::mma_f16(d, a, v.word[j], v.word[j + 1]);
    } else {
      ptx::mma_bf16(d, a, v.word[j], v.word[j + 1]);
    }
  }
}

// Stores the sums of a tile, [token][row].
INLINE void store_sums(float* slot, Sums& sums, const Place& place) {
  if constexpr (kTensor) {
    const int token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      slot[(i / 4 * 8 + token + i % 2) * kUnitRows + place.row + i / 2 % 2 * 8] = sums[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float sum = sums[i];
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 2));
      if (place.offset == 0) slot[i % kTokens * kUnitRows + place.row + i / kTokens * 8] = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
}

// Copies `m` rows of `elements` to shared memory, with zeros up to a multiple of WHOLE. Several loads of a
// thread are under way together; the weights behind them are, too. References: values of the launch are
// read where they are used, and take no registers.
template <int WHOLE, int THREADS>
INLINE void stage_rows(const u64& rows, const i64& stride, const int& m, const int& elements,
                       const u32& wide, u8* to, const u32& pitch) {
  const int bytes = elements * kElementBytes;
  const int chunks = ceiling_divide(bytes, WHOLE) * (WHOLE / 16);
  constexpr int kBatch = 4;
  for (int first = threadIdx.x; first < chunks * m; first += kBatch * THREADS) {
    ptx::Raw<16> raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = first + i * THREADS, token = c / chunks, at = c % chunks * 16;
      raw[i] = {};
      if (token >= m || at >= bytes) continue;
      const u64 from = rows + token * stride * kElementBytes + at;
      if (wide && at + 16 <= bytes) {
        raw[i] = ptx::load_global((const ptx::Raw<16>*)from);
      } else {
        constexpr int kCount = 16 / kElementBytes;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (at + j * kElementBytes >= bytes) break;
          const u32 element = ((const Element*)from)[j];
          raw[i].word[j * kElementBytes / 4] |= element << (j * kElementBytes % 4 * 8);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = first + i * THREADS, token = c / chunks, at = c % chunks * 16;
      if (token < m) *(ptx::Raw<16>*)(to + token * pitch + at) = raw[i];
    }
  }
}

// One thread of each block waits for those of all others. Blocks count at one word, the first of them so
// that all together turn its highest bit over and leave the rest as it was: it needs no reset, and the
// next launch may have another grid. The bit cannot turn before this block has counted, so it is read any time
// before that, and what is counted need not come back: one way through the cache less.
struct GridMeeting {
  const u64 word;
  const u32 before;
  // Once the grids before this one have ended.
  INLINE explicit GridMeeting(u64 at) : word(at), before(ptx::load_relaxed((const u32*)at)) {}
  INLINE void meet() const {
    const u32 count = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    ptx::add_release((u32*)word, count);
    ptx::wait_for_turnover((const u32*)word, before);
  }
};
