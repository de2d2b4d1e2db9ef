// What a compiled kernel and the simulated driver share: the view a simulated thread has of
// itself, the table that describes a kernel, and the operations that need other threads.
//
// Included by kernels (through ptx.hpp) and by the runtime in libcuda.so.1, so it has no other
// includes.
#pragma once

namespace sim {

struct Index3 {
  unsigned x, y, z;
};

// The part of a simulated thread that device code reads directly.
struct ThreadView {
  Index3 thread_index, block_index, block_dim, grid_dim;
  unsigned char* dynamic_shared;
};

// One per kernel of an image, found by the symbol `sim_kernel_<name>`.
struct KernelInfo {
  const char* marked_name;  // after KERNEL_MARK, so that the compiler can list an image's kernels
  void (*entry)(const void* params);
  unsigned long (*params_bytes)();
  unsigned threads, min_blocks;
};

enum class Shuffle : int { Index, Up, Down, Xor };
enum class Vote : int { Ballot, Any, All };
enum class Element : int { F16, BF16, TF32 };
enum class MatrixMove : int { Load, LoadTransposed, Store };

// wgmma.mma_async, D = A·B (+ D): one thread's view of it.
struct WgmmaArgs {
  unsigned long long a, b;
  float* d;
  int n;
  Element element;
  bool transpose_a, transpose_b, accumulate;
};

}  // namespace sim

#define SIM_KERNEL_MARK "\1simulated kernel:"
// What createpolicy gives here: opaque, and no other value is one.
#define SIM_CACHE_POLICY 0x12f0000000000000ull

// Exported from libcuda.so.1, whose other symbols are hidden.
#pragma GCC visibility push(default)
extern "C" {

// The running thread. Initial-exec: libcuda.so.1 takes 8 bytes of the loader's spare static block,
// and an access costs one load.
extern __thread sim::ThreadView* sim_thread __attribute__((tls_model("initial-exec")));

unsigned sim_shared_address(const void* pointer);
void sim_misaligned(const void* pointer, unsigned bytes);

void sim_syncthreads();
void sim_named_barrier(unsigned id, unsigned threads);
void sim_named_barrier_arrive(unsigned id, unsigned threads);
void sim_syncwarp(unsigned mask);
unsigned sim_shuffle(sim::Shuffle kind, unsigned mask, unsigned value, int argument, int width);
unsigned sim_vote(sim::Vote kind, unsigned mask, bool predicate);

void sim_store_for_grid(void* to, const void* from, unsigned bytes);
void sim_reads_grid(const void* from, unsigned bytes);
void sim_tma_reads_grid(const void* from, unsigned bytes);
void sim_grid_dependency_wait();
void sim_grid_dependency_launch();
void sim_stores_global(const void* to, unsigned bytes);
void sim_add_release(unsigned* p, unsigned value);
unsigned sim_load_relaxed(const unsigned* p);
void sim_wait_for_turnover(const unsigned* p, unsigned before);

unsigned sim_load_shared(unsigned address);
void sim_load_shared_wide(unsigned address, unsigned* words);
void sim_store_shared(unsigned address, unsigned value, unsigned bytes);
void sim_copy_async(unsigned to, const void* from, unsigned bytes, unsigned read);
void sim_copy_async_commit();
void sim_copy_async_wait(unsigned pending);

void sim_matrix_move(sim::MatrixMove kind, unsigned count, unsigned address, unsigned* registers);
void sim_mma(sim::Element element, float* d, const unsigned* a, const unsigned* b);

void sim_barrier_init(unsigned barrier, unsigned arrivals);
void sim_barrier_init_fence();
void sim_barrier_arrive(unsigned barrier, unsigned expect_bytes);
void sim_barrier_wait(unsigned barrier, unsigned parity);

unsigned sim_cluster_rank();
unsigned sim_cluster_address(unsigned address, unsigned rank);
unsigned sim_load_shared_cluster(unsigned address);
void sim_store_shared_cluster(unsigned address, const unsigned* words, unsigned barrier);
void sim_cluster_arrive();
void sim_cluster_wait();
void sim_barrier_arrive_cluster(unsigned barrier);

void sim_prefetch_tensor_map(const void* map);
void sim_expect_policy(unsigned long long policy, const char* operation);
void sim_tensor_load(unsigned to, const void* map, unsigned barrier, int column, int row);
void sim_tensor_load_multicast(unsigned to, const void* map, unsigned barrier, int column, int row,
                               unsigned blocks);
void sim_bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                   unsigned long long policy);
void sim_tensor_store(const void* map, unsigned from, int column, int row);
void sim_bulk_commit();
void sim_bulk_wait(unsigned pending, bool only_read);
void sim_fence_async_shared();
void sim_fence_async_global();

void sim_registers(unsigned count, bool request);
void sim_wgmma_fence();
void sim_wgmma(const sim::WgmmaArgs* args);
void sim_wgmma_commit();
void sim_wgmma_wait(unsigned pending);

}  // extern "C"
#pragma GCC visibility pop
