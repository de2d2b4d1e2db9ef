// Device memory: each allocation is a mapping of its own, with a canary around it and an
// inaccessible page on both sides, filled with 0xff (NaN) when it is fresh and when it is freed.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.hpp"

namespace sim {
namespace {

constexpr size_t ALIGNMENT = 256;
constexpr std::byte CANARY{0xc5}, POISON{0xff};

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

CUresult allocate(uint64_t* address, size_t bytes, int device, bool host) {
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Driver& d = driver();
  const auto index = static_cast<size_t>(device);
  if (!host && (bytes > d.memory_bytes || d.allocated[index] > d.memory_bytes - bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  // The end, rounded to the alignment, touches the upper guard page: an overrun of more than the
  // alignment is caught as it happens, a smaller one by the canary.
  const size_t body = round_up(round_up(bytes, ALIGNMENT) + ALIGNMENT, page);
  void* p = mmap(nullptr, body + 2 * page, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto* mapping = static_cast<std::byte*>(p);
  mprotect(mapping, page, PROT_NONE);
  mprotect(mapping + page + body, page, PROT_NONE);
  std::byte* base = mapping + page + body - round_up(bytes, ALIGNMENT);
  std::memset(mapping + page, static_cast<int>(CANARY), static_cast<size_t>(base - mapping) - page);
  std::memset(base, static_cast<int>(POISON), bytes);
  std::memset(base + bytes, static_cast<int>(CANARY), round_up(bytes, ALIGNMENT) - bytes);
  *address = reinterpret_cast<uint64_t>(base);
  if (!host) d.allocated[index] += bytes;
  d.allocations[*address] = {*address, bytes, device, mapping, body + 2 * page, host};
  return CUDA_SUCCESS;
}

bool is_intact(const Allocation& a) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto* base = reinterpret_cast<const std::byte*>(a.base);
  for (const std::byte* p = a.mapping + page; p < base; ++p) {
    if (*p != CANARY) return false;
  }
  const std::byte* end = a.mapping + a.mapping_bytes - page;
  for (const std::byte* p = base + a.bytes; p < end; ++p) {
    if (*p != CANARY) return false;
  }
  return true;
}

void report(const Allocation& a, const char* after) {
  std::fprintf(stderr,
               "simulator: bytes around the allocation of %zu bytes at %#llx were written (%s)\n",
               a.bytes, static_cast<unsigned long long>(a.base), after);
}

CUresult release(uint64_t address, bool host) {
  Driver& d = driver();
  const auto found = d.allocations.find(address);
  if (found == d.allocations.end() || found->second.host != host) return CUDA_ERROR_INVALID_VALUE;
  const Allocation a = found->second;
  const bool intact = is_intact(a);
  if (!intact) report(a, "seen when it was freed");
  if (!host) d.allocated[static_cast<size_t>(a.device)] -= a.bytes;
  d.allocations.erase(found);
  munmap(a.mapping, a.mapping_bytes);
  return intact ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

bool is_device_range(uint64_t address, size_t bytes) {
  const Allocation* a = find_allocation(address, bytes);
  return a != nullptr;
}

}  // namespace

const Allocation* find_allocation(uint64_t address, size_t bytes) {
  Driver& d = driver();
  auto next = d.allocations.upper_bound(address);
  if (next == d.allocations.begin()) return nullptr;
  const Allocation& a = std::prev(next)->second;
  return address - a.base <= a.bytes && bytes <= a.bytes - (address - a.base) ? &a : nullptr;
}

bool check_guards(const char* after) {
  auto lock = lock_driver();
  bool intact = true;
  for (auto& [address, a] : driver().allocations) {
    if (a.damaged || is_intact(a)) continue;
    a.damaged = true;  // one report is enough
    report(a, after);
    intact = false;
  }
  return intact;
}

namespace {

struct Side {
  std::byte* pointer;
  bool device;
};

// A copy of `height` rows of `width` bytes, checked now and carried out in stream order.
CUresult copy(CUstream stream, Side to, size_t to_pitch, Side from, size_t from_pitch, size_t width,
              size_t height) {
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  if (height > 1 && (to_pitch < width || from_pitch < width)) return CUDA_ERROR_INVALID_VALUE;
  const auto extent = [&](size_t pitch) { return pitch * (height - 1) + width; };
  const auto ok = [&](Side side, size_t pitch) {
    if (side.pointer == nullptr) return false;
    return !side.device || is_device_range(reinterpret_cast<uint64_t>(side.pointer), extent(pitch));
  };
  if (!ok(to, to_pitch) || !ok(from, from_pitch)) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memmove(to.pointer + row * to_pitch, from.pointer + row * from_pitch, width);
    }
    return CUDA_SUCCESS;
  });
}

Side on_device(uint64_t p) { return {reinterpret_cast<std::byte*>(p), true}; }
Side on_host(const void* p) { return {static_cast<std::byte*>(const_cast<void*>(p)), false}; }

CUresult copy_line(CUstream stream, Side to, Side from, size_t bytes) {
  return copy(stream, to, bytes, from, bytes, bytes, 1);
}

CUresult copy_2d(CUstream stream, const CUDA_MEMCPY2D* c) {
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
      stream,
      side(c->target_type, c->target_host, c->target_device, to_pitch, c->target_x, c->target_y),
      to_pitch,
      side(c->source_type, c->source_host, c->source_device, from_pitch, c->source_x, c->source_y),
      from_pitch, c->width_bytes, c->height);
}

template <class T>
CUresult set_memory(CUstream stream, uint64_t address, T value, size_t count) {
  if (count == 0) return CUDA_SUCCESS;
  if (address % sizeof(T) != 0 || !is_device_range(address, count * sizeof(T))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return submit(stream, [=] {
    auto* p = reinterpret_cast<T*>(address);
    for (size_t i = 0; i < count; ++i) p[i] = value;
    return CUDA_SUCCESS;
  });
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
  return address == 0 ? CUDA_SUCCESS : release(address, false);
}

// Allocations of a capture would belong to its graph; that is not simulated.
SIM_API cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_on_capturing(s); r != CUDA_SUCCESS) return r;
  uint64_t p = 0;
  const CUresult r = allocate(address != nullptr ? &p : nullptr, bytes, s->context->device, false);
  if (r == CUDA_SUCCESS) *address = p;
  return r;
}
SIM_API cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  ASYNCHRONOUS();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_on_capturing(s); r != CUDA_SUCCESS) return r;
  return release(address, false);
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
  return release(reinterpret_cast<uint64_t>(pointer), true);
}

SIM_API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  SYNCHRONOUS();
  return copy_line(nullptr, on_device(to), on_host(from), bytes);
}
SIM_API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  SYNCHRONOUS();
  return copy_line(nullptr, on_host(to), on_device(from), bytes);
}
SIM_API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  SYNCHRONOUS();
  return copy_line(nullptr, on_device(to), on_device(from), bytes);
}
SIM_API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  return copy_line(stream, on_device(to), on_host(from), bytes);
}
SIM_API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  return copy_line(stream, on_host(to), on_device(from), bytes);
}
SIM_API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  return copy_line(stream, on_device(to), on_device(from), bytes);
}
SIM_API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ASYNCHRONOUS();
  Side a = on_device(to), b = on_device(from);
  a.device = find_allocation(to, 1) != nullptr;
  b.device = find_allocation(from, 1) != nullptr;
  return copy_line(stream, a, b, bytes);
}
SIM_API cuMemcpy2D_v2(const CUDA_MEMCPY2D* c) {
  SYNCHRONOUS();
  return copy_2d(nullptr, c);
}
SIM_API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* c) { return cuMemcpy2D_v2(c); }
SIM_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream stream) {
  ASYNCHRONOUS();
  return copy_2d(stream, c);
}

SIM_API cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
  SYNCHRONOUS();
  return set_memory(nullptr, address, value, count);
}
SIM_API cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  ASYNCHRONOUS();
  return set_memory(stream, address, value, count);
}
SIM_API cuMemsetD16Async(CUdeviceptr address, unsigned short value, size_t count, CUstream stream) {
  ASYNCHRONOUS();
  return set_memory(stream, address, value, count);
}
SIM_API cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  ASYNCHRONOUS();
  return set_memory(stream, address, value, count);
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
