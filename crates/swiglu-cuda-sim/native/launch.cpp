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
  gang().wild_thread = &self();
  gang().wild_address = info->si_addr;
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

// ": " and why it is not accessible, if that is known.
std::string reason_of(void* address) {
  auto lock = lock_driver();
  const std::string why = describe_address(reinterpret_cast<uint64_t>(address));
  return why.empty() ? why : ": " + why;
}

}  // namespace

Grid::Grid(std::shared_ptr<const Launch> launch, std::shared_ptr<GridTrace> before)
    : launch_(std::move(launch)),
      before_(std::move(before)),
      trace_(std::make_shared<GridTrace>()),
      schedule_(next_schedule()) {}

double Grid::gang_share() const {
  const double gang =
      static_cast<double>(launch_->cooperative ? launch_->blocks() : launch_->cluster);
  return gang / launch_->resident / sm_count();
}

std::unique_ptr<Gang> Grid::begin_gang(const bool* before_over) {
  const uint64_t together = launch_->cooperative ? launch_->blocks() : launch_->cluster;
  auto gang = std::make_unique<Gang>(*launch_, *trace_, before_.get(), schedule_, next_);
  gang->before_over = before_over;
  for (uint64_t i = 0; i < together; ++i) add_block(*gang, next_ + i);
  gang->prepare();
  next_ += together;
  ++running_;
  return gang;
}

void Grid::end_gang(Gang& gang) {
  --running_;
  if (!gang.failed) {
    for (Block& block : gang.blocks) finish_warpgroups(block);
  }
  if (gang.failed && result_ == LaunchResult::Done) result_ = LaunchResult::Failed;
  if (gang.wild_thread == nullptr) return;
  result_ = LaunchResult::IllegalAddress;
  std::fprintf(stderr, "simulator: %s: access to address %p%s\n", describe(*gang.wild_thread).c_str(),
               gang.wild_address, reason_of(gang.wild_address).c_str());
}

// Grids that are carried out beside each other.
class Grids {
 public:
  Grids(const std::vector<Grid*>& grids, const std::vector<Grid*>& behind)
      : party_(grids[0]->schedule()), chain_{grids[0]} {
    constexpr unsigned HESITATES[] = {1, 8, 64};
    hesitates_ = HESITATES[party_.random.below(3)];
    chain_.insert(chain_.end(), behind.begin(), behind.end());
    for (Grid* grid : grids) begin(*grid, nullptr);
    if (!behind.empty()) begin_all(*grids[0], nullptr);
  }

  void run() {
    while (!running_.empty()) {
      if (started_ < chain_.size() && may_start_next() && party_.random.one_in(hesitates_)) {
        const Grid& before = *chain_[started_ - 1];
        begin_all(*chain_[started_++], &before.over_);
      }
      party_.direct = running_.size() == 1 && started_ == chain_.size();
      Gang* gang = party_.run();
      if (gang == nullptr) {
        // What has not started might have gone on: nobody waits for that.
        for (const Running& r : running_) report_deadlock(*r.gang);
        for (const Running& r : running_) r.gang->failed = true;
      }
      if (gang == nullptr || gang->over()) end_those_over();
    }
  }

 private:
  struct Running {
    Grid* grid;
    std::unique_ptr<Gang> gang;
  };

  void begin(Grid& grid, const bool* before_over) {
    running_.push_back({&grid, grid.begin_gang(before_over)});
    running_.back().gang->party = &party_;
    party_.gangs.push_back(running_.back().gang.get());
  }
  void begin_all(Grid& grid, const bool* before_over) {
    while (!grid.all_begun()) begin(grid, before_over);
  }

  // PTX ISA 9.7.13.13 (griddepcontrol): all blocks of the grid before have said so, or have ended.
  bool may_start_next() const {
    const Grid& before = *chain_[started_ - 1];
    if (!before.all_begun()) return false;
    for (const Running& r : running_) {
      if (r.grid != &before) continue;
      for (const Block& block : r.gang->blocks) {
        if (!block.triggered && block.live > 0) return false;
      }
    }
    // When it is over there is nothing to run beside.
    return before.running_ > 0 && before.result_ == LaunchResult::Done;
  }

  void end_those_over() {
    for (size_t i = 0; i < running_.size();) {
      if (!running_[i].gang->over()) {
        ++i;
        continue;
      }
      Grid& grid = *running_[i].grid;
      grid.end_gang(*running_[i].gang);
      std::erase(party_.gangs, running_[i].gang.get());
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      end_chain();
    }
    // The rest of the chain has nothing to run beside any more.
    if (started_ < chain_.size() && chain_[started_ - 1]->done()) chain_.resize(started_);
  }

  // A grid is over for the next one when it has ended and so has the one before it: streams keep their order.
  void end_chain() {
    for (size_t i = 0; i < started_; ++i) {
      Grid& grid = *chain_[i];
      if (!grid.done()) return;
      if (grid.over_) continue;
      grid.over_ = true;
      for (const Running& r : running_) {
        if (r.gang->before_over != &grid.over_) continue;
        std::vector<Thread*> waiting;
        waiting.swap(r.gang->grid_waiters);
        for (Thread* t : waiting) wake(*t);
      }
    }
  }

  Party party_;
  unsigned hesitates_;  // a grid that may start does so at one turn in so many
  std::vector<Grid*> chain_;
  size_t started_ = 1;
  std::vector<Running> running_;
};

void run_together(const std::vector<Grid*>& grids, const std::vector<Grid*>& behind) {
  catch_faults();
  Grids(grids, behind).run();
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
  std::fprintf(stderr, "simulator: %s: access to address %p%s\n", what, here.address,
               reason_of(here.address).c_str());
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

}  // namespace sim
