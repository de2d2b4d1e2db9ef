// A launch: its blocks in gangs, one gang after the other; and what becomes of a wild pointer.
#include "launch.hpp"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "driver.hpp"
#include "wgmma.hpp"

namespace sim {
namespace {

struct WildAccess {
  const Thread* thread = nullptr;
  void* address = nullptr;
};
thread_local WildAccess wild_access;
struct sigaction previous[NSIG];

// Where a fault leads in work that is no kernel.
struct Guard {
  sigjmp_buf back;
  void* address = nullptr;
};
thread_local Guard* guard = nullptr;

// An access that faults inside a kernel ends the launch, not the process: the fiber is abandoned
// and the scheduler goes on. A fault anywhere else goes to whoever handled it before.
void on_fault(int signal, siginfo_t* info, void* context) {
  if (sim_thread == nullptr && guard != nullptr) {
    guard->address = info->si_addr;
    siglongjmp(guard->back, 1);
  }
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

Grid::Grid(std::shared_ptr<const Launch> launch, std::shared_ptr<GridTrace> before)
    : launch_(std::move(launch)),
      before_(std::move(before)),
      trace_(std::make_shared<GridTrace>()),
      schedule_(next_schedule()) {}

void Grid::step() {
  catch_faults();
  const uint64_t together = launch_->cooperative ? launch_->blocks() : launch_->cluster;
  Gang gang(*launch_, *trace_, before_.get(), schedule_, next_);
  for (uint64_t i = 0; i < together; ++i) add_block(gang, next_ + i);
  next_ += together;
  wild_access = {};
  bool run = gang.run();
  if (run) {
    for (Block& block : gang.blocks) finish_warpgroups(block);
    run = !gang.failed;
  }
  if (!run) result_ = LaunchResult::Failed;
  if (wild_access.thread == nullptr) return;
  result_ = LaunchResult::IllegalAddress;
  std::string why;
  {
    auto lock = lock_driver();
    why = describe_address(reinterpret_cast<uint64_t>(wild_access.address));
  }
  std::fprintf(stderr, "simulator: %s: access to address %p%s%s\n",
               describe(*wild_access.thread).c_str(), wild_access.address,
               why.empty() ? "" : ": ", why.c_str());
}

CUresult guarded(const char* what, const std::function<CUresult()>& work) {
  catch_faults();
  Guard here;
  if (sigsetjmp(here.back, 1) == 0) {
    guard = &here;
    const CUresult result = work();
    guard = nullptr;
    return result;
  }
  guard = nullptr;
  std::string why;
  {
    auto lock = lock_driver();
    why = describe_address(reinterpret_cast<uint64_t>(here.address));
  }
  std::fprintf(stderr, "simulator: %s: access to address %p%s%s\n", what, here.address,
               why.empty() ? "" : ": ", why.c_str());
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

}  // namespace sim
