// Whether a tool that looks for races follows lanes of a warp through __syncwarp to the one that arrives at an mbarrier: the hand-over
// of sums in sm90_decode_mlp.cu, alone. Warps leave sums in slots of two sets in turn and go on; one warp, another for every tile,
// waits for all of them and adds up.
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -DMODE=0 -o slots 2026-11-23-elected-arrival.cu
//   compute-sanitizer --tool racecheck --num-cuda-barriers 256 ./slots TILES
// MODE 0: lane 0 arrives behind __syncwarp. 1: every lane arrives. 2, 3: as 0, without the wait for `added` or `summed`, a race.
#include <cstdio>
#include <cstdint>
#include <cstdlib>
#ifndef MODE
#define MODE 0
#endif
constexpr int kWarps = 8;
__device__ __forceinline__ void init(uint32_t b, uint32_t n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\nagain_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again_%=;\n}\n" ::"r"(b), "r"(parity) : "memory");
}
__global__ void slots(float* out, int tiles) {
  __shared__ uint64_t bars[4];
  __shared__ float slot[2][kWarps][32];
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(bars);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int arrivals = MODE == 1 ? 32 * kWarps : kWarps;
  if (threadIdx.x < 4) init(base + 8 * threadIdx.x, arrivals);
  __syncthreads();
  for (int t = 0; t < tiles; ++t) {
    const int set = t % 2, parity = t / 2 % 2;
    const uint32_t summed = base + 16 * set, added = summed + 8;
    if (MODE != 2) wait(added, parity ^ 1);
    slot[set][warp][lane] = t * 0.5f + warp + lane;
    __syncwarp();
    if (MODE == 1 || lane == 0) arrive(summed);
    if (warp == t % kWarps) {
      if (MODE != 3) wait(summed, parity);
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += slot[set][w][lane];
      out[t * 32 + lane] = sum;
      __syncwarp();
    }
    if (MODE == 1 || lane == 0) arrive(added);
  }
}
int main(int argc, char** argv) {
  int tiles = argc > 1 ? atoi(argv[1]) : 1;
  float* out; cudaMallocManaged(&out, tiles * 128);
  slots<<<1, 32 * kWarps>>>(out, tiles);
  cudaError_t e = cudaDeviceSynchronize();
  int bad = 0;
  for (int t = 0; t < tiles; ++t) for (int l = 0; l < 32; ++l) bad += out[t * 32 + l] != kWarps * (t * 0.5f + l) + 28;
  printf("mode %d tiles %d: %s, %d wrong\n", MODE, tiles, cudaGetErrorString(e), bad);
}
