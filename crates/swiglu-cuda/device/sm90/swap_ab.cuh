// What kernels for few tokens share: features are the rows of wgmma and tokens its columns (swap-AB), so that no row is wasted
// on tokens that do not exist. A ring of stages is claimed by who asks for copies, and multiplied stage by stage.
#pragma once
#include "sm90/ring.cuh"

// Waits until a stage is free and, where MOST is not 0, until at most so many stages of weights are in flight; then announces
// the bytes that come by its full barrier.
template <u32 MOST, class Ring>
INLINE void claim_stage(const Ring& ring, u32 step, u32 bytes) {
  ptx::barrier_wait(ring.empty_barrier(step), Ring::parity(step) ^ 1);
  if (MOST != 0 && step >= MOST) ptx::barrier_wait(ring.full_barrier(step - MOST), Ring::parity(step - MOST));
  ptx::barrier_arrive_expect(ring.full_barrier(step), bytes);
}

// Multiplies every STRIDE-th of `all` stages from `first` on. `arrived(step)` waits for what comes by another barrier than the
// full one; `multiply(stage, step)` issues the instructions of a stage, which is given back when they have retired: AT_ONCE,
// or else behind the next one's.
template <u32 STRIDE, bool AT_ONCE, class Ring, class Arrived, class Multiply>
INLINE void multiply_stages(const Ring& ring, u32 first, u32 all, Arrived arrived, Multiply multiply) {
  // Unrolled, the compiler moves sums between registers, and serialises the multiplications (C7520).
#pragma unroll 1
  for (u32 step = first; step < all; step += STRIDE) {
    ptx::barrier_wait(ring.full_barrier(step), Ring::parity(step));
    arrived(step);
    ptx::wgmma_fence();
    multiply(ring.stage(step), step);
    ptx::wgmma_commit();
    constexpr u32 kLate = AT_ONCE ? 0 : 1;
    ptx::wgmma_wait<kLate>();
    const bool retired = AT_ONCE || step > first;
    if (retired && threadIdx.x % 128 == 0) ptx::barrier_arrive(ring.empty_barrier(step - kLate * STRIDE));
  }
}

// Stores a warp's sums to shared memory, [token][feature], rows of PITCH bytes; of features those below MOST alone, if that is
// not 0. Element 4j + 2i + c of a thread is feature 16·warp + lane/4 + 8i of token 8j + 2(lane % 4) + c.
template <u32 PITCH, u32 MOST, int COUNT>
INLINE void store_sums(const float (&d)[COUNT], u32 to, u32 warp) {
  const u32 lane = threadIdx.x % 32;
  const u32 at = to + lane % 4 * 2 * PITCH + (warp * 16 + lane / 4) * 4;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const u32 token = i / 4 * 8 + i % 2, feature = i / 2 % 2 * 8;
    if (MOST != 0 && warp * 16 + feature >= MOST) continue;
    ptx::store_shared(at + token * PITCH + feature * 4, ptx::as_bits(d[i]));
  }
}
