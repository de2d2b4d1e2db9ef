// State of the simulated driver. Work is carried out when it is submitted, on the calling thread; a
// stream in capture records it instead.
#pragma once

#include <atomic>
#include <chrono>
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

struct Context {
  int device = 0;
};

// One unit of work; may be carried out any number of times.
using Work = std::function<CUresult()>;

struct Graph {
  std::vector<Work> nodes;
};

struct Capture {
  uint64_t id = 0;
  unsigned mode = 0;  // 0 global, 1 thread-local, 2 relaxed
  std::thread::id thread;
  Stream* origin = nullptr;
  bool invalidated = false;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  std::vector<Stream*> streams;  // those that take part, the origin first
};

struct Stream {
  Context* context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  std::shared_ptr<Capture> capture;
  // Work of a forked stream that no event has carried back to the origin.
  uint64_t submitted = 0, joined = 0;
};

struct Event {
  Context* context = nullptr;
  unsigned flags = 0;
  bool recorded = false;
  std::chrono::steady_clock::time_point time;
  std::shared_ptr<Capture> capture;
  Stream* stream = nullptr;
  uint64_t submitted = 0;
};

struct Allocation {
  uint64_t base = 0;
  size_t bytes = 0;
  int device = 0;
  std::byte* mapping = nullptr;
  size_t mapping_bytes = 0;
  bool host = false;
  bool damaged = false;
};

struct Driver {
  std::recursive_mutex mutex;
  bool initialised = false;
  int devices = 1;
  int arch = 90;
  std::vector<std::unique_ptr<Context>> primary;
  std::vector<std::unique_ptr<Stream>> legacy;  // one per device
  std::map<uint64_t, Allocation> allocations;
  std::vector<size_t> allocated;  // bytes per device
  size_t memory_bytes = 0;
  std::unordered_set<const void*> handles;  // live streams, events, graphs, modules, functions
  std::vector<std::shared_ptr<Capture>> captures;
  uint64_t next_id = 1;
};

Driver& driver();
std::unique_lock<std::recursive_mutex> lock_driver();

// The calling thread's context; null without.
Context*& current_context();
// The stream of a handle: null and CU_STREAM_LEGACY (1) are the legacy stream of the context,
// CU_STREAM_PER_THREAD (2) is taken for it too. Null if the handle is stale.
Stream* stream_of(CUstream handle);
bool is_live(const void* handle);

// Carries work out, or records it.
CUresult submit(CUstream handle, Work work);
// For calls that wait or allocate: what a capture forbids now, and it invalidates the capture.
CUresult forbid_during_capture();
CUresult forbid_on_capturing(Stream* stream);

// The allocation that holds all of [address, address + bytes).
const Allocation* find_allocation(uint64_t address, size_t bytes);
// Names allocations whose surroundings were written to.
bool check_guards(const char* after);

int arch_shared_optin(int arch);
int sm_count();
int l2_bytes();

}  // namespace sim

#define SIM_REQUIRE_CONTEXT()                                        \
  if (!sim::driver().initialised) return CUDA_ERROR_NOT_INITIALIZED; \
  if (sim::current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT
