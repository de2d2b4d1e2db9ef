// Tensor cores of a warpgroup (PTX ISA 9.7.15) and its register counts (setmaxnreg).
#include "wgmma.hpp"

#include <array>
#include <cstdio>
#include <cstring>
#include <limits>

#include "floats.hpp"
#include "gang.hpp"

namespace sim {
namespace {

// A matrix descriptor (PTX ISA 9.7.15.5.1.2.2).
struct Operand {
  uint32_t start, leading, stride, span;

  explicit Operand(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4),
        span(0) {
    constexpr uint32_t SPANS[4] = {16, 128, 64, 32};  // no swizzle: lines of one 16-byte chunk
    span = SPANS[bits >> 62];
    if ((bits >> 49 & 7) != 0) fault("wgmma descriptor with a base offset: not modelled");
    // Then eight lines of the swizzle begin where their pattern does (9.7.15.5.1.2.2, base offset).
    if (span > 16 && start % (8 * span) >= span) {
      fault(
          "wgmma operand at shared address %u: expected the swizzle's pattern to begin at a "
          "multiple of %u",
          start, 8 * span);
    }
  }

  // Where the 16-byte chunk with row `row` (of M or N) and elements 8·chunk.. of K lies: rows in
  // groups of 8, `span` bytes apart within a group (9.7.15.5.1.2.1.1, K-major canonical layouts).
  uint32_t k_major(uint32_t row, uint32_t chunk) const {
    const uint32_t along = span == 16 ? chunk * leading : chunk * 16;
    return swizzled(start + row % 8 * span + row / 8 * stride + along, span);
  }
  // Where the chunk with elements 8·chunk.. of M or N at depth `k` lies (MN-major): a line of
  // `span` bytes along M or N for each k, 8 lines to a group.
  uint32_t mn_major(uint32_t chunk, uint32_t k) const {
    const uint32_t per_line = span / 16;
    const uint32_t line = start + k % 8 * span;
    // Without swizzle the two offsets have their roles exchanged.
    if (span == 16) return line + chunk * stride + k / 8 * leading;
    return swizzled(line + chunk % per_line * 16 + chunk / per_line * leading + k / 8 * stride,
                    span);
  }
};

void load_chunk(Block& block, uint32_t address, Element element, float (&to)[8]) {
  const std::byte* p = shared_at(block, address, 16, 16, "wgmma");
  uint16_t h[8];
  std::memcpy(h, p, 16);
  if (element == Element::BF16) {
    for (int i = 0; i < 8; ++i) to[i] = from_bf16(h[i]);
  } else {
    for (int i = 0; i < 8; ++i) to[i] = from_f16(h[i]);
  }
}

// Rows `first`.. of an operand, as values[k][row].
void load_operand(Block& block, const Operand& operand, bool mn_major, Element element,
                  uint32_t first, uint32_t rows, float* values) {
  float chunk[8];
  if (mn_major) {
    for (uint32_t k = 0; k < WGMMA_K; ++k) {
      for (uint32_t row = 0; row < rows; row += 8) {
        load_chunk(block, operand.mn_major((first + row) / 8, k), element, chunk);
        std::memcpy(values + k * rows + row, chunk, sizeof chunk);
      }
    }
    return;
  }
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t half = 0; half < 2; ++half) {
      load_chunk(block, operand.k_major(first + row, half), element, chunk);
      for (uint32_t i = 0; i < 8; ++i) values[(8 * half + i) * rows + row] = chunk[i];
    }
  }
}

#if defined(__x86_64__)
__attribute__((target_clones("default", "avx2", "avx512f")))
#endif
void multiply(const float* a, const float* b, float* d, int n) {
  for (int row = 0; row < 16; ++row) {
    float* out = d + row * n;
    for (int k = 0; k < WGMMA_K; k += 4) {
      const float x0 = a[k * 16 + row], x1 = a[(k + 1) * 16 + row];
      const float x2 = a[(k + 2) * 16 + row], x3 = a[(k + 3) * 16 + row];
      const float *b0 = b + k * n, *b1 = b0 + n, *b2 = b1 + n, *b3 = b2 + n;
      for (int column = 0; column < n; ++column) {
        float sum = out[column];
        sum += x0 * b0[column];
        sum += x1 * b1[column];
        sum += x2 * b2[column];
        sum += x3 * b3[column];
        out[column] = sum;
      }
    }
  }
}

void require_operand_fenced(Block& block, const Operand& operand, bool mn_major, uint32_t rows) {
  for (uint32_t i = 0; i < rows; i += 8) {
    for (uint32_t k = 0; k < WGMMA_K; ++k) {
      const uint32_t p = mn_major ? operand.mn_major(i / 8, k) : operand.k_major(i + k % 8, k / 8);
      shared_at(block, p, 16, 16, "wgmma");
      require_fenced(block, p, 16, "wgmma");
    }
  }
}

void compute(Warp& warp, WgmmaOp& op, WgmmaTile& tile) {
  if (op.done) return;
  op.done = true;
  thread_local std::vector<float> b_values;
  float a_values[WGMMA_K * 16];
  const WgmmaArgs& x = op.args;
  b_values.resize(static_cast<size_t>(WGMMA_K) * static_cast<size_t>(x.n));
  load_operand(*warp.block, Operand(x.a), x.transpose_a, x.element, 16 * (warp.index % 4), 16,
               a_values);
  load_operand(*warp.block, Operand(x.b), x.transpose_b, x.element, 0, static_cast<uint32_t>(x.n),
               b_values.data());
  if (!x.accumulate) std::fill(tile.values.begin(), tile.values.end(), 0.0f);
  multiply(a_values, b_values.data(), tile.values.data(), x.n);
}

// Element d[4j + 2i + c] of lane l: row l / 4 + 8i, column 8j + 2(l % 4) + c (9.7.15.5.2).
template <class Each>
void for_each_element(WgmmaTile& tile, Each each) {
  for (unsigned lane = 0; lane < WARP; ++lane) {
    for (unsigned e = 0; e < static_cast<unsigned>(tile.n) / 2; ++e) {
      const unsigned row = lane / 4 + 8 * (e / 2 % 2),
                     column = 8 * (e / 4) + 2 * (lane % 4) + e % 2;
      each(tile.lanes[lane][e], tile.values[row * static_cast<unsigned>(tile.n) + column]);
    }
  }
}

void log_operation(Warp& warp, uint64_t what) {
  // FNV-1a over the sequence: the four warps of a warpgroup must carry out the same one.
  uint64_t hash = warp.warpgroup_log.empty() ? 0xcbf29ce484222325u : warp.warpgroup_log.back();
  warp.warpgroup_log.push_back((hash ^ what) * 0x100000001b3u);
}

// Lanes of a warp met at a wgmma: starts it.
void start(Warp& warp, Meeting& m) {
  WgmmaState& state = *warp.wgmma;
  const WgmmaArgs& args = *static_cast<const WgmmaArgs*>(m.arguments[0]);
  std::shared_ptr<WgmmaTile> tile;
  for (auto& t : state.tiles) {
    if (t->lanes[0] == args.d) tile = t;
  }
  if (tile == nullptr) {
    if (!state.fenced) fault("wgmma on registers of other use without wgmma.fence before");
    tile = std::make_shared<WgmmaTile>();
    tile->n = args.n;
    tile->in_flight = 0;
    tile->values.resize(16 * static_cast<size_t>(args.n));
    for (unsigned lane = 0; lane < WARP; ++lane) {
      tile->lanes[lane] = static_cast<const WgmmaArgs*>(m.arguments[lane])->d;
    }
    for_each_element(*tile, [](float& own, float& value) {
      value = own;
      own = std::numeric_limits<float>::quiet_NaN();
    });
    state.tiles.push_back(tile);
  } else if (tile->n != args.n) {
    fault("wgmma of N = %d on accumulators in flight with N = %d", args.n, tile->n);
  }
  const auto rows = static_cast<uint32_t>(args.n);
  require_operand_fenced(*warp.block, Operand(args.a), args.transpose_a, 64);
  require_operand_fenced(*warp.block, Operand(args.b), args.transpose_b, rows);
  ++tile->in_flight;
  state.open.ops.push_back({WgmmaOp{args, false}, tile});
  // The operands are read at some time between here and the wait. Early shows data that is not
  // there yet, late shows a buffer that was given back too soon.
  if (warp.block->gang->random.one_in(2)) {
    for (auto& group : state.committed) {
      for (auto& [op, t] : group.ops) compute(warp, op, *t);
    }
    for (auto& [op, t] : state.open.ops) compute(warp, op, *t);
  }
}

// Computes the groups before number `end`.
void compute_groups(Warp& warp, uint64_t end) {
  WgmmaState& state = *warp.wgmma;
  for (size_t i = 0; i < state.committed.size() && state.retired + i < end; ++i) {
    for (auto& [op, tile] : state.committed[i].ops) compute(warp, op, *tile);
  }
}

void retire_group(Warp& warp) {
  WgmmaState& state = *warp.wgmma;
  for (auto& [op, tile] : state.committed.front().ops) {
    if (--tile->in_flight > 0) continue;
    for_each_element(*tile, [](float& own, float& value) { own = value; });
    std::erase(state.tiles, tile);
  }
  state.committed.erase(state.committed.begin());
  ++state.retired;
}

WgmmaState& state_of(Warp& warp) {
  if (!warp.wgmma) warp.wgmma = std::make_unique<WgmmaState>();
  return *warp.wgmma;
}

constexpr const char* WAITS_FOR_WARPGROUP = "wgmma.wait_group, for another warp's wgmma";

std::array<Warp*, 4> warpgroup(Warp& warp) {
  std::array<Warp*, 4> warps;
  for (size_t i = 0; i < 4; ++i) warps[i] = &warp.block->warps[warp.index / 4 * 4 + i];
  return warps;
}

void require_warpgroup(const char* operation) {
  const Thread& me = self();
  if (me.warp->members != ~0u || (me.warp->index / 4 + 1) * 128 > me.block->threads.size()) {
    fault("%s outside a warpgroup of 128 threads", operation);
  }
}

struct RegistersArgs {
  unsigned count;
  bool request, granted;
  unsigned releases;  // of the block when the request was looked at
};

void change_registers(Warp& warp, Meeting& m) {
  auto& first = *static_cast<RegistersArgs*>(m.arguments[0]);
  Block& block = *warp.block;
  bool granted = true;
  if (!first.request) {
    if (first.count > warp.registers) {
      fault("setmaxnreg.dec to %u of %u registers", first.count, warp.registers);
    }
    block.free_registers += warp.registers - first.count;
    ++block.register_releases;
    warp.registers = first.count;
    for (Thread& t : block.threads) {
      if (t.waits_for != nullptr && std::strcmp(t.waits_for, "setmaxnreg.inc") == 0) wake(t);
    }
  } else {
    // How many registers the compiler gave the kernel is not known here, only how many it could: a
    // request below that is granted from the warp's own.
    if (first.count < warp.registers) warp.registers = first.count;
    granted = block.free_registers >= first.count - warp.registers;
    if (granted) {
      block.free_registers -= first.count - warp.registers;
      warp.registers = first.count;
    }
  }
  for (void* a : m.arguments) {
    auto& args = *static_cast<RegistersArgs*>(a);
    args.granted = granted;
    args.releases = block.register_releases;
  }
}

}  // namespace

// At the end of a block: warps of a warpgroup did the same, and nothing is left in flight.
void finish_warpgroups(Block& block) {
  for (Warp& warp : block.warps) {
    const Warp& first = block.warps[warp.index / 4 * 4];
    const bool open =
        warp.wgmma && (!warp.wgmma->open.ops.empty() || !warp.wgmma->committed.empty());
    const bool differs = warp.warpgroup_log != first.warpgroup_log;
    if (!open && !differs) continue;
    std::fprintf(stderr, "simulator: kernel %s: warp %u ends %s\n", block.gang->launch.name.c_str(),
                 warp.index,
                 open
                     ? "with wgmma under way"
                     : "with other wgmma or setmaxnreg operations than its warpgroup's first warp");
    block.gang->failed = true;
  }
}

}  // namespace sim

using namespace sim;

extern "C" {

// PTX ISA 9.7.20.5 (setmaxnreg): all warps of the warpgroup; a request waits until the registers
// are free.
void sim_registers(unsigned count, bool request) {
  require_warpgroup("setmaxnreg");
  Warp& warp = *self().warp;
  const uint64_t signature = uint64_t{count} << 1 | (request ? 1 : 0);
  RegistersArgs args{count, request, false, 0};
  for (;;) {
    meet("setmaxnreg", signature, ~0u, &args, change_registers);
    if (args.granted) break;
    // Registers that were given back before this lane got here have woken nobody: look again.
    if (warp.block->register_releases == args.releases) {
      wait_until_woken("setmaxnreg.inc", count, 0);
    }
  }
  if (self().lane == 0) log_operation(warp, signature);
}

void sim_wgmma_fence() {
  require_warpgroup("wgmma.fence");
  meet("wgmma.fence", 0, ~0u, nullptr, [](Warp& w, Meeting&) { state_of(w).fenced = true; });
}

void sim_wgmma(const WgmmaArgs* args) {
  require_warpgroup("wgmma");
  // All lanes give the same descriptors (9.7.15.5.2, wgmma.mma_async).
  const uint64_t signature = args->a * 0x9e3779b97f4a7c15u ^ args->b * 0xc2b2ae3d27d4eb4fu ^
                             static_cast<uint64_t>(args->n) << 4 ^
                             static_cast<uint64_t>(args->element) << 2 ^
                             (args->transpose_b ? 2u : 0u) ^ (args->accumulate ? 1u : 0u);
  Warp& warp = *self().warp;
  state_of(warp);
  WgmmaArgs copy = *args;
  meet("wgmma", signature, ~0u, &copy, start);
  if (self().lane == 0) log_operation(warp, signature);
  maybe_yield();
}

void sim_wgmma_commit() {
  require_warpgroup("wgmma.commit_group");
  meet("wgmma.commit_group", 0, ~0u, nullptr, [](Warp& w, Meeting&) {
    WgmmaState& state = state_of(w);
    state.committed.push_back(std::move(state.open));
    state.open = {};
    for (Warp* sibling : warpgroup(w)) {
      for (Thread* t : sibling->lanes) {
        if (t->waits_for == WAITS_FOR_WARPGROUP) wake(*t);
      }
    }
  });
}

// An operation of the warpgroup is under way until it has done the rows of all four warps, so a
// warp that has waited knows that the others' operands were read too.

void sim_wgmma_wait(unsigned pending) {
  require_warpgroup("wgmma.wait_group");
  Warp& warp = *self().warp;
  const uint64_t issued = state_of(warp).issued();
  uint64_t end = issued > pending ? issued - pending : 0;
  for (Warp* sibling : warpgroup(warp)) {
    while (state_of(*sibling).issued() < end) {
      wait_until_woken(WAITS_FOR_WARPGROUP, sibling->index, static_cast<uint32_t>(end));
    }
  }
  meet("wgmma.wait_group", pending, ~0u, &end, [](Warp& w, Meeting& m) {
    const uint64_t last = *static_cast<const uint64_t*>(m.arguments[0]);
    for (Warp* sibling : warpgroup(w)) compute_groups(*sibling, last);
    while (w.wgmma->retired < last) retire_group(w);
    w.wgmma->fenced = false;
  });
  maybe_yield();
}

}  // extern "C"
