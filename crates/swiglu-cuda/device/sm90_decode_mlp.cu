// y = act(x·Wg + bg, x·Wu + bu)·Wd + bd for up to 16 tokens on Hopper: weights stream through the copy
// engine.
//
// PART 0, 1 and 2 as in decode_mlp.cu: one persistent launch whose blocks meet between the two halves,
// or the halves as two launches. What differs is how weights come. There every lane asks for its own 16
// bytes; here a few warps ask for pieces of rows, of 1 to 2 KB, one instruction each, and eight others
// multiply. A *stage* is a piece of each row of a tile: of up to 8 gate rows and the matching up rows, or
// of up to 16 down rows. Stages follow each other in a ring, along the rows of a tile, then tile by tile,
// and without a pause from the gate and up rows to the down rows: while a block adds up, activates and
// waits for the others, its ring fills.
//
// The eight warps share a stage by units of 64 bytes of all its rows. At the end of a tile each leaves its
// sums in a slot, they meet, and some threads add up the slots in the order of the warps: the same bits on
// every run. There are two sets of slots, so that they meet once for a tile: who comes to the next meeting
// has read the sums of the last.
//
// The host fits the rows of the largest share into stages of about 17 KiB: even tiles, even pieces. The
// down tiles of 896/4864, 7 rows, come in pieces of 2 KB. The ring takes what is left of shared memory, 60
// to 205 KiB. Rows lie an odd multiple of 64 bytes apart in it: the 16 bytes of eight lanes, of two rows,
// are then in different banks.
//
// Why: decode_mlp.cu was measured on an H200 (bf16, M = 1) at 14.3 µs for 896/4864, whose floor is 6.1 at
// 4.3 TB/s, and at 94 µs for 4096/14336, floor 82; sm90_skinny_gated_gemm.cu, which the copy engine
// feeds, at 4.0 TB/s. 21 to 26 KB under way on each multiprocessor suffice for 4.3 TB/s. A ring of 200 KB
// is as much as each has to read for 896/4864: all of it is asked for before the first sum is complete.
//
// Predicted, to be measured: 896/4864 8 to 9 µs (6.1 for the weights, 1 to 1.5 until the first ones come,
// 0.5 to 1 to multiply what came during the barrier); 4096/14336 86 to 88. With one token a warp needs 48
// instructions for a unit, 26 for one of up to 8 rows: at 4.3 TB/s a quarter of what a multiprocessor
// issues. h of one or two tokens fits into shared memory and passes through L2 once for each block; more of
// it is loaded one stage ahead.
//
// A copy takes its operands from registers of a whole warp, so lanes issue theirs one after the other: an
// election, three moves and a branch (as compiled for sm_90a), 30 to 50 cycles expected, and that 16 times
// in the 880 cycles in which a stage arrives. Hence four warps, or two where two blocks are to be on a
// multiprocessor. Weights are the first to leave L2; x and h stay.
//
// Compile-time: ELEMENT; TENSOR and TOKENS, see decode_tiles.cuh; STAGE_X and STAGE_H 1 = x or h is copied
// to shared memory, 0 = read through the cache, which for x takes rows of whole 16 bytes; WARPS that
// multiply; PRODUCERS, warps that ask for copies; RING_AT and MOST_PIECE as the host computed them; PART;
// and what gate.cuh names.
#include "decode_tiles.cuh"

constexpr int kWarps = WARPS, kConsumers = 32 * kWarps;
constexpr int kProducers = PRODUCERS, kThreads = kConsumers + 32 * kProducers;
constexpr bool kGateUp = PART != 2, kDown = PART != 1;

// How the rows of a matrix are cut.
struct Pieces {
  int tile;   // features or columns of a tile
  int bytes;  // of a row in a stage, a multiple of 64
  int pitch;  // from row to row of a stage
  int count;  // along a row
  // Features or columns of every block, and how many of the first blocks have one more: the host divides.
  int share, rest;
};

struct Sm90DecodeMlpParams {
  DecodeMlpParams block;
  Pieces gate_up, down;
  u32 stages, stage_bytes;
  u32 slots_at;  // in shared memory, behind the ring
  u32 h_pitch;   // from token to token of h, in the place of x
};

// Shared memory begins with barriers, two for a stage, and zeros.
constexpr u32 kMostStages = 64;
constexpr u32 kZerosAt = 16 * kMostStages, kRingAt = kZerosAt + 128;
static_assert(kRingAt == RING_AT, "the host and the kernel disagree about shared memory");

// Units of a stage that one warp multiplies at most.
constexpr int kGroup = 4;
static_assert(kGroup * kWarps * kUnitBytes == MOST_PIECE, "the host and the kernel disagree");

// Where copies go, or where they are read, in order.
struct Ring {
  const u32 shared, stages, stage_bytes;
  u32 stage = 0, parity = 0;
  INLINE Ring(const Sm90DecodeMlpParams& p, u32 start)
      : shared(start), stages(p.stages), stage_bytes(p.stage_bytes) {}
  INLINE u32 data() const { return shared + kRingAt + stage * stage_bytes; }
  INLINE u32 full() const { return shared + 16 * stage; }
  INLINE u32 empty() const { return full() + 8; }
  INLINE void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One of the two matrices as a block sees it.
template <bool GATE_UP>
struct Half {
  const DecodeMlpParams& p;
  const Pieces& pieces;
  const Range share;    // features or columns, this block's
  const int row_bytes;  // with the padding of rows to whole 16 bytes

  INLINE explicit Half(const Sm90DecodeMlpParams& params)
      : p(params.block),
        pieces(GATE_UP ? params.gate_up : params.down),
        share(share_of(pieces)),
        row_bytes(((GATE_UP ? p.k : p.features) * kElementBytes + 15) / 16 * 16) {}
  static INLINE Range share_of(const Pieces& pieces) {
    const int block = blockIdx.x;
    const int first = block * pieces.share + smaller(block, pieces.rest);
    return {first, first + pieces.share + (block < pieces.rest ? 1 : 0)};
  }
  INLINE int tile_count(int first) const { return smaller(pieces.tile, share.last - first); }
  INLINE int bytes_of(int piece) const {
    return smaller(pieces.bytes, row_bytes - piece * pieces.bytes);
  }
};

// --- The warps that ask for copies -----------------------------------------------------------------

// The first stages are filled before anyone waits; then the block meets again.
struct Producer {
  Ring ring;
  const u64 policy = ptx::policy_evict_first();
  const int warp = threadIdx.x / 32 - kWarps, lane = threadIdx.x % 32;
  u32 issued = 0;

  INLINE Producer(const Sm90DecodeMlpParams& p, u32 shared) : ring(p, shared) {}

  // One copy each by the first `copies` lanes.
  INLINE void copy_stage(u32 to, u64 from, u32 bytes, int copies) {
    if (issued++ == ring.stages) __syncthreads();
    ptx::barrier_wait(ring.empty(), ring.parity ^ 1);
    if (lane == 0) ptx::barrier_arrive_expect(ring.full(), copies * bytes);
    __syncwarp();
    if (lane < copies) {
      ptx::bulk_load(ring.data() + to, (const void*)from, bytes, ring.full(), policy);
    }
    ring.next();
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
        copy_stage(to, from + piece * pieces.bytes, half.bytes_of(piece), copies);
      }
    }
  }
};

INLINE void produce(const Sm90DecodeMlpParams& p, u32 shared) {
  Producer producer(p, shared);
  // Weights are nobody's result: they may be read before the grid that this one depends on ends.
  if constexpr (kGateUp) producer.copy_half<true>(p);
  if constexpr (kDown) producer.copy_half<false>(p);
  if (producer.issued <= p.stages) __syncthreads();
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

// A unit's products, its rows at `low` and `high`; without HIGH there are eight rows at most.
template <bool HIGH>
INLINE void multiply_unit(Sums& sums, u32 low, u32 high, const Vectors& v) {
  const ptx::Raw<16> a = ptx::load_shared_wide(low);
  if constexpr (kTensor) {
    const ptx::Raw<16> b = ptx::load_shared_wide(high);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      multiply_fragments(*(float(*)[4]) & sums[4 * i], a.word, b.word, v[i]);
    }
  } else {
    multiply_row<0>(sums, a, v);
    if constexpr (HIGH) multiply_row<kTokens>(sums, ptx::load_shared_wide(high), v);
  }
}

struct Consumer {
  const Sm90DecodeMlpParams& params;
  u8* const shared;
  const Place place;
  Ring ring;
  int tiles = 0;  // that are finished

  INLINE Consumer(const Sm90DecodeMlpParams& p, u8* start)
      : params(p), shared(start), ring(p, ptx::shared_address(start)) {}

  static INLINE void meet() { ptx::named_barrier<1>(kConsumers); }

  INLINE float* slots() const {
    return (float*)(shared + params.slots_at) + tiles % 2 * (kWarps * kSlotFloats);
  }

  // The sum of what the warps have left, in their order.
  static INLINE float total(const float* slots, int token, int row) {
    const float* from = slots + token * kUnitRows + row;
    float sum = from[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum = __fadd_rn(sum, from[warp * kSlotFloats]);
    return sum;
  }

  // Another warp comes first for every tile: the few results of one are the work of one warp.
  template <bool GATE_UP>
  INLINE void finish_tile(Sums& sums, int first, int rows) {
    const DecodeMlpParams& p = params.block;
    float* slots = this->slots();
    store_sums(slots + place.warp * kSlotFloats, sums, place);
    meet();
    for (int i = (threadIdx.x + tiles * 32) % kConsumers; i < rows * p.m; i += kConsumers) {
      const int token = i / rows, row = i % rows;
      const float sum = total(slots, token, row);
      if constexpr (GATE_UP) {
        const float up = total(slots, token, row + kUnitPairs);
        ptx::store_for_grid((Element*)p.h + token * p.h_stride + first + row,
                            activated(p, first + row, sum, up));
      } else {
        store_output(p, token, first + row, sum);
      }
    }
    ++tiles;
  }

  // Multiplies the stages of a half. AHEAD: tokens come from global memory, a stage in advance.
  template <bool GATE_UP, bool HIGH, bool AHEAD, class Source>
  INLINE void multiply_half(const Source& source) {
    // Four tokens of f32 would take 64 registers, eight 128: there the other warps hide the loads.
    constexpr bool kEarly = AHEAD && kGroup * kVectors <= 8;
    const Half<GATE_UP> half(params);
    const Pieces& pieces = half.pieces;
    const u32 zeros = ring.shared + kZerosAt;
    const int units = pieces.bytes / kUnitBytes;  // of a whole piece
    Vectors ahead[kGroup];
    const auto load = [&](int i, int piece) {
      const int unit = place.warp + i * kWarps;
      if (unit < units) source.load(ahead[i], place, piece * units + unit);
    };
    if constexpr (kEarly) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) load(i, 0);
    }
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
        const int bytes = half.bytes_of(piece), next = piece + 1 == pieces.count ? 0 : piece + 1;
        const bool more = next != 0 || first + pieces.tile < half.share.last;
        ptx::barrier_wait(ring.full(), ring.parity);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const int unit = place.warp + i * kWarps, at = unit * kUnitBytes + place.offset;
          if (unit * kUnitBytes < bytes) {
            const u32 from = ring.data() + at;
            // What lies behind the last 16 bytes of a row is an older stage's.
            const bool exists = at < bytes;
            const u32 low_from = exists ? from + low_at : zeros;
            const u32 high_from = exists ? from + high_at : zeros;
            if constexpr (kEarly) {
              multiply_unit<HIGH>(sums, low_from, high_from, ahead[i]);
            } else {
              Vectors v;
              source.load(v, place, piece * units + unit);
              multiply_unit<HIGH>(sums, low_from, high_from, v);
            }
          }
          if (kEarly && more) load(i, next);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ring.empty());
        ring.next();
      }
      finish_tile<GATE_UP>(sums, first, rows);
    }
  }

  // x and h lie in the same place, one after the other.
  INLINE StagedTokens staged(u32 pitch) const {
    return {shared + params.block.x_at, pitch, params.block.m};
  }

  INLINE void multiply_gate_up() {
    const DecodeMlpParams& p = params.block;
    if constexpr (STAGE_X != 0) {
      multiply_half<true, true, false>(staged(p.x_pitch));
    } else {
      const Tokens x = {p.x, p.x_stride * kElementBytes, p.m, p.k * kElementBytes};
      multiply_half<true, true, true>(x);
    }
    // Rows of h are read in whole 16 bytes, and what lies behind them meets weights that are zero.
    if (blockIdx.x + 1 == gridDim.x) {
      const int padding = (int)p.h_stride - p.features;
      for (int i = threadIdx.x; i < padding * p.m; i += kConsumers) {
        const i64 at = i / padding * p.h_stride + p.features + i % padding;
        ptx::store_for_grid((Element*)p.h + at, (Element)0);
      }
    }
  }

  template <bool HIGH>
  INLINE void multiply_down() {
    const DecodeMlpParams& p = params.block;
    const Tokens h = {p.h, p.h_stride * kElementBytes, p.m, p.features * kElementBytes};
    if constexpr (STAGE_H != 0) {
      const int padded = (h.bytes + 15) / 16 * 16 / kElementBytes;
      stage_rows<kUnitBytes, kConsumers, true>(p.h, p.h_stride, p.m, padded, 1u, shared + p.x_at,
                                               params.h_pitch);
      meet();
      multiply_half<false, HIGH, false>(staged(params.h_pitch));
    } else {
      multiply_half<false, HIGH, true>(h);
    }
  }
};

INLINE void consume(const Sm90DecodeMlpParams& params, u8* shared) {
  const DecodeMlpParams& p = params.block;
  Consumer consumer(params, shared);
  if (threadIdx.x < 4) ((u32*)(shared + kZerosAt))[threadIdx.x] = 0;
  ptx::grid_dependency_wait();
  if (PART == 1) ptx::grid_dependency_launch();
  if constexpr (kGateUp && STAGE_X != 0) {
    stage_rows<kUnitBytes, kConsumers>(p.x, p.x_stride, p.m, p.k, p.x_wide, shared + p.x_at,
                                       p.x_pitch);
  }
  __syncthreads();
  if constexpr (kGateUp) consumer.multiply_gate_up();
  if constexpr (kGateUp && kDown) {
    Consumer::meet();
    if (threadIdx.x == 0) meet_grid(p.barrier);
    Consumer::meet();
  }
  if constexpr (kDown) {
    // Tensor cores multiply 16 rows at a time anyway.
    if (kTensor || params.down.tile > 8) {
      consumer.multiply_down<true>();
    } else {
      consumer.multiply_down<false>();
    }
  }
}

KERNEL(kThreads, PART == 0 ? 1 : 2, sm90_decode_mlp)(KERNEL_PARAMS(Sm90DecodeMlpParams) p) {
  u8* shared = ptx::dynamic_shared();
  const u32 barriers = ptx::shared_address(shared);
  // Lanes of a warp would set up theirs one after the other, too.
  if (threadIdx.x % 32 == 0) {
    for (u32 s = threadIdx.x / 32; s < p.stages; s += kThreads / 32) {
      ptx::barrier_init(barriers + 16 * s, kProducers);
      ptx::barrier_init(barriers + 16 * s + 8, kWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    consume(p, shared);
  } else {
    produce(p, barriers);
  }
}
