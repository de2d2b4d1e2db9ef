// State of the simulated driver. Work is put in the queue of its stream when it is submitted, and carried
// out later, by a thread that waits for it or by the toss of a coin; a stream in capture records it instead.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "driver_abi.hpp"
#include "launch.hpp"

namespace sim {

using Lock = std::unique_lock<std::mutex>;

// What went wrong in a stream: kept until a call that waits for the stream has returned it.
struct Failure {
  CUresult code = CUDA_SUCCESS;
  bool reported = false;
};

// The end of a piece of work: others may wait for it, and an event is one.
struct Mark {
  bool done = false;
  Stream* stream = nullptr;  // until it is done
  std::thread::id thread;    // that submitted it
  std::chrono::steady_clock::time_point time;
  std::shared_ptr<Failure> failure;  // of the stream, then
};
using MarkRef = std::shared_ptr<Mark>;

// How far the work of other streams is known to have come when a stream's next work begins: the number of
// their last work that it waits for, by the stream's id.
using Reach = std::map<uint64_t, uint64_t>;

// A unit of work; may be carried out any number of times. It is a kernel, or a function.
struct Work {
  std::shared_ptr<const Launch> kernel;
  std::function<CUresult()> function;
  bool locked = false;  // whether the function wants the driver's lock held
  bool always = false;  // whether it is carried out after a failure too
};

// Of a graph; every work in a queue is a graph, most of one node.
struct Node {
  Work work;
  std::vector<size_t> after;
};
using Nodes = std::vector<Node>;

struct Graph {
  Nodes nodes;
};

// A graph made executable. Its launches run one after the other.
struct Executable {
  std::shared_ptr<const Nodes> nodes;
  MarkRef last;
};

// Work in a queue, in part carried out.
struct Task {
  std::shared_ptr<const Nodes> nodes;
  std::vector<MarkRef> needs;
  MarkRef mark;
  std::vector<bool> done;
  std::vector<std::unique_ptr<Grid>> grids;  // of kernels that have begun
  size_t left = 0;
};

struct Context {
  int device = 0;
  unsigned retained = 0;
  // Failures of streams that are gone, with the threads that used them.
  std::vector<std::pair<std::thread::id, std::shared_ptr<Failure>>> orphans;
};

struct Capture {
  uint64_t id = 0;
  unsigned mode = 0;  // 0 global, 1 thread-local, 2 relaxed
  std::thread::id thread;
  Stream* origin = nullptr;
  bool invalidated = false, ended = false;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  std::vector<Stream*> streams;  // those that take part, the origin first
};

// When a stream's work is carried out: at once, only where a call waits for it, or at any time between.
enum class Temper { Early, Late, Any };

struct Stream {
  Context* context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  bool legacy = false, destroyed = false;

  std::deque<Task> queue;
  bool running = false;  // a thread carries out a part of the first task
  Temper temper = Temper::Any;
  std::thread::id thread;  // that submitted last
  MarkRef last;            // of the work submitted last
  uint64_t submitted = 0;
  Reach reach;
  std::shared_ptr<Failure> failure;
  // Of the kernel carried out last, if nothing else came since: what the next may not read before it waits.
  std::shared_ptr<GridTrace> trace;

  std::shared_ptr<Capture> capture;
  std::vector<size_t> frontier;  // nodes that the next one of a capture comes after

  bool blocking() const { return (flags & 1) == 0; }
};

struct Event {
  Context* context = nullptr;
  unsigned flags = 0;
  MarkRef mark;  // null: never recorded, or in a capture
  Reach reach;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> frontier;
};

struct MemoryPool {
  int device = 0;
  uint64_t follow_events = 1, opportunistic = 1, internal = 1, threshold = 0;
};

// Addresses of one mapping with inaccessible pages around it. Memory of a pool goes from one allocation to
// the next.
struct Mapping {
  std::byte* start = nullptr;
  size_t bytes = 0;  // with the pages around
};

struct Allocation {
  uint64_t base = 0;
  size_t bytes = 0;
  int device = 0;
  std::shared_ptr<Mapping> mapping;
  std::byte *first = nullptr, *end = nullptr;  // the accessible part
  bool host = false, pool = false;
  bool live = false;  // for what is carried out now: its allocation is, and its free is not
  bool freed = false;
  bool damaged = false;
  uint64_t stream = 0;  // in whose order it is allocated, or freed
  uint64_t number = 0;  // of the free in that stream
  MarkRef mark;         // of the free
};
using AllocationRef = std::shared_ptr<Allocation>;

// Plain memory that the program has freed while work might still use it.
struct Unfreed {
  AllocationRef allocation;
  std::vector<MarkRef> users;
};

struct Driver {
  std::mutex mutex;
  std::condition_variable changed;  // a part of some work has been carried out
  bool initialised = false;
  int devices = 1;
  int arch = 90;
  std::vector<std::unique_ptr<Context>> primary;
  std::vector<Stream*> legacy;                    // one per device
  std::vector<std::unique_ptr<MemoryPool>> pools;  // likewise
  std::vector<std::unique_ptr<Stream>> streams;   // with those destroyed that have work left
  std::map<uint64_t, AllocationRef> allocations;  // that calls may name
  std::map<uint64_t, AllocationRef> resident;     // that work carried out now may use
  std::vector<AllocationRef> free;                // of pools, the youngest last
  std::vector<Unfreed> unfreed;
  std::deque<AllocationRef> gone;                 // freed last, for messages
  std::vector<size_t> allocated;                  // bytes per device
  size_t memory_bytes = 0;
  std::unordered_set<const void*> handles;  // live streams, events, graphs, modules, functions
  std::vector<std::shared_ptr<Capture>> captures;
  uint64_t next_id = 1;
};

Driver& driver();
Lock lock_driver();

// The calling thread's context; null without.
Context*& current_context();
// The stream of a handle: null and CU_STREAM_LEGACY (1) are the legacy stream of the context,
// CU_STREAM_PER_THREAD (2) is one of the thread's own. Null if the handle is stale.
Stream* stream_of(CUstream handle);
Stream* make_stream(Context* context, unsigned flags);
bool is_live(const void* handle);

// Puts work into the stream's queue, or into the graph that is recorded. Some of what waits may be carried
// out, for which the lock is released.
CUresult submit(Lock& lock, Stream* stream, Work work, MarkRef* mark = nullptr);
CUresult submit(Lock& lock, Stream* stream, std::shared_ptr<const Nodes> nodes,
                std::vector<MarkRef> needs, MarkRef* mark = nullptr);
// Waits for work, by carrying out what it needs; and returns what went wrong before it.
CUresult wait_for(Lock& lock, MarkRef mark);
CUresult wait_for_stream(Lock& lock, Stream* stream);
CUresult wait_for_context(Lock& lock, Context* context);
// Whether work is done; by the toss of a coin some of it is carried out first.
bool poll(Lock& lock, const MarkRef& mark);
// Gives a stream up that no handle names any more.
void abandon(Lock& lock, Stream* stream);
// Whether a coin of the calling thread's generator for streams falls on one of n sides.
bool stream_toss(unsigned n);

// For calls that wait or allocate: what a capture forbids now, and it invalidates the capture.
CUresult forbid_during_capture();
CUresult forbid_on_capturing(Stream* stream);
// Waiting for, or work on, the legacy stream would make it wait for a blocking stream in capture.
CUresult forbid_implicit(Stream* stream);

// The allocation that holds all of [address, address + bytes), for calls.
const Allocation* find_allocation(uint64_t address, size_t bytes);
// The same for work that is carried out now.
const Allocation* find_resident(uint64_t address, size_t bytes);
// What an address was, or will be, that is not accessible now; empty if nothing is known.
std::string describe_address(uint64_t address);
// Names allocations whose surroundings were written to. Takes the lock.
bool check_guards(const char* after);

int arch_shared_optin(int arch);
int sm_count();
int l2_bytes();

}  // namespace sim

#define SIM_REQUIRE_CONTEXT()                                        \
  if (!sim::driver().initialised) return CUDA_ERROR_NOT_INITIALIZED; \
  if (sim::current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT
