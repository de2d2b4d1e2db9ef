// Running gangs: choosing the next thread, ending it, deadlocks.
#include "gang.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "fiber.hpp"
#include "wgmma.hpp"

extern "C" {
__thread sim::ThreadView* sim_thread __attribute__((tls_model("initial-exec"))) = nullptr;
}

namespace sim {

Warp::Warp() = default;
Warp::~Warp() = default;

namespace {

std::string format_index(Index3 i) {
  char text[64];
  std::snprintf(text, sizeof text, "(%u, %u, %u)", i.x, i.y, i.z);
  return text;
}

}  // namespace

// Up to `limit` waiting threads, those of one block with the same reason on one line.
void report_deadlock(Gang& g) {
  std::fprintf(stderr, "simulator: kernel %s: every thread waits (schedule %llu):\n",
               g.launch.name.c_str(), static_cast<unsigned long long>(g.seed));
  int lines = 0;
  for (Block& block : g.blocks) {
    for (size_t first = 0; first < block.threads.size() && lines < 24;) {
      const Thread& a = block.threads[first];
      size_t last = first;
      while (last + 1 < block.threads.size()) {
        const Thread& b = block.threads[last + 1];
        if (b.state != a.state || b.waits_for != a.waits_for || b.wait_address != a.wait_address ||
            b.wait_detail != a.wait_detail) {
          break;
        }
        ++last;
      }
      if (a.state == State::Waiting) {
        std::fprintf(stderr, "  block %s threads %zu to %zu: %s (%u, %u)\n",
                     format_index(block.index).c_str(), first, last, a.waits_for, a.wait_address,
                     a.wait_detail);
        ++lines;
      }
      first = last + 1;
    }
  }
}

namespace {

// Three kinds of schedule: any thread, the one woken last, or the one that waits longest.
Thread* take_runnable(Gang& g) {
  size_t i = g.runnable.size() - 1;
  if (g.policy == 0 || g.random.one_in(16)) {
    i = g.random.below(g.runnable.size());
  } else if (g.policy == 1) {
    i = 0;
  }
  Thread* chosen = g.runnable[i];
  g.runnable[i] = g.runnable.back();
  g.runnable.pop_back();
  return chosen;
}

Thread* choose(Gang& g) {
  for (;;) {
    if (!g.runnable.empty()) {
      if (!g.starves_loads && g.random.one_in(8)) progress_transfer(g);
      return take_runnable(g);
    }
    if (!progress_transfer(g)) return nullptr;
  }
}

void switch_to_scheduler(Party& p, Thread* from) {
  sim_thread = nullptr;
  void* ignored;
  sim_switch_stack(from != nullptr ? &from->stack_pointer : &ignored, p.scheduler);
}

void run_next(Gang& g, Thread* from) {
  if (!g.party->direct) return switch_to_scheduler(*g.party, from);
  Thread* next = choose(g);
  if (next == from && next != nullptr) return;
  if (next == nullptr) {
    if (g.live > 0) {
      g.failed = true;
      report_deadlock(g);
    }
    return switch_to_scheduler(*g.party, from);
  }
  sim_thread = next;
  void* ignored;
  sim_switch_stack(from != nullptr ? &from->stack_pointer : &ignored, next->stack_pointer);
}

// A transfer between two turns has a stack of its own, from which a failure leaves as from a thread's.
thread_local Gang* transferring = nullptr;

void transfer_main() {
  Gang& g = *transferring;
  progress_transfer(g);
  switch_to_scheduler(*g.party, nullptr);
}

void transfer(Gang& g) {
  transferring = &g;
  Stack* stack = take_stack();
  void* entry = stack->prepare(transfer_main);
  sim_switch_stack(&g.party->scheduler, entry);
  give_stack_back(stack);
}

void thread_main() {
  Thread& thread = self();
  const Launch& launch = gang().launch;
  launch.kernel->entry(launch.params.data());
  finish_thread_transfers(thread);
  land_stores(thread.unreleased);
  land_stores(thread.warp->unreleased);
  thread.state = State::Exited;
  Gang& g = *thread.block->gang;
  if (thread.cluster_round > g.cluster_rounds) --g.cluster_arrived;
  if (--thread.block->live == 0) {
    expect_no_loads(*thread.block);
    land_stores(thread.block->unreleased);
  }
  --g.live;
  release_barriers(*thread.block);
  release_cluster_barrier(g);
  // By the last thread to end: what goes wrong in a transfer is reported as a thread's.
  while (g.live == 0 && progress_transfer(g)) {
  }
  leave_for_good();
}

}  // namespace

void leave_for_good() {
  Gang& g = gang();
  if (g.failed) {
    switch_to_scheduler(*g.party, nullptr);
  }
  run_next(g, nullptr);
  __builtin_unreachable();
}

void wait_until_woken(const char* what, uint32_t address, uint32_t detail) {
  Thread& thread = self();
  thread.state = State::Waiting;
  thread.waits_for = what;
  thread.wait_address = address;
  thread.wait_detail = detail;
  run_next(gang(), &thread);
}

void wake(Thread& thread) {
  if (thread.state != State::Waiting) return;
  thread.state = State::Runnable;
  thread.block->gang->runnable.push_back(&thread);
}

void maybe_yield() {
  Gang& g = gang();
  if (!g.random.one_in(4)) return;
  Thread& thread = self();
  g.runnable.push_back(&thread);
  run_next(g, &thread);
}

std::string describe(const Thread& thread) {
  const Gang& g = *thread.block->gang;
  char text[96];
  std::snprintf(text, sizeof text, " thread %u (schedule %llu)", thread.index,
                static_cast<unsigned long long>(g.seed));
  return "kernel " + g.launch.name + " block " + format_index(thread.block->index) + text;
}

void fault(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "simulator: %s: %s\n", describe(self()).c_str(), text);
  gang().failed = true;
  leave_for_good();
}

Gang::~Gang() {
  for (Stack* stack : stacks) give_stack_back(stack);
}

void Gang::prepare() {
  for (Block& b : blocks) {
    for (Thread& t : b.threads) {
      stacks.push_back(take_stack());
      t.stack_pointer = stacks.back()->prepare(thread_main);
      runnable.push_back(&t);
    }
  }
  live = static_cast<unsigned>(runnable.size());
  // Any thread may be the first.
  for (size_t i = runnable.size(); i > 1; --i) {
    std::swap(runnable[i - 1], runnable[random.below(i)]);
  }
  policy = static_cast<unsigned>(random.below(3));
  starves_loads = random.one_in(3);
}

Gang* Party::run() {
  const size_t count = gangs.size();
  if (current >= count || random.one_in(stays)) current = random.below(count);
  for (size_t i = 0; i < count; ++i, ++current) {
    if (current >= count) current = 0;
    Gang& g = *gangs[current];
    const bool transfers = !g.loads.empty() || !g.stores.empty();
    if (g.runnable.empty() && !transfers) continue;
    if (transfers && (g.runnable.empty() || (!g.starves_loads && g.random.one_in(8)))) {
      transfer(g);
      return &g;
    }
    Thread* next = take_runnable(g);
    sim_thread = next;
    sim_switch_stack(&scheduler, next->stack_pointer);
    sim_thread = nullptr;
    return &g;
  }
  return nullptr;
}

}  // namespace sim
