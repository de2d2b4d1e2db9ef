// What the rates of a device are measured by: each kernel is nothing but what is timed. There are no options.
#include "lib/ptx.cuh"

constexpr int kThreads = 256, kReaders = 512;

struct ProbeParams {
  u64 data;   // what is read, from a multiple of 16 bytes on, or the word of the barrier
  i64 count;  // barriers, vectors of 16 bytes, or cycles
};

// Starts and ends on every SM.
KERNEL(kThreads, 1, probe_nothing)(KERNEL_PARAMS(ProbeParams) p) {}

// As in decode_tiles.cuh, with the threads that wait for what the others have stored.
KERNEL(kThreads, 1, probe_barriers)(KERNEL_PARAMS(ProbeParams) p) {
  u32* const word = (u32*)p.data;
  for (i64 i = 0; i < p.count; ++i) {
    if (threadIdx.x == 0) {
      const u32 before = ptx::load_relaxed(word);
      ptx::add_release(word, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
      ptx::wait_for_turnover(word, before);
    }
    __syncthreads();
  }
}

// Every block reads all of a buffer that L2 keeps, each from another place on: what an SM has in its L1 it meets again
// only after more than L1 holds.
KERNEL(kReaders, 2, probe_reads)(KERNEL_PARAMS(ProbeParams) p) {
  constexpr int kAtOnce = 8;
  const ptx::Raw<16>* const data = (const ptx::Raw<16>*)p.data;
  i64 at = p.count / gridDim.x * blockIdx.x + threadIdx.x;
  u32 seen = 0;
  for (i64 i = threadIdx.x; i < p.count; i += kAtOnce * kReaders) {
    ptx::Raw<16> read[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (at >= p.count) at -= p.count;
      read[j] = ptx::load_global(data + at);
      at += kReaders;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) seen |= read[j].word[0] | read[j].word[3];
  }
  // The buffer is zeros: nobody writes, and the reads have come before a block ends.
  if (seen != 0) *(u32*)p.data = seen;
}

// Lasts a number of cycles, by one thread.
KERNEL(kThreads, 1, probe_cycles)(KERNEL_PARAMS(ProbeParams) p) {
  if (threadIdx.x != 0) return;
  const i64 begin = clock64();
  while (clock64() - begin < p.count) {
  }
}
