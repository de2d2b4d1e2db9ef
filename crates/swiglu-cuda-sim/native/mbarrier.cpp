// mbarrier objects (PTX ISA 9.7.13.15). The object is 8 bytes of shared memory, as on the device:
// pending and expected arrivals, the transaction count in bytes, and the phase. A phase is complete
// when no arrival is pending and the transaction count is zero; then the next begins.
#include <cstring>

#include "gang.hpp"

namespace sim {
namespace {

constexpr uint32_t MAX_COUNT = (1u << 20) - 1;

struct Mbarrier {
  uint64_t pending : 20, expected : 20;
  int64_t bytes : 21;
  uint64_t phase : 1, mark : 2;
};
static_assert(sizeof(Mbarrier) == 8);
constexpr uint64_t INITIALISED = 2;  // fresh shared memory has all bits set

Mbarrier read(Block& block, uint32_t address, const char* operation) {
  Mbarrier b;
  std::memcpy(&b, shared_at(block, address, 8, 8, operation), 8);
  if (b.mark != INITIALISED) {
    fault("%s at shared address %u, where no mbarrier was initialised", operation, address);
  }
  return b;
}

void write(Block& block, uint32_t address, Mbarrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.pending = b.expected;
    Gang& g = *block.gang;
    for (size_t i = 0; i < g.barrier_waiters.size();) {
      Thread* t = g.barrier_waiters[i];
      if (t->block == &block && t->wait_address == address && t->wait_detail != b.phase) {
        g.barrier_waiters[i] = g.barrier_waiters.back();
        g.barrier_waiters.pop_back();
        wake(*t);
      } else {
        ++i;
      }
    }
  }
  std::memcpy(block.shared + (address - SHARED_BASE), &b, 8);
}

}  // namespace

void complete_bytes(Block& block, uint32_t address, uint32_t bytes) {
  Mbarrier b;
  std::memcpy(&b, block.shared + (address - SHARED_BASE), 8);
  // The barrier was checked when the copy was issued; data that overwrote it since shows as a
  // deadlock of its waiters.
  b.bytes = b.bytes - static_cast<int64_t>(bytes);
  write(block, address, b);
}

// True once the phase of `parity` is complete: the current phase has the other parity.
bool barrier_passed(Block& block, uint32_t address, uint32_t parity) {
  return read(block, address, "mbarrier.try_wait").phase != (parity & 1);
}

void require_barrier(Block& block, uint32_t address, const char* operation) {
  read(block, address, operation);
}

void arrive(Block& block, uint32_t address, uint32_t expect_bytes) {
  const char* operation = expect_bytes != 0 ? "mbarrier.arrive.expect_tx" : "mbarrier.arrive";
  Mbarrier b = read(block, address, operation);
  if (b.pending == 0) {
    fault("%s at shared address %u: all %u arrivals of this phase have come", operation, address,
          static_cast<unsigned>(b.expected));
  }
  const int64_t bytes = b.bytes + int64_t{expect_bytes};
  if (bytes > int64_t{MAX_COUNT}) {
    fault("%s at shared address %u: %lld bytes expected, more than an mbarrier can count",
          operation, address, static_cast<long long>(bytes));
  }
  // expect-tx comes before the arrival (9.7.13.15.13), so one write is right.
  b.bytes = bytes;
  b.pending = b.pending - 1;
  write(block, address, b);
}

}  // namespace sim

using namespace sim;

extern "C" {

void sim_barrier_init(unsigned barrier, unsigned arrivals) {
  Block& block = *self().block;
  std::byte* p = shared_at(block, barrier, 8, 8, "mbarrier.init");
  if (arrivals == 0 || arrivals > MAX_COUNT) {
    fault("mbarrier.init with a count of %u: expected 1 to %u", arrivals, MAX_COUNT);
  }
  Mbarrier b{};
  b.pending = arrivals;
  b.expected = arrivals;
  b.mark = INITIALISED;
  std::memcpy(p, &b, 8);
  // TMA may use it only after a fence, which other proxies also need.
  mark_unfenced(self(), barrier, 8);
}

void sim_barrier_init_fence() { sim_fence_async_shared(); }

void sim_barrier_arrive(unsigned barrier, unsigned expect_bytes) {
  hand_stores_to_block(self());
  arrive(*self().block, barrier, expect_bytes);
  maybe_yield();
}

void sim_barrier_wait(unsigned barrier, unsigned parity) {
  Block& block = *self().block;
  maybe_yield();
  while (!barrier_passed(block, barrier, parity)) {
    gang().barrier_waiters.push_back(&self());
    wait_until_woken("mbarrier wait", barrier, parity & 1);
  }
}

}  // extern "C"
