// Device memory: each allocation lies in a mapping of its own, with a canary around it and an inaccessible
// page on both sides, filled with 0xff (NaN) when it is fresh. Memory of a pool is accessible from the time
// its allocation is carried out until its free is, and then waits for the next allocation.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.hpp"

namespace sim {
namespace {

constexpr size_t ALIGNMENT = 256;
constexpr std::byte CANARY{0xc5}, POISON{0xff};
// What pools keep for the next allocation; a smaller one may take up to so many times what it needs.
constexpr size_t MOST_FREE_BYTES = size_t{64} << 20;
constexpr size_t MOST_WASTE = 16;
constexpr size_t MOST_GONE = 1024;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

size_t page_bytes() {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

// The end, rounded to the alignment, touches the upper guard page: an overrun of more than the alignment is
// caught as it happens, a smaller one by the canary.
size_t body_bytes(size_t bytes) {
  return round_up(round_up(bytes, ALIGNMENT) + ALIGNMENT, page_bytes());
}

std::shared_ptr<Mapping> map_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  return {new Mapping{static_cast<std::byte*>(p), bytes}, [](Mapping* m) {
            munmap(m->start, m->bytes);
            delete m;
          }};
}

// An allocation at the end of a mapping, not yet accessible.
AllocationRef place(std::shared_ptr<Mapping> mapping, size_t bytes, int device) {
  auto a = std::make_shared<Allocation>();
  a->end = mapping->start + mapping->bytes - page_bytes();
  a->first = a->end - body_bytes(bytes);
  a->base = reinterpret_cast<uint64_t>(a->end - round_up(bytes, ALIGNMENT));
  a->bytes = bytes;
  a->device = device;
  a->mapping = std::move(mapping);
  return a;
}

// The allocation is carried out.
CUresult begin_life(const AllocationRef& a) {
  if (a->freed) return CUDA_SUCCESS;  // before its allocation, which has been reported
  const auto body = static_cast<size_t>(a->end - a->first);
  if (mprotect(a->first, body, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  auto* base = reinterpret_cast<std::byte*>(a->base);
  std::memset(a->first, static_cast<int>(CANARY), static_cast<size_t>(base - a->first));
  std::memset(base, static_cast<int>(POISON), a->bytes);
  std::memset(base + a->bytes, static_cast<int>(CANARY),
              static_cast<size_t>(a->end - base) - a->bytes);
  a->live = true;
  driver().resident[a->base] = a;
  return CUDA_SUCCESS;
}

bool is_intact(const Allocation& a) {
  const auto is_canary = [](std::byte b) { return b == CANARY; };
  const auto* base = reinterpret_cast<const std::byte*>(a.base);
  return std::all_of(static_cast<const std::byte*>(a.first), base, is_canary) &&
         std::all_of(base + a.bytes, static_cast<const std::byte*>(a.end), is_canary);
}

void report(const Allocation& a, const char* after) {
  std::fprintf(stderr,
               "simulator: bytes around the allocation of %zu bytes at %#llx were written (%s)\n",
               a.bytes, static_cast<unsigned long long>(a.base), after);
}

// The free is carried out.
CUresult end_life(const AllocationRef& a) {
  if (!a->live) {
    a->freed = true;
    std::fprintf(stderr,
                 "simulator: %zu bytes at %#llx are freed in the order of stream %llu before they are "
                 "allocated\n",
                 a->bytes, static_cast<unsigned long long>(a->base),
                 static_cast<unsigned long long>(a->stream));
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  const bool intact = is_intact(*a);
  if (!intact) report(*a, "seen when it was freed");
  mprotect(a->first, static_cast<size_t>(a->end - a->first), PROT_NONE);
  a->live = false;
  a->freed = true;
  Driver& d = driver();
  d.resident.erase(a->base);
  // A plain one's addresses become others' at once.
  d.gone.push_back(a);
  if (!a->pool) a->mapping = nullptr;
  if (d.gone.size() > MOST_GONE) d.gone.pop_front();
  return intact ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

bool fits_in_memory(size_t bytes, int device) {
  const Driver& d = driver();
  const size_t used = d.allocated[static_cast<size_t>(device)];
  return bytes <= d.memory_bytes && used <= d.memory_bytes - bytes;
}

void name(const AllocationRef& a) {
  Driver& d = driver();
  if (!a->host) d.allocated[static_cast<size_t>(a->device)] += a->bytes;
  d.allocations[a->base] = a;
}

void forget(const AllocationRef& a) {
  Driver& d = driver();
  if (!a->host) d.allocated[static_cast<size_t>(a->device)] -= a->bytes;
  d.allocations.erase(a->base);
}

CUresult free_unused();

// cuMemAlloc, cuMemHostAlloc: accessible at once.
CUresult allocate(uint64_t* address, size_t bytes, int device, bool host) {
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!host && !fits_in_memory(bytes, device)) return CUDA_ERROR_OUT_OF_MEMORY;
  free_unused();
  std::shared_ptr<Mapping> mapping = map_pages(body_bytes(bytes) + 2 * page_bytes());
  if (mapping == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  const AllocationRef a = place(std::move(mapping), bytes, device);
  a->host = host;
  if (CUresult r = begin_life(a); r != CUDA_SUCCESS) return r;
  name(a);
  *address = a->base;
  return CUDA_SUCCESS;
}

AllocationRef find_named(uint64_t address) {
  const auto found = driver().allocations.find(address);
  return found != driver().allocations.end() ? found->second : nullptr;
}

bool pool_allows(const MemoryPool& pool, const Allocation& a, const Stream& s) {
  if (a.stream == s.id) return true;
  if (pool.opportunistic != 0 && (a.mark == nullptr || a.mark->done)) return true;
  const auto reached = s.reach.find(a.stream);
  return pool.follow_events != 0 && reached != s.reach.end() && reached->second >= a.number;
}

// Memory that was freed for work that comes before the stream's next: the youngest that is large enough.
std::shared_ptr<Mapping> take_free(const Stream& s, size_t bytes) {
  Driver& d = driver();
  const MemoryPool& pool = *d.pools[static_cast<size_t>(s.context->device)];
  const size_t needed = body_bytes(bytes) + 2 * page_bytes();
  for (size_t i = d.free.size(); i-- > 0;) {
    const AllocationRef a = d.free[i];
    const size_t has = a->mapping->bytes;
    if (a->device != pool.device || has < needed || has > MOST_WASTE * needed) continue;
    if (!pool_allows(pool, *a, s)) continue;
    d.free.erase(d.free.begin() + static_cast<std::ptrdiff_t>(i));
    return std::move(a->mapping);
  }
  return nullptr;
}

// Gives free memory back, the oldest first, until a device's pool keeps no more than so many bytes.
void trim(int device, size_t keep) {
  Driver& d = driver();
  size_t kept = 0;
  for (size_t i = d.free.size(); i-- > 0;) {
    const Allocation& a = *d.free[i];
    if (a.device != device) continue;
    kept += a.mapping->bytes;
    if (kept > keep && a.freed) {
      kept -= a.mapping->bytes;
      d.free[i]->mapping = nullptr;
      d.free.erase(d.free.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

CUresult allocate_in_order(Lock& lock, uint64_t* address, size_t bytes, Stream* s) {
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const int device = s->context->device;
  if (!fits_in_memory(bytes, device)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::shared_ptr<Mapping> mapping = take_free(*s, bytes);
  if (mapping == nullptr) mapping = map_pages(body_bytes(bytes) + 2 * page_bytes());
  if (mapping == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  const AllocationRef a = place(std::move(mapping), bytes, device);
  a->pool = true;
  a->stream = s->id;
  name(a);
  *address = a->base;
  Work work;
  work.function = [a] { return begin_life(a); };
  work.locked = work.always = true;
  return submit(lock, s, std::move(work));
}

CUresult free_in_order(Lock& lock, uint64_t address, Stream* s) {
  const AllocationRef a = find_named(address);
  if (a == nullptr || a->host) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
  forget(a);
  a->stream = s->id;
  a->number = s->submitted + 1;
  if (a->pool) driver().free.push_back(a);
  Work work;
  work.function = [a] {
    const CUresult r = end_life(a);
    if (a->pool) trim(a->device, MOST_FREE_BYTES);
    return r;
  };
  work.locked = work.always = true;
  return submit(lock, s, std::move(work), &a->mark);
}

// Frees memory whose users are done.
CUresult free_unused() {
  auto& waiting = driver().unfreed;
  CUresult result = CUDA_SUCCESS;
  for (size_t i = 0; i < waiting.size();) {
    std::erase_if(waiting[i].users, [](const MarkRef& m) { return m->done; });
    if (!waiting[i].users.empty()) {
      ++i;
      continue;
    }
    const CUresult r = end_life(waiting[i].allocation);
    if (result == CUDA_SUCCESS) result = r;
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return result;
}

// cuMemFree, cuMemFreeHost. Plain memory stays until the work that is submitted is done, and the work of the
// calling thread is waited for; of memory of a pool the caller promises that there is none.
CUresult release(Lock& lock, uint64_t address, bool host) {
  const AllocationRef a = find_named(address);
  if (a == nullptr || a->host != host) return CUDA_ERROR_INVALID_VALUE;
  forget(a);
  std::vector<MarkRef> users;
  for (const auto& s : driver().streams) {
    const bool uses = a->pool ? !a->live && s->id == a->stream : true;
    if (uses && s->last != nullptr && !s->last->done) users.push_back(s->last);
  }
  CUresult waited = CUDA_SUCCESS;
  for (const MarkRef& mark : users) {
    if (mark->thread != std::this_thread::get_id() && !a->pool) continue;
    if (waited == CUDA_SUCCESS) waited = wait_for(lock, mark);
  }
  CUresult r = CUDA_SUCCESS;
  if (a->pool) {
    a->number = 0;
    r = end_life(a);
    driver().free.push_back(a);
    trim(a->device, MOST_FREE_BYTES);
  } else {
    driver().unfreed.push_back({a, users});
    r = free_unused();
  }
  return r != CUDA_SUCCESS ? r : waited;
}

const Allocation* find_in(const std::map<uint64_t, AllocationRef>& all, uint64_t address,
                          size_t bytes) {
  auto next = all.upper_bound(address);
  if (next == all.begin()) return nullptr;
  const Allocation& a = *std::prev(next)->second;
  return address - a.base <= a.bytes && bytes <= a.bytes - (address - a.base) ? &a : nullptr;
}

bool is_device_range(uint64_t address, size_t bytes) {
  return find_allocation(address, bytes) != nullptr;
}

}  // namespace

const Allocation* find_allocation(uint64_t address, size_t bytes) {
  return find_in(driver().allocations, address, bytes);
}

const Allocation* find_resident(uint64_t address, size_t bytes) {
  return find_in(driver().resident, address, bytes);
}

std::string describe_address(uint64_t address) {
  const Driver& d = driver();
  if (find_resident(address, 1) != nullptr) return "";
  const auto describe = [](const Allocation& a, const char* what, const char* how) {
    char text[160];
    std::snprintf(text, sizeof text, "%s, %zu bytes at %#llx, %s%llu", what, a.bytes,
                  static_cast<unsigned long long>(a.base), how,
                  static_cast<unsigned long long>(a.stream));
    return std::string(text);
  };
  const auto holds = [address](const Allocation& a) {
    return address >= a.base && address - a.base < a.bytes;
  };
  // The youngest first: addresses are used again.
  for (size_t i = d.gone.size(); i-- > 0;) {
    if (holds(*d.gone[i])) {
      return describe(*d.gone[i], "use of freed memory", "freed in the order of stream ");
    }
  }
  const Allocation* named = find_allocation(address, 1);
  if (named == nullptr || named->live) return "";
  return describe(*named, "use of memory before its allocation", "allocated in the order of stream ");
}

bool check_guards(const char* after) {
  auto lock = lock_driver();
  bool intact = true;
  for (auto& [address, a] : driver().resident) {
    if (a->damaged || is_intact(*a)) continue;
    a->damaged = true;  // one report is enough
    report(*a, after);
    intact = false;
  }
  return intact;
}

namespace {

struct Side {
  std::byte* pointer;
  bool device;
};

bool is_resident_or_report(Side side, size_t bytes, const char* operation) {
  const auto address = reinterpret_cast<uint64_t>(side.pointer);
  if (!side.device || find_resident(address, bytes) != nullptr) return true;
  std::string why = describe_address(address);
  if (why.empty()) why = "memory of no allocation";
  std::fprintf(stderr, "simulator: %s of %zu bytes at %#llx: %s\n", operation, bytes,
               static_cast<unsigned long long>(address), why.c_str());
  return false;
}

bool is_pinned(Side side) {
  const Allocation* a = find_allocation(reinterpret_cast<uint64_t>(side.pointer), 1);
  return a != nullptr && a->host;
}

void copy_rows(std::byte* to, size_t to_pitch, const std::byte* from, size_t from_pitch, size_t width,
               size_t height) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(to + row * to_pitch, from + row * from_pitch, width);
  }
}

// A copy of `height` rows of `width` bytes, checked now and carried out in stream order. Pageable memory of
// the host is read before the call returns, and written before it returns; pinned memory is not (API
// synchronization behavior, in the reference of the runtime).
CUresult copy(Lock& lock, CUstream stream, Side to, size_t to_pitch, Side from, size_t from_pitch,
              size_t width, size_t height) {
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  if (height > 1 && (to_pitch < width || from_pitch < width)) return CUDA_ERROR_INVALID_VALUE;
  const auto extent = [=](size_t pitch) { return pitch * (height - 1) + width; };
  const auto ok = [&](Side side, size_t pitch) {
    if (side.pointer == nullptr) return false;
    return !side.device || is_device_range(reinterpret_cast<uint64_t>(side.pointer), extent(pitch));
  };
  if (!ok(to, to_pitch) || !ok(from, from_pitch)) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<std::vector<std::byte>> staged;
  const bool captured = s->capture != nullptr;
  if (!captured && !from.device && !is_pinned(from)) {
    staged = std::make_shared<std::vector<std::byte>>(width * height);
    copy_rows(staged->data(), width, from.pointer, from_pitch, width, height);
  }
  Work work;
  work.locked = true;
  work.function = [=] {
    const bool there = is_resident_or_report(to, extent(to_pitch), "a copy to") &&
                       is_resident_or_report(from, extent(from_pitch), "a copy from");
    if (!there) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (staged != nullptr) {
      copy_rows(to.pointer, to_pitch, staged->data(), width, width, height);
    } else {
      copy_rows(to.pointer, to_pitch, from.pointer, from_pitch, width, height);
    }
    return CUDA_SUCCESS;
  };
  const bool waits = !captured && !to.device && !is_pinned(to);
  MarkRef mark;
  if (CUresult r = submit(lock, s, std::move(work), &mark); r != CUDA_SUCCESS) return r;
  return waits ? wait_for(lock, mark) : CUDA_SUCCESS;
}

Side on_device(uint64_t p) { return {reinterpret_cast<std::byte*>(p), true}; }
Side on_host(const void* p) { return {static_cast<std::byte*>(const_cast<void*>(p)), false}; }

CUresult copy_line(Lock& lock, CUstream stream, Side to, Side from, size_t bytes) {
  return copy(lock, stream, to, bytes, from, bytes, bytes, 1);
}

CUresult copy_2d(Lock& lock, CUstream stream, const CUDA_MEMCPY2D* c) {
  if (c == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto side = [](unsigned type, const void* host, CUdeviceptr device, size_t pitch, size_t x,
                       size_t y) {
    Side s = type == MEMORY_HOST ? on_host(host) : on_device(device);
    if (type == MEMORY_UNIFIED) s.device = find_allocation(device, 1) != nullptr;
    if (s.pointer != nullptr) s.pointer += y * pitch + x;
    return s;
  };
  for (unsigned type : {c->source_type, c->target_type}) {
    if (type != MEMORY_HOST && type != MEMORY_DEVICE && type != MEMORY_UNIFIED) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const size_t from_pitch = c->source_pitch != 0 ? c->source_pitch : c->width_bytes;
  const size_t to_pitch = c->target_pitch != 0 ? c->target_pitch : c->width_bytes;
  return copy(
      lock, stream,
      side(c->target_type, c->target_host, c->target_device, to_pitch, c->target_x, c->target_y),
      to_pitch,
      side(c->source_type, c->source_host, c->source_device, from_pitch, c->source_x, c->source_y),
      from_pitch, c->width_bytes, c->height);
}

template <class T>
CUresult set_memory(Lock& lock, CUstream stream, uint64_t address, T value, size_t count) {
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (count == 0) return CUDA_SUCCESS;
  if (address % sizeof(T) != 0 || !is_device_range(address, count * sizeof(T))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Work work;
  work.locked = true;
  work.function = [=] {
    const Side side{reinterpret_cast<std::byte*>(address), true};
    if (!is_resident_or_report(side, count * sizeof(T), "a memset")) return CUDA_ERROR_ILLEGAL_ADDRESS;
    auto* p = reinterpret_cast<T*>(address);
    for (size_t i = 0; i < count; ++i) p[i] = value;
    return CUDA_SUCCESS;
  };
  return submit(lock, s, std::move(work));
}

// A call of the synchronous kind: forbidden while a capture is under way.
#define SYNCHRONOUS()        \
  SIM_REQUIRE_CONTEXT();     \
  auto lock = lock_driver(); \
  if (CUresult r = forbid_during_capture(); r != CUDA_SUCCESS) return r
#define ASYNCHRONOUS()   \
  SIM_REQUIRE_CONTEXT(); \
  auto lock = lock_driver()

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API cuMemGetInfo_v2(size_t* free, size_t* total) {
  SIM_REQUIRE_CONTEXT();
  if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  Driver& d = driver();
  *total = d.memory_bytes;
  *free = d.memory_bytes - d.allocated[static_cast<size_t>(current_context()->device)];
  return CUDA_SUCCESS;
}

SIM_API cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  SYNCHRONOUS();
  uint64_t p = 0;
  const CUresult r =
      allocate(address != nullptr ? &p : nullptr, bytes, current_context()->device, false);
  if (r == CUDA_SUCCESS) *address = p;
  return r;
}
SIM_API cuMemFree_v2(CUdeviceptr address) {
  SYNCHRONOUS();
  return address == 0 ? CUDA_SUCCESS : release(lock, address, false);
}

// Allocations of a capture would belong to its graph; that is not simulated.
SIM_API cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_on_capturing(s); r != CUDA_SUCCESS) return r;
  if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
  uint64_t p = 0;
  const CUresult r = allocate_in_order(lock, address != nullptr ? &p : nullptr, bytes, s);
  if (p != 0) *address = p;
  return r;
}
SIM_API cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool pool,
                                CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  const auto device = static_cast<size_t>(current_context()->device);
  if (pool != driver().pools[device].get()) return CUDA_ERROR_INVALID_VALUE;
  return cuMemAllocAsync(address, bytes, stream);
}
SIM_API cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  ASYNCHRONOUS();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_on_capturing(s); r != CUDA_SUCCESS) return r;
  return free_in_order(lock, address, s);
}

// Each device has one pool; others are not simulated.
SIM_API cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  if (!driver().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || device >= driver().devices) return CUDA_ERROR_INVALID_DEVICE;
  *pool = driver().pools[static_cast<size_t>(device)].get();
  return CUDA_SUCCESS;
}
SIM_API cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  return cuDeviceGetDefaultMemPool(pool, device);
}
SIM_API cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
  SIM_REQUIRE_CONTEXT();
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  trim(pool->device, keep);
  return CUDA_SUCCESS;
}

namespace {

// CU_MEMPOOL_ATTR_*: three that take an int, and the bytes that a synchronisation leaves to the pool.
CUresult pool_attribute(MemoryPool* pool, int attribute, void* value, bool set) {
  if (pool == nullptr || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  const auto exchange = [&](uint64_t& of, auto typed) {
    if (set) {
      std::memcpy(&typed, value, sizeof typed);
      of = static_cast<uint64_t>(typed);
    } else {
      typed = static_cast<decltype(typed)>(of);
      std::memcpy(value, &typed, sizeof typed);
    }
    return CUDA_SUCCESS;
  };
  switch (attribute) {
    case 1:
      return exchange(pool->follow_events, 0);
    case 2:
      return exchange(pool->opportunistic, 0);
    case 3:
      return exchange(pool->internal, 0);
    case 4:
      return exchange(pool->threshold, uint64_t{0});
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

SIM_API cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void* value) {
  SIM_REQUIRE_CONTEXT();
  return pool_attribute(pool, attribute, value, true);
}
SIM_API cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void* value) {
  SIM_REQUIRE_CONTEXT();
  return pool_attribute(pool, attribute, value, false);
}

SIM_API cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  SYNCHRONOUS();
  uint64_t p = 0;
  const CUresult r =
      allocate(pointer != nullptr ? &p : nullptr, bytes, current_context()->device, true);
  if (r == CUDA_SUCCESS) *pointer = reinterpret_cast<void*>(p);
  return r;
}
SIM_API cuMemAllocHost_v2(void** pointer, size_t bytes) {
  return cuMemHostAlloc(pointer, bytes, 0);
}
SIM_API cuMemFreeHost(void* pointer) {
  SYNCHRONOUS();
  return release(lock, reinterpret_cast<uint64_t>(pointer), true);
}

// From pageable memory it may return when the data is staged: streams that do not wait for the legacy stream
// may then see what was there before.
SIM_API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  SYNCHRONOUS();
  Stream* legacy = stream_of(nullptr);
  if (CUresult r = forbid_implicit(legacy); r != CUDA_SUCCESS) return r;
  if (CUresult r = wait_for_stream(lock, legacy); r != CUDA_SUCCESS) return r;
  const bool pinned = is_pinned(on_host(from));
  const CUresult r = copy_line(lock, nullptr, on_device(to), on_host(from), bytes);
  if (r != CUDA_SUCCESS || (!pinned && stream_toss(2))) return r;
  return wait_for_stream(lock, legacy);
}
SIM_API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  SYNCHRONOUS();
  Stream* legacy = stream_of(nullptr);
  const CUresult r = copy_line(lock, nullptr, on_host(to), on_device(from), bytes);
  return r != CUDA_SUCCESS ? r : wait_for_stream(lock, legacy);
}
SIM_API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  SYNCHRONOUS();
  return copy_line(lock, nullptr, on_device(to), on_device(from), bytes);
}
SIM_API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  return copy_line(lock, stream, on_device(to), on_host(from), bytes);
}
SIM_API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  return copy_line(lock, stream, on_host(to), on_device(from), bytes);
}
SIM_API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  return copy_line(lock, stream, on_device(to), on_device(from), bytes);
}
SIM_API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  Side a = on_device(to), b = on_device(from);
  a.device = find_allocation(to, 1) != nullptr;
  b.device = find_allocation(from, 1) != nullptr;
  return copy_line(lock, stream, a, b, bytes);
}
SIM_API cuMemcpy2D_v2(const CUDA_MEMCPY2D* c) {
  SYNCHRONOUS();
  const CUresult r = copy_2d(lock, nullptr, c);
  return r != CUDA_SUCCESS ? r : wait_for_stream(lock, stream_of(nullptr));
}
SIM_API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* c) { return cuMemcpy2D_v2(c); }
SIM_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream stream) {
  ASYNCHRONOUS();
  return copy_2d(lock, stream, c);
}

SIM_API cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
  SYNCHRONOUS();
  return set_memory(lock, nullptr, address, value, count);
}
SIM_API cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  ASYNCHRONOUS();
  return set_memory(lock, stream, address, value, count);
}
SIM_API cuMemsetD16Async(CUdeviceptr address, unsigned short value, size_t count, CUstream stream) {
  ASYNCHRONOUS();
  return set_memory(lock, stream, address, value, count);
}
SIM_API cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  ASYNCHRONOUS();
  return set_memory(lock, stream, address, value, count);
}

SIM_API cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const Allocation* a = find_allocation(address, 1);
  if (a == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = a->base;
  if (bytes != nullptr) *bytes = a->bytes;
  return CUDA_SUCCESS;
}

namespace {

// CU_POINTER_ATTRIBUTE_*
CUresult pointer_attribute(void* data, int attribute, uint64_t address) {
  const Allocation* a = find_allocation(address, 1);
  if (a == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto put = [data](auto value) {
    std::memcpy(data, &value, sizeof value);
    return CUDA_SUCCESS;
  };
  switch (attribute) {
    case 1:
      return put(driver().primary[static_cast<size_t>(a->device)].get());
    case 2:
      return put(static_cast<unsigned>(a->host ? MEMORY_HOST : MEMORY_DEVICE));
    case 3:
      return put(address);
    case 4:
      return a->host ? put(address) : CUDA_ERROR_INVALID_VALUE;
    case 8:
      return put(0);
    case 9:
      return put(a->device);
    case 11:
      return put(a->base);
    case 12:
      return put(a->bytes);
    case 13:
      return put(1);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

SIM_API cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
  SIM_REQUIRE_CONTEXT();
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  return pointer_attribute(data, attribute, address);
}

// Of memory that the driver does not know, each attribute is zero, and that is no error.
SIM_API cuPointerGetAttributes(unsigned count, const int* attributes, void** data,
                               CUdeviceptr address) {
  SIM_REQUIRE_CONTEXT();
  if (attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  for (unsigned i = 0; i < count; ++i) {
    const bool wide = attributes[i] == 1 || attributes[i] == 3 || attributes[i] == 4 ||
                      attributes[i] == 11 || attributes[i] == 12;
    std::memset(data[i], 0, wide ? 8 : 4);
    constexpr int NO_DEVICE = -2;
    if (attributes[i] == 9) std::memcpy(data[i], &NO_DEVICE, sizeof NO_DEVICE);
    const CUresult r = pointer_attribute(data[i], attributes[i], address);
    if (r == CUDA_ERROR_NOT_SUPPORTED) return r;
  }
  return CUDA_SUCCESS;
}
