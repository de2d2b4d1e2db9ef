// libcublasLt.so.13: D = alpha·op(A)·op(B) + beta·C (+ bias), with plain loops, in stream order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "floats.hpp"

extern "C" int sim_submit(void* stream, int (*work)(const void*), const void* arguments,
                          size_t bytes);
extern "C" bool sim_is_device_range(const void* p, size_t bytes);

namespace {

enum Status : int {
  SUCCESS = 0,
  NOT_INITIALIZED = 1,
  INVALID_VALUE = 7,
  EXECUTION_FAILED = 13,
  NOT_SUPPORTED = 15,
};

enum DataType : int { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum ComputeType : int { COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, COMPUTE_32F_FAST_TF32 = 77 };

struct Layout {
  int type, order;  // order 0: columns one after the other, 1: rows
  uint64_t rows, columns;
  int64_t leading;
  int batches;

  uint64_t lines() const { return order == 0 ? columns : rows; }
  uint64_t line() const { return order == 0 ? rows : columns; }
  size_t element_bytes() const { return type == R_32F ? 4 : 2; }
  size_t bytes() const {
    if (lines() == 0 || line() == 0) return 0;
    return ((lines() - 1) * static_cast<uint64_t>(leading) + line()) * element_bytes();
  }
  size_t at(uint64_t row, uint64_t column) const {
    const auto ld = static_cast<uint64_t>(leading);
    return order == 0 ? column * ld + row : row * ld + column;
  }
};

struct Operation {
  int compute, scale;
  int pointer_mode = 0;
  int transpose[3] = {0, 0, 0};
  int epilogue = 1;
  const void* bias = nullptr;
  int bias_type = -1;
};

struct Preference {
  uint64_t workspace = 0;
};

float load(const void* p, int type, size_t i) {
  if (type == R_32F) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return type == R_16BF ? sim::from_bf16(bits) : sim::from_f16(bits);
}

uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t to_f16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (x != x) return 0x7fff;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  // Below the normal numbers, adding 0.5 leaves the value in units of 2^-24.
  const uint32_t small =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  return static_cast<uint16_t>(sign | (magnitude < 0x38800000 ? small : normal));
}

void store(void* p, int type, size_t i, float x) {
  if (type == R_32F) {
    static_cast<float*>(p)[i] = x;
  } else {
    static_cast<uint16_t*>(p)[i] = type == R_16BF ? to_bf16(x) : to_f16(x);
  }
}

// Nearest tf32, ties away from zero, as cvt.rna.tf32.f32.
float to_tf32(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7f800000) == 0x7f800000) return x;
  return std::bit_cast<float>((bits + 0x1000) & 0xffffe000);
}

struct Call {
  Operation operation;
  Layout a, b, c, d;
  float alpha, beta;
  const void *pa, *pb, *pc;
  void* pd;
};

// op(X) as rows of floats.
std::vector<float> gather(const void* p, const Layout& layout, bool transposed, bool tf32) {
  const uint64_t rows = transposed ? layout.columns : layout.rows;
  const uint64_t columns = transposed ? layout.rows : layout.columns;
  std::vector<float> values(rows * columns);
  for (uint64_t i = 0; i < rows; ++i) {
    for (uint64_t j = 0; j < columns; ++j) {
      const float x = load(p, layout.type, transposed ? layout.at(j, i) : layout.at(i, j));
      values[i * columns + j] = tf32 ? to_tf32(x) : x;
    }
  }
  return values;
}

// A function whose loops are vectorised for what the processor has; GCC does so at -O2 only where the trip count is known.
#if defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((optimize("O3")))
#else
#define VECTORISED
#endif
#if defined(__x86_64__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_EACH_PROCESSOR
#endif

FOR_EACH_PROCESSOR VECTORISED void add_scaled(float* __restrict to, const float* __restrict from,
                                              float factor, uint64_t n) {
  for (uint64_t j = 0; j < n; ++j) to[j] += factor * from[j];
}

// Four rows of n values behind each other, each by its factor, one after the other: the bits of four times one, with a
// quarter of the loads and stores of sums.
FOR_EACH_PROCESSOR VECTORISED void add_four_scaled(float* __restrict to,
                                                   const float* __restrict from,
                                                   const float* factors, uint64_t n) {
  const float a = factors[0], b = factors[1], c = factors[2], d = factors[3];
  for (uint64_t j = 0; j < n; ++j) {
    float sum = to[j];
    sum += a * from[j];
    sum += b * from[n + j];
    sum += c * from[2 * n + j];
    sum += d * from[3 * n + j];
    to[j] = sum;
  }
}

int multiply(const void* arguments) {
  Call call;
  std::memcpy(&call, arguments, sizeof call);
  const bool tf32 = call.operation.compute == COMPUTE_32F_FAST_TF32;
  const std::vector<float> a = gather(call.pa, call.a, call.operation.transpose[0] != 0, tf32);
  const std::vector<float> b = gather(call.pb, call.b, call.operation.transpose[1] != 0, tf32);
  const uint64_t m = call.d.rows, n = call.d.columns;
  const uint64_t k = m > 0 ? a.size() / m : 0;
  std::vector<float> sums(n);
  for (uint64_t i = 0; i < m; ++i) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    uint64_t l = 0;
    for (; l + 4 <= k; l += 4) add_four_scaled(sums.data(), &b[l * n], &a[i * k + l], n);
    for (; l < k; ++l) add_scaled(sums.data(), &b[l * n], a[i * k + l], n);
    // One bias per row of D, of the type of D.
    const float bias =
        (call.operation.epilogue & 4) != 0 ? load(call.operation.bias, call.d.type, i) : 0;
    for (uint64_t j = 0; j < n; ++j) {
      float x = call.alpha * sums[j];
      if (call.beta != 0) x += call.beta * load(call.pc, call.c.type, call.c.at(i, j));
      store(call.pd, call.d.type, call.d.at(i, j), x + bias);
    }
  }
  return SUCCESS;
}

bool is_type(int type) { return type == R_32F || type == R_16F || type == R_16BF; }

// What the library would refuse, of what is simulated.
Status check(const Operation& o, const Layout& a, const Layout& b, const Layout& c,
             const Layout& d) {
  if (o.compute != COMPUTE_32F && o.compute != COMPUTE_32F_PEDANTIC &&
      o.compute != COMPUTE_32F_FAST_TF32) {
    return NOT_SUPPORTED;
  }
  if (o.scale != R_32F || o.pointer_mode != 0 || o.transpose[2] != 0) return NOT_SUPPORTED;
  if (o.epilogue != 1 && o.epilogue != 4) return NOT_SUPPORTED;
  for (const Layout* l : {&a, &b, &c, &d}) {
    if (!is_type(l->type) || l->batches != 1 || (l->order != 0 && l->order != 1))
      return NOT_SUPPORTED;
    if (l->leading < 0 || static_cast<uint64_t>(l->leading) < l->line()) return INVALID_VALUE;
  }
  const bool same = a.type == b.type && c.type == d.type;
  if (!same || (d.type != a.type && d.type != R_32F)) return NOT_SUPPORTED;
  if (o.compute == COMPUTE_32F_FAST_TF32 && a.type != R_32F) return NOT_SUPPORTED;
  // -1 stands for the type of D, and there is no other for these types.
  if (o.epilogue == 4 && o.bias_type != -1 && o.bias_type != d.type) return NOT_SUPPORTED;
  const bool ta = o.transpose[0] != 0, tb = o.transpose[1] != 0;
  const uint64_t m = ta ? a.columns : a.rows, ka = ta ? a.rows : a.columns;
  const uint64_t kb = tb ? b.columns : b.rows, n = tb ? b.rows : b.columns;
  if (m != d.rows || n != d.columns || ka != kb) return INVALID_VALUE;
  if (c.rows != d.rows || c.columns != d.columns) return INVALID_VALUE;
  return SUCCESS;
}

template <class T>
Status put(T& field, const void* value, size_t bytes) {
  if (value == nullptr || bytes != sizeof(T)) return INVALID_VALUE;
  std::memcpy(&field, value, sizeof(T));
  return SUCCESS;
}

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
constexpr uint64_t ALGORITHM_MARK = 0x6d697371736c;
constexpr uint32_t ALGORITHM_ID = 66;
// CUBLASLT_MATMUL_TILE_*, CUBLASLT_CLUSTER_SHAPE_*: 128x256 and 128x128 in clusters of 2x1, 128x160 alone and in 1x2.
struct Configuration {
  uint32_t tile;
  uint16_t cluster;
};
constexpr Configuration CONFIGURATIONS[] = {{23, 3}, {29, 2}, {20, 3}, {29, 5}};
constexpr int PROPOSALS = sizeof CONFIGURATIONS / sizeof *CONFIGURATIONS;

template <class T>
Status destroy(T* p) {
  if (p == nullptr) return INVALID_VALUE;
  delete p;
  return SUCCESS;
}

}  // namespace

#define SIM_API extern "C" __attribute__((visibility("default")))

SIM_API int cublasLtCreate(int** handle) {
  if (handle == nullptr) return INVALID_VALUE;
  *handle = new int(0);
  return SUCCESS;
}
SIM_API int cublasLtDestroy(int* handle) { return destroy(handle); }
SIM_API size_t cublasLtGetVersion() { return 130000; }
SIM_API size_t cublasLtGetCudartVersion() { return 13000; }

namespace {

const char* status_name(int status) {
  switch (status) {
    case SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "unknown cuBLAS status";
  }
}

}  // namespace

SIM_API const char* cublasLtGetStatusName(int status) { return status_name(status); }
SIM_API const char* cublasLtGetStatusString(int status) { return status_name(status); }

SIM_API int cublasLtMatmulDescCreate(Operation** operation, int compute, int scale) {
  if (operation == nullptr) return INVALID_VALUE;
  *operation = new Operation{compute, scale};
  return SUCCESS;
}
SIM_API int cublasLtMatmulDescDestroy(Operation* operation) { return destroy(operation); }
SIM_API int cublasLtMatmulDescSetAttribute(Operation* o, int attribute, const void* value,
                                           size_t bytes) {
  if (o == nullptr) return INVALID_VALUE;
  switch (attribute) {
    case 0:
      return put(o->compute, value, bytes);
    case 1:
      return put(o->scale, value, bytes);
    case 2:
      return put(o->pointer_mode, value, bytes);
    case 3:
    case 4:
    case 5:
      return put(o->transpose[attribute - 3], value, bytes);
    case 7:
      return put(o->epilogue, value, bytes);
    case 8:
      return put(o->bias, value, bytes);
    case 26:
      return put(o->bias_type, value, bytes);
    default:
      return NOT_SUPPORTED;
  }
}

SIM_API int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns,
                                       int64_t leading) {
  if (layout == nullptr) return INVALID_VALUE;
  *layout = new Layout{type, 0, rows, columns, leading, 1};
  return SUCCESS;
}
SIM_API int cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }
SIM_API int cublasLtMatrixLayoutSetAttribute(Layout* l, int attribute, const void* value,
                                             size_t bytes) {
  if (l == nullptr) return INVALID_VALUE;
  switch (attribute) {
    case 0:
      return put(l->type, value, bytes);
    case 1:
      return put(l->order, value, bytes);
    case 2:
      return put(l->rows, value, bytes);
    case 3:
      return put(l->columns, value, bytes);
    case 4:
      return put(l->leading, value, bytes);
    case 5:
      return put(l->batches, value, bytes);
    default:
      return NOT_SUPPORTED;
  }
}

SIM_API int cublasLtMatmulPreferenceCreate(Preference** preference) {
  if (preference == nullptr) return INVALID_VALUE;
  *preference = new Preference;
  return SUCCESS;
}
SIM_API int cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }
SIM_API int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value,
                                                 size_t bytes) {
  if (p == nullptr || value == nullptr) return INVALID_VALUE;
  // The others restrict a choice among algorithms that are all the same here.
  return attribute == 1 ? put(p->workspace, value, bytes) : SUCCESS;
}

SIM_API int cublasLtMatmulAlgoGetHeuristic(int* handle, const Operation* o, const Layout* a,
                                           const Layout* b, const Layout* c, const Layout* d,
                                           const Preference* preference, int requested,
                                           Heuristic* results, int* count) {
  if (count != nullptr) *count = 0;
  if (handle == nullptr) return NOT_INITIALIZED;
  if (o == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr ||
      preference == nullptr || results == nullptr || count == nullptr || requested < 1) {
    return INVALID_VALUE;
  }
  if (Status s = check(*o, *a, *b, *c, *d); s != SUCCESS) return s;
  // All compute the same; they differ by the configuration that they say they have.
  *count = std::min(requested, PROPOSALS);
  for (int i = 0; i < *count; ++i) {
    results[i] = {};
    results[i].algorithm.data[0] = ALGORITHM_MARK;
    results[i].algorithm.data[1] = static_cast<uint64_t>(i);
    results[i].waves = 1;
  }
  return SUCCESS;
}

SIM_API int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int attribute,
                                                 void* value, size_t bytes, size_t* written) {
  if (algorithm == nullptr || algorithm->data[0] != ALGORITHM_MARK || value == nullptr ||
      algorithm->data[1] >= PROPOSALS) {
    return INVALID_VALUE;
  }
  const Configuration& of = CONFIGURATIONS[algorithm->data[1]];
  const auto give = [&](auto number) -> int {
    if (bytes != sizeof number) return INVALID_VALUE;
    std::memcpy(value, &number, sizeof number);
    if (written != nullptr) *written = sizeof number;
    return SUCCESS;
  };
  switch (attribute) {
    case 0:
      return give(ALGORITHM_ID);
    case 1:
      return give(of.tile);
    case 2:  // One part of K.
      return give(uint32_t{1});
    case 3:
    case 4:
    case 5:
    case 6:
      return give(uint32_t{0});
    case 7:
      return give(uint16_t{0});
    case 8:
      return give(of.cluster);
    default:
      return NOT_SUPPORTED;
  }
}

SIM_API int cublasLtMatmulAlgoCheck(int* handle, const Operation* o, const Layout* a,
                                    const Layout* b, const Layout* c, const Layout* d,
                                    const Algorithm* algorithm, Heuristic* result) {
  if (handle == nullptr) return NOT_INITIALIZED;
  if (o == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr ||
      algorithm == nullptr || result == nullptr || algorithm->data[0] != ALGORITHM_MARK) {
    return INVALID_VALUE;
  }
  if (Status s = check(*o, *a, *b, *c, *d); s != SUCCESS) return s;
  *result = {};
  result->algorithm = *algorithm;
  result->waves = 1;
  return SUCCESS;
}

SIM_API int cublasLtMatmul(int* handle, const Operation* o, const float* alpha, const void* pa,
                           const Layout* a, const void* pb, const Layout* b, const float* beta,
                           const void* pc, const Layout* c, void* pd, const Layout* d,
                           const Algorithm* algorithm, void*, size_t, void* stream) {
  if (handle == nullptr) return NOT_INITIALIZED;
  if (o == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr ||
      alpha == nullptr || beta == nullptr) {
    return INVALID_VALUE;
  }
  if (algorithm != nullptr && algorithm->data[0] != ALGORITHM_MARK) return INVALID_VALUE;
  if (Status s = check(*o, *a, *b, *c, *d); s != SUCCESS) return s;
  const auto inside = [](const void* p, const Layout& l) {
    return l.bytes() == 0 || sim_is_device_range(p, l.bytes());
  };
  if (!inside(pa, *a) || !inside(pb, *b) || !inside(pd, *d)) return INVALID_VALUE;
  if (*beta != 0 && !inside(pc, *c)) return INVALID_VALUE;
  if (o->epilogue == 4 && !sim_is_device_range(o->bias, d->rows * d->element_bytes())) {
    return INVALID_VALUE;
  }
  const Call call{*o, *a, *b, *c, *d, *alpha, *beta, pa, pb, pc, pd};
  return sim_submit(stream, multiply, &call, sizeof call) == 0 ? SUCCESS : EXECUTION_FAILED;
}
