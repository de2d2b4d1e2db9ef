// Modules, functions and launches.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.hpp"
#include "image.hpp"
#include "tensor_map.hpp"

namespace sim {

struct Module {
  std::shared_ptr<void> library;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Function {
  std::string name;
  const KernelInfo* kernel = nullptr;
  std::shared_ptr<void> library;
  size_t params_bytes = 0;
  unsigned shared_optin = 48 * 1024;
  bool wide_clusters = false;
};

namespace {

// sm_90a and the like run on exactly that capability, others on later minor ones too.
bool runs_on_device(const char* image_arch) {
  int number = 0;
  char feature = 0;
  if (std::sscanf(image_arch, "sm_%d%c", &number, &feature) < 1) return false;
  const int device = driver().arch;
  if (feature != 0) return number == device;
  return number / 10 == device / 10 && number <= device;
}

CUresult load(CUmodule* module, const void* image) {
  if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto* p = static_cast<const unsigned char*>(image);
  const uint64_t bytes = library_bytes(p);
  if (bytes == 0) return CUDA_ERROR_INVALID_IMAGE;
  ImageTrailer trailer;
  std::memcpy(&trailer, p + bytes, sizeof trailer);
  if (std::memcmp(trailer.mark, ImageTrailer::MARK, 8) != 0 || trailer.bytes != bytes ||
      trailer.hash != image_hash(p, bytes)) {
    return CUDA_ERROR_INVALID_IMAGE;
  }
  // A name of its own: the loader takes a library of a known name for loaded.
  const char* temporary = std::getenv("TMPDIR");
  std::string path =
      std::string(temporary != nullptr ? temporary : "/tmp") + "/swiglu-sim-kernel-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  bool written = true;
  for (uint64_t done = 0; written && done < bytes;) {
    const ssize_t n = write(file, p + done, bytes - done);
    written = n > 0;
    done += written ? static_cast<uint64_t>(n) : 0;
  }
  close(file);
  void* library = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path.c_str());
  if (!written) return CUDA_ERROR_OPERATING_SYSTEM;
  if (library == nullptr) {
    std::fprintf(stderr, "simulator: loading a kernel image: %s\n", dlerror());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  std::shared_ptr<void> owner(library, [](void* l) { dlclose(l); });
  const auto* arch = static_cast<const char*>(dlsym(library, "sim_image_arch"));
  if (arch == nullptr) return CUDA_ERROR_INVALID_IMAGE;
  if (!runs_on_device(arch)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  auto* m = new Module;
  m->library = owner;
  driver().handles.insert(m);
  *module = m;
  return CUDA_SUCCESS;
}

unsigned registers_of(const Function& f) {
  const unsigned threads = std::max(1u, f.kernel->threads * std::max(1u, f.kernel->min_blocks));
  return std::min(255u, 65536u / threads) / 8 * 8;
}

int blocks_per_sm(const Function& f, int threads, size_t shared_bytes) {
  int warps = (threads + 31) / 32;
  if (warps == 0 || threads > static_cast<int>(f.kernel->threads)) return 0;
  const int arch = driver().arch;
  const int max_threads = arch == 86 || arch == 89 || arch == 120 ? 1536 : 2048;
  const size_t per_sm = static_cast<size_t>(arch_shared_optin(arch)) + 1024;
  const size_t by_shared = per_sm / (shared_bytes + 1024);
  const int by_registers = 65536 / static_cast<int>(registers_of(f) * 32) / warps;
  return std::min({max_threads / (warps * 32), static_cast<int>(by_shared), by_registers, 32});
}

CUresult check(const Function& f, Launch& l) {
  const auto positive = [](Index3 i) { return i.x > 0 && i.y > 0 && i.z > 0; };
  if (!positive(l.grid) || !positive(l.block)) return CUDA_ERROR_INVALID_VALUE;
  if (l.grid.x > 2147483647u || l.grid.y > 65535 || l.grid.z > 65535)
    return CUDA_ERROR_INVALID_VALUE;
  if (l.block.x > 1024 || l.block.y > 1024 || l.block.z > 64) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t threads = uint64_t{l.block.x} * l.block.y * l.block.z;
  if (threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  // __launch_bounds__ is a promise; the driver refuses to break it.
  if (threads > f.kernel->threads) return CUDA_ERROR_INVALID_VALUE;
  if (l.shared_bytes > f.shared_optin) return CUDA_ERROR_INVALID_VALUE;
  if (l.cluster > 1) {
    if (driver().arch < 90) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    if (l.cluster > (f.wide_clusters ? 16u : 8u) || l.grid.x % l.cluster != 0) {
      return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    }
  }
  const int resident = blocks_per_sm(f, static_cast<int>(threads), l.shared_bytes);
  if (resident == 0) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  l.resident = static_cast<unsigned>(resident);
  if (l.cooperative &&
      l.blocks() > static_cast<uint64_t>(resident) * static_cast<uint64_t>(sm_count())) {
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  return CUDA_SUCCESS;
}

CUresult launch(Function* f, Launch l, CUstream stream, void** params, void** extra) {
  if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  auto lock = lock_driver();
  if (!is_live(f)) return CUDA_ERROR_INVALID_HANDLE;
  if (params == nullptr || params[0] == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult r = check(*f, l); r != CUDA_SUCCESS) return r;
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  l.name = f->name;
  l.kernel = f->kernel;
  l.module = f->library;
  const auto* p = static_cast<const std::byte*>(params[0]);
  l.params.assign(p, p + f->params_bytes);
  Work work;
  work.kernel = std::make_shared<const Launch>(std::move(l));
  return submit(lock, s, std::move(work));
}

Launch shape(const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes) {
  Launch l;
  l.grid = {grid[0], grid[1], grid[2]};
  l.block = {block[0], block[1], block[2]};
  l.shared_bytes = shared_bytes;
  return l;
}

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API cuModuleLoadData(CUmodule* module, const void* image) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  return load(module, image);
}
SIM_API cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, int*, void**) {
  return cuModuleLoadData(module, image);
}
SIM_API cuModuleUnload(CUmodule module) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (driver().handles.erase(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
  for (auto& [name, function] : module->functions) driver().handles.erase(function.get());
  delete module;
  return CUDA_SUCCESS;
}
SIM_API cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!is_live(module)) return CUDA_ERROR_INVALID_HANDLE;
  std::unique_ptr<Function>& f = module->functions[name];
  if (f == nullptr) {
    void* symbol = dlsym(module->library.get(), ("sim_kernel_" + std::string(name)).c_str());
    if (symbol == nullptr) {
      module->functions.erase(name);
      return CUDA_ERROR_NOT_FOUND;
    }
    f = std::make_unique<Function>();
    f->name = name;
    f->kernel = static_cast<const KernelInfo*>(symbol);
    f->library = module->library;
    f->params_bytes = f->kernel->params_bytes();
    driver().handles.insert(f.get());
  }
  *function = f.get();
  return CUDA_SUCCESS;
}

// CU_FUNC_ATTRIBUTE_*: 8 the opted-in dynamic shared memory, 9 the carve-out hint, 14 clusters of
// more than 8.
SIM_API cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute == 8) {
    if (value < 0 || value > arch_shared_optin(driver().arch)) return CUDA_ERROR_INVALID_VALUE;
    function->shared_optin = static_cast<unsigned>(std::max(value, 0));
    return CUDA_SUCCESS;
  }
  if (attribute == 14) function->wide_clusters = value != 0;
  return attribute == 9 || attribute == 14 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
SIM_API cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case 0:
      *value = static_cast<int>(function->kernel->threads);
      break;
    case 1:
    case 2:
    case 3:
      *value = 0;
      break;  // static shared, constant, local memory
    case 4:
      *value = static_cast<int>(registers_of(*function));
      break;
    case 5:
    case 6:
      *value = driver().arch;
      break;
    case 8:
      *value = static_cast<int>(function->shared_optin);
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

SIM_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function,
                                                             int threads, size_t shared_bytes,
                                                             unsigned) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
  if (blocks == nullptr || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  *blocks = blocks_per_sm(*function, threads, shared_bytes);
  return CUDA_SUCCESS;
}
SIM_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads,
                                                    size_t shared_bytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                              shared_bytes, 0);
}
SIM_API cuOccupancyMaxActiveClusters(int* clusters, CUfunction function,
                                     const CUlaunchConfig* config) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  int blocks = 0;
  const unsigned threads = config->block[0] * config->block[1] * config->block[2];
  const CUresult r = cuOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, function, static_cast<int>(threads), config->shared_bytes);
  if (r != CUDA_SUCCESS) return r;
  unsigned size = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const CUlaunchAttribute& a = config->attributes[i];
    if (a.id == LAUNCH_CLUSTER_DIMENSION) size = a.cluster[0] * a.cluster[1] * a.cluster[2];
  }
  if (size == 0 || clusters == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *clusters = blocks * sm_count() / static_cast<int>(size);
  return CUDA_SUCCESS;
}

SIM_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                         void** extra) {
  SIM_REQUIRE_CONTEXT();
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (config->attribute_count > 0 && config->attributes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Launch l = shape(config->grid, config->block, config->shared_bytes);
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const CUlaunchAttribute& a = config->attributes[i];
    switch (a.id) {
      case LAUNCH_IGNORE:
      case LAUNCH_ACCESS_POLICY_WINDOW:
      case LAUNCH_SYNCHRONIZATION_POLICY:
      case LAUNCH_CLUSTER_SCHEDULING:
      case LAUNCH_PRIORITY:
        break;
      case LAUNCH_PROGRAMMATIC_SERIALIZATION:
        if (driver().arch < 90) return CUDA_ERROR_NOT_SUPPORTED;
        l.programmatic = a.flag != 0;
        break;
      case LAUNCH_COOPERATIVE:
        l.cooperative = a.flag != 0;
        break;
      case LAUNCH_CLUSTER_DIMENSION:
        // Clusters along x are what the device code uses.
        if (a.cluster[0] == 0 || a.cluster[1] != 1 || a.cluster[2] != 1) {
          return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        }
        l.cluster = a.cluster[0];
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return launch(function, std::move(l), config->stream, params, extra);
}
SIM_API cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                       unsigned by, unsigned bz, unsigned shared_bytes, CUstream stream,
                       void** params, void** extra) {
  SIM_REQUIRE_CONTEXT();
  return launch(function, shape({gx, gy, gz}, {bx, by, bz}, shared_bytes), stream, params, extra);
}
SIM_API cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz,
                                  unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                                  CUstream stream, void** params) {
  SIM_REQUIRE_CONTEXT();
  Launch l = shape({gx, gy, gz}, {bx, by, bz}, shared_bytes);
  l.cooperative = true;
  return launch(function, std::move(l), stream, params, nullptr);
}
