// y = act(x·Wg + bg, x·Wu + bu)·Wd + bd for up to 16 tokens on Hopper, in two launches, with quantised weights so few that
// an SM's share of both halves fits into its shared memory.
//
// With so few bytes nothing but latencies is left. sm90_decode_mlp.cu has all of them in a row: a grid begins when the one
// before has ended, stages x, meets at a barrier of the grid. Here, as in sm90_register_gemm.cu, every weight has a place of
// its own: each half asks for all of its weights when it starts, which is while the kernel before it still multiplies, and
// lets the next one start at once. What is left is a boundary between grids, the way of tokens from L2,
// a few products for each warp, and sums that meet in shared memory, twice.
//
// Weights lie as decode_formats.cuh says, and are multiplied as there: a warp has *units*, 16 rows of 64 bytes, of which a
// lane has 16 bytes of two rows with the scales of their blocks. Only that lane copies and reads them, so that no barrier
// stands between the two. The rows of a block are cut into tiles of 16: eight gate rows over the matching eight up rows, or
// 16 down rows. PLACES warps share k in pieces, STEPS for each, and BESIDE warps with the same pieces share the tiles, so that
// a warp reads its tokens once for all of its tiles. Sums of all places are added up in their order. Of the down rows, which
// are few, the blocks of a cluster share k too: each reads its part of h only, and what they have summed goes to the block
// that has the rows (st.async), which adds it up in the order of the blocks. The same bits on every launch.
//
// Compile-time: ELEMENT 1|2; FORMAT_GATE_UP and FORMAT_DOWN, see decode_formats.cuh; TENSOR 1; TOKENS 8 or 16; PART 1 = gate
// and up, 2 = down; TILES of a block; PLACES, BESIDE, STEPS as above; CLUSTER, 1 for PART 1, else 2 or 4; SHARED_BYTES as the
// host computed them; and what gate.cuh names. M, K and H are run-time values.
//
// Floors, what was measured and what was tried: docs/kernels/sm90_held_mlp.md.
#include "decode/decode_formats.cuh"

constexpr bool kGateUp = PART == 1;
constexpr int kFormat = kGateUp ? kGateUpFormat : kDownFormat;
typedef Format<kFormat> Kind;
constexpr int kTiles = TILES, kPlaces = PLACES, kBeside = BESIDE, kSteps = STEPS, kCluster = CLUSTER;
constexpr int kOwnTiles = ceiling_divide(kTiles, kBeside);  // of a warp
constexpr int kThreads = 32 * kPlaces * kBeside;
// The compiler is told of so many: a thread then has 64 or 80 registers, with which blocks of both halves share an SM.
constexpr int kMostThreads = kVectors == 1 ? 1024 : 768;
static_assert(kFormat != 0 && kThreads <= kMostThreads, "quantised weights");
static_assert(kCluster == 1 || (!kGateUp && (kCluster == 2 || kCluster == 4)), "blocks that share k of down rows");

// [warp][tile][step] units, two rows of each lane and their scales; [place][tile] slots of sums; [block][tile][token] sums
// of this block's rows by all blocks of the cluster, and the barrier they come by.
constexpr u32 kHalfUnit = 32 * kLaneBytes;
constexpr u32 kUnitStride = 2 * kHalfUnit + 64 * Kind::kScaleBytes;
constexpr u32 kWarpUnits = kOwnTiles * kSteps;
constexpr int kSlotsAt = kPlaces * kBeside * kWarpUnits * kUnitStride;
constexpr int kOwnPairs = kUnitRows / 2 / kCluster;  // of rows, in a tile
constexpr int kPartsAt = kSlotsAt + kPlaces * kTiles * kSlotFloats * 4;
constexpr int kPartBytes = kTiles * kTokens * kOwnPairs * 8;
constexpr int kBarrierAt = kPartsAt + (kGateUp ? 0 : kCluster * kPartBytes);
static_assert(kBarrierAt + 8 == SHARED_BYTES, "the host and the kernel disagree about shared memory");

// A part of n things; parts differ by one at most.
INLINE Range share(int n, u32 part, u32 parts) {
  const int each = (u32)n / parts, rest = (u32)n % parts, first = part * each + smaller(part, rest);
  return {first, first + each + ((int)part < rest ? 1 : 0)};
}

// What is this block's.
struct Block {
  const DecodeMlpParams& p;
  const Place place;
  const u32 rank;
  const Range rows, pieces;  // of features or columns; of k

  INLINE explicit Block(const DecodeMlpParams& params)
      : p(params),
        rank(kCluster > 1 ? ptx::cluster_rank() : 0),
        rows(share(kGateUp ? p.features : p.k, blockIdx.x / kCluster, gridDim.x / kCluster)),
        pieces(share(ceiling_divide(kGateUp ? p.k : p.features, Kind::kUnitK), rank, kCluster)) {}

  // This warp's pieces and tiles, in turns with the others.
  INLINE int piece(int step) const { return pieces.first + place.warp / kBeside + step * kPlaces; }
  INLINE int tile(int i) const { return place.warp % kBeside + i * kBeside; }

  // Where this lane's two rows of a tile begin; 0: there is no such row.
  INLINE u64 row(int tile, int half) const {
    const int at = rows.first + tile * (kGateUp ? kUnitPairs : kUnitRows) + place.row + (kGateUp ? 0 : 8 * half);
    const u64 from = kGateUp ? (half == 0 ? p.gate : p.up) : p.down;
    return at < rows.last ? from + at * (kGateUp ? p.gate_stride : p.down_stride) : 0;
  }
};

// This lane's part of a unit, as it lies in shared memory.
template <int FORMAT>
struct Unit {
  typedef Format<FORMAT> F;
  u32 at;
  INLINE u32 row(int half) const { return at + half * kHalfUnit + threadIdx.x % 32 * kLaneBytes; }
  INLINE u32 scales(int half) const {
    return at + 2 * kHalfUnit + (threadIdx.x % 32 * 2 + half) * F::kScaleBytes;
  }

  // Asks for a piece of a row; zeros where `row` is 0. Any address will do for what is not read.
  INLINE void copy_row(int half, u64 row, int piece, u32 offset, u64 any) const {
    const bool exists = row != 0;
    ptx::copy_async<16>(this->row(half), (const void*)(exists ? row + F::unit_at(piece) + offset : any), exists);
    if constexpr (F::kScaledBlocks) {
      ptx::copy_async<F::kScaleBytes>(scales(half), (const void*)(exists ? row + F::scales_at(piece) : any), exists);
    }
  }

  INLINE void load(UnitPart<FORMAT>& part) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part.row[half] = ptx::load_shared_wide(row(half));
      part.load_scales(half, scales(half));
    }
  }
};

// A warp's unit of its own tiles.
INLINE Unit<kFormat> unit_at(u32 shared, const Place& place, int tile, int step) {
  return {shared + ((place.warp * kOwnTiles + tile) * kSteps + step) * kUnitStride};
}

// Bytes of weights.
constexpr int kUnderWay = 30 << 10;

// Asks for all units of this warp, at a pace: tokens of the kernel before, which still multiplies, come behind what is under
// way, and more than this the latency of memory does not ask for.
INLINE void copy_weights(u32 shared, const Block& block) {
  constexpr int kEach = kPlaces * kBeside * kUnitRows * (kUnitBytes + Kind::kScaleBytes);
  constexpr int kPace = (kUnderWay + kEach / 2) / kEach > 0 ? (kUnderWay + kEach / 2) / kEach : 1;
#pragma unroll
  for (int i = 0; i < kOwnTiles; ++i) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (i * kSteps + s >= kPace) ptx::copy_async_wait<kPace - 1>();
      const int piece = block.piece(s);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool exists = block.tile(i) < kTiles && piece < block.pieces.last;
        const u64 row = exists ? block.row(block.tile(i), half) : 0;
        unit_at(shared, block.place, i, s).copy_row(half, row, piece, block.place.offset, block.p.gate);
      }
      ptx::copy_async_commit();
    }
  }
}

// 16 bytes of a token's row of so many elements, one by one.
INLINE ptx::Raw<16> load_elements(u64 row, int column, int elements) {
  ptx::Raw<16> raw = {};
#pragma unroll 1
  for (int i = 0; i < 8 && column + i < elements; ++i) {
    const u32 element = ((const Element*)row)[column + i];
    const u32 word = element << (i % 2 * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) raw.word[j] |= i / 2 == j ? word : 0;
  }
  return raw;
}

typedef Vectors Inputs[kSteps][Kind::kBlocks];

// x or h of this warp's pieces, all under way at once where rows are whole 16 bytes.
INLINE void load_inputs(Inputs& inputs, const Block& block) {
  const DecodeMlpParams& p = block.p;
  const u64 data = kGateUp ? p.x : p.h;
  const i64 stride = (kGateUp ? p.x_stride : p.h_stride) * kElementBytes;
  const int elements = kGateUp ? p.k : p.features;
  // Rows of h are padded with zeros to whole units.
  const bool wide = !kGateUp || (p.x_wide != 0 && elements % 8 == 0);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int b = 0; b < Kind::kBlocks; ++b) {
      const int column = (block.piece(s) * Kind::kBlocks + b) * Kind::kBlockK + block.place.offset / kElementBytes;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int token = 8 * i + block.place.row;
        const bool exists = token < p.m && column < elements && block.piece(s) < block.pieces.last;
        const u64 row = data + token * stride;
        if (wide) {
          inputs[s][b][i] = ptx::load_global_if(exists, (const ptx::Raw<16>*)(row + column * kElementBytes));
        } else {
          inputs[s][b][i] = exists ? load_elements(row, column, elements) : ptx::Raw<16>{};
        }
      }
    }
  }
}

// Leaves the sums of this warp in their slots.
INLINE void multiply(u32 shared, float* slots, const Inputs& inputs, const Block& block) {
#pragma unroll(kVectors == 1 || Kind::kNibbles ? 2 : 1)
  for (int i = 0; i < kOwnTiles; ++i) {
    if (block.tile(i) >= kTiles) break;
    Sums sums = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      UnitPart<kFormat> part[1];
      unit_at(shared, block.place, i, s).load(part[0]);
      multiply_parts<kFormat>(sums, part, [&](Vectors& v, int, int b) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) v[j] = inputs[s][b][j];
      });
    }
    store_sums(slots + (block.place.warp / kBeside * kTiles + block.tile(i)) * kSlotFloats, sums, block.place);
  }
}

// A sum over all places, in their order.
INLINE float total(const float* slots, int tile, int token, int row) {
  const float* from = slots + tile * kSlotFloats + token * kUnitRows + row;
  float sum = from[0];
#pragma unroll
  for (int place = 1; place < kPlaces; ++place) sum = __fadd_rn(sum, from[place * kTiles * kSlotFloats]);
  return sum;
}

INLINE void activate(const Block& block, const float* slots) {
  const DecodeMlpParams& p = block.p;
  constexpr int kMostPairs = kTiles * kUnitPairs;
  for (int i = threadIdx.x; i < kMostPairs * p.m; i += kThreads) {
    const int token = i / kMostPairs, pair = i % kMostPairs, feature = block.rows.first + pair;
    if (feature >= block.rows.last) continue;
    const int tile = pair / kUnitPairs, row = pair % kUnitPairs;
    const float gate = scaled<kFormat>(total(slots, tile, token, row), (const float*)p.gate_scales, feature);
    const float up = scaled<kFormat>(total(slots, tile, token, row + kUnitPairs), (const float*)p.up_scales, feature);
    ((Element*)p.h)[token * p.h_stride + feature] = activated(p, feature, gate, up);
  }
  // What lies behind rows of h meets weights that are zero.
  const int padding = (int)p.h_stride - p.features;
  if (blockIdx.x + 1 == gridDim.x) {
    for (int i = threadIdx.x; i < padding * p.m; i += kThreads) {
      ((Element*)p.h)[i / padding * p.h_stride + p.features + i % padding] = (Element)0;
    }
  }
}

// The barrier for the parts of all blocks of the cluster, before any of them comes.
INLINE void begin_sharing(u32 shared, int m) {
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared + kBarrierAt, 1);
    ptx::barrier_init_fence();
    ptx::barrier_arrive_expect(shared + kBarrierAt, kCluster * kTiles * m * kOwnPairs * 8);
  }
  ptx::cluster_arrive();
}

// Two rows of a token to each thread at a time: the sums of this block's part of k go to the block that has the rows, each
// to the place of this block there, and those of all parts become y.
INLINE void finish(const Block& block, const float* slots, u32 shared) {
  const DecodeMlpParams& p = block.p;
  for (int i = threadIdx.x; i < kTiles * p.m * 8; i += kThreads) {
    const int pair = i % 8, tile = i / 8 % kTiles, token = i / 8 / kTiles;
    ptx::Raw<8> sums;
#pragma unroll
    for (int c = 0; c < 2; ++c) sums.word[c] = ptx::as_bits(total(slots, tile, token, 2 * pair + c));
    const u32 owner = pair / kOwnPairs;
    const u32 at = ((block.rank * kTiles + tile) * kTokens + token) * kOwnPairs + pair % kOwnPairs;
    ptx::store_shared_cluster(ptx::cluster_address(shared + kPartsAt + at * 8, owner), sums,
                              ptx::cluster_address(shared + kBarrierAt, owner));
  }
  ptx::barrier_wait(shared + kBarrierAt, 0);
  for (int i = threadIdx.x; i < kTiles * p.m * kOwnPairs; i += kThreads) {
    const int pair = i % kOwnPairs, tile = i / kOwnPairs % kTiles, token = i / kOwnPairs / kTiles;
    const u32 at = shared + kPartsAt + ((tile * kTokens + token) * kOwnPairs + pair) * 8;
    float sums[2] = {};
#pragma unroll
    for (int part = 0; part < kCluster; ++part) {
      const ptx::Raw<8> raw = ptx::load_shared_pair(at + part * kPartBytes);
#pragma unroll
      for (int c = 0; c < 2; ++c) sums[c] = __fadd_rn(sums[c], ptx::as_float(raw.word[c]));
    }
    const int first = block.rows.first + tile * kUnitRows + (block.rank * kOwnPairs + pair) * 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (first + c >= block.rows.last) break;
      store_output(p, token, first + c, scaled<kFormat>(sums[c], (const float*)p.down_scales, first + c));
    }
  }
}

KERNEL(kMostThreads, 1, sm90_held_mlp)(KERNEL_PARAMS(DecodeMlpParams) p) {
  u8* memory = ptx::dynamic_shared();
  const u32 shared = ptx::shared_address(memory);
  if constexpr (!kGateUp) begin_sharing(shared, p.m);
  const Block block(p);
  copy_weights(shared, block);
  if constexpr (kGateUp) {
    prefetch_scales<kFormat, kThreads>(p.gate_scales, block.rows);
    prefetch_scales<kFormat, kThreads>(p.up_scales, block.rows);
  } else {
    prefetch_scales<kFormat, kThreads>(p.down_scales, block.rows);
  }
  // The next grid may read weights from here on: nobody writes them on the device.
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  Inputs inputs;
  load_inputs(inputs, block);
  float* slots = (float*)(memory + kSlotsAt);
  ptx::copy_async_wait<0>();
  multiply(shared, slots, inputs, block);
  // Every block of the cluster has begun, and has its barrier.
  if constexpr (!kGateUp) ptx::cluster_wait();
  __syncthreads();
  if constexpr (kGateUp) {
    activate(block, slots);
  } else {
    finish(block, slots, shared);
  }
}
