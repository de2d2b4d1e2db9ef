// Initialisation, devices, contexts, error texts.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.hpp"

namespace sim {

Driver& driver() {
  static Driver* instance = new Driver;  // outlives every thread that may still call
  return *instance;
}

Lock lock_driver() { return Lock(driver().mutex); }

Context*& current_context() {
  thread_local Context* context = nullptr;
  return context;
}

bool is_live(const void* handle) { return driver().handles.contains(handle); }

// Largest dynamic shared memory of a block, in bytes (CUDA C++ programming guide, technical
// specifications per compute capability).
int arch_shared_optin(int arch) {
  switch (arch) {
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

static int positive_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  const int n = text != nullptr ? std::atoi(text) : otherwise;
  return n > 0 ? n : otherwise;
}

int sm_count() {
  static const int count = positive_from("SWIGLU_SIM_SMS", 4);
  return count;
}

int l2_bytes() {
  static const int bytes = positive_from("SWIGLU_SIM_L2", 8 << 20);
  return bytes;
}

namespace {

uint64_t number_from(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != 0 ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct ErrorText {
  CUresult code;
  const char *name, *text;
};
#define ERROR(code, text) {code, #code, text}
constexpr ErrorText ERRORS[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
          "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE,
          "operation would result in a merge of separate captures"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
          "capture was not ended in the same stream as it began"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
          "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a "
          "capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_INVALID_CLUSTER_SIZE, "cluster misconfiguration"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef ERROR

const ErrorText* find_error(CUresult code) {
  for (const ErrorText& e : ERRORS) {
    if (e.code == code) return &e;
  }
  return nullptr;
}

int attribute_value(int attribute) {
  const int arch = driver().arch;
  switch (attribute) {
    case 1:
      return 1024;  // threads per block
    case 2:
    case 3:
      return 1024;  // block x, y
    case 4:
      return 64;  // block z
    case 5:
      return 2147483647;  // grid x
    case 6:
    case 7:
      return 65535;  // grid y, z
    case 8:
      return 48 * 1024;  // shared memory per block
    case 9:
      return 65536;  // constant memory
    case 10:
      return 32;  // warp size
    case 12:
    case 82:
      return 65536;  // registers per block, per SM
    case 13:
      return 1000000;  // clock, kHz
    case 16:
      return sm_count();
    case 31:
    case 41:
    case 78:
    case 115:
      return 1;  // concurrent kernels, unified addresses,
                 // stream priorities, memory pools
    case 36:
      return 1000000;  // memory clock, kHz
    case 37:
      return 512;  // bus width
    case 38:
      return l2_bytes();
    case 39:
      return arch == 86 || arch == 89 || arch == 120 ? 1536 : 2048;
    case 40:
      return 1;  // copy engines
    case 75:
      return arch / 10;
    case 76:
      return arch % 10;
    case 81:
      return arch_shared_optin(arch) + 1024;
    case 95:
      return 1;  // cooperative launch
    case 97:
      return arch_shared_optin(arch);
    case 106:
      return 32;  // blocks per SM
    case 108:
      return l2_bytes() / 4 * 3;  // persisting L2
    case 111:
      return 1024;  // shared memory reserved per block
    case 120:
      return arch >= 90 ? 1 : 0;  // cluster launch
    case 127:
      return arch >= 90 ? 1 : 0;  // tensor maps
    default:
      return 0;
  }
}

bool is_device(CUdevice device) { return device >= 0 && device < driver().devices; }

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  Driver& d = driver();
  if (d.initialised) return CUDA_SUCCESS;
  d.devices = static_cast<int>(number_from("SWIGLU_SIM_DEVICES", 1));
  d.arch = static_cast<int>(number_from("SWIGLU_SIM_ARCH", 90));
  d.memory_bytes = number_from("SWIGLU_SIM_MEMORY_LIMIT", uint64_t{4} << 30);
  if (d.devices <= 0) return CUDA_ERROR_NO_DEVICE;
  for (int i = 0; i < d.devices; ++i) {
    d.primary.push_back(std::make_unique<Context>());
    d.primary.back()->device = i;
    d.legacy.push_back(make_stream(d.primary.back().get(), 0));
    d.legacy.back()->legacy = true;
    d.pools.push_back(std::make_unique<MemoryPool>());
    d.pools.back()->device = i;
  }
  d.allocated.assign(static_cast<size_t>(d.devices), 0);
  d.initialised = true;
  return CUDA_SUCCESS;
}

SIM_API cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = 13000;
  return CUDA_SUCCESS;
}

SIM_API cuDeviceGetCount(int* count) {
  if (!driver().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = driver().devices;
  return CUDA_SUCCESS;
}

SIM_API cuDeviceGet(CUdevice* device, int ordinal) {
  if (!driver().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

SIM_API cuDeviceGetName(char* name, int length, CUdevice device) {
  if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(length), "Simulated GPU (sm_%d)", driver().arch);
  return CUDA_SUCCESS;
}

SIM_API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid->bytes, 0, sizeof uuid->bytes);
  std::memcpy(uuid->bytes, "swiglu simulate", 15);
  uuid->bytes[15] = static_cast<unsigned char>(device);
  return CUDA_SUCCESS;
}
SIM_API cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

SIM_API cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = driver().memory_bytes;
  return CUDA_SUCCESS;
}

SIM_API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  if (value == nullptr || attribute <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute_value(attribute);
  return CUDA_SUCCESS;
}

SIM_API cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  if (text == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return CUDA_SUCCESS;
}

SIM_API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!driver().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  auto lock = lock_driver();
  *context = driver().primary[static_cast<size_t>(device)].get();
  ++(*context)->retained;
  return CUDA_SUCCESS;
}
// Primary contexts are never torn down here, so what they own stays valid. But the last release waits for
// their work.
SIM_API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  auto lock = lock_driver();
  Context* context = driver().primary[static_cast<size_t>(device)].get();
  if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--context->retained > 0) return CUDA_SUCCESS;
  return wait_for_context(lock, context);
}

SIM_API cuCtxSetCurrent(CUcontext context) {
  if (!driver().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  bool known = context == nullptr;
  for (const auto& primary : driver().primary) known |= primary.get() == context;
  if (!known) return CUDA_ERROR_INVALID_CONTEXT;
  current_context() = context;
  return CUDA_SUCCESS;
}
SIM_API cuCtxGetCurrent(CUcontext* context) {
  if (!driver().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = current_context();
  return CUDA_SUCCESS;
}
SIM_API cuCtxGetDevice(CUdevice* device) {
  SIM_REQUIRE_CONTEXT();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = current_context()->device;
  return CUDA_SUCCESS;
}
SIM_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SIM_REQUIRE_CONTEXT();
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}
// It waits for every stream, those in capture too, whoever captures them.
SIM_API cuCtxSynchronize() {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const auto& captures = driver().captures;
  for (const auto& capture : captures) capture->invalidated = true;
  if (!captures.empty()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return wait_for_context(lock, current_context());
}

SIM_API cuGetErrorName(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* e = find_error(error);
  *text = e != nullptr ? e->name : nullptr;
  return e != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
SIM_API cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorText* e = find_error(error);
  *text = e != nullptr ? e->text : nullptr;
  return e != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
