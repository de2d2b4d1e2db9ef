// The part of the CUDA driver's binary interface that is simulated (CUDA 13.0, cuda.h).
#pragma once

#include <cstddef>
#include <cstdint>

using CUdevice = int;
using CUdeviceptr = unsigned long long;

enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_OPERATING_SYSTEM = 304,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_ILLEGAL_STATE = 401,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
  CUDA_ERROR_INVALID_CLUSTER_SIZE = 912,
  CUDA_ERROR_UNKNOWN = 999,
};

// Handles are pointers to objects of the simulator.
namespace sim {
struct Context;
struct Stream;
struct Event;
struct Graph;
struct Executable;
struct MemoryPool;
struct Module;
struct Function;
}  // namespace sim
using CUcontext = sim::Context*;
using CUstream = sim::Stream*;
using CUevent = sim::Event*;
using CUgraph = sim::Graph*;
using CUgraphExec = sim::Executable*;
using CUmemoryPool = sim::MemoryPool*;
using CUmodule = sim::Module*;
using CUfunction = sim::Function*;

struct CUuuid {
  unsigned char bytes[16];
};

// CU_LAUNCH_ATTRIBUTE_*
enum CUlaunchAttributeID : unsigned {
  LAUNCH_IGNORE = 0,
  LAUNCH_ACCESS_POLICY_WINDOW = 1,
  LAUNCH_COOPERATIVE = 2,
  LAUNCH_SYNCHRONIZATION_POLICY = 3,
  LAUNCH_CLUSTER_DIMENSION = 4,
  LAUNCH_CLUSTER_SCHEDULING = 5,
  LAUNCH_PROGRAMMATIC_SERIALIZATION = 6,
  LAUNCH_PRIORITY = 8,
};
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char padding[4];
  union {
    char bytes[64];
    unsigned cluster[3];
    int flag;
  };
};
static_assert(sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct CUDA_MEMCPY2D {
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  CUdeviceptr source_device;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned target_type;
  void* target_host;
  CUdeviceptr target_device;
  void* target_array;
  size_t target_pitch;
  size_t width_bytes, height;
};

enum MemoryType : unsigned { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_UNIFIED = 4 };

#define SIM_API extern "C" __attribute__((visibility("default"))) CUresult
