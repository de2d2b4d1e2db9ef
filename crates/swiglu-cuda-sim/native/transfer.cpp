// Bulk copies of TMA: loads of bytes (PTX ISA 9.7.9.25.5.2, cp.async.bulk), tensor loads and stores
// (9.7.9.27, cp.async.bulk.tensor); and stores to other blocks, which land as loads do (9.7.9.12, st.async).
// Transfers make progress at times that the schedule's generator picks, in any order.
#include <cstring>

#include "gang.hpp"

namespace sim {

void finish_copies(Thread& thread);

namespace {

TensorMap checked_map(const void* pointer, uint32_t shared, Block& block, const char* operation) {
  if (reinterpret_cast<uintptr_t>(pointer) % 64 != 0) {
    fault("%s with a tensor map at %p: expected an alignment of 64 bytes", operation, pointer);
  }
  TensorMap map;
  std::memcpy(&map, pointer, sizeof map);
  if (map.magic != TensorMap::MAGIC) fault("%s with bytes that are no tensor map", operation);
  if (map.rank != 2) fault("%s of two dimensions with a map of %u", operation, map.rank);
  const uint32_t span = swizzle_span(map.swizzle);
  // How a row that is narrower than the swizzle would lie is not modelled.
  if (span != 0 && map.row_bytes() != span && map.box[1] > 1) {
    fault("%s with rows of %u bytes and a swizzle of %u: expected them to be equal", operation,
          map.row_bytes(), span);
  }
  shared_at(block, shared, map.box_bytes(), 128, operation);
  return map;
}

// Calls `move(shared address, tensor pointer, bytes inside the tensor)` for each 16 bytes of the
// box; of a chunk that lies partly outside, the inside comes first, unless it begins left of it.
template <class Move>
void for_each_chunk(const TensorMap& map, uint32_t shared, int column, int row, Move move) {
  const uint32_t row_bytes = map.row_bytes(), span = swizzle_span(map.swizzle);
  const int64_t width = static_cast<int64_t>(map.size(0)) * map.element_bytes;
  for (uint32_t r = 0; r < map.box[1]; ++r) {
    const int64_t at_row = int64_t{row} + r;
    const bool row_inside = at_row >= 0 && at_row < static_cast<int64_t>(map.size(1));
    for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
      const int64_t begin = int64_t{column} * map.element_bytes + byte;
      const int64_t low = begin < 0 ? 0 : begin, high = begin + 16 < width ? begin + 16 : width;
      const uint32_t inside = row_inside && high > low ? static_cast<uint32_t>(high - low) : 0;
      const uint32_t skipped = static_cast<uint32_t>(inside > 0 ? low - begin : 0);
      auto* p = reinterpret_cast<std::byte*>(map.base);
      if (inside > 0) p += at_row * static_cast<int64_t>(map.stride[0]) + low;
      move(swizzled(shared + r * row_bytes + byte, span), skipped, p, inside);
    }
  }
}

void expect_waited(const TensorMap& map, int column, int row) {
  const GridTrace* before = gang().before;
  if (!gang().launch.programmatic || self().waited_for_grid || before == nullptr) return;
  for_each_chunk(map, 0, column, row, [&](uint32_t, uint32_t, const std::byte* from, uint32_t inside) {
    if (inside > 0) sim_reads_grid(from, inside);
  });
}

void land_bytes(const BulkLoad& load) {
  Block& block = *load.block;
  const uint32_t at = load.to - SHARED_BASE;
  std::memcpy(block.shared + at, load.from, load.bytes);
  for (uint32_t byte = 0; byte < load.bytes; byte += 16) block.unfenced_by[(at + byte) / 16] = 0;
  complete_bytes(block, load.barrier, load.bytes);
}

void land_store(const BulkLoad& store) {
  std::memcpy(store.block->shared + (store.to - SHARED_BASE), &store.value, sizeof store.value);
  complete_bytes(*store.block, store.barrier, sizeof store.value);
}

void land(const BulkLoad& load) {
  if (load.stores) return land_store(load);
  if (load.from != nullptr) return land_bytes(load);
  Block& block = *load.block;
  for_each_chunk(load.map, load.to, load.column, load.row,
                 [&](uint32_t to, uint32_t skipped, std::byte* from, uint32_t inside) {
                   std::byte* p = block.shared + (to - SHARED_BASE);
                   std::memset(p, 0, 16);
                   if (inside > 0) std::memcpy(p + skipped, from, inside);
                   // What was written here before no longer matters to the asynchronous proxy.
                   block.unfenced_by[(to - SHARED_BASE) / 16] = 0;
                 });
  // The whole box counts, with what lies outside the tensor.
  complete_bytes(block, load.barrier, load.map.box_bytes());
}

void read_shared(BulkStore& store) {
  if (store.stage != BulkStore::Stage::Issued) return;
  const std::byte* p = store.block->shared + (store.from - SHARED_BASE);
  store.box.assign(p, p + store.map.box_bytes());
  store.stage = BulkStore::Stage::Read;
}

void write_tensor(BulkStore& store) {
  read_shared(store);
  if (store.stage == BulkStore::Stage::Written) return;
  for_each_chunk(store.map, store.from, store.column, store.row,
                 [&](uint32_t from, uint32_t skipped, std::byte* to, uint32_t inside) {
                   const std::byte* p = store.box.data() + (from - store.from);
                   if (inside > 0 && skipped + inside < 16) {
                     fault("a tensor store to rows that end within 16 bytes: TMA would "
                           "write all of them, past the end");
                   }
                   if (inside == 0) return;
                   std::memcpy(to, p + skipped, inside);
                   store.block->gang->trace.add(to, inside);
                 });
  store.stage = BulkStore::Stage::Written;
  store.box.clear();
}

}  // namespace

namespace {

// What goes wrong in a transfer is its thread's failure, whichever runs.
class ActingFor {
 public:
  explicit ActingFor(Thread* thread) : before_(sim_thread) { sim_thread = thread; }
  ~ActingFor() { sim_thread = before_; }
  ActingFor(const ActingFor&) = delete;
  ActingFor& operator=(const ActingFor&) = delete;

 private:
  ThreadView* before_;
};

}  // namespace

bool progress_transfer(Gang& g) {
  const size_t loads = g.loads.size(), all = loads + g.stores.size();
  if (all == 0) return false;
  const bool youngest = g.starves_loads && loads > 0 && !g.random.one_in(8);
  const size_t i = youngest ? loads - 1 : g.random.below(all);
  if (i < loads) {
    const BulkLoad load = g.loads[i];
    // In their order.
    g.loads.erase(g.loads.begin() + static_cast<std::ptrdiff_t>(i));
    const ActingFor thread(load.by);
    land(load);
    return true;
  }
  std::shared_ptr<BulkStore>& store = g.stores[i - loads];
  const ActingFor thread(store->by);
  if (store->stage == BulkStore::Stage::Issued) {
    read_shared(*store);
  } else {
    write_tensor(*store);
    store = g.stores.back();
    g.stores.pop_back();
  }
  return true;
}

void expect_no_loads(const Block& block) {
  for (const BulkLoad& load : block.gang->loads) {
    if (load.block == &block) fault("exits, the last of its block, while a load, or a store to it, is under way");
  }
}

void finish_thread_transfers(Thread& thread) {
  finish_copies(thread);
  for (auto& group : thread.store_groups) {
    for (auto& store : group) {
      if (store->stage == BulkStore::Stage::Issued) {
        fault("exits before cp.async.bulk.wait_group.read: its store may still read shared memory");
      }
    }
  }
  if (!thread.stores.empty()) fault("exits with a tensor store that was never committed");
}

}  // namespace sim

using namespace sim;

extern "C" {

void sim_prefetch_tensor_map(const void* map) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) {
    fault("prefetch.tensormap at %p: expected an alignment of 64 bytes", map);
  }
}

void sim_expect_policy(unsigned long long policy, const char* operation) {
  if (policy != SIM_CACHE_POLICY) fault("%s with %#llx, which is no cache policy", operation, policy);
}

void sim_tensor_load(unsigned to, const void* pointer, unsigned barrier, int column, int row) {
  Thread& me = self();
  Block& block = *me.block;
  const TensorMap map = checked_map(pointer, to, block, "tensor load");
  require_barrier(block, barrier, "tensor load");
  require_fenced(block, barrier, 8, "TMA");
  expect_waited(map, column, row);
  gang().loads.push_back({&block, &me, map, to, barrier, column, row});
  maybe_yield();
}

void sim_tensor_load_multicast(unsigned to, const void* pointer, unsigned barrier, int column,
                               int row, unsigned blocks) {
  Thread& me = self();
  if (blocks == 0) fault("a tensor load to no block of its cluster");
  for (unsigned rank = 0; rank < 16; ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    Block& block = cluster_block(rank, "tensor load");
    const TensorMap map = checked_map(pointer, to, block, "tensor load");
    require_barrier(block, barrier, "tensor load");
    require_fenced(block, barrier, 8, "TMA");
    expect_waited(map, column, row);
    gang().loads.push_back({&block, &me, map, to, barrier, column, row});
  }
  maybe_yield();
}

void sim_bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                   unsigned long long policy) {
  Block& block = *self().block;
  if (bytes == 0 || bytes % 16 != 0) {
    fault("cp.async.bulk of %u bytes: expected a multiple of 16", bytes);
  }
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) sim_misaligned(from, 16);
  if (!is_resident(from, bytes)) {
    fault("cp.async.bulk of %u bytes from %p: they are in no allocation", bytes, from);
  }
  sim_expect_policy(policy, "cp.async.bulk");
  shared_at(block, to, bytes, 16, "cp.async.bulk");
  require_barrier(block, barrier, "cp.async.bulk");
  require_fenced(block, barrier, 8, "TMA");
  sim_tma_reads_grid(from, bytes);
  gang().loads.push_back({&block, &self(), {}, to, barrier, 0, 0, from, bytes});
  maybe_yield();
}

void sim_tensor_store(const void* pointer, unsigned from, int column, int row) {
  Thread& me = self();
  Block& block = *me.block;
  const TensorMap map = checked_map(pointer, from, block, "tensor store");
  require_fenced(block, from, map.box_bytes(), "a tensor store");
  auto store = std::make_shared<BulkStore>();
  store->block = &block;
  store->by = &me;
  store->map = map;
  store->from = from;
  store->column = column;
  store->row = row;
  gang().stores.push_back(store);
  me.stores.push_back(std::move(store));
  maybe_yield();
}

void sim_bulk_commit() {
  Thread& me = self();
  me.store_groups.push_back(std::move(me.stores));
  me.stores.clear();
}

void sim_bulk_wait(unsigned pending, bool only_read) {
  Thread& me = self();
  const size_t groups = me.store_groups.size();
  for (size_t i = 0; i + pending < groups; ++i) {
    for (auto& store : me.store_groups[i]) {
      if (only_read) {
        read_shared(*store);
      } else {
        write_tensor(*store);
      }
    }
  }
  if (only_read) return;
  while (me.store_groups.size() > pending) me.store_groups.erase(me.store_groups.begin());
}

}  // extern "C"
