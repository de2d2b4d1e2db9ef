// The one place where PTX is written: each function is one instruction (or one short loop around
// it), named after what it does. Kernels are plain C++ above this layer. In one file because it is a list in which
// instructions are looked up.
//
// Compiled by NVRTC without any other header. References are to the PTX ISA manual, version 9.0.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A kernel takes one struct by value; the host fills it in and passes its address.
#define KERNEL(threads, min_blocks, name) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name
#define KERNEL_PARAMS(Type) const __grid_constant__ Type

#define INLINE __device__ __forceinline__

namespace ptx {

// A CUtensorMap, encoded by the driver, read by TMA.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// --- Registers: conversions and approximations -----------------------------------------------

INLINE float as_float(u32 x) { return __uint_as_float(x); }
INLINE u32 as_bits(float x) { return __float_as_uint(x); }

// 2^x, relative error below 2^-22; subnormal results are 0.
INLINE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/x within 1 ulp; 0 for infinities.
INLINE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two floats to nearest-even bfloat16, `low` in the low half.
INLINE u32 pack_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// Two floats to nearest-even binary16, `low` in the low half; overflow becomes infinity.
INLINE u32 pack_f16(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// a·b + c of two pairs of 16-bit values, rounded to nearest even once; subnormals are kept (9.7.4, fma).
INLINE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
INLINE u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// Byte i is the one that nibble i of `selected` counts: 0 to 3 of `a`, 4 to 7 of `b`.
INLINE u32 permute_bytes(u32 a, u32 b, u32 selected) { return __byte_perm(a, b, selected); }
// The binary16 in the low half of `x`.
INLINE float float_from_f16(u32 x) {
  float y;
  asm("{ .reg .b16 h;\n cvt.u16.u32 h, %1;\n cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(x));
  return y;
}
// The bfloat16 in the low half of `x`: its bits are the high half of the float's.
INLINE float float_from_bf16(u32 x) { return as_float(x << 16); }
// Rounded to the 10 mantissa bits that tensor cores read of a tf32 operand, ties away from zero.
INLINE u32 tf32_bits(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// --- Global memory -----------------------------------------------------------------------------

// `BYTES` bytes as 32-bit words (16-bit for 2), aligned to their size.
template <int BYTES>
struct alignas(BYTES) Raw {
  u32 word[BYTES / 4];
};
template <>
struct alignas(2) Raw<2> {
  u16 half;
};

// Loads and stores without a hint, see elementwise.cuh. Never the read-only path: what is read may have been
// written by this grid.
INLINE Raw<16> load_global(const Raw<16>* p) {
  Raw<16> r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3])
               : "l"(p)
               : "memory");
  return r;
}
INLINE Raw<8> load_global(const Raw<8>* p) {
  Raw<8> r;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.word[0]), "=r"(r.word[1]) : "l"(p) : "memory");
  return r;
}
INLINE Raw<4> load_global(const Raw<4>* p) {
  Raw<4> r;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(r.word[0]) : "l"(p) : "memory");
  return r;
}
INLINE Raw<2> load_global(const Raw<2>* p) {
  Raw<2> r;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(r.half) : "l"(p) : "memory");
  return r;
}
// Where `exists`, else zeros: one guarded instruction, which the compiler leaves where it is.
INLINE Raw<16> load_global_if(bool exists, const Raw<16>* p) {
  Raw<16> r = {};
  asm volatile(
      "{.reg .pred e;\n setp.ne.u32 e, %5, 0;\n @e ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(r.word[0]), "+r"(r.word[1]), "+r"(r.word[2]), "+r"(r.word[3])
      : "l"(p), "r"((u32)exists)
      : "memory");
  return r;
}
INLINE Raw<4> load_global_if(bool exists, const Raw<4>* p) {
  Raw<4> r = {};
  asm volatile("{.reg .pred e;\n setp.ne.u32 e, %2, 0;\n @e ld.global.u32 %0, [%1];}"
               : "+r"(r.word[0])
               : "l"(p), "r"((u32)exists)
               : "memory");
  return r;
}
INLINE Raw<2> load_global_if(bool exists, const Raw<2>* p) {
  Raw<2> r = {};
  asm volatile("{.reg .pred e;\n setp.ne.u32 e, %2, 0;\n @e ld.global.u16 %0, [%1];}"
               : "+h"(r.half)
               : "l"(p), "r"((u32)exists)
               : "memory");
  return r;
}
INLINE void store_global(Raw<16>* p, Raw<16> r) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r.word[0]), "r"(r.word[1]),
               "r"(r.word[2]), "r"(r.word[3])
               : "memory");
}
INLINE void store_global(Raw<8>* p, Raw<8> r) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(r.word[0]), "r"(r.word[1]) : "memory");
}
INLINE void store_global(Raw<4>* p, Raw<4> r) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(r.word[0]) : "memory");
}
INLINE void store_global(Raw<2>* p, Raw<2> r) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(r.half) : "memory");
}
// Asks for 32 bytes to be in L2.
INLINE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// --- Between blocks of a grid ------------------------------------------------------------------

// An ordinary store of what other blocks read once this one has released it, below.
template <class T>
INLINE void store_for_grid(T* p, T value) {
  *(volatile T*)p = value;
}
// Adds to a word after everything that this thread, and those it has met at a barrier of the block,
// stored before is visible to the device (9.7.13.6, red; 8.10).
INLINE void add_release(u32* p, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
// A word that other blocks change meanwhile (9.7.9.8, ld).
INLINE u32 load_relaxed(const u32* p) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// Waits until the highest bit of a word is another than in `before`. Then this thread, and those it
// meets at a barrier of the block, see what was released by the threads that changed the word.
INLINE void wait_for_turnover(const u32* p, u32 before) {
  asm volatile(
      "{\n .reg .pred same;\n .reg .u32 now;\n"
      "again_%=:\n ld.acquire.gpu.global.u32 now, [%0];\n xor.b32 now, now, %1;\n"
      " setp.ge.s32 same, now, 0;\n @same bra again_%=;\n}\n" ::"l"(p),
      "r"(before)
      : "memory");
}

// --- Shared memory -----------------------------------------------------------------------------

// The block's dynamic shared memory; kernels align what they need themselves.
INLINE u8* dynamic_shared() {
  extern __shared__ __align__(1024) u8 shared_bytes[];
  return shared_bytes;
}
// The 32-bit address of a shared-memory pointer, as the instructions below take it.
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

INLINE u32 load_shared(u32 address) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
INLINE Raw<8> load_shared_pair(u32 address) {
  Raw<8> r;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(r.word[0]), "=r"(r.word[1])
               : "r"(address)
               : "memory");
  return r;
}
INLINE Raw<16> load_shared_wide(u32 address) {
  Raw<16> r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3])
               : "r"(address)
               : "memory");
  return r;
}
INLINE void store_shared(u32 address, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}
INLINE void store_shared(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Asynchronous copy of BYTES (4, 8 or 16) from global to shared memory, or zeros where the source does not exist: nothing
// is read then (PTX ISA 9.7.9.25.3, cp.async). A count of bytes to read instead would cost four instructions: the
// device has a predicate.
template <int BYTES>
INLINE void copy_async(u32 to, const void* from, bool exists) {
  if constexpr (BYTES == 16) {
    // Rows are read front to back: what follows in the same 256 bytes is asked for soon.
    asm volatile(
        "{\n .reg .pred missing;\n setp.eq.u32 missing, %2, 0;\n"
        " cp.async.cg.shared.global.L2::256B [%0], [%1], 16, missing;\n}" ::"r"(to),
        "l"(from), "r"((u32)exists)
        : "memory");
  } else {
    asm volatile(
        "{\n .reg .pred missing;\n setp.eq.u32 missing, %2, 0;\n"
        " cp.async.ca.shared.global [%0], [%1], %3, missing;\n}" ::"r"(to),
        "l"(from), "r"((u32)exists), "n"(BYTES)
        : "memory");
  }
}
INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's latest groups are under way.
template <int PENDING>
INLINE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8×8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i, and
// gets elements 2(lane % 4) and the next of row lane / 4 of each (9.7.14.5.15, ldmatrix).
INLINE void load_matrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// As above, each matrix transposed.
INLINE void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// The inverse of `load_matrix_x4` (sm_90; 9.7.14.5.16, stmatrix).
INLINE void store_matrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// --- Tensor cores of a warp (sm_80) ----------------------------------------------------------

// d += a·b, m16n8k16, binary16 (9.7.14.5.8).
INLINE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a·b, m16n8k16, bfloat16.
INLINE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a·b, m16n8k8, tf32 (9.7.14.5.6).
INLINE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// --- Barriers (sm_90) --------------------------------------------------------------------------

// Barrier ID (1 to 15) among `threads` threads of the block. The id is an immediate: with one in a
// register ptxas reserves all sixteen.
template <int ID>
INLINE void named_barrier(u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}

// Counts at the barrier without waiting at it.
template <int ID>
INLINE void named_barrier_arrive(u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}

// mbarrier objects are 8 bytes of shared memory (9.7.13.15).
INLINE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA and to other blocks of the cluster.
INLINE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
INLINE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and announces `bytes` that copies will complete in this phase.
INLINE void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of the given parity has completed.
INLINE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again_%=;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether this thread is the one that its warp elects, always the same; all of the warp has to ask. The compiler knows
// that one thread takes such a branch: in others it repeats a copy for each lane, in eight instructions (elect.sync).
INLINE bool elect() {
  u32 elected;
  asm volatile("{\n .reg .pred one;\n elect.sync _|one, 0xFFFFFFFF;\n selp.u32 %0, 1, 0, one;\n}\n" : "=r"(elected));
  return elected != 0;
}

// --- Clusters (sm_90) --------------------------------------------------------------------------

// This block's number in its cluster.
INLINE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The address, for the operations that take one of the cluster, of what lies at `address` in the
// shared memory of block `rank`.
INLINE u32 cluster_address(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Reads the shared memory of any block of the cluster.
INLINE Raw<8> load_shared_cluster(u32 address) {
  Raw<8> r;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(r.word[0]), "=r"(r.word[1])
               : "r"(address)
               : "memory");
  return r;
}
// Stores to the shared memory of any block of the cluster, and completes 8 bytes on a barrier of the same block, which
// whoever reads them waits for (9.7.9.12, st.async).
INLINE void store_shared_cluster(u32 address, const Raw<8>& x, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "r"(x.word[0]), "r"(x.word[1]), "r"(barrier)
               : "memory");
}
// The two halves of a barrier of all threads of the cluster that publishes initialised barriers and nothing else.
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Waits for every thread of the cluster that has not ended.
INLINE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at a barrier of any block of the cluster, to say that this thread has read: it publishes no
// writes to other blocks. With `.release.cluster`, which would, each arrival waits for a fence of the
// memory system, about 1 µs.
INLINE void barrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// --- Bulk copies of TMA (sm_90) --------------------------------------------------------------

INLINE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies the map's box at (column, row) to shared memory and completes its bytes on `barrier`.
// What lies outside the tensor is written as zeros and counted.
INLINE void tensor_load(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// The same with a `policy` of L2, below.
INLINE void tensor_load(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}
// As the first, to the same place of every block of the cluster whose bit is set in `blocks`; each of
// them has its own bytes completed on its own barrier.
INLINE void tensor_load_multicast(u32 to, const TensorMap* map, u32 barrier, int column, int row,
                                  u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}
// Copies shared memory to the map's box at (column, row), clipped to the tensor.
INLINE void tensor_store(const TensorMap* map, u32 from, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from), "r"(column), "r"(row)
      : "memory");
}
// Copies `bytes` to shared memory and completes them on `barrier`. Both addresses and the number of bytes
// are multiples of 16 (9.7.9.25.5.2, cp.async.bulk). `policy`: of L2, below.
INLINE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// The same without a policy.
INLINE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// What is read with it is the first to leave L2 (9.7.9.18, createpolicy).
INLINE u64 policy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// What is read with it leaves L2 in the order of use, as without a policy.
INLINE u64 policy_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// What nobody reads again, with a `policy`: as load_global_if, past the first-level cache.
INLINE Raw<16> load_global_if(bool exists, const Raw<16>* p, u64 policy) {
  Raw<16> r = {};
  asm volatile(
      "{.reg .pred e;\n setp.ne.u32 e, %5, 0;\n"
      " @e ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
      : "+r"(r.word[0]), "+r"(r.word[1]), "+r"(r.word[2]), "+r"(r.word[3])
      : "l"(p), "r"((u32)exists), "l"(policy)
      : "memory");
  return r;
}
INLINE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's bulk groups still read shared memory.
template <int PENDING>
INLINE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until at most `PENDING` of this thread's bulk groups are incomplete.
template <int PENDING>
INLINE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Orders this thread's ordinary writes to shared memory before later reads of it by TMA
// or the tensor cores; every writing thread needs it, before the barrier that hands the data over.
INLINE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders ordinary writes of global memory that this thread has seen before its later copies of it by the
// TMA (8.6, proxies).
INLINE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- Launch order (sm_90) ----------------------------------------------------------------------

// Waits for the grids before this one; nothing without programmatic launch.
INLINE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next grid start; it still waits, as above, for the memory of this one.
INLINE void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif  // sm_90

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// --- Tensor cores of a warpgroup (sm_90a; 9.7.15) ----------------------------------------------

// Registers per thread of the calling warpgroup; given back or asked for in steps of 8.
template <int N>
INLINE void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
INLINE void registers_request() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Descriptor of an operand in shared memory with lines of LINE bytes in the swizzle of as many, aligned to
// eight lines (9.7.15.5.1.2.2): bits 0-13 address/16, 16-29 leading and 32-45 stride byte offset/16, 62-63
// the swizzle. K-major: 8-row groups are `stride` = 8 lines apart and `leading` is not read.
// MN-major: groups of 8 k are `stride` apart, groups of LINE/2 n are `leading` apart.
template <int LINE = 128>
INLINE u64 swizzled_operand(u32 address, u32 leading) {
  static_assert(LINE == 128 || LINE == 64 || LINE == 32, "bytes of a line of the swizzle");
  constexpr u64 kSwizzle = LINE == 128 ? 1 : LINE == 64 ? 2 : 3;
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(8 * LINE >> 4) << 32) |
         (kSwizzle << 62);
}

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `PENDING` of the warpgroup's groups are under way; only then may the
// accumulators of the others be read.
template <int PENDING>
INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Accumulators i and the next ones of d, and the names of so many registers of an instruction from the i-th on.
#define SWIGLU_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SWIGLU_F8(d, i) SWIGLU_F4(d, i), SWIGLU_F4(d, i + 4)
#define SWIGLU_F16(d, i) SWIGLU_F8(d, i), SWIGLU_F8(d, i + 8)
#define SWIGLU_F32(d, i) SWIGLU_F16(d, i), SWIGLU_F16(d, i + 16)
#define SWIGLU_F64(d, i) SWIGLU_F32(d, i), SWIGLU_F32(d, i + 32)
#define SWIGLU_R4 "%0,%1,%2,%3"
#define SWIGLU_R8_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SWIGLU_R8_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SWIGLU_R8_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SWIGLU_R8_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SWIGLU_R8_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define SWIGLU_R8_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define SWIGLU_R8_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define SWIGLU_R8_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define SWIGLU_R8_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define SWIGLU_R8_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define SWIGLU_R8_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define SWIGLU_R8_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define SWIGLU_R8_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define SWIGLU_R8_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define SWIGLU_R8_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define SWIGLU_R8_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define SWIGLU_R8 SWIGLU_R8_0
#define SWIGLU_R16 SWIGLU_R8 SWIGLU_R8_8
#define SWIGLU_R24 SWIGLU_R16 SWIGLU_R8_16
#define SWIGLU_R32 SWIGLU_R24 SWIGLU_R8_24
#define SWIGLU_R40 SWIGLU_R32 SWIGLU_R8_32
#define SWIGLU_R48 SWIGLU_R40 SWIGLU_R8_40
#define SWIGLU_R56 SWIGLU_R48 SWIGLU_R8_48
#define SWIGLU_R64 SWIGLU_R56 SWIGLU_R8_56
#define SWIGLU_R72 SWIGLU_R64 SWIGLU_R8_64
#define SWIGLU_R80 SWIGLU_R72 SWIGLU_R8_72
#define SWIGLU_R88 SWIGLU_R80 SWIGLU_R8_80
#define SWIGLU_R96 SWIGLU_R88 SWIGLU_R8_88
#define SWIGLU_R104 SWIGLU_R96 SWIGLU_R8_96
#define SWIGLU_R112 SWIGLU_R104 SWIGLU_R8_104
#define SWIGLU_R120 SWIGLU_R112 SWIGLU_R8_112
#define SWIGLU_R128 SWIGLU_R120 SWIGLU_R8_120

// d = a·b (+ d if `accumulate`), m64 × N × k16, both operands described in shared memory.
#define SWIGLU_WGMMA_OF(N, TYPE, REGISTERS, A, B, ACCUMULATE, TA, TB, ...)                         \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #ACCUMULATE                                  \
               ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE            \
               " {" REGISTERS "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}\n"             \
               : __VA_ARGS__                                                                       \
               : "l"(a), "l"(b), "r"(accumulate ? 1 : 0), "n"(TRANSPOSE_A ? 1 : 0),                \
                 "n"(TRANSPOSE_B ? 1 : 0))
// A, B and the next three are numbers of operands, counted behind N / 2 accumulators.
#define SWIGLU_WGMMA(N, REGISTERS, A, B, ACCUMULATE, TA, TB, ...)                                  \
  if constexpr (BF16) {                                                                            \
    SWIGLU_WGMMA_OF(N, bf16, REGISTERS, A, B, ACCUMULATE, TA, TB, __VA_ARGS__);                    \
  } else {                                                                                         \
    SWIGLU_WGMMA_OF(N, f16, REGISTERS, A, B, ACCUMULATE, TA, TB, __VA_ARGS__);                     \
  }

// The accumulators a thread holds of an m64 × N tile: element d[4j + 2i + c] is row
// 16·warp + lane/4 + 8i, column 8j + 2(lane % 4) + c (9.7.15.5.2, figure of fragment D). A
// transposed operand is MN-major.
template <int N, bool BF16, bool TRANSPOSE_B, bool TRANSPOSE_A = false>
INLINE void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  static_assert(N == 8 || N <= 256 && N % 16 == 0, "of the instruction's multiples of 8 the first and the even ones");
  if constexpr (N == 8) {
    SWIGLU_WGMMA(8, SWIGLU_R4, 4, 5, 6, 7, 8, SWIGLU_F4(d, 0));
  } else if constexpr (N == 16) {
    SWIGLU_WGMMA(16, SWIGLU_R8, 8, 9, 10, 11, 12, SWIGLU_F8(d, 0));
  } else if constexpr (N == 32) {
    SWIGLU_WGMMA(32, SWIGLU_R16, 16, 17, 18, 19, 20, SWIGLU_F16(d, 0));
  } else if constexpr (N == 48) {
    SWIGLU_WGMMA(48, SWIGLU_R24, 24, 25, 26, 27, 28, SWIGLU_F16(d, 0), SWIGLU_F8(d, 16));
  } else if constexpr (N == 64) {
    SWIGLU_WGMMA(64, SWIGLU_R32, 32, 33, 34, 35, 36, SWIGLU_F32(d, 0));
  } else if constexpr (N == 80) {
    SWIGLU_WGMMA(80, SWIGLU_R40, 40, 41, 42, 43, 44, SWIGLU_F32(d, 0), SWIGLU_F8(d, 32));
  } else if constexpr (N == 96) {
    SWIGLU_WGMMA(96, SWIGLU_R48, 48, 49, 50, 51, 52, SWIGLU_F32(d, 0), SWIGLU_F16(d, 32));
  } else if constexpr (N == 112) {
    SWIGLU_WGMMA(112, SWIGLU_R56, 56, 57, 58, 59, 60, SWIGLU_F32(d, 0),
                 SWIGLU_F16(d, 32), SWIGLU_F8(d, 48));
  } else if constexpr (N == 128) {
    SWIGLU_WGMMA(128, SWIGLU_R64, 64, 65, 66, 67, 68, SWIGLU_F64(d, 0));
  } else if constexpr (N == 144) {
    SWIGLU_WGMMA(144, SWIGLU_R72, 72, 73, 74, 75, 76, SWIGLU_F64(d, 0), SWIGLU_F8(d, 64));
  } else if constexpr (N == 160) {
    SWIGLU_WGMMA(160, SWIGLU_R80, 80, 81, 82, 83, 84, SWIGLU_F64(d, 0), SWIGLU_F16(d, 64));
  } else if constexpr (N == 176) {
    SWIGLU_WGMMA(176, SWIGLU_R88, 88, 89, 90, 91, 92, SWIGLU_F64(d, 0),
                 SWIGLU_F16(d, 64), SWIGLU_F8(d, 80));
  } else if constexpr (N == 192) {
    SWIGLU_WGMMA(192, SWIGLU_R96, 96, 97, 98, 99, 100, SWIGLU_F64(d, 0), SWIGLU_F32(d, 64));
  } else if constexpr (N == 208) {
    SWIGLU_WGMMA(208, SWIGLU_R104, 104, 105, 106, 107, 108, SWIGLU_F64(d, 0),
                 SWIGLU_F32(d, 64), SWIGLU_F8(d, 96));
  } else if constexpr (N == 224) {
    SWIGLU_WGMMA(224, SWIGLU_R112, 112, 113, 114, 115, 116, SWIGLU_F64(d, 0),
                 SWIGLU_F32(d, 64), SWIGLU_F16(d, 96));
  } else if constexpr (N == 240) {
    SWIGLU_WGMMA(240, SWIGLU_R120, 120, 121, 122, 123, 124, SWIGLU_F64(d, 0),
                 SWIGLU_F32(d, 64), SWIGLU_F16(d, 96), SWIGLU_F8(d, 112));
  } else {
    SWIGLU_WGMMA(256, SWIGLU_R128, 128, 129, 130, 131, 132, SWIGLU_F64(d, 0), SWIGLU_F64(d, 64));
  }
}

#endif  // sm_90a

}  // namespace ptx
