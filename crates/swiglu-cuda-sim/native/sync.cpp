// Waiting for other threads: meetings of a warp, barriers of a block.
#include <cstring>

#include "gang.hpp"

namespace sim {

void meet(const char* operation, uint64_t signature, uint32_t mask, void* arguments,
          void (*perform)(Warp&, Meeting&)) {
  Thread& me = self();
  Warp& warp = *me.warp;
  const uint32_t bit = 1u << me.lane;
  mask &= warp.members;
  if ((mask & bit) == 0) fault("%s with a lane mask that lacks the calling lane", operation);
  Meeting* meeting = nullptr;
  for (Meeting& m : warp.meetings) {
    if (m.operation != nullptr && m.mask == mask && (m.arrived & bit) == 0) meeting = &m;
  }
  if (meeting == nullptr) {
    for (Meeting& m : warp.meetings) {
      if (m.operation == nullptr) meeting = &m;
    }
    if (meeting == nullptr) fault("%s: more than 8 groups of lanes in one warp", operation);
    *meeting = Meeting{operation, signature, mask, 0, {}};
  } else if (std::strcmp(meeting->operation, operation) != 0 || meeting->signature != signature) {
    fault("%s (%llx), while other lanes of its warp are at %s (%llx)", operation,
          static_cast<unsigned long long>(signature), meeting->operation,
          static_cast<unsigned long long>(meeting->signature));
  }
  meeting->arrived |= bit;
  meeting->arguments[me.lane] = arguments;
  if (meeting->arrived != mask) {
    wait_until_woken(operation, mask, 0);
    return;
  }
  perform(warp, *meeting);
  meeting->operation = nullptr;
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if ((mask >> lane & 1) != 0 && lane != me.lane) wake(*warp.lanes[lane]);
  }
}

namespace {

void release(NamedBarrier& barrier) {
  barrier.arrived = 0;
  std::vector<Thread*> waiting;
  waiting.swap(barrier.waiting);
  for (Thread* t : waiting) wake(*t);
}

// PTX ISA 9.7.13.2 (bar.sync, bar.arrive).
void arrive_at(unsigned id, unsigned expected, const char* operation, bool wait) {
  Thread& me = self();
  NamedBarrier& barrier = me.block->barriers[id];
  if (barrier.arrived > 0 && barrier.expected != expected) {
    fault("%s %u for %u threads, while others wait at it for %u", operation, id, expected,
          barrier.expected);
  }
  barrier.expected = expected;
  ++barrier.arrived;
  const unsigned needed = expected == 0 ? me.block->live : expected;
  if (barrier.arrived == needed) {
    release(barrier);
    maybe_yield();
    return;
  }
  if (!wait) return;
  barrier.waiting.push_back(&me);
  wait_until_woken(operation, id, expected);
}

struct ShuffleArgs {
  unsigned value;
  int argument, width;
};

// PTX ISA 9.7.9.6 (shfl.sync): segments of `width` lanes; a source outside the segment gives the
// caller's own value, one that does not take part an unspecified one.
template <Shuffle KIND>
void shuffle(Warp&, Meeting& m) {
  unsigned values[WARP];
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if ((m.mask >> lane & 1) == 0) continue;
    const auto& a = *static_cast<const ShuffleArgs*>(m.arguments[lane]);
    const int l = static_cast<int>(lane), base = l & ~(a.width - 1), end = base + a.width;
    int source = l;
    if (KIND == Shuffle::Index) source = base + (a.argument & (a.width - 1));
    if (KIND == Shuffle::Up && l - a.argument >= base) source = l - a.argument;
    if (KIND == Shuffle::Down && l + a.argument < end) source = l + a.argument;
    // Above its segment a butterfly keeps its own value; below it may read.
    if (KIND == Shuffle::Xor && (l ^ a.argument) < end) source = l ^ a.argument;
    const bool takes_part = source >= 0 && source < 32 && (m.mask >> source & 1) != 0;
    values[lane] =
        takes_part ? static_cast<const ShuffleArgs*>(m.arguments[source])->value : 0xffffffffu;
  }
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if ((m.mask >> lane & 1) != 0)
      static_cast<ShuffleArgs*>(m.arguments[lane])->value = values[lane];
  }
}

void vote(Warp&, Meeting& m) {
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if ((m.mask >> lane & 1) != 0 && *static_cast<unsigned*>(m.arguments[lane]) != 0) {
      ballot |= 1u << lane;
    }
  }
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if ((m.mask >> lane & 1) != 0) *static_cast<unsigned*>(m.arguments[lane]) = ballot;
  }
}

}  // namespace

// Threads that have exited are no longer waited for by __syncthreads, as on sm_70 and later.
void release_barriers(Block& block) {
  NamedBarrier& all = block.barriers[0];
  if (all.arrived > 0 && all.arrived == block.live) release(all);
}

}  // namespace sim

using namespace sim;

extern "C" {

void sim_syncthreads() {
  hand_stores_to_block(self());
  arrive_at(0, 0, "__syncthreads", true);
}

// PTX ISA 9.7.13.1 (bar.sync): the number of threads is a multiple of the warp size.
void sim_named_barrier(unsigned id, unsigned threads) {
  if (threads == 0 || threads % WARP != 0 || threads > self().block->threads.size()) {
    fault("named barrier %u for %u threads: expected a multiple of 32 up to the block's %zu", id,
          threads, self().block->threads.size());
  }
  hand_stores_to_block(self());
  arrive_at(id, threads, "named barrier", true);
}

void sim_named_barrier_arrive(unsigned id, unsigned threads) {
  if (threads == 0 || threads % WARP != 0 || threads > self().block->threads.size()) {
    fault("named barrier %u for %u threads: expected a multiple of 32 up to the block's %zu", id,
          threads, self().block->threads.size());
  }
  hand_stores_to_block(self());
  arrive_at(id, threads, "named barrier", false);
}

void sim_syncwarp(unsigned mask) {
  meet("__syncwarp", 0, mask, nullptr, [](Warp& warp, Meeting& m) {
    for (unsigned lane = 0; lane < WARP; ++lane) {
      if ((m.mask >> lane & 1) != 0) hand_stores_to_warp(*warp.lanes[lane]);
    }
  });
  maybe_yield();
}

unsigned sim_shuffle(Shuffle kind, unsigned mask, unsigned value, int argument, int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fault("shuffle with width %d: expected a power of two up to 32", width);
  }
  ShuffleArgs args{value, argument, width};
  switch (kind) {
    case Shuffle::Index:
      meet("__shfl_sync", 0, mask, &args, shuffle<Shuffle::Index>);
      break;
    case Shuffle::Up:
      meet("__shfl_up_sync", 0, mask, &args, shuffle<Shuffle::Up>);
      break;
    case Shuffle::Down:
      meet("__shfl_down_sync", 0, mask, &args, shuffle<Shuffle::Down>);
      break;
    case Shuffle::Xor:
      meet("__shfl_xor_sync", 0, mask, &args, shuffle<Shuffle::Xor>);
      break;
  }
  return args.value;
}

unsigned sim_vote(Vote kind, unsigned mask, bool predicate) {
  unsigned value = predicate ? 1 : 0;
  meet("vote", static_cast<uint64_t>(kind), mask, &value, vote);
  switch (kind) {
    case Vote::Ballot:
      return value;
    case Vote::Any:
      return value != 0;
    case Vote::All:
      return value == (mask & self().warp->members);
  }
  return 0;
}

}  // extern "C"
