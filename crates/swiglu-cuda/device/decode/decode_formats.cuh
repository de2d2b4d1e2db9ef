// Weights as the decode kernels stream them: what 64 bytes of a row hold, how a row is laid out, and how
// bytes become factors of tensor cores.
//
// FORMAT 0 = elements; with f16 scales of 32 of k 1 = bytes, 2 = nibbles; with f32 scales of rows 3 = bytes,
// 4 = e4m3; with f32 scales of 128 of k 5 = e4m3.
//
// Quantised weights are laid out when a layer is built. A row is whole units of 64 bytes, lane t of the four
// that share a row of a unit has the 16 bytes at 16·t: its factors of two or four blocks of k, in order. Where
// blocks have scales, 16 bytes of them stand before each *group* of units that they are of, so that one copy of
// a piece of a row brings both; only the last group of a row may lack units.
//
// Bytes and nibbles, biased, become factors in one operation that isolates two of them and one that is exact.
// bf16 has 7 bits behind its leading one, too few to put a byte there; but an exponent of 0 or 1 makes its 8
// lowest bits u the number u·2^-133, and u·2^-133 · 2^127 - bias·2^-6 is a factor, of 1/64 of its size: sums
// are multiplied by 64 in the end. The same with f16 is u·2^-24 · 2^15 - bias·2^-9.
// e4m3 becomes f16 or bf16 by moving its bits and one product with a power of two, 2^8 or 2^120, by which the
// exponents' biases differ: subnormals, too. NaN would become 480; the layout puts it into the scale.
#pragma once
#include "decode/decode_tiles.cuh"

template <int FORMAT>
struct Format {
  static constexpr bool kBytes = FORMAT == 1 || FORMAT == 3, kNibbles = FORMAT == 2;
  static constexpr bool kE4m3 = FORMAT == 4 || FORMAT == 5;
  static constexpr bool kScaledRows = FORMAT == 3 || FORMAT == 4;
  static constexpr bool kScaledBlocks = FORMAT != 0 && !kScaledRows;
  // Blocks of a unit, 64 bytes of x each.
  static constexpr int kBlocks = FORMAT == 0 ? 1 : kNibbles ? 4 : 2;
  static constexpr int kBlockK = FORMAT == 0 ? kUnitBytes / kElementBytes : 32;
  static constexpr int kUnitK = kBlocks * kBlockK;
  // Bytes of scales for a unit, how many units share them, and blocks that have one in common.
  static constexpr int kScaleBytes = FORMAT == 5 ? 4 : kScaledBlocks ? 2 * kBlocks : 0;
  static constexpr int kScaleUnits = FORMAT == 5 ? 2 : 1;
  static constexpr int kScaleBlocks = FORMAT == 5 ? kBlocks : 1;
  static constexpr int kScaleWords = kScaleBytes / 4;
  static constexpr int kGroupScales = kScaledBlocks ? 16 : 0;
  static constexpr int kGroupUnits = kScaledBlocks ? kGroupScales / kScaleBytes * kScaleUnits : 1;
  // What sums lack.
  static constexpr float kRest = !kBytes && !kNibbles ? 1.0f : kIsF16 ? 512.0f : 64.0f;
  static_assert(FORMAT == 0 || kTensor, "quantised weights are multiplied on tensor cores");
  static_assert(kBlockK * kElementBytes == kUnitBytes, "a block of x is 64 bytes");

  // Bytes from the start of a row to a unit, and to its scales.
  static INLINE int unit_at(int unit) {
    return unit * kUnitBytes + (unit / kGroupUnits + 1) * kGroupScales;
  }
  static INLINE int scales_at(int unit) {
    return unit / kGroupUnits * (kGroupUnits * kUnitBytes + kGroupScales) +
           unit % kGroupUnits / kScaleUnits * kScaleBytes;
  }
};
constexpr int kGateUpFormat = FORMAT_GATE_UP, kDownFormat = FORMAT_DOWN;

INLINE u32 fma_elements(u32 a, u32 b, u32 c) {
  return kIsF16 ? ptx::fma_f16x2(a, b, c) : ptx::fma_bf16x2(a, b, c);
}

// Bytes 2·HALF and 2·HALF + 1 of a word, biased by 128.
template <int HALF>
INLINE u32 elements_from_bytes(u32 word) {
  constexpr u32 kSelected = HALF == 0 ? 0x4140 : 0x4342;
  return fma_elements(ptx::permute_bytes(word, 0, kSelected), kIsF16 ? 0x78007800u : 0x7F007F00u,
                      kIsF16 ? 0xB400B400u : 0xC000C000u);
}

// The nibbles, biased by 8, in bits 0 to 3 of both halves of a word, or in bits 4 to 7.
template <int NIBBLE>
INLINE u32 elements_from_nibbles(u32 word) {
  const u32 nibbles = word & (NIBBLE == 0 ? 0x000F000Fu : 0x00F000F0u);
  // Those of the upper bits count 16 times.
  const u32 size = NIBBLE == 0 ? (kIsF16 ? 0x78007800u : 0x7F007F00u)
                               : (kIsF16 ? 0x68006800u : 0x7D007D00u);
  return fma_elements(nibbles, size, kIsF16 ? 0xA400A400u : 0xBE00BE00u);
}

// Two of the four e4m3 in a word. The first two lie where an element has its sign and the bits around the
// exponent's end. The others fill the bits between: of bf16 bits 14 to 12, 11 and 3 to 0 are the upper bits,
// the sign and the lower bits; of f16 bit 14 is the sign and the lowest seven are the others.
template <int HALF>
INLINE u32 elements_from_e4m3(u32 word) {
  const u32 scale = kIsF16 ? 0x5C005C00u : 0x7B807B80u, negative_zeros = 0x80008000u;
  const u32 first = kIsF16 ? 0xBF80BF80u : 0x87F087F0u;
  if (HALF == 0) return fma_elements(word & first, scale, negative_zeros);
  const u32 second = kIsF16 ? (word << 7 & 0x3F803F80u) | (word << 1 & 0x80008000u)
                            : (word << 4 & 0x80F080F0u) | (word >> 4 & 0x07000700u);
  return fma_elements(second, scale, negative_zeros);
}

// A lane's part of a unit: its bytes of two rows, and their scales.
template <int FORMAT>
struct UnitPart {
  static constexpr int kScaleWords = Format<FORMAT>::kScaleWords;
  ptx::Raw<16> row[2];
  u32 scales[2][kScaleWords > 0 ? kScaleWords : 1];

  // The scales of row `half` from shared memory.
  INLINE void load_scales(int half, u32 from) {
    if constexpr (kScaleWords == 1) scales[half][0] = ptx::load_shared(from);
    if constexpr (kScaleWords == 2) {
      const ptx::Raw<8> pair = ptx::load_shared_pair(from);
      scales[half][0] = pair.word[0];
      scales[half][1] = pair.word[1];
    }
  }

  // The four words of 16-bit factors of a block.
  INLINE void factors(u32 (&w)[4], int half, int block) const {
    if constexpr (FORMAT == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = row[half].word[i];
    } else if constexpr (Format<FORMAT>::kNibbles) {
      const u32 word = row[half].word[block];
      w[0] = elements_from_nibbles<0>(word);
      w[1] = elements_from_nibbles<1>(word);
      w[2] = elements_from_nibbles<0>(word >> 8);
      w[3] = elements_from_nibbles<1>(word >> 8);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 word = row[half].word[2 * block + i / 2];
        if constexpr (Format<FORMAT>::kBytes) {
          w[i] = elements_from_bytes<0>(word);
          w[i + 1] = elements_from_bytes<1>(word);
        } else {
          w[i] = elements_from_e4m3<0>(word);
          w[i + 1] = elements_from_e4m3<1>(word);
        }
      }
    }
  }

  INLINE float scale(int half, int block) const {
    if constexpr (FORMAT == 5) return ptx::as_float(scales[half][0]);
    return ptx::float_from_f16(scales[half][block / 2] >> (16 * (block % 2)));
  }
};

// Multiplies a block of a unit on tensor cores.
template <int FORMAT>
INLINE void multiply_block(Sums& sums, const UnitPart<FORMAT>& part, int block, const Vectors& v) {
  u32 low[4], high[4];
  part.factors(low, 0, block);
  part.factors(high, 1, block);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    multiply_fragments(*(float(*)[4]) & sums[4 * i], low, high, v[i]);
  }
}

// Multiplies UNITS units of the same rows on tensor cores with the vectors that `load(v, unit, block)` gives for their
// blocks. Quantised ones have sums of their own first: their products, each of which waits for the one before, take
// turns.
template <int FORMAT, int UNITS, class Load>
INLINE void multiply_parts(Sums& sums, const UnitPart<FORMAT> (&parts)[UNITS], const Load& load) {
  typedef Format<FORMAT> F;
  Vectors v;
  if constexpr (FORMAT == 0) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      load(v, unit, 0);
      multiply_block(sums, parts[unit], 0, v);
    }
    return;
  }
  constexpr int kTogether = F::kScaledBlocks ? F::kScaleBlocks : F::kBlocks;
#pragma unroll
  for (int first = 0; first < F::kBlocks; first += kTogether) {
    Sums products[UNITS] = {};
#pragma unroll
    for (int block = first; block < first + kTogether; ++block) {
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        load(v, unit, block);
        multiply_block(products[unit], parts[unit], block, v);
      }
    }
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if constexpr (F::kScaledBlocks) {
          sums[i] = __fmaf_rn(parts[unit].scale(i / 2 % 2, first), products[unit][i], sums[i]);
        } else {
          sums[i] = __fadd_rn(sums[i], products[unit][i]);
        }
      }
    }
  }
}

// A whole sum of a row, with the row's scale where rows have one.
template <int FORMAT>
INLINE float scaled(float sum, const float* scales, int row) {
  if constexpr (Format<FORMAT>::kRest != 1.0f) sum = __fmul_rn(sum, Format<FORMAT>::kRest);
  if constexpr (Format<FORMAT>::kScaledRows) sum = __fmul_rn(sum, scales[row]);
  return sum;
}

// Asks for the scales of rows, each of THREADS threads for those around four: they are needed when all else
// is there, and would then be waited for.
template <int FORMAT, int THREADS>
INLINE void prefetch_scales(u64 scales, Range rows) {
  if constexpr (Format<FORMAT>::kScaledRows) {
    for (int row = rows.first + threadIdx.x * 4; row < rows.last; row += THREADS * 4) {
      ptx::prefetch_l2((const float*)scales + row);
    }
  }
}

// The same to shared memory, at `to`: whoever reads them has waited for the copies of all threads.
template <int FORMAT, int THREADS>
INLINE void copy_scales(u32 to, u64 scales, Range rows) {
  if constexpr (Format<FORMAT>::kScaledRows) {
    for (int row = rows.first + threadIdx.x; row < rows.last; row += THREADS) {
      ptx::copy_async<4>(to + (row - rows.first) * 4, (const float*)scales + row, true);
    }
  }
}
