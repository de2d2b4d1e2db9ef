// The CPU's side of the layer that device code is written on: the names and semantics of
// swiglu-cuda/device/lib/ptx.cuh, for simulated threads. The compiler library puts it in the place of
// that file. What is available on which architecture is guarded alike, so that a kernel for sm_80
// that uses an instruction of sm_90 does not compile here either.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL(threads, min_blocks, name) SIM_KERNEL(threads, min_blocks, name)
#define KERNEL_PARAMS(Type) const ::sim::Params<Type>

#define INLINE __device__ __forceinline__

namespace ptx {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// --- Registers: conversions and approximations -----------------------------------------------

INLINE float as_float(u32 x) { return __uint_as_float(x); }
INLINE u32 as_bits(float x) { return __float_as_uint(x); }

// Subnormal values count as zeros of their sign (.ftz).
INLINE float flushed(float x) {
  return (as_bits(x) & 0x7f800000u) == 0 ? as_float(as_bits(x) & 0x80000000u) : x;
}
// An approximation is not the rounded value: a third of the results are off by one unit in the last
// place, so that no test comes to depend on the host's exactness.
INLINE float nudged(float x, u32 key) {
  const u32 hash = (key * 2654435761u) >> 24;
  const u32 exponent = as_bits(x) & 0x7f800000u;
  if (hash >= 85 || exponent == 0 || exponent == 0x7f800000u) return x;
  return as_float(as_bits(x) + (hash & 1 ? 1u : ~0u));
}
INLINE float exp2_approx(float x) {
  const float value = exp2f(flushed(x));
  // Powers of two are exact.
  return flushed(x == rintf(x) ? value : nudged(value, as_bits(x)));
}
INLINE float reciprocal_approx(float x) {
  const float value = 1.0f / flushed(x);
  return flushed((as_bits(x) & 0x007fffffu) == 0 ? value : nudged(value, as_bits(x)));
}
INLINE u32 bf16_bits(float x) {
  if (isnan(x)) return 0x7fffu;  // the canonical NaN of cvt (PTX ISA 9.7.9.21)
  const u32 bits = as_bits(x);
  return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}
INLINE u32 f16_bits(float x) {
  if (isnan(x)) return 0x7fffu;
  const u32 sign = (as_bits(x) >> 16) & 0x8000u, magnitude = as_bits(x) & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the value in units of 2^-24, rounded to nearest even.
    return sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13);
}
INLINE u32 pack_bf16(float low, float high) { return bf16_bits(low) | (bf16_bits(high) << 16); }
INLINE u32 pack_f16(float low, float high) { return f16_bits(low) | (f16_bits(high) << 16); }
INLINE float float_from_f16(u32 x) {
  const u32 sign = (x & 0x8000u) << 16, magnitude = (x & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return as_float(sign | 0x7f800000u | (magnitude & 0x007fffffu));
  // The exponent's bias changes by 112; a multiplication also normalises subnormal values.
  return as_float(sign | as_bits(as_float(magnitude) * 0x1p112f));
}
INLINE float float_from_bf16(u32 x) { return as_float(x << 16); }
// Rounded to float first: what is added up here has few bits.
INLINE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  const auto fma = [](u32 a, u32 b, u32 c) {
    return __fmaf_rn(float_from_bf16(a), float_from_bf16(b), float_from_bf16(c));
  };
  return pack_bf16(fma(a, b, c), fma(a >> 16, b >> 16, c >> 16));
}
INLINE u32 fma_f16x2(u32 a, u32 b, u32 c) {
  const auto fma = [](u32 a, u32 b, u32 c) {
    return __fmaf_rn(float_from_f16(a & 0xffffu), float_from_f16(b & 0xffffu),
                     float_from_f16(c & 0xffffu));
  };
  return pack_f16(fma(a, b, c), fma(a >> 16, b >> 16, c >> 16));
}
INLINE u32 permute_bytes(u32 a, u32 b, u32 selected) {
  const u64 both = (u64)b << 32 | a;
  u32 y = 0;
  for (int i = 0; i < 4; ++i) {
    y |= (u32)(both >> (8 * (selected >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return y;
}
INLINE u32 tf32_bits(float x) {
  if (!isfinite(x)) return isnan(x) ? 0x7fffffffu : as_bits(x);
  return (as_bits(x) + 0x1000u) & 0xffffe000u;
}

// --- Global memory -----------------------------------------------------------------------------

template <int BYTES>
struct alignas(BYTES) Raw {
  u32 word[BYTES / 4];
};
template <>
struct alignas(2) Raw<2> {
  u16 half;
};

// A vector access needs its full alignment on a GPU; a CPU would not notice.
template <int BYTES>
INLINE Raw<BYTES> load_global(const Raw<BYTES>* p) {
  sim_reads_grid(p, BYTES);
  if ((u64)p % BYTES != 0) sim_misaligned(p, BYTES);
  return *p;
}
INLINE Raw<16> load_global_if(bool exists, const Raw<16>* p) {
  return exists ? load_global(p) : Raw<16>{};
}
INLINE Raw<4> load_global_if(bool exists, const Raw<4>* p) {
  return exists ? load_global(p) : Raw<4>{};
}
INLINE Raw<2> load_global_if(bool exists, const Raw<2>* p) {
  return exists ? load_global(p) : Raw<2>{};
}
// Reads a byte, so that a wrong address is found.
INLINE void prefetch_l2(const void* p) { (void)*(const volatile u8*)p; }
template <int BYTES>
INLINE void store_global(Raw<BYTES>* p, Raw<BYTES> r) {
  if ((u64)p % BYTES != 0) sim_misaligned(p, BYTES);
  *p = r;
  sim_stores_global(p, BYTES);
}

// --- Between blocks of a grid ------------------------------------------------------------------

template <class T>
INLINE void store_for_grid(T* p, T value) {
  sim_store_for_grid(p, &value, sizeof value);
}
INLINE void add_release(u32* p, u32 value) { sim_add_release(p, value); }
INLINE u32 load_relaxed(const u32* p) { return sim_load_relaxed(p); }
INLINE void wait_for_turnover(const u32* p, u32 before) { sim_wait_for_turnover(p, before); }

// --- Shared memory -----------------------------------------------------------------------------

INLINE u8* dynamic_shared() { return sim_thread->dynamic_shared; }
INLINE u32 shared_address(const void* p) { return sim_shared_address(p); }
INLINE u32 load_shared(u32 address) { return sim_load_shared(address); }
INLINE Raw<8> load_shared_pair(u32 address) {
  if (address % 8 != 0) sim_misaligned((const void*)(u64)address, 8);
  return {{sim_load_shared(address), sim_load_shared(address + 4)}};
}
INLINE Raw<16> load_shared_wide(u32 address) {
  Raw<16> r;
  sim_load_shared_wide(address, r.word);
  return r;
}
INLINE void store_shared(u32 address, u16 x) { sim_store_shared(address, x, 2); }
INLINE void store_shared(u32 address, u32 x) { sim_store_shared(address, x, 4); }

template <int BYTES>
INLINE void copy_async(u32 to, const void* from, bool exists) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  sim_copy_async(to, from, BYTES, exists ? BYTES : 0);
}
INLINE void copy_async_commit() { sim_copy_async_commit(); }
template <int PENDING>
INLINE void copy_async_wait() {
  sim_copy_async_wait(PENDING);
}

INLINE void load_matrix_x4(u32 (&r)[4], u32 address) {
  sim_matrix_move(sim::MatrixMove::Load, 4, address, r);
}
INLINE void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
  sim_matrix_move(sim::MatrixMove::LoadTransposed, 4, address, r);
}
INLINE void store_matrix_x4(u32 address, const u32 (&r)[4]) {
  u32 copy[4] = {r[0], r[1], r[2], r[3]};
  sim_matrix_move(sim::MatrixMove::Store, 4, address, copy);
}

// --- Tensor cores of a warp (sm_80) ----------------------------------------------------------

INLINE void mma_of(sim::Element element, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 b[2] = {b0, b1};
  sim_mma(element, d, a, b);
}
INLINE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_of(sim::Element::F16, d, a, b0, b1);
}
INLINE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_of(sim::Element::BF16, d, a, b0, b1);
}
INLINE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_of(sim::Element::TF32, d, a, b0, b1);
}

#if __CUDA_ARCH__ >= 900

// --- Barriers (sm_90) --------------------------------------------------------------------------

template <int ID>
INLINE void named_barrier(u32 threads) {
  static_assert(ID >= 1 && ID <= 15, "0 is __syncthreads");
  sim_named_barrier(ID, threads);
}
template <int ID>
INLINE void named_barrier_arrive(u32 threads) {
  static_assert(ID >= 1 && ID <= 15, "0 is __syncthreads");
  sim_named_barrier_arrive(ID, threads);
}
INLINE void barrier_init(u32 barrier, u32 arrivals) { sim_barrier_init(barrier, arrivals); }
INLINE void barrier_init_fence() { sim_barrier_init_fence(); }
INLINE void barrier_arrive(u32 barrier) { sim_barrier_arrive(barrier, 0); }
INLINE void barrier_arrive_expect(u32 barrier, u32 bytes) { sim_barrier_arrive(barrier, bytes); }
INLINE void barrier_wait(u32 barrier, u32 parity) { sim_barrier_wait(barrier, parity); }
// Which lane it is is not said; it takes all of the warp.
INLINE bool elect() { return __shfl_sync(~0u, threadIdx.x % 32, 31) == threadIdx.x % 32; }

// --- Clusters (sm_90) --------------------------------------------------------------------------

INLINE u32 cluster_rank() { return sim_cluster_rank(); }
INLINE u32 cluster_address(u32 address, u32 rank) { return sim_cluster_address(address, rank); }
INLINE Raw<8> load_shared_cluster(u32 address) {
  if (address % 8 != 0) sim_misaligned((const void*)(u64)address, 8);
  return {{sim_load_shared_cluster(address), sim_load_shared_cluster(address + 4)}};
}
INLINE void store_shared_cluster(u32 address, const Raw<8>& x, u32 barrier) {
  if (address % 8 != 0) sim_misaligned((const void*)(u64)address, 8);
  sim_store_shared_cluster(address, x.word, barrier);
}
INLINE void cluster_arrive() { sim_cluster_arrive(); }
INLINE void cluster_wait() { sim_cluster_wait(); }
INLINE void cluster_barrier() {
  sim_cluster_arrive();
  sim_cluster_wait();
}
INLINE void barrier_arrive_cluster(u32 barrier) { sim_barrier_arrive_cluster(barrier); }

// --- Bulk copies of TMA (sm_90) --------------------------------------------------------------

INLINE void prefetch_tensor_map(const TensorMap* map) { sim_prefetch_tensor_map(map); }
INLINE void tensor_load(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
  sim_tensor_load(to, map, barrier, column, row);
}
INLINE void tensor_load(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 policy) {
  sim_expect_policy(policy, "a tensor load");
  sim_tensor_load(to, map, barrier, column, row);
}
INLINE void tensor_load_multicast(u32 to, const TensorMap* map, u32 barrier, int column, int row,
                                  u16 blocks) {
  sim_tensor_load_multicast(to, map, barrier, column, row, blocks);
}
INLINE void tensor_store(const TensorMap* map, u32 from, int column, int row) {
  sim_tensor_store(map, from, column, row);
}
INLINE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  sim_bulk_load(to, from, bytes, barrier, policy);
}
INLINE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  sim_bulk_load(to, from, bytes, barrier, SIM_CACHE_POLICY);
}
INLINE u64 policy_evict_first() { return SIM_CACHE_POLICY; }
INLINE u64 policy_evict_normal() { return SIM_CACHE_POLICY; }
INLINE Raw<16> load_global_if(bool exists, const Raw<16>* p, u64 policy) {
  sim_expect_policy(policy, "a load");
  return load_global_if(exists, p);
}
INLINE void bulk_commit() { sim_bulk_commit(); }
template <int PENDING>
INLINE void bulk_wait_read() {
  sim_bulk_wait(PENDING, true);
}
template <int PENDING>
INLINE void bulk_wait() {
  sim_bulk_wait(PENDING, false);
}
INLINE void fence_async_shared() { sim_fence_async_shared(); }
INLINE void fence_async_global() { sim_fence_async_global(); }

// --- Launch order (sm_90) ----------------------------------------------------------------------

INLINE void grid_dependency_wait() { sim_grid_dependency_wait(); }
INLINE void grid_dependency_launch() { sim_grid_dependency_launch(); }

#endif  // sm_90

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// --- Tensor cores of a warpgroup (sm_90a) ------------------------------------------------------

template <int N>
INLINE void registers_release() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg takes 24 to 256 in steps of 8");
  sim_registers(N, false);
}
template <int N>
INLINE void registers_request() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg takes 24 to 256 in steps of 8");
  sim_registers(N, true);
}

template <int LINE = 128>
INLINE u64 swizzled_operand(u32 address, u32 leading) {
  static_assert(LINE == 128 || LINE == 64 || LINE == 32, "bytes of a line of the swizzle");
  constexpr u64 kSwizzle = LINE == 128 ? 1 : LINE == 64 ? 2 : 3;
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(8 * LINE >> 4) << 32) |
         (kSwizzle << 62);
}

INLINE void wgmma_fence() { sim_wgmma_fence(); }
INLINE void wgmma_commit() { sim_wgmma_commit(); }
template <int PENDING>
INLINE void wgmma_wait() {
  sim_wgmma_wait(PENDING);
}
template <int N, bool BF16, bool TRANSPOSE_B, bool TRANSPOSE_A = false>
INLINE void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  static_assert(N >= 8 && N <= 256 && N % 8 == 0, "wgmma takes N of 8 to 256 in steps of 8");
  const sim::Element element = BF16 ? sim::Element::BF16 : sim::Element::F16;
  const sim::WgmmaArgs args = {a, b, d, N, element, TRANSPOSE_A, TRANSPOSE_B, accumulate};
  sim_wgmma(&args);
}

#endif  // sm_90a

}  // namespace ptx
