// y = act(x·Wg + bg, x·Wu + bu)·Wd + bd for up to 16 tokens: every weight is read once, so the time
// is that of reading them.
//
// PART 0: one persistent launch of at most as many blocks as the device holds at once. A block owns
// contiguous, equal shares of the features of h and of the columns of y. It streams its gate and up
// rows, writes its part of h to the workspace, waits for the others at a barrier of the grid, and
// streams its down rows. PART 1 and 2: the same halves as two launches, the second a programmatic
// dependent of the first.
//
// Weights lie [out, in], k adjacent. A warp works on *units*, 16 rows of 64 bytes: 8 gate rows over
// the matching 8 up rows, so that the two pre-activations of an output meet in one thread, or 16
// down rows. Of a unit a lane holds 16 bytes of two rows, and only that lane reads them: so the ring
// in shared memory that cp.async fills belongs to the lane, and needs no barrier of the block. Tensor
// cores take the 16 bytes as they are: a product is a sum over k in any order, and the x fragment is
// read in the same order. The units of a block are one list, cut into one contiguous range per warp.
// Where a range cuts a tile of rows, its sums are partial; slots in shared memory hold them, and they
// are added in the order of the warps: the same bits on every run.
//
// Why a ring: by Little's law 4.3 TB/s at 650 to 800 ns take 2.8 to 3.4 MB in flight, 21 to 26 KB on
// each of 132 SMs; WARPS · DEPTH KiB are 64 to 128. And the ring runs ahead: while a
// block adds up, activates and waits at the barrier, its first down rows arrive. 64 KiB on each of
// 132 SMs are 2 µs of memory; a barrier is expected to take 0.8 to 1.5 µs. A prefetch to
// L2 beyond the ring would have nothing left to hide, so there is none.
//
// What was measured and tried: docs/kernels/decode_mlp.md.
//
// FMA or tensor cores: an SM takes in 9.3 16-bit weights per cycle; the FMA pipes spend one
// lane-cycle per weight and token and two to unpack it, 22 % of 128 lanes at one token, 44 % at four, all
// of them from 12 on. Tensor cores spend 1/256 of an instruction per weight at any M. So FMA for one or
// two tokens, in exact f32, tensor cores above.
// Every block reads all of h: at M = 16, H = 14336 that is 60 MB from L2 beside 117 MB of weights
// through it, and L2 may become the limit there.
//
// Quantised weights: a unit is 16 rows of 64 bytes as well, see decode_formats.cuh, and the scales of its
// blocks are beside it in the ring. All types are exact as f16 and bf16; the sums of a block are scaled, in
// f32, and a scale of a whole row multiplies its sum, once.
//
// Compile-time: ELEMENT; FORMAT_GATE_UP and FORMAT_DOWN, see decode_formats.cuh; TENSOR 1 = tensor cores
// (16-bit types), TOKENS 8 or 16, 0 = FMA, TOKENS 1, 2, 4 or 8; STAGE_X 1 = x is copied to shared memory,
// where it fits, 0 = it is read through the cache, which takes rows of whole 16 bytes; WARPS; DEPTH of the
// ring; PART; and what gate.cuh names.
#include "decode/decode_formats.cuh"

constexpr int kWarps = WARPS, kThreads = 32 * kWarps;
constexpr u32 kDepth = DEPTH;
constexpr bool kStageX = STAGE_X != 0;
constexpr bool kGateUp = PART != 2, kDown = PART != 1;
static_assert((kDepth & (kDepth - 1)) == 0, "a power of two");

constexpr u32 kHalfUnit = 32 * kLaneBytes;

constexpr int kGateUpScales = Format<kGateUpFormat>::kScaleBytes;
constexpr int kDownScales = Format<kDownFormat>::kScaleBytes;
constexpr int kMostScaleBytes = kGateUpScales > kDownScales ? kGateUpScales : kDownScales;
constexpr u32 kUnitStride = 2 * kHalfUnit + 64 * kMostScaleBytes;
constexpr u32 kRingBytes = kWarps * kDepth * kUnitStride;
static_assert(kRingBytes == RING_BYTES, "the host and the kernel disagree about shared memory");

// This block's share of n rows; shares differ by at most one.
INLINE Range share_of(int n) {
  return {(int)((i64)n * blockIdx.x / gridDim.x), (int)((i64)n * (blockIdx.x + 1) / gridDim.x)};
}

// The units of one of the two matrices: tile by tile of rows, each in pieces along k.
struct Phase {
  int tiles, pieces, per_warp;
  INLINE Phase(int rows, int tile_rows, int k, int unit_k)
      : tiles(ceiling_divide(rows, tile_rows)),
        pieces(ceiling_divide(k, unit_k)),
        per_warp(ceiling_divide(tiles * pieces, kWarps)) {}
  INLINE Range of_warp(int warp) const {
    const int units = tiles * pieces;
    return {smaller(warp * per_warp, units), smaller((warp + 1) * per_warp, units)};
  }
};

// The copies of a lane: first its part of the gate and up units, then that of the down units.
struct Stream {
  const DecodeMlpParams& p;
  const Place place;
  const Range features, columns;  // of h and of y, this block's
  const Phase gate_up, down;
  u32 ring;  // this warp's first unit in the ring
  u32 issued = 0;
  bool in_down = false;
  int left = 0, tile = 0, piece = 0;  // units of this phase to copy, and where the next one lies
  u64 low = 0, high = 0;              // this lane's bytes of piece 0 of its two rows; 0: no such row

  INLINE explicit Stream(const DecodeMlpParams& params)
      : p(params),
        features(share_of(params.features)),
        columns(share_of(params.k)),
        gate_up(features.count(), kUnitPairs, params.k, Format<kGateUpFormat>::kUnitK),
        down(columns.count(), kUnitRows, params.features, Format<kDownFormat>::kUnitK),
        ring(ptx::shared_address(ptx::dynamic_shared()) + place.warp * (kDepth * kUnitStride)) {
    if (kGateUp) {
      enter(gate_up);
    } else {
      in_down = true;
      enter(down);
    }
    if (kGateUp && kDown && left == 0) {
      in_down = true;
      enter(down);
    }
  }

  INLINE void enter(const Phase& phase) {
    const Range units = phase.of_warp(place.warp);
    left = units.count();
    tile = units.first / (phase.pieces > 0 ? phase.pieces : 1);
    piece = units.first - tile * phase.pieces;
    point();
  }

  // To the rows of this lane in the tile.
  INLINE void point() {
    if (!in_down) {
      const int feature = features.first + tile * kUnitPairs + place.row;
      const u64 at = feature * p.gate_stride + place.offset;
      const bool exists = feature < features.last;
      low = exists ? p.gate + at : 0;
      high = exists ? p.up + at : 0;
    } else {
      const int column = columns.first + tile * kUnitRows + place.row;
      const u64 at = p.down + column * p.down_stride + place.offset;
      low = column < columns.last ? at : 0;
      high = column + 8 < columns.last ? at + 8 * p.down_stride : 0;
    }
  }

  // Rows of elements are padded with zeros to whole copies, quantised ones to whole units; what lies
  // beyond is filled with zeros.
  template <int FORMAT>
  INLINE void copy_row(u32 to, u64 row) {
    const int k = in_down ? p.features : p.k;
    const bool exists =
        row != 0 && (FORMAT != 0 || piece * kUnitBytes + place.offset < k * kElementBytes);
    const u64 from = exists ? row + Format<FORMAT>::unit_at(piece) : p.gate;
    ptx::copy_async<16>(to, (const void*)from, exists);
  }
  template <int FORMAT>
  INLINE void copy_scales(u32 to, u64 row) {
    constexpr int kBytes = Format<FORMAT>::kScaleBytes;
    const u64 from = row != 0 ? row - place.offset + Format<FORMAT>::scales_at(piece) : p.gate;
    ptx::copy_async<kBytes>(to, (const void*)from, row != 0);
  }
  template <int FORMAT>
  INLINE void copy_unit(u32 to) {
    const u32 lane = threadIdx.x % 32;
    copy_row<FORMAT>(to + lane * kLaneBytes, low);
    copy_row<FORMAT>(to + kHalfUnit + lane * kLaneBytes, high);
    if constexpr (Format<FORMAT>::kScaledBlocks) {
      const u32 at = to + 2 * kHalfUnit + lane * (2 * Format<FORMAT>::kScaleBytes);
      copy_scales<FORMAT>(at, low);
      copy_scales<FORMAT>(at + Format<FORMAT>::kScaleBytes, high);
    }
  }

  INLINE u32 unit_at(u32 unit) const { return ring + unit % kDepth * kUnitStride; }

  // The next unit, if there is one, to the place of the oldest. One group for each call: the count
  // of groups is the clock.
  INLINE void copy_next() {
    if (left > 0) {
      const u32 to = unit_at(issued);
      if (in_down) {
        copy_unit<kDownFormat>(to);
      } else {
        copy_unit<kGateUpFormat>(to);
      }
      const int pieces = in_down ? down.pieces : gate_up.pieces;
      if (++piece == pieces) {
        piece = 0;
        ++tile;
        point();
      }
      if (--left == 0 && kDown && !in_down) {
        in_down = true;
        enter(down);
      }
    }
    ptx::copy_async_commit();
    ++issued;
  }
};

// A lane's part of the unit in its place of the ring.
template <int FORMAT>
INLINE void load_part(UnitPart<FORMAT>& part, u32 unit) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    part.row[half] = ptx::load_shared_wide(unit + half * kHalfUnit + lane * kLaneBytes);
    part.load_scales(half, unit + 2 * kHalfUnit + (2 * lane + half) * Format<FORMAT>::kScaleBytes);
  }
}

// Multiplies a unit with the vectors that `load(v, 0, block)` gives.
template <int FORMAT, class Load>
INLINE void multiply(Sums& sums, const UnitPart<FORMAT> (&part)[1], const Load& load) {
  if constexpr (kTensor) {
    multiply_parts<FORMAT>(sums, part, load);
  } else {
    Vectors v;
    load(v, 0, 0);
    const Values<16> a = unpack(part[0].row[0]), b = unpack(part[0].row[1]);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const Values<16> x = unpack(v[i]);
#pragma unroll
      for (int j = 0; j < x.kCount; ++j) {
        sums[i] = __fmaf_rn(a.value[j], x.value[j], sums[i]);
        sums[kTokens + i] = __fmaf_rn(b.value[j], x.value[j], sums[kTokens + i]);
      }
    }
  }
}

// Multiplies this warp's units of a phase. Ranges and tiles both only go forward from warp to warp,
// so `warp + tile` names one slot for each pair that meets. AHEAD: vectors come from global memory and
// are loaded for some units in advance.
template <int FORMAT, bool AHEAD, class Source>
INLINE void multiply_phase(Stream& stream, u32& unit, const Phase& phase, const Source& source,
                           float* slots) {
  constexpr int kBlocks = Format<FORMAT>::kBlocks;
  constexpr int kLoads = kBlocks * kVectors;  // of 16 bytes for a unit
  constexpr int kAhead = kLoads >= 8 ? 1 : kLoads >= 4 ? 2 : 4;
  // Nibbles for 16 tokens: eight loads for a unit do not fit beside what unpacks it, so each block has
  // its own when it is multiplied; the other warps hide them.
  constexpr bool kEarly = AHEAD && (FORMAT == 0 || kLoads < 8);
  const Place& place = stream.place;
  const Range units = phase.of_warp(place.warp);
  if (units.count() <= 0) return;
  int tile = units.first / phase.pieces, piece = units.first - tile * phase.pieces;
  int next = piece;  // of the vectors
  Vectors ahead[kAhead][kBlocks];
  const auto load = [&](Vectors(&v)[kBlocks], int at) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) source.load(v[block], place, at * kBlocks + block);
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load(ahead[i], next);
      next = next + 1 == phase.pieces ? 0 : next + 1;
    }
  }
  Sums sums = {};
  for (int u = units.first; u < units.last; u += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (u + i >= units.last) break;
      ptx::copy_async_wait<kDepth - 1>();
      UnitPart<FORMAT> part[1];
      load_part(part[0], stream.unit_at(unit++));
      if constexpr (kEarly) {
        multiply<FORMAT>(sums, part, [&](Vectors& v, int, int block) {
#pragma unroll
          for (int j = 0; j < kVectors; ++j) v[j] = ahead[i][block][j];
        });
        if (u + i + kAhead < units.last) load(ahead[i], next);
        next = next + 1 == phase.pieces ? 0 : next + 1;
      } else {
        multiply<FORMAT>(sums, part, [&](Vectors& v, int, int block) {
          source.load(v, place, piece * kBlocks + block);
        });
      }
      // The products above have used what this copy overwrites.
      stream.copy_next();
      if (++piece == phase.pieces) {
        store_sums(slots + (place.warp + tile) * kSlotFloats, sums, place);
        piece = 0;
        ++tile;
      }
    }
  }
  if (piece != 0) store_sums(slots + (place.warp + tile) * kSlotFloats, sums, place);
}

// The sum of what the warps that share a tile have left in their slots, in their order.
INLINE float total(const float* slots, const Phase& phase, int tile, int token, int row) {
  const float* from = slots + tile * kSlotFloats + token * kUnitRows + row;
  const int first = tile * phase.pieces / phase.per_warp;
  const int last = ((tile + 1) * phase.pieces - 1) / phase.per_warp;
  float sum = from[first * kSlotFloats];
  for (int warp = first + 1; warp <= last; ++warp) sum = __fadd_rn(sum, from[warp * kSlotFloats]);
  return sum;
}

INLINE void activate(const Stream& s, const float* slots) {
  const DecodeMlpParams& p = s.p;
  const int count = s.features.count();
  for (int i = threadIdx.x; i < count * p.m; i += kThreads) {
    const int token = i / count, pair = i % count, feature = s.features.first + pair;
    const int tile = pair / kUnitPairs, row = pair % kUnitPairs;
    const float gate = scaled<kGateUpFormat>(total(slots, s.gate_up, tile, token, row),
                                             (const float*)p.gate_scales, feature);
    const float up =
        scaled<kGateUpFormat>(total(slots, s.gate_up, tile, token, row + kUnitPairs),
                              (const float*)p.up_scales, feature);
    ptx::store_for_grid((Element*)p.h + token * p.h_stride + feature,
                        activated(p, feature, gate, up));
  }
  // Rows of h are read in whole copies, and what lies behind them meets weights that are zero.
  const int padding = (int)p.h_stride - p.features;
  if (blockIdx.x + 1 == gridDim.x) {
    for (int i = threadIdx.x; i < padding * p.m; i += kThreads) {
      const i64 at = i / padding * p.h_stride + p.features + i % padding;
      ptx::store_for_grid((Element*)p.h + at, (Element)0);
    }
  }
}

INLINE void finish(const Stream& s, const float* slots) {
  const DecodeMlpParams& p = s.p;
  const int count = s.columns.count();
  for (int i = threadIdx.x; i < count * p.m; i += kThreads) {
    const int token = i / count, row = i % count, column = s.columns.first + row;
    const float sum = total(slots, s.down, row / kUnitRows, token, row % kUnitRows);
    const float* scales = (const float*)p.down_scales;
    store_output(p, token, column, scaled<kDownFormat>(sum, scales, column));
  }
}

INLINE void grid_barrier(u64 word) {
  __syncthreads();
  if (threadIdx.x == 0) GridMeeting(word).meet();
  __syncthreads();
}

KERNEL(kThreads, PART == 0 ? 1 : 2, decode_mlp)(KERNEL_PARAMS(DecodeMlpParams) p) {
  u8* shared = ptx::dynamic_shared();
  float* slots = (float*)(shared + kRingBytes);
  Stream stream(p);
  for (u32 i = 0; i < kDepth; ++i) stream.copy_next();
  if (kGateUp) {
    prefetch_scales<kGateUpFormat, kThreads>(p.gate_scales, stream.features);
    prefetch_scales<kGateUpFormat, kThreads>(p.up_scales, stream.features);
  }
  if (kDown) prefetch_scales<kDownFormat, kThreads>(p.down_scales, stream.columns);
  u32 unit = 0;
#if __CUDA_ARCH__ >= 900
  // Weights are nobody's result: they may be read before the grid that this one depends on ends.
  ptx::grid_dependency_wait();
  if (PART == 1) ptx::grid_dependency_launch();
#endif
  if constexpr (kGateUp) {
    if constexpr (kStageX) {
      constexpr int kWhole = Format<kGateUpFormat>::kBlocks * kUnitBytes;
      stage_rows<kWhole, kThreads>(p.x, p.x_stride, p.m, p.k, p.x_wide, shared + p.x_at, p.x_pitch);
      __syncthreads();
      const StagedTokens x = {shared + p.x_at, p.x_pitch, p.m};
      multiply_phase<kGateUpFormat, false>(stream, unit, stream.gate_up, x, slots);
    } else {
      const Tokens x = {p.x, p.x_stride * kElementBytes, p.m, p.k * kElementBytes};
      multiply_phase<kGateUpFormat, true>(stream, unit, stream.gate_up, x, slots);
    }
    __syncthreads();
    activate(stream, slots);
  }
  if constexpr (kGateUp && kDown) grid_barrier(p.barrier);
  if constexpr (kDown) {
    const Tokens h = {p.h, p.h_stride * kElementBytes, p.m, p.features * kElementBytes};
    multiply_phase<kDownFormat, true>(stream, unit, stream.down, h, slots);
    __syncthreads();
    finish(stream, slots);
  }
  // No copy may still be under way when the block's shared memory is given back.
  ptx::copy_async_wait<0>();
}
