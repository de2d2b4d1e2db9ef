// A launch: its blocks in gangs, one gang after the other; and what becomes of a wild pointer.
#include "launch.hpp"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "wgmma.hpp"

namespace sim {
namespace {

struct WildAccess {
  const Thread* thread = nullptr;
  void* address = nullptr;
};
thread_local WildAccess wild_access;
struct sigaction previous[NSIG];

// An access that faults inside a kernel ends the launch, not the process: the fiber is abandoned
// and the scheduler goes on. A fault anywhere else goes to whoever handled it before.
void on_fault(int signal, siginfo_t* info, void* context) {
  if (sim_thread == nullptr) {
    const struct sigaction& old = previous[signal];
    if ((old.sa_flags & SA_SIGINFO) != 0) {
      old.sa_sigaction(signal, info, context);
    } else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN) {
      ::signal(signal, SIG_DFL);
      raise(signal);
    } else {
      old.sa_handler(signal);
    }
    return;
  }
  // The handler's stack is too small to print on.
  wild_access = {&self(), info->si_addr};
  gang().failed = true;
  leave_for_good();
}

void catch_faults() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (int signal : {SIGSEGV, SIGBUS}) {
      struct sigaction action {};
      action.sa_sigaction = on_fault;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
      sigaction(signal, &action, &previous[signal]);
    }
  });
  // A kernel that overflows its stack leaves none to run the handler on.
  thread_local bool has_stack = false;
  if (has_stack) return;
  has_stack = true;
  stack_t current{};
  sigaltstack(nullptr, &current);
  if ((current.ss_flags & SS_DISABLE) == 0) return;
  constexpr size_t BYTES = 64 * 1024;
  stack_t stack{};
  stack.ss_sp = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  stack.ss_size = BYTES;
  if (stack.ss_sp != MAP_FAILED) sigaltstack(&stack, nullptr);
}

// Each launch has a schedule of its own. SWIGLU_SIM_SEED starts another series of them;
// SWIGLU_SIM_SCHEDULE repeats one that a message named.
uint64_t next_schedule() {
  static std::atomic<uint64_t> launches{0};
  if (const char* fixed = std::getenv("SWIGLU_SIM_SCHEDULE")) {
    return std::strtoull(fixed, nullptr, 10);
  }
  const char* text = std::getenv("SWIGLU_SIM_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 0;
  return seed * 1000003 + launches.fetch_add(1) + 1;
}

Index3 index_of(uint64_t linear, Index3 extent) {
  return {static_cast<unsigned>(linear % extent.x),
          static_cast<unsigned>(linear / extent.x % extent.y),
          static_cast<unsigned>(linear / extent.x / extent.y)};
}

void add_block(Gang& gang, uint64_t linear) {
  const Launch& launch = gang.launch;
  Block& block = gang.blocks.emplace_back();
  block.gang = &gang;
  block.index = index_of(linear, launch.grid);
  // As aligned as the device would align it; what was there before is garbage.
  block.storage.assign(launch.shared_bytes + 1024, std::byte{0xff});
  const auto at = reinterpret_cast<uintptr_t>(block.storage.data());
  block.shared = block.storage.data() + (1024 - at % 1024) % 1024;
  block.unfenced_by.assign(launch.shared_bytes / 16 + 1, 0);
  const unsigned threads = launch.threads();
  block.live = threads;
  for (unsigned i = 0; i < threads; ++i) {
    if (i % WARP == 0) {
      Warp& warp = block.warps.emplace_back();
      warp.block = &block;
      warp.index = i / WARP;
      // What ptxas may give each thread of such a block: the register file, in steps of 8.
      const unsigned warps = (threads + WARP - 1) / WARP *
                             (launch.kernel->min_blocks > 0 ? launch.kernel->min_blocks : 1);
      warp.registers = std::min(255u, 65536u / (warps * WARP)) / 8 * 8;
    }
    Thread& thread = block.threads.emplace_back();
    thread.thread_index = index_of(i, launch.block);
    thread.block_index = block.index;
    thread.block_dim = launch.block;
    thread.grid_dim = launch.grid;
    thread.dynamic_shared = reinterpret_cast<unsigned char*>(block.shared);
    thread.block = &block;
    thread.warp = &block.warps.back();
    thread.index = i;
    thread.lane = i % WARP;
    thread.warp->members |= 1u << thread.lane;
    thread.warp->lanes[thread.lane] = &thread;
  }
}

}  // namespace

LaunchResult run_launch(const Launch& launch) {
  catch_faults();
  begin_grid();
  const uint64_t schedule = next_schedule();
  const uint64_t blocks = launch.blocks();
  const uint64_t together = launch.cooperative ? blocks : launch.cluster;
  for (uint64_t first = 0; first < blocks; first += together) {
    Gang gang(launch, schedule, first);
    for (uint64_t i = 0; i < together; ++i) add_block(gang, first + i);
    wild_access = {};
    bool done = gang.run();
    if (done) {
      for (Block& block : gang.blocks) finish_warpgroups(block);
      done = !gang.failed;
    }
    if (wild_access.thread != nullptr) {
      std::fprintf(stderr, "simulator: %s: access to address %p\n",
                   describe(*wild_access.thread).c_str(), wild_access.address);
      return LaunchResult::IllegalAddress;
    }
    if (!done) return LaunchResult::Failed;
  }
  return LaunchResult::Done;
}

}  // namespace sim
