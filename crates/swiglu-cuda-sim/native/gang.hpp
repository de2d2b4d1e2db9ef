// The running part of launches: threads, warps, blocks, the gang of blocks that need each other, and the party
// of gangs, of one launch or of several, that run beside each other.
//
// A gang is a cluster, or all blocks of a cooperative launch. Its threads are fibers of one
// operating-system thread; one runs until it waits, then another is chosen by a seeded generator.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "device_abi.hpp"
#include "tensor_map.hpp"

namespace sim {

struct Block;
struct Warp;
struct Thread;
struct Gang;
struct Party;
class Stack;

constexpr unsigned WARP = 32;
// Shared memory starts above the part the system keeps for itself, as on sm_90.
constexpr unsigned SHARED_BASE = 1024;

// What a launch is, checked and copied by the driver.
struct Launch {
  std::string name;
  const KernelInfo* kernel = nullptr;
  std::shared_ptr<void> module;  // keeps the code mapped
  Index3 grid{1, 1, 1}, block{1, 1, 1};
  unsigned shared_bytes = 0;
  unsigned cluster = 1;
  unsigned resident = 1;  // blocks that an SM holds
  bool cooperative = false;
  bool programmatic = false;  // may start before the grid before it has ended
  std::vector<std::byte> params;

  unsigned threads() const { return block.x * block.y * block.z; }
  uint64_t blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
  // How much of a device all blocks take at a time, or of how many devices.
  double device_share(int sms) const { return static_cast<double>(blocks()) / resident / sms; }
};

// xorshift64*: small, and the same on every host.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u | 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return (state_ * 0x2545f4914f6cdd1du) >> 16;
  }
  size_t below(size_t n) { return static_cast<size_t>(next() % n); }
  bool one_in(unsigned n) { return next() % n == 0; }

 private:
  uint64_t state_;
};

// cp.async, not yet done.
struct AsyncCopy {
  uint32_t to;
  const void* from;
  uint32_t bytes, read;
  bool done;
};

// A store that other blocks read once it is released.
struct GridStore {
  std::byte* to;
  uint32_t bytes;
  std::byte value[16];
};

// A tensor store: reads shared memory, then writes the tensor, each at a time of its own.
struct BulkStore {
  Block* block;
  Thread* by;
  TensorMap map;
  uint32_t from;
  int column, row;
  std::vector<std::byte> box;
  enum class Stage { Issued, Read, Written } stage = Stage::Issued;
};

// A load that has not landed: a box of a tensor, or a number of bytes.
struct BulkLoad {
  Block* block;
  Thread* by;
  TensorMap map;
  uint32_t to, barrier;
  int column, row;
  const void* from = nullptr;  // of bytes
  uint32_t bytes = 0;
  uint64_t value = 0;  // of a store to another block, of 8 bytes at `to`
  bool stores = false;
};

// Addresses from the first to the last.
struct Span {
  uintptr_t first = UINTPTR_MAX, last = 0;
  bool meets(uintptr_t address, size_t bytes) const {
    return address <= last && address + bytes > first;
  }
};

// What a grid stored for other grids.
struct GridTrace {
  Span stored;
  std::set<uintptr_t> counted;  // words that were counted at: they lie far from what was stored
  // Where ordinary stores and those of TMA went: granules of as many bytes as memory is aligned to.
  static constexpr uintptr_t GRANULE = 256;
  std::unordered_set<uintptr_t> granules;
  uintptr_t last_granule = UINTPTR_MAX;

  void add(const void* to, size_t bytes) {
    const auto first = reinterpret_cast<uintptr_t>(to) / GRANULE;
    const auto end = (reinterpret_cast<uintptr_t>(to) + bytes - 1) / GRANULE + 1;
    for (uintptr_t i = first; i < end; ++i) {
      if (i == last_granule) continue;
      last_granule = i;
      granules.insert(i);
    }
  }
  bool meets(const void* from, size_t bytes) const {
    const auto address = reinterpret_cast<uintptr_t>(from);
    if (stored.meets(address, bytes) || counted.count(address) > 0) return true;
    for (uintptr_t i = address / GRANULE; i <= (address + bytes - 1) / GRANULE; ++i) {
      if (granules.count(i) > 0) return true;
    }
    return false;
  }
};

enum class State : uint8_t { Runnable, Waiting, Exited };

struct Thread : ThreadView {
  void* stack_pointer = nullptr;
  State state = State::Runnable;
  Block* block = nullptr;
  Warp* warp = nullptr;
  unsigned index = 0, lane = 0;

  // What a waiting thread waits for, in words for the report of a deadlock.
  const char* waits_for = "";
  uint32_t wait_address = 0, wait_detail = 0;

  std::vector<AsyncCopy> copies;  // uncommitted
  std::vector<std::vector<AsyncCopy>> copy_groups;
  std::vector<std::shared_ptr<BulkStore>> stores;  // uncommitted
  std::vector<std::vector<std::shared_ptr<BulkStore>>> store_groups;
  std::vector<GridStore> unreleased;
  uint64_t cluster_round = 0;  // of the cluster's barrier, that it arrived at last
  bool cluster_pending = false;  // whether it has arrived there and not waited since
  bool waited_for_grid = false;
  bool fenced_global = false;  // since it last waited for a word of the grid
  std::vector<uint32_t> unfenced;  // 16-byte granules of shared memory written since the last fence
};

// An operation that lanes of a warp carry out together. Lanes leave their arguments and wait; the
// last to come performs it for all.
struct Meeting {
  const char* operation = nullptr;  // null: free
  uint64_t signature = 0;
  uint32_t mask = 0, arrived = 0;
  void* arguments[WARP] = {};
};

struct WgmmaState;

struct Warp {
  Block* block = nullptr;
  unsigned index = 0;
  uint32_t members = 0;
  Thread* lanes[WARP] = {};
  Meeting meetings[8];
  unsigned registers = 0;
  std::vector<uint64_t> warpgroup_log;  // setmaxnreg and wgmma, to be the same in all four warps
  std::unique_ptr<WgmmaState> wgmma;
  std::vector<GridStore> unreleased;  // of lanes that have since met
  Warp();
  ~Warp();
};

struct NamedBarrier {
  unsigned arrived = 0, expected = 0;
  std::vector<Thread*> waiting;
};

struct Block {
  Gang* gang = nullptr;
  Index3 index{};
  std::vector<std::byte> storage;
  std::byte* shared = nullptr;        // the byte at address SHARED_BASE
  std::vector<uint16_t> unfenced_by;  // per granule: 1 + the thread that wrote it unfenced
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  std::vector<GridStore> unreleased;  // of threads that have since been at a barrier of the block
  NamedBarrier barriers[16];
  unsigned live = 0;
  bool triggered = false;  // whether a thread has let the next grid start
  unsigned free_registers = 0;  // per lane of a warp, given back by setmaxnreg
  unsigned register_releases = 0;
};

struct Gang {
  const Launch& launch;
  GridTrace& trace;
  const GridTrace* before;           // of the grid before it
  const bool* before_over = nullptr;  // whether that one has ended; null if it had when this one began
  uint64_t seed;
  Random random;
  Party* party = nullptr;
  std::deque<Block> blocks;
  std::vector<Stack*> stacks;
  std::vector<Thread*> runnable;
  std::vector<Thread*> barrier_waiters;
  std::vector<Thread*> cluster_waiters;
  unsigned cluster_arrived = 0;  // threads at the cluster's barrier, whether they wait for it yet or not
  uint64_t cluster_rounds = 0;   // in which all have come
  std::vector<Thread*> word_waiters;
  std::vector<Thread*> grid_waiters;  // for the grid before
  std::vector<BulkLoad> loads;
  std::vector<std::shared_ptr<BulkStore>> stores;
  unsigned live = 0;
  bool failed = false;
  // An access that faulted ended it.
  const Thread* wild_thread = nullptr;
  void* wild_address = nullptr;
  unsigned policy = 0;
  // Whether transfers wait until no thread can run, and then the youngest load lands first: older ones lag
  // behind by as much as barriers allow.
  bool starves_loads = false;

  Gang(const Launch& l, GridTrace& t, const GridTrace* b, uint64_t s, uint64_t first_block)
      : launch(l), trace(t), before(b), seed(s), random(s * 0x9e3779b97f4a7c15u + first_block) {}
  ~Gang();
  Gang(const Gang&) = delete;
  Gang& operator=(const Gang&) = delete;

  // Makes its threads ready to run.
  void prepare();
  bool over() const { return failed || live == 0; }
};

// Gangs whose threads run in turns. Each keeps its own order of threads; the party says which gang is next.
struct Party {
  std::vector<Gang*> gangs;
  Random random;
  unsigned stays;       // a turn goes to any gang one time in so many
  size_t current = 0;   // gang
  bool direct = false;  // of one gang, whose threads switch to each other
  void* scheduler = nullptr;

  explicit Party(uint64_t seed) : random(seed ^ 0x5bd1e995u) {
    constexpr unsigned STAYS[] = {1, 4, 32, 256};
    stays = STAYS[random.below(4)];
  }
  // Lets a gang go on: to its end or its first failure where it is alone, else for a turn of one of its
  // threads. Null if every thread waits.
  Gang* run();
};

// Says who waits for what.
void report_deadlock(Gang& gang);

// The running thread and its gang; only from device code.
inline Thread& self() { return *static_cast<Thread*>(sim_thread); }
inline Gang& gang() { return *self().block->gang; }

// Leaves the running thread until `wake`.
void wait_until_woken(const char* what, uint32_t address = 0, uint32_t detail = 0);
void wake(Thread& thread);
// Now and then lets another thread run first: where threads are not ordered, any order is possible.
void maybe_yield();
[[noreturn]] void leave_for_good();

// Ends the launch with a message that names kernel, block and thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fault(const char* format, ...);
std::string describe(const Thread& thread);

// `bytes` of the running block's shared memory at `address`, checked.
std::byte* shared_at(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment,
                     const char* operation);
// Marks shared memory as written by ordinary means, invisible to TMA and wgmma before
// fence.proxy.async (PTX ISA 8.9, proxies), and checks that none such is left.
void mark_unfenced(Thread& thread, uint32_t address, uint32_t bytes);
void require_fenced(const Block& block, uint32_t address, uint32_t bytes, const char* reader);

// Stores for the grid: at a barrier of the block a thread hands its own to the block, where the next
// release finds them; at its end they land.
void hand_stores_to_warp(Thread& thread);
void hand_stores_to_block(Thread& thread);
void land_stores(std::vector<GridStore>& stores);

// Carries out `perform` once all lanes of `mask` came with the same operation and signature.
void meet(const char* operation, uint64_t signature, uint32_t mask, void* arguments,
          void (*perform)(Warp&, Meeting&));
void release_barriers(Block& block);
// A block of the running thread's cluster, which must not have ended: its shared memory is gone then.
Block& cluster_block(unsigned rank, const char* operation);
void release_cluster_barrier(Gang& gang);
void arrive(Block& block, uint32_t barrier, uint32_t expect_bytes);
void require_barrier(Block& block, uint32_t address, const char* operation);

// Lets one transfer of TMA make progress; false if none is under way.
bool progress_transfer(Gang& gang);
void finish_thread_transfers(Thread& thread);
// A block whose last thread ends gives its shared memory back.
void expect_no_loads(const Block& block);
void complete_bytes(Block& block, uint32_t barrier, uint32_t bytes);
bool barrier_passed(Block& block, uint32_t barrier, uint32_t parity);
void finish_warpgroups(Block& block);

// Whether bytes of device memory are those of an allocation that work carried out now may use.
bool is_resident(const void* p, size_t bytes);

}  // namespace sim
