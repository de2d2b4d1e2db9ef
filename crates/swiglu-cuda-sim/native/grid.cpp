// Between the blocks of a cooperative launch: stores, releases, waiting for a word (PTX ISA 8, the
// memory consistency model). A store lands at once, by the toss of a coin, or when it is released: by
// its thread, by a lane that it has met at __syncwarp, or by another thread of the block after a barrier
// of the block or an arrival at an mbarrier. So a release that is missing, or a barrier before it, shows
// other blocks what was there before. TMA reads what the own grid stored only for threads
// that fenced it. And what a grid has stored so, the grid behind it may not read before
// griddepcontrol.wait, if it was launched to start early.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gang.hpp"

namespace sim {

void land_stores(std::vector<GridStore>& stores) {
  for (const GridStore& store : stores) std::memcpy(store.to, store.value, store.bytes);
  stores.clear();
}

namespace {

void hand_on(std::vector<GridStore>& from, std::vector<GridStore>& to) {
  to.insert(to.end(), from.begin(), from.end());
  from.clear();
}

}  // namespace

void hand_stores_to_warp(Thread& thread) { hand_on(thread.unreleased, thread.warp->unreleased); }

void hand_stores_to_block(Thread& thread) {
  hand_on(thread.warp->unreleased, thread.block->unreleased);
  hand_on(thread.unreleased, thread.block->unreleased);
}

namespace {

bool turned(const unsigned* p, unsigned before) { return ((*p ^ before) >> 31) != 0; }

}  // namespace

}  // namespace sim

using namespace sim;

extern "C" {

void sim_store_for_grid(void* to, const void* from, unsigned bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0) sim_misaligned(to, bytes);
  Thread& me = self();
  // A wild address faults here, where it is known whose it is.
  auto* p = static_cast<volatile std::byte*>(to);
  *p = *p;
  const auto address = reinterpret_cast<uintptr_t>(to);
  Span& stored = gang().trace.stored;
  stored.first = std::min(stored.first, address);
  stored.last = std::max(stored.last, address + bytes - 1);
  if (gang().random.one_in(2)) {
    std::memcpy(to, from, bytes);
    return;
  }
  GridStore& store = me.unreleased.emplace_back();
  store.to = static_cast<std::byte*>(to);
  store.bytes = bytes;
  std::memcpy(store.value, from, bytes);
}

// PTX ISA 9.7.13.13 (griddepcontrol): until it waits, a grid that started early sees nothing for sure of
// the one before it.
void sim_reads_grid(const void* from, unsigned bytes) {
  const GridTrace* before = gang().before;
  if (!gang().launch.programmatic || self().waited_for_grid || before == nullptr) return;
  if (before->meets(from, bytes)) {
    fault("reads what the grid before it wrote, at %p, without griddepcontrol.wait", from);
  }
}
void sim_tma_reads_grid(const void* from, unsigned bytes) {
  sim_reads_grid(from, bytes);
  if (!self().fenced_global && gang().trace.stored.meets(reinterpret_cast<uintptr_t>(from), bytes)) {
    fault("copies what its grid stored, at %p, without fence.proxy.async.global", from);
  }
}
void sim_grid_dependency_wait() {
  const bool* over = gang().before_over;
  while (over != nullptr && !*over) {
    gang().grid_waiters.push_back(&self());
    wait_until_woken("griddepcontrol.wait");
  }
  self().waited_for_grid = true;
}
// The next grid may start when a thread of each block has said so, or the block has ended.
void sim_grid_dependency_launch() {
  self().block->triggered = true;
  maybe_yield();
}
void sim_stores_global(const void* to, unsigned bytes) { gang().trace.add(to, bytes); }

unsigned sim_load_relaxed(const unsigned* p) {
  if (reinterpret_cast<uintptr_t>(p) % 4 != 0) sim_misaligned(p, 4);
  sim_reads_grid(p, 4);
  maybe_yield();
  return *p;
}

void sim_add_release(unsigned* p, unsigned value) {
  if (reinterpret_cast<uintptr_t>(p) % 4 != 0) sim_misaligned(p, 4);
  Thread& me = self();
  land_stores(me.unreleased);
  land_stores(me.warp->unreleased);
  land_stores(me.block->unreleased);
  *p += value;
  gang().trace.counted.insert(reinterpret_cast<uintptr_t>(p));
  // Those of other grids too, that wait for the same word.
  for (Gang* g : gang().party->gangs) {
    std::vector<Thread*> waiting;
    waiting.swap(g->word_waiters);
    for (Thread* t : waiting) wake(*t);
  }
  maybe_yield();
}

void sim_wait_for_turnover(const unsigned* p, unsigned before) {
  maybe_yield();
  while (!turned(p, before)) {
    gang().word_waiters.push_back(&self());
    wait_until_woken("a word of the grid", static_cast<uint32_t>(*p), before);
  }
  self().fenced_global = false;
}

}  // extern "C"
