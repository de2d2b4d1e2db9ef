// The part of CUDA C++ that NVRTC knows without a header, for a C++ compiler on a CPU. Included
// before the first line of every kernel source.
#pragma once

#include "device_abi.hpp"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

#define threadIdx (sim_thread->thread_index)
#define blockIdx (sim_thread->block_index)
#define blockDim (sim_thread->block_dim)
#define gridDim (sim_thread->grid_dim)
#define warpSize 32

typedef __SIZE_TYPE__ size_t;

template <class T, int N, int ALIGN>
struct SimVector;
template <class T, int ALIGN>
struct alignas(ALIGN) SimVector<T, 2, ALIGN> {
  T x, y;
};
template <class T, int ALIGN>
struct alignas(ALIGN) SimVector<T, 4, ALIGN> {
  T x, y, z, w;
};
typedef SimVector<float, 2, 8> float2;
typedef SimVector<float, 4, 16> float4;
typedef SimVector<int, 2, 8> int2;
typedef SimVector<int, 4, 16> int4;
typedef SimVector<unsigned, 2, 8> uint2;
typedef SimVector<unsigned, 4, 16> uint4;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

// Multiplications and additions are contracted to fused ones where the processor has them, as NVRTC
// does by default (--fmad=true); these intrinsics are the way to forbid it, so their results are
// hidden from the optimiser.
inline __attribute__((always_inline)) float sim_as_written(float x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
inline float __fadd_rn(float x, float y) { return sim_as_written(x + y); }
inline float __fsub_rn(float x, float y) { return sim_as_written(x - y); }
inline float __fmul_rn(float x, float y) { return sim_as_written(x * y); }
inline float __fdiv_rn(float x, float y) { return sim_as_written(x / y); }
inline float __frcp_rn(float x) { return sim_as_written(1.0f / x); }
inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline int __float2int_rn(float x) { return static_cast<int>(__builtin_rintf(x)); }

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float expm1f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log1pf(float) noexcept;
float tanhf(float) noexcept;
float erff(float) noexcept;
float erfcf(float) noexcept;
float powf(float, float) noexcept;
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float truncf(float) noexcept;
float rintf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
float copysignf(float, float) noexcept;
double exp(double) noexcept;
double fabs(double) noexcept;
double fma(double, double, double) noexcept;
}
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(x * -0.707106781186547524f); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

#define SIM_MIN_MAX(T)                             \
  inline T min(T x, T y) { return y < x ? y : x; } \
  inline T max(T x, T y) { return x < y ? y : x; }
SIM_MIN_MAX(int)
SIM_MIN_MAX(unsigned)
SIM_MIN_MAX(long)
SIM_MIN_MAX(unsigned long)
SIM_MIN_MAX(long long)
SIM_MIN_MAX(unsigned long long)
#undef SIM_MIN_MAX
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

// A counter that grows with time.
inline long long clock64() {
#if defined(__x86_64__)
  return static_cast<long long>(__builtin_ia32_rdtsc());
#else
  long long ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#endif
}
inline void __syncthreads() { sim_syncthreads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { sim_syncwarp(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Shuffles of 32-bit values; wider types do not compile, as they are two instructions.
template <class T>
inline T sim_shuffle_as(sim::Shuffle kind, unsigned mask, T value, int argument, int width) {
  static_assert(sizeof(T) == 4, "shuffle 32-bit values");
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  return __builtin_bit_cast(T, sim_shuffle(kind, mask, bits, argument, width));
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return sim_shuffle_as(sim::Shuffle::Index, mask, value, lane, width);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return sim_shuffle_as(sim::Shuffle::Up, mask, value, static_cast<int>(delta), width);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return sim_shuffle_as(sim::Shuffle::Down, mask, value, static_cast<int>(delta), width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return sim_shuffle_as(sim::Shuffle::Xor, mask, value, lanes, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return sim_vote(sim::Vote::Ballot, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return static_cast<int>(sim_vote(sim::Vote::Any, mask, predicate != 0));
}
inline int __all_sync(unsigned mask, int predicate) {
  return static_cast<int>(sim_vote(sim::Vote::All, mask, predicate != 0));
}

template <class T>
inline T atomicAdd(T* p, T value) {
  if constexpr (__is_same(T, float)) {
    unsigned* bits = reinterpret_cast<unsigned*>(p);
    unsigned old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &old, __float_as_uint(__uint_as_float(old) + value),
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    return __uint_as_float(old);
  } else {
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
  }
}

namespace sim {

// A kernel's parameter struct. Built from the launch's bytes; asked for its size, it leaves before
// the kernel's first statement (see SIM_KERNEL).
template <class T>
struct Params : T {
  template <class Tag>
  Params(Tag tag) : T(*check(tag.bytes)) {}
  static const T* check(const void* bytes) {
    if (bytes == nullptr) throw sizeof(T);
    return static_cast<const T*>(bytes);
  }
};

}  // namespace sim

// Defines kernel `name` up to its parameter list. The parameter type is only known after the macro,
// so the entry calls the kernel through a template: the name is then looked up at the end of the
// file, where the kernel is declared.
#define SIM_KERNEL(threads, min_blocks, name)                                                      \
  struct sim_tag_##name {                                                                          \
    const void* bytes;                                                                             \
  };                                                                                               \
  template <class Tag>                                                                             \
  void sim_enter_##name(Tag tag) {                                                                 \
    sim_body_##name(tag);                                                                          \
  }                                                                                                \
  static void sim_entry_##name(const void* params) { sim_enter_##name(sim_tag_##name{params}); }   \
  static unsigned long sim_bytes_##name() {                                                        \
    try {                                                                                          \
      sim_enter_##name(sim_tag_##name{nullptr});                                                   \
    } catch (unsigned long bytes) {                                                                \
      return bytes;                                                                                \
    }                                                                                              \
    return 0;                                                                                      \
  }                                                                                                \
  extern "C" __attribute__((visibility("default"), used)) const sim::KernelInfo sim_kernel_##name{ \
      SIM_KERNEL_MARK #name, sim_entry_##name, sim_bytes_##name, (threads), (min_blocks)};         \
  static void sim_body_##name
