// Shared memory: addresses, the order between ordinary accesses and the asynchronous proxy, and
// cp.async.
#include <cstring>

#include "gang.hpp"

namespace sim {

std::byte* shared_at(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment,
                     const char* operation) {
  const uint32_t size = block.gang->launch.shared_bytes;
  if (address < SHARED_BASE || uint64_t{address} + bytes > uint64_t{SHARED_BASE} + size) {
    fault("%s of %u bytes at shared address %u: the block has %u bytes from address %u", operation,
          bytes, address, size, SHARED_BASE);
  }
  if (address % alignment != 0) {
    fault("%s at shared address %u: expected an alignment of %u bytes", operation, address,
          alignment);
  }
  return block.shared + (address - SHARED_BASE);
}

void mark_unfenced(Thread& thread, uint32_t address, uint32_t bytes) {
  Block& block = *thread.block;
  const uint32_t first = (address - SHARED_BASE) / 16;
  const uint32_t last = (address - SHARED_BASE + bytes - 1) / 16;
  for (uint32_t granule = first; granule <= last; ++granule) {
    if (block.unfenced_by[granule] != thread.index + 1) thread.unfenced.push_back(granule);
    block.unfenced_by[granule] = static_cast<uint16_t>(thread.index + 1);
  }
}

void require_fenced(const Block& block, uint32_t address, uint32_t bytes, const char* reader) {
  const uint32_t first = (address - SHARED_BASE) / 16;
  const uint32_t last = (address - SHARED_BASE + bytes - 1) / 16;
  for (uint32_t granule = first; granule <= last; ++granule) {
    if (block.unfenced_by[granule] != 0) {
      fault("%s reads shared address %u, which thread %u wrote without fence.proxy.async since",
            reader, SHARED_BASE + 16 * granule, block.unfenced_by[granule] - 1u);
    }
  }
}

namespace {

void perform(Thread& thread, AsyncCopy& copy) {
  if (copy.done) return;
  copy.done = true;
  std::byte* to = thread.block->shared + (copy.to - SHARED_BASE);
  if (copy.read > 0) std::memcpy(to, copy.from, copy.read);
  std::memset(to + copy.read, 0, copy.bytes - copy.read);
  mark_unfenced(thread, copy.to, copy.bytes);
}

void perform_group(Thread& thread) {
  for (AsyncCopy& copy : thread.copy_groups.front()) perform(thread, copy);
  thread.copy_groups.erase(thread.copy_groups.begin());
}

}  // namespace

void finish_copies(Thread& thread) {
  while (!thread.copy_groups.empty()) perform_group(thread);
  for (AsyncCopy& copy : thread.copies) perform(thread, copy);
  thread.copies.clear();
}

}  // namespace sim

using namespace sim;

extern "C" {

unsigned sim_shared_address(const void* pointer) {
  Block& block = *self().block;
  const auto* p = static_cast<const std::byte*>(pointer);
  const auto offset = static_cast<uint64_t>(p - block.shared);
  if (p < block.shared || offset > block.gang->launch.shared_bytes) {
    fault("shared_address of %p, which is not in the block's shared memory", pointer);
  }
  return SHARED_BASE + static_cast<unsigned>(offset);
}

unsigned sim_load_shared(unsigned address) {
  unsigned value;
  std::memcpy(&value, shared_at(*self().block, address, 4, 4, "ld.shared"), 4);
  return value;
}

void sim_load_shared_wide(unsigned address, unsigned* words) {
  std::memcpy(words, shared_at(*self().block, address, 16, 16, "ld.shared.v4"), 16);
}

void sim_store_shared(unsigned address, unsigned value, unsigned bytes) {
  // Little-endian hosts: the low bytes come first.
  std::memcpy(shared_at(*self().block, address, bytes, bytes, "st.shared"), &value, bytes);
  mark_unfenced(self(), address, bytes);
}

void sim_misaligned(const void* pointer, unsigned bytes) {
  fault("access to %u bytes at %p: expected an alignment of as many bytes", bytes, pointer);
}

// PTX ISA 9.7.9.25.3 (cp.async): the copy may happen at any time up to its wait_group, so it
// happens now or then, by the toss of a coin: early shows a buffer reused too soon, late shows a
// missing wait.
void sim_copy_async(unsigned to, const void* from, unsigned bytes, unsigned read) {
  Thread& me = self();
  shared_at(*me.block, to, bytes, bytes, "cp.async");
  if (read > bytes) fault("cp.async of %u bytes that reads %u", bytes, read);
  if (read > 0 && reinterpret_cast<uintptr_t>(from) % bytes != 0) sim_misaligned(from, bytes);
  if (read > 0) sim_reads_grid(from, read);
  me.copies.push_back({to, from, bytes, read, false});
  if (gang().random.one_in(2)) perform(me, me.copies.back());
}

void sim_copy_async_commit() {
  Thread& me = self();
  me.copy_groups.push_back(std::move(me.copies));
  me.copies.clear();
}

void sim_copy_async_wait(unsigned pending) {
  Thread& me = self();
  while (me.copy_groups.size() > pending) perform_group(me);
}

// PTX ISA 9.7.13.5 (fence.proxy.async): orders the calling thread's earlier accesses.
void sim_fence_async_shared() {
  Thread& me = self();
  for (uint32_t granule : me.unfenced) {
    uint16_t& by = me.block->unfenced_by[granule];
    if (by == me.index + 1) by = 0;
  }
  me.unfenced.clear();
  maybe_yield();
}

void sim_fence_async_global() {
  self().fenced_global = true;
  maybe_yield();
}

}  // extern "C"
