// The first half of a feed-forward block's backward pass on Hopper: dh = dy·Wdᵀ by the main loop of gemm.cuh, and
// in its epilogue, from saved gate and up, ∂L/∂gate, ∂L/∂up and, where the gradient of Wd is wanted, h once more. dh is
// never in memory, and h need not be kept from the forward pass.
//
// The operands of the main loop are dy, for x, and Wd, whose outputs are here what is summed over. In ping-pong one
// team of consumers runs the epilogue while the other multiplies. A consumer goes through its rows of the tile slab by slab,
// 64 rows of a panel: TMA brings gate and up, in the order of the consumer's fragments they are read, replaced by their
// gradients where they stand, and leave through TMA, h from a place of its own. Who waits for whom, per slab:
//   1. the leader until the last slab's stores have read shared memory; then it asks for this one
//   2. all at the consumer's barrier: h's place is free
//   3. all for gate and up (the consumer's mbarrier)
//   4. all, with their writes fenced, at the consumer's barrier; the leader stores
// The first slab of a tile is asked for before it is multiplied: every earlier read of its place is behind 4.
// Slabs without rows or columns are passed over by all. The gradients may replace gate and up in memory: a slab is stored
// after it was read, and no other slab has the same elements.
//
// With ROW_SCALE dh and h are multiplied with a factor of their row, and the sum of h·dh of each slab's row, before that, goes to
// memory, for the gradient of that factor: four threads have a row's columns, and add them in one order.
//
// Compile-time: what shape.cuh and gate.cuh name, and ROW_SCALE.
//
// Floors: 2·M·H·K FLOP, 4096 per cycle and SM, so 12·K cycles for a tile of 128 × 192; of memory 10 bytes for each
// element of h, 8 without it. What was measured: docs/kernels/sm90_dgated_gemm.md.
#include "lib/gate.cuh"
#include "sm90/gemm.cuh"

static_assert(kOperands == 1 && kPingPong && kCluster == 1, "a plain product, hidden behind another");
static_assert(kPanel == 64, "slabs are 64 columns of the 128-byte swizzle");
constexpr int kSlabBytes = 64 * kPitch;
constexpr int kConsumerBytes = 3 * kSlabBytes;
constexpr bool kScaled = ROW_SCALE != 0;
// Of four consumers each has few registers beside its sums. Then a branch keeps the compiler from computing the next
// columns too: up to 24 bytes of spills of the longest formula otherwise, with factors up to 48. With factors two consumers have
// few too, also one around each sum of h·dh, and of four the GELUs one within 16 columns; what these ask is true, as H is whole
// groups of 8 columns.
constexpr bool kGuarded = kScaled && kConsumers == 2 || kConsumers == 4 && !kFast && CLAMP;
constexpr bool kGuardedWithin = kScaled && kConsumers == 4 && (kGate == kGeluErf || kGate == kGeluTanh);
constexpr bool kGuardedDot = kScaled && kConsumers == 2;

struct alignas(64) Sm90DgatedGemmParams {
  Operands operands;
  // Boxes of a slab: read, and written.
  ptx::TensorMap gate, up, gate_grad, up_grad, h;
  Formula formula;
  int stores_h;
  // With ROW_SCALE: of each row, 1 at address 0, and for each 64 columns M sums of h·dh, none at address 0.
  u64 scale, dots;
};

// Of the two rows of a block of which a thread has columns: their factors, and its sums of h·dh.
struct Rows {
  float scale[2], dot[2];
};
// Their factors where they are the thread's only ones of a tile: asked for before it is multiplied.
template <bool HAS_ANY>
struct Factors {
  INLINE void keep(const Rows&) {}
  INLINE void give(Rows&) const {}
};
template <>
struct Factors<true> {
  float scale[2];
  INLINE void keep(const Rows& rows) { scale[0] = rows.scale[0], scale[1] = rows.scale[1]; }
  INLINE void give(Rows& rows) const { rows.scale[0] = scale[0], rows.scale[1] = scale[1]; }
};
constexpr bool kScaledAtOnce = kScaled && kBlocks == 1;

class Dgated : Factors<kScaledAtOnce> {
  const Sm90DgatedGemmParams& p;
  const u32 gate_and_up, barrier;
  const int consumer;
  u32 done = 0;  // slabs of the tiles before

 public:
  static constexpr int kBytes = kConsumers * kConsumerBytes, kBarriers = kConsumers;

  INLINE static void initialise(const Sm90DgatedGemmParams& p, u32 barriers) {
    for (int i = 0; i < kBarriers; ++i) ptx::barrier_init(barriers + 8 * i, 1);
    ptx::prefetch_tensor_map(&p.gate);
    ptx::prefetch_tensor_map(&p.up);
    ptx::prefetch_tensor_map(&p.gate_grad);
    ptx::prefetch_tensor_map(&p.up_grad);
    if (p.stores_h) ptx::prefetch_tensor_map(&p.h);
  }

  INLINE Dgated(const Sm90DgatedGemmParams& p, u32 shared, u32 barriers, int consumer)
      : p(p),
        gate_and_up(shared + consumer * kConsumerBytes),
        barrier(barriers + 8 * consumer),
        consumer(consumer) {}

  template <int WIDTH>
  INLINE void begin(Sums<WIDTH>& d, Tile tile) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) d[b][i] = 0.0f;
    }
    if constexpr (kScaledAtOnce) keep(rows_from(own_rows(tile).row));
    if (threadIdx.x % 128 != 0) return;
    const Slabs slabs(p.operands.extents, own_rows(tile), WIDTH);
    ptx::bulk_wait_read<0>();
    if (slabs.count() > 0) ask_for(slabs, 0);
  }

  template <int WIDTH>
  INLINE void finish(const Sums<WIDTH>& d, Tile tile) {
    const bool leader = threadIdx.x % 128 == 0;
    const Slabs slabs(p.operands.extents, own_rows(tile), WIDTH);
#pragma unroll
    for (int panel = 0; panel < WIDTH / kPanel; ++panel) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (panel >= slabs.panels || b >= slabs.blocks) continue;
        const int s = panel * slabs.blocks + b;
        Rows rows = {};
        // Beside gate and up, which are waited for.
        if constexpr (kScaled && !kScaledAtOnce) rows = rows_from(slabs.row(s));
        give(rows);
        if (s > 0) {
          if (leader) {
            ptx::bulk_wait_read<0>();
            ask_for(slabs, s);
          }
          consumer_barrier(consumer);
        }
        ptx::barrier_wait(barrier, (done + s) & 1);
        differentiate<WIDTH>(d[b], panel, slabs.column(s), slabs.row(s), rows);
        ptx::fence_async_shared();
        consumer_barrier(consumer);
        if (leader) {
          const int column = slabs.column(s), row = slabs.row(s);
          ptx::tensor_store(&p.gate_grad, gate_and_up, column, row);
          ptx::tensor_store(&p.up_grad, gate_and_up + kSlabBytes, column, row);
          if (p.stores_h) ptx::tensor_store(&p.h, place_of_h(), column, row);
          ptx::bulk_commit();
        }
      }
    }
    done += slabs.count();
  }

  INLINE void end() const {
    if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
  }

 private:
  INLINE Tile own_rows(Tile tile) const {
    tile.row = consumer_row(tile, consumer);
    return tile;
  }

  // Those of a tile that have rows and columns, blocks of 64 rows innermost; none where no row is the consumer's.
  struct Slabs {
    Tile tile;
    int panels, blocks;

    INLINE Slabs(const Extents& e, Tile tile, int width) : tile(tile) {
      panels = within(e.features - tile.column, kPanel, width / kPanel);
      blocks = within(e.m - tile.row, 64, kBlocks);
    }
    static INLINE int within(int extent, int unit, int most) {
      const int units = ceiling_divide(extent, unit);
      return units < most ? units : most;
    }
    INLINE int count() const { return panels * blocks; }
    INLINE int column(int s) const { return tile.column + s / blocks * kPanel; }
    INLINE int row(int s) const { return tile.row + s % blocks * 64; }
  };

  INLINE u32 place_of_h() const { return gate_and_up + 2 * kSlabBytes; }

  // Asks for gate and up of slab s, by one thread.
  INLINE void ask_for(const Slabs& slabs, int s) const {
    ptx::barrier_arrive_expect(barrier, 2 * kSlabBytes);
    ptx::tensor_load(gate_and_up, &p.gate, barrier, slabs.column(s), slabs.row(s));
    ptx::tensor_load(gate_and_up + kSlabBytes, &p.up, barrier, slabs.column(s), slabs.row(s));
  }

  // Replaces gate and up of the slab at a place of the result by their gradients, and writes h.
  template <int WIDTH>
  INLINE void differentiate(const float (&d)[WIDTH / 2], int panel, int first_column, int first_row, Rows rows) const {
    const int columns = p.operands.extents.features - first_column;  // of it exist, or more
#pragma unroll
    for (int j = 0; j < kPanel / 8; j += 2) {
      if (kGuarded && 8 * j >= columns) continue;
      const u32 at = place_in_panel(0, 0, j);
      u32 gate[4], up[4], h[4] = {};
      ptx::load_matrix_x4(gate, gate_and_up + at);
      ptx::load_matrix_x4(up, gate_and_up + kSlabBytes + at);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (kGuardedWithin && 8 * (j + q / 2) >= columns) continue;
        const int i = 4 * (panel * kPanel / 8 + j + q / 2) + 2 * (q % 2);
        const Values<4> g = unpack(ptx::Raw<4>{{gate[q]}}), u = unpack(ptx::Raw<4>{{up[q]}});
        Gradients grad[2];
        float value[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // The product as a linear map would leave it.
          const float dh = kPreRound ? round_to_element(d[i + c]) : d[i + c];
          const float scaled = kScaled ? __fmul_rn(dh, rows.scale[q % 2]) : dh;
          grad[c] = gated_backward(scaled, g.value[c], u.value[c], p.formula);
          value[c] = gated(g.value[c], u.value[c], p.formula);
          if constexpr (kScaled) {
            const int column = 8 * (j + q / 2) + 2 * (int)(threadIdx.x % 4) + c;
            if (!kGuardedDot || column < columns) rows.dot[q % 2] = __fmaf_rn(value[c], dh, rows.dot[q % 2]);
            value[c] = __fmul_rn(value[c], rows.scale[q % 2]);
          }
        }
        gate[q] = pack_elements(grad[0].gate, grad[1].gate);
        up[q] = pack_elements(grad[0].up, grad[1].up);
        h[q] = pack_elements(value[0], value[1]);
      }
      ptx::store_matrix_x4(gate_and_up + at, gate);
      ptx::store_matrix_x4(gate_and_up + kSlabBytes + at, up);
      ptx::store_matrix_x4(place_of_h() + at, h);
    }
    if constexpr (kScaled) store_dots(rows, first_column, first_row);
  }

  INLINE static int row_of_thread(int first, int r) {
    return first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
  }

  INLINE Rows rows_from(int first) const {
    Rows rows = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of_thread(first, r);
      const bool scaled = p.scale != 0 && row < p.operands.extents.m;
      rows.scale[r] = scaled ? ((const float*)p.scale)[row] : 1.0f;
    }
    return rows;
  }

  INLINE void store_dots(const Rows& rows, int first_column, int first_row) const {
    const int m = p.operands.extents.m;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float dot = rows.dot[r];
      dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, 1));
      dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, 2));
      const int row = row_of_thread(first_row, r);
      if (threadIdx.x % 4 == 0 && p.dots != 0 && row < m)
        ((float*)p.dots)[(i64)(first_column / kPanel) * m + row] = dot;
    }
  }
};

KERNEL(kThreads, 1, sm90_dgated_gemm)(KERNEL_PARAMS(Sm90DgatedGemmParams) p) { gemm<Dgated>(p); }
