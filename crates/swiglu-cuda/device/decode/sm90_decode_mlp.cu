// y = act(x·Wg + bg, x·Wu + bu)·Wd + bd for up to 16 tokens on Hopper: weights stream through the copy
// engine. In one file because its roles, producers, multipliers and adders, only make sense by what each waits for in the
// others.
//
// One persistent launch, whose blocks meet between the two halves. In decode_mlp.cu every lane asks for its
// own 16 bytes of weights; here four warps ask for pieces of rows, of 1 to 2 KB, one instruction each, and
// WARPS others multiply. A *stage* is a piece of each row of a tile: of up to 8 gate rows and the matching up
// rows, or of up to 16 down rows. Stages follow each other in a ring, along the rows of a tile, then tile by
// tile, and without a pause from the gate and up rows to the down rows: while a block adds up, activates and
// waits for the others, its ring fills.
//
// x is the first that is asked for, whole, on a barrier of its own: behind 200 KB of weights its 2 KB took
// 3 µs. h, and x where it has no room, come as pieces too, each with the stage of the same place, through a
// ring that one more warp fills: it meets the other blocks, while the rest of this one goes on.
//
// The warps share a stage by units of 64 bytes of all its rows, and load all of theirs before they multiply.
// At the end of a tile each leaves its sums in a slot and goes on. Some, others with every tile, as many as have a result
// for each of their threads, wait for those of all and add them up in the order of the warps: the same bits on every
// run. There are slots for two tiles in turn.
//
// The host fits the rows of the largest share into stages, even tiles, even pieces, and has two forms of
// this: 8 warps and stages of about 17 KiB, or 16 and 33 KiB. The ring takes what is left of shared memory.
// Rows lie an odd multiple of 64 bytes apart in it: the 16 bytes of eight lanes, of two rows, are then in
// different banks. Weights are the first to leave L2; x and h stay.
//
// Of gate and up rows at most 60 KiB are in flight with 8 warps where all of a block's fit into the ring, so that a fast
// block's down rows are not asked for before a slow one's gate rows.
//
// A copy takes its operands from registers of a whole warp, so lanes issue theirs one after the other, in
// 30 to 50 cycles, and that 16 times in the 880 cycles in which a stage of 17 KiB arrives. Hence four warps.
//
// Quantised weights, see decode_formats.cuh, are stages of whole groups of units, with the scales of blocks in
// them, and a unit's number in its stage and a warp's have the same remainder, so all addresses of a warp's
// units are a sum that goes on by a constant. As compiled for 8 tokens in bf16, a unit of the loop takes
// (instructions), units · instructions / 4 a cycle at 1.755 GHz are for 4096/14336 (µs), and memory takes
// (4.23 TB/s, µs):
//     bytes, a scale per 32    66   12.3   44.2
//     nibbles, a scale per 32 124   11.5   23.4
//     bytes, a scale per row   52    9.7   41.6
//     e4m3, a scale per row    75   13.9   41.6
//     e4m3, one per 128 of k   82   15.2   42.9
// What was measured and tried: docs/kernels/sm90_decode_mlp.md.
//
// Compile-time: ELEMENT; FORMAT_GATE_UP and FORMAT_DOWN, see decode_formats.cuh; TENSOR and TOKENS, see
// decode_tiles.cuh; STAGE_X 1 = x lies in shared memory, 0 = it comes in pieces, which takes rows of whole 16
// bytes, for quantised weights of whole units; WARPS that multiply; PRODUCERS, warps that ask for weights;
// GROUP, units of elements of a stage for a warp at most; DOWN_HIGH 1 = down tiles have more than 8 rows;
// RING_AT as the host computed it; and what gate.cuh names.
#include "decode/decode_formats.cuh"

constexpr int kWarps = WARPS, kConsumers = 32 * kWarps;
constexpr int kProducers = PRODUCERS, kWeightThreads = kConsumers + 32 * kProducers;
constexpr int kThreads = kWeightThreads + 32;
constexpr bool kStageX = STAGE_X != 0;
constexpr bool kScaledRows = Format<kGateUpFormat>::kScaledRows || Format<kDownFormat>::kScaledRows;

// How the rows of a matrix are cut.
struct Pieces {
  int tile;   // features or columns of a tile
  int bytes;  // of a row in a stage: whole units of 64, quantised whole groups
  int units;  // that these are
  int pitch;  // from row to row of a stage
  int count;  // along a row
  // Features or columns of every block, and how many of the first blocks have one more: the host divides.
  int share, rest;
};

struct Sm90DecodeMlpParams {
  DecodeMlpParams block;
  Pieces gate_up, down;
  u32 stages, stage_bytes;
  u32 limit;     // stages of gate and up rows under way at most
  u32 slots_at;  // in shared memory, behind the ring
  // Stages of the pieces of tokens, behind slots and scales, and bytes from token to token there.
  u32 token_stages, token_pitch;
  // Behind the slots, where rows have scales: those of the block's gate, up and down rows.
  u32 scales_at;
};

// Shared memory begins with barriers, two for a stage, one for x; and with zeros.
constexpr u32 kMostStages = 32, kMostTokenStages = 12;
constexpr u32 kTokensAt = 16 * kMostStages, kXAt = kTokensAt + 16 * kMostTokenStages;
constexpr u32 kZerosAt = kXAt + 16, kSumsAt = kZerosAt + 16, kRingAt = 768;
// Sets of slots for the sums of a tile, each with two barriers: at one the warps have left theirs, at the other those
// that add them up are through.
constexpr u32 kSlotSets = 2;
static_assert(kZerosAt % 16 == 0 && kSumsAt + 16 * kSlotSets <= kRingAt, "16 bytes");
static_assert(kRingAt == RING_AT, "the host and the kernel disagree about shared memory");

// Where the warps that multiply say that this block has done its part of h and is through with x, and the
// one that asks for tokens waits for them: a barrier of threads, which orders what they read and stored. They wait
// too, though they need not: tools that look for races do not follow an arrival alone.
constexpr int kHandOver = 2;
constexpr u32 kHandOverThreads = kConsumers + 32;

// Bytes of a token's row that meet a unit.
template <int FORMAT>
constexpr int kTokenBytes = Format<FORMAT>::kBlocks * kUnitBytes;

// Where copies go, or where they are read, in order.
struct Ring {
  const u32 barriers, bytes_at, stages, stage_bytes;
  u32 stage = 0, parity = 0;
  INLINE u32 data() const { return bytes_at + stage * stage_bytes; }
  INLINE u32 full_of(u32 s) const { return barriers + 16 * s; }
  INLINE u32 full() const { return full_of(stage); }
  INLINE u32 empty() const { return full() + 8; }
  INLINE void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

INLINE Ring ring_of_weights(const Sm90DecodeMlpParams& p, u32 shared) {
  return {shared, shared + kRingAt, p.stages, p.stage_bytes};
}
// In the place of x, if that is in shared memory.
INLINE Ring ring_of_tokens(const Sm90DecodeMlpParams& p, u32 shared) {
  return {shared + kTokensAt, shared + p.block.x_at, p.token_stages, p.token_pitch * p.block.m};
}

// Whether rows of x are what products read of them: whole 16 bytes, or whole units of quantised weights.
INLINE bool x_is_whole(const DecodeMlpParams& p) {
  constexpr int kWhole = kGateUpFormat == 0 ? 16 : kTokenBytes<kGateUpFormat>;
  return p.x_wide && p.k * kElementBytes % kWhole == 0;
}

// One of the two matrices as a block sees it.
template <bool GATE_UP>
struct Half {
  static constexpr int kFormat = GATE_UP ? kGateUpFormat : kDownFormat;
  const DecodeMlpParams& p;
  const Pieces& pieces;
  const Range share;    // features or columns, this block's
  const int row_bytes;  // of elements with the padding to whole 16 bytes; quantised rows are whole units

  INLINE explicit Half(const Sm90DecodeMlpParams& params)
      : p(params.block),
        pieces(GATE_UP ? params.gate_up : params.down),
        share(share_of(pieces)),
        row_bytes(kFormat != 0 ? (int)(GATE_UP ? p.gate_stride : p.down_stride)
                               : ((GATE_UP ? p.k : p.features) * kElementBytes + 15) / 16 * 16) {}
  static INLINE Range share_of(const Pieces& pieces) {
    const int block = blockIdx.x;
    const int first = block * pieces.share + smaller(block, pieces.rest);
    return {first, first + pieces.share + (block < pieces.rest ? 1 : 0)};
  }
  INLINE int tile_count(int first) const { return smaller(pieces.tile, share.last - first); }
  INLINE int bytes_of(int piece) const {
    return smaller(pieces.bytes, row_bytes - piece * pieces.bytes);
  }
  INLINE int units_of(int piece) const {
    const int units = ceiling_divide(GATE_UP ? p.k : p.features, Format<kFormat>::kUnitK);
    return smaller(pieces.units, units - piece * pieces.units);
  }
  // The part of a token's row that meets a piece: where it begins, and its bytes.
  INLINE int token_at(int piece) const {
    return piece * (kFormat == 0 ? pieces.bytes : pieces.units * kTokenBytes<kFormat>);
  }
  INLINE int token_bytes_of(int piece) const {
    return kFormat == 0 ? bytes_of(piece) : units_of(piece) * kTokenBytes<kFormat>;
  }
};

// --- The warps that ask for copies -----------------------------------------------------------------

struct Producer {
  Ring ring;
  const u64 policy = ptx::policy_evict_first();
  const int warp = threadIdx.x / 32 - kWarps, lane = threadIdx.x % 32;
  u32 issued = 0;

  INLINE Producer(const Sm90DecodeMlpParams& p, u32 shared) : ring(ring_of_weights(p, shared)) {}

  // One copy each by the first `copies` lanes.
  INLINE void copy_stage(u32 to, u64 from, u32 bytes, int copies) {
    ptx::barrier_wait(ring.empty(), ring.parity ^ 1);
    // A warp without a row of this tile arrives when all of its lanes have seen the stage empty: nothing else
    // would keep the others from filling it, and the consumers from emptying it again.
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_expect(ring.full(), copies * bytes);
    if (lane < copies) {
      ptx::bulk_load(ring.data() + to, (const void*)from, bytes, ring.full(), policy);
    }
    ring.next();
    ++issued;
  }

  // The rows of a tile, the gate's before the up's, are dealt out to the warps, there one to a lane.
  template <bool GATE_UP>
  INLINE void copy_half(const Sm90DecodeMlpParams& params) {
    const Half<GATE_UP> half(params);
    const DecodeMlpParams& p = half.p;
    const Pieces& pieces = half.pieces;
    const int line = lane * kProducers + warp;
#pragma unroll 1
    for (int first = half.share.first; first < half.share.last; first += pieces.tile) {
      const int rows = half.tile_count(first);
      const int lines = GATE_UP ? 2 * rows : rows;
      const int copies = (lines - warp + kProducers - 1) / kProducers;
      const bool up = GATE_UP && line >= rows;
      const int row = up ? line - rows : line;
      const u32 to = (up ? pieces.tile + row : row) * pieces.pitch;
      const i64 at = (i64)(first + row) * (GATE_UP ? p.gate_stride : p.down_stride);
      const u64 from = (!GATE_UP ? p.down : up ? p.up : p.gate) + at;
#pragma unroll 1
      for (int piece = 0; piece < pieces.count; ++piece) {
        // There is a limit only where these stages are the first of the ring.
        if (GATE_UP && issued >= params.limit) {
          ptx::barrier_wait(ring.full_of(issued - params.limit), 0);
        }
        copy_stage(to, from + piece * pieces.bytes, half.bytes_of(piece), copies);
      }
    }
  }
};

INLINE void produce(const Sm90DecodeMlpParams& p, u32 shared) {
  Producer producer(p, shared);
  producer.copy_half<true>(p);
  producer.copy_half<false>(p);
}

// One row of x to each lane, before any weight.
INLINE void copy_x(const DecodeMlpParams& p, u32 shared) {
  const int lane = threadIdx.x % 32;
  const u32 bytes = p.k * kElementBytes, barrier = shared + kXAt;
  if (lane == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::barrier_init_fence();
    ptx::barrier_arrive_expect(barrier, p.m * bytes);
  }
  __syncwarp();
  ptx::grid_dependency_wait();
  if (lane < p.m) {
    const u64 from = p.x + lane * p.x_stride * kElementBytes;
    ptx::bulk_load(shared + p.x_at + lane * p.x_pitch, (const void*)from, bytes, barrier);
  }
}

// The warp that asks for pieces of tokens.
struct TokenProducer {
  Ring ring;

  // A piece of each token's row for each stage of a half, one to a lane.
  template <bool GATE_UP>
  INLINE void copy_half(const Sm90DecodeMlpParams& params) {
    const Half<GATE_UP> half(params);
    const DecodeMlpParams& p = half.p;
    const int lane = threadIdx.x % 32;
    const u64 row = GATE_UP ? p.x + lane * p.x_stride * kElementBytes
                            : p.h + lane * p.h_stride * kElementBytes;
#pragma unroll 1
    for (int first = half.share.first; first < half.share.last; first += half.pieces.tile) {
#pragma unroll 1
      for (int piece = 0; piece < half.pieces.count; ++piece) {
        const u32 bytes = half.token_bytes_of(piece);
        ptx::barrier_wait(ring.empty(), ring.parity ^ 1);
        if (lane == 0) ptx::barrier_arrive_expect(ring.full(), p.m * bytes);
        __syncwarp();
        if (lane < p.m) {
          const u64 from = row + half.token_at(piece);
          const u32 to = ring.data() + lane * params.token_pitch;
          ptx::bulk_load(to, (const void*)from, bytes, ring.full());
        }
        ring.next();
      }
    }
  }
};

INLINE void produce_tokens(const Sm90DecodeMlpParams& p, u32 shared) {
  TokenProducer producer = {ring_of_tokens(p, shared)};
  const GridMeeting meeting(p.block.barrier);
  if constexpr (!kStageX) producer.copy_half<true>(p);
  ptx::named_barrier<kHandOver>(kHandOverThreads);
  if (threadIdx.x % 32 == 0) meeting.meet();
  __syncwarp();
  // The other blocks stored h as threads do, and so may this one have x; TMA reads the one and
  // overwrites the other.
  ptx::fence_async_global();
  ptx::fence_async_shared();
  producer.copy_half<false>(p);
}

// --- The warps that multiply -----------------------------------------------------------------------

// The products of a row of a unit with every token, onto the lane's sums from FIRST on.
template <int FIRST>
INLINE void multiply_row(Sums& sums, const ptx::Raw<16>& row, const Vectors& v) {
  const Values<16> w = unpack(row);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const Values<16> x = unpack(v[i]);
#pragma unroll
    for (int j = 0; j < w.kCount; ++j) {
      sums[FIRST + i] = __fmaf_rn(w.value[j], x.value[j], sums[FIRST + i]);
    }
  }
}

// A unit's products, its first eight rows in `low`; without HIGH there are no others.
template <bool HIGH>
INLINE void multiply_unit(Sums& sums, const ptx::Raw<16>& low, const ptx::Raw<16>& high,
                          const Vectors& v) {
  if constexpr (kTensor) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      multiply_fragments(*(float(*)[4]) & sums[4 * i], low.word, high.word, v[i]);
    }
  } else {
    multiply_row<0>(sums, low, v);
    if constexpr (HIGH) multiply_row<kTokens>(sums, high, v);
  }
}

struct Consumer {
  const Sm90DecodeMlpParams& params;
  u8* const shared;
  const u32 base;  // the same
  const Place place;
  Ring ring, tokens;
  u32 tiles = 0;  // whose sums this warp has left

  INLINE Consumer(const Sm90DecodeMlpParams& p, u8* start)
      : params(p),
        shared(start),
        base(ptx::shared_address(start)),
        ring(ring_of_weights(p, base)),
        tokens(ring_of_tokens(p, base)) {}

  static INLINE void meet() { ptx::named_barrier<1>(kConsumers); }

  static INLINE int largest_share(const Pieces& pieces) {
    return pieces.share + (pieces.rest > 0 ? 1 : 0);
  }
  // Of the rows of a half, the gate's before the up's.
  template <bool GATE_UP>
  INLINE u32 scales_bytes_at() const {
    constexpr bool kBehind = !GATE_UP && Format<kGateUpFormat>::kScaledRows;
    return params.scales_at + (kBehind ? 8 * largest_share(params.gate_up) : 0);
  }
  template <bool GATE_UP>
  INLINE const float* scales_of() const {
    return (const float*)(shared + scales_bytes_at<GATE_UP>());
  }
  // A block reads its rows' scales when all else is there: from global memory it would wait for them then.
  INLINE void copy_row_scales() const {
    const DecodeMlpParams& p = params.block;
    const Range features = Half<true>::share_of(params.gate_up);
    const u32 gate = base + scales_bytes_at<true>();
    const u32 up = gate + 4 * largest_share(params.gate_up);
    copy_scales<kGateUpFormat, kConsumers>(gate, p.gate_scales, features);
    copy_scales<kGateUpFormat, kConsumers>(up, p.up_scales, features);
    const Range columns = Half<false>::share_of(params.down);
    copy_scales<kDownFormat, kConsumers>(base + scales_bytes_at<false>(), p.down_scales, columns);
    if constexpr (kScaledRows) ptx::copy_async_commit();
  }

  // The sum of what the warps have left, in their order.
  static INLINE float total(const float* slots, int token, int row) {
    const float* from = slots + token * kUnitRows + row;
    float sum = from[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum = __fadd_rn(sum, from[warp * kSlotFloats]);
    return sum;
  }

  // Leaves this warp's sums of a tile, whose features or columns begin at `first`. As many warps as the results have threads,
  // others with every tile, wait for those of all, add them up and finish: the few of one token are the work of one.
  template <bool GATE_UP>
  INLINE void finish_tile(Sums& sums, int first, int rows) {
    const DecodeMlpParams& p = params.block;
    const u32 set = tiles % kSlotSets, parity = tiles / kSlotSets % 2;
    const u32 summed = base + kSumsAt + 16 * set, added = summed + 8;
    float* slots = (float*)(shared + params.slots_at) + set * (kWarps * kSlotFloats);
    ptx::barrier_wait(added, parity ^ 1);
    store_sums(slots + place.warp * kSlotFloats, sums, place);
    // Scales of rows have come long ago.
    if constexpr (kScaledRows) ptx::copy_async_wait<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(summed);

    constexpr int kRows = GATE_UP ? kUnitPairs : kUnitRows;
    const int results = kRows * p.m;
    const u32 turn = tiles * ((results + 31) / 32 * 32);
    const int start = (threadIdx.x + turn) % kConsumers;
    if (start / 32 * 32 < results) {
      ptx::barrier_wait(summed, parity);
      for (int i = start; i < results; i += kConsumers) {
        const int token = i / kRows, row = i % kRows;
        if (row < rows) finish<GATE_UP>(slots, token, row, first);
      }
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(added);
    ++tiles;
  }

  // A result of a tile.
  template <bool GATE_UP>
  INLINE void finish(const float* slots, int token, int row, int first) {
    const DecodeMlpParams& p = params.block;
    constexpr int kFormat = Half<GATE_UP>::kFormat;
    const Pieces& pieces = GATE_UP ? params.gate_up : params.down;
    const int line = first + row, of_share = line - Half<GATE_UP>::share_of(pieces).first;
    const float* scales = scales_of<GATE_UP>();
    const float sum = scaled<kFormat>(total(slots, token, row), scales, of_share);
    if constexpr (GATE_UP) {
      const float* up_scales = scales + largest_share(pieces);
      const float up = scaled<kFormat>(total(slots, token, row + kUnitPairs), up_scales, of_share);
      ptx::store_for_grid((Element*)p.h + token * p.h_stride + line, activated(p, line, sum, up));
    } else {
      store_output(p, token, line, sum);
    }
  }

  // Multiplies this warp's units of a stage of elements, which begins at `rows`, this lane's two rows of it
  // behind that.
  template <bool HIGH>
  INLINE void multiply_elements(Sums& sums, u32 rows, u32 low, u32 high, const u8* tokens_at,
                                u32 pitch, int bytes) {
    constexpr int kGroup = GROUP;
    // A warp's units of a stage are loaded together. Four of four tokens of f32 would take 64 registers.
    constexpr int kTogether = kGroup * kVectors <= 8 ? kGroup : 1;
    const u32 zeros = base + kZerosAt;
#pragma unroll (kTogether == 1 ? 1 : kGroup)
    for (int start = 0; start < kGroup; start += kTogether) {
      ptx::Raw<16> a[kTogether], b[kTogether];
      Vectors v[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int unit = place.warp + (start + i) * kWarps;
        const int at = unit * kUnitBytes + place.offset;
        // What lies behind the last 16 bytes of a row is an older stage's, or nobody's.
        const bool exists = at < bytes;
        a[i] = ptx::load_shared_wide(exists ? rows + low + at : zeros);
        if (kTensor || HIGH) b[i] = ptx::load_shared_wide(exists ? rows + high + at : zeros);
        const StagedTokens source = {tokens_at, pitch, exists ? params.block.m : 0};
        source.load(v[i], place, unit);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) multiply_unit<HIGH>(sums, a[i], b[i], v[i]);
    }
  }

  // Where this lane finds its parts of quantised weights in a stage, and of tokens.
  template <int FORMAT>
  struct QuantizedPlace {
    typedef Format<FORMAT> F;
    static_assert(kWarps % F::kGroupUnits == 0, "a warp's units have the same place in their groups");
    // From a warp's unit to its next.
    static constexpr u32 kTurn = kWarps * kUnitBytes + kWarps / F::kGroupUnits * F::kGroupScales;
    static constexpr u32 kTokenTurn = kWarps * kTokenBytes<FORMAT>;
    u32 low, high;  // of its rows
    u32 values, scales;
    u32 token[kVectors];
  };

  // Multiplies UNITS of a warp's units, loaded together and multiplied in turns: there are few warps to hide what an
  // instruction waits for.
  template <int FORMAT, int UNITS>
  INLINE void multiply_units(Sums& sums, QuantizedPlace<FORMAT>& at) {
    typedef QuantizedPlace<FORMAT> P;
    UnitPart<FORMAT> parts[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      parts[i].row[0] = ptx::load_shared_wide(at.low + at.values + i * P::kTurn);
      parts[i].row[1] = ptx::load_shared_wide(at.high + at.values + i * P::kTurn);
      parts[i].load_scales(0, at.low + at.scales + i * P::kTurn);
      parts[i].load_scales(1, at.high + at.scales + i * P::kTurn);
    }
    multiply_parts<FORMAT>(sums, parts, [&](Vectors& v, int unit, int block) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        v[j] = ptx::load_shared_wide(at.token[j] + unit * P::kTokenTurn + block * kUnitBytes);
      }
    });
    at.low += UNITS * P::kTurn;
    at.high += UNITS * P::kTurn;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) at.token[j] += UNITS * P::kTokenTurn;
  }

  // The same of quantised weights: `units` whole ones.
  template <int FORMAT>
  INLINE void multiply_quantized(Sums& sums, u32 low, u32 high, const u8* tokens_at, u32 pitch,
                                 int units) {
    typedef Format<FORMAT> F;
    QuantizedPlace<FORMAT> at;
    at.low = low;
    at.high = high;
    at.values = F::unit_at(place.warp) + place.offset;
    at.scales = F::scales_at(place.warp);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      // Lanes of tokens that do not exist read the last one's, and their sums are not used.
      const int row = smaller(8 * i + place.row, params.block.m - 1);
      at.token[i] = ptx::shared_address(tokens_at) + row * pitch + place.warp * kTokenBytes<FORMAT>;
      at.token[i] += place.offset;
    }
    // A warp mostly has one or two of a stage. A thread of 16 warps has too few registers for two of 16 tokens, or of nibbles.
    constexpr bool kTwo = kWarps <= 8 || (kVectors == 1 && !F::kNibbles);
    int unit = place.warp;
#pragma unroll 1
    for (; kTwo && unit + kWarps < units; unit += 2 * kWarps) multiply_units<FORMAT, 2>(sums, at);
#pragma unroll 1
    for (; unit < units; unit += kWarps) multiply_units<FORMAT, 1>(sums, at);
  }

  // Multiplies the stages of a half. PIECES: tokens come in stages, too, else they are x in shared memory.
  template <bool GATE_UP, bool HIGH, bool PIECES>
  INLINE void multiply_half() {
    const Half<GATE_UP> half(params);
    const Pieces& pieces = half.pieces;
    const u32 x_at = params.block.x_at;
    const u32 pitch = PIECES ? params.token_pitch : params.block.x_pitch;
    // Little code: the first pass of a launch reads all of it from memory.
#pragma unroll 1
    for (int first = half.share.first; first < half.share.last; first += pieces.tile) {
      const int rows = half.tile_count(first);
      // Lanes of rows that do not exist read the last one's, and their sums are not used.
      const int low = smaller(place.row, rows - 1);
      const int high = GATE_UP ? pieces.tile + low : smaller(place.row + 8, rows - 1);
      const u32 low_at = low * pieces.pitch, high_at = high * pieces.pitch;
      Sums sums = {};
#pragma unroll 1
      for (int piece = 0; piece < pieces.count; ++piece) {
        if constexpr (PIECES) ptx::barrier_wait(tokens.full(), tokens.parity);
        ptx::barrier_wait(ring.full(), ring.parity);
        const u32 rows_at = ring.data();
        const u8* tokens_at = shared + x_at;
        tokens_at += PIECES ? tokens.stage * tokens.stage_bytes : half.token_at(piece);
        if constexpr (Half<GATE_UP>::kFormat == 0) {
          multiply_elements<HIGH>(sums, rows_at, low_at, high_at, tokens_at, pitch,
                                  half.bytes_of(piece));
        } else {
          multiply_quantized<Half<GATE_UP>::kFormat>(sums, rows_at + low_at, rows_at + high_at,
                                                     tokens_at, pitch, half.units_of(piece));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          ptx::barrier_arrive(ring.empty());
          if constexpr (PIECES) ptx::barrier_arrive(tokens.empty());
        }
        ring.next();
        if constexpr (PIECES) tokens.next();
      }
      finish_tile<GATE_UP>(sums, first, rows);
    }
  }

  // Rows of h are read in whole 16 bytes, or units, and what lies behind them meets weights that are zero.
  INLINE void pad_h() {
    const DecodeMlpParams& p = params.block;
    if (blockIdx.x + 1 != gridDim.x) return;
    const int padding = (int)p.h_stride - p.features;
    for (int i = threadIdx.x; i < padding * p.m; i += kConsumers) {
      const i64 at = i / padding * p.h_stride + p.features + i % padding;
      ptx::store_for_grid((Element*)p.h + at, (Element)0);
    }
  }
};

INLINE void consume(const Sm90DecodeMlpParams& params, u8* shared) {
  const DecodeMlpParams& p = params.block;
  Consumer consumer(params, shared);
  if (threadIdx.x < 4) ((u32*)(shared + kZerosAt))[threadIdx.x] = 0;
  consumer.copy_row_scales();
  const bool whole = x_is_whole(p);
  if (kStageX && !whole) {
    constexpr int kWhole = kTokenBytes<kGateUpFormat>;
    stage_rows<kWhole, kConsumers>(p.x, p.x_stride, p.m, p.k, p.x_wide, shared + p.x_at, p.x_pitch);
  }
  Consumer::meet();
  if (kStageX && whole) ptx::barrier_wait(consumer.base + kXAt, 0);
  consumer.multiply_half<true, true, !kStageX>();
  consumer.pad_h();
  ptx::named_barrier<kHandOver>(kHandOverThreads);
  // Tensor cores multiply 16 rows at a time anyway.
  consumer.multiply_half<false, kTensor || DOWN_HIGH != 0, true>();
}

KERNEL(kThreads, 1, sm90_decode_mlp)(KERNEL_PARAMS(Sm90DecodeMlpParams) p) {
  u8* shared = ptx::dynamic_shared();
  const u32 barriers = ptx::shared_address(shared);
  const u32 warp = threadIdx.x / 32;
  if (kStageX && warp == kWarps && x_is_whole(p.block)) copy_x(p.block, barriers);
  // Lanes of a warp would set up theirs one after the other, too.
  if (threadIdx.x % 32 == 0) {
    for (u32 s = warp; s < p.stages; s += kThreads / 32) {
      ptx::barrier_init(barriers + 16 * s, kProducers);
      ptx::barrier_init(barriers + 16 * s + 8, kWarps);
    }
    if (warp < p.token_stages) {
      ptx::barrier_init(barriers + kTokensAt + 16 * warp, 1);
      ptx::barrier_init(barriers + kTokensAt + 16 * warp + 8, kWarps);
    }
    if (warp < kSlotSets) {
      ptx::barrier_init(barriers + kSumsAt + 16 * warp, kWarps);
      ptx::barrier_init(barriers + kSumsAt + 16 * warp + 8, kWarps);
    }
    ptx::barrier_init_fence();
  }
  static_assert(kMostTokenStages <= kThreads / 32, "a barrier of each warp");
  // Only now does it read or write what others do, but for x, whose warp has waited already; the next launch may
  // begin when its blocks find room.
  ptx::grid_dependency_wait();
  __syncthreads();
  ptx::grid_dependency_launch();
  if (threadIdx.x < kConsumers) {
    consume(p, shared);
  } else if (threadIdx.x < kWeightThreads) {
    produce(p, barriers);
  } else {
    produce_tokens(p, barriers);
  }
}
