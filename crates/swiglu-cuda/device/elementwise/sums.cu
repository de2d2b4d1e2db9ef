// Sums of f32: of the columns of a matrix of T, which are the gradient of a bias, and as values of T, which is what a
// product over two matrices of weights leaves. Compile-time: ELEMENT, and SHARED_BYTES as the host
// computed them.
//
// Floors: bytes / bandwidth, one read of each element, and for the second one write. A block of `column_sums` has 64
// adjacent columns, so that a warp reads whole lines, and eight warps that take the rows in turns, each several at a
// time; what they add up is added in the order of the warps: the same bits on every launch.
#include "lib/element.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 64;   // of a block
constexpr int kRowsAtATime = 8;  // of a warp
static_assert(kWarps * kColumns * 4 == SHARED_BYTES, "the host and the kernel disagree about shared memory");

struct ColumnSumsParams {
  u64 in, out;  // out: f32
  i64 stride, rows, cols;
  i64 accumulate;  // whether they are added to what is there
};

KERNEL(kThreads, 1, column_sums)(KERNEL_PARAMS(ColumnSumsParams) p) {
  float(*sums)[kColumns] = (float(*)[kColumns])ptx::dynamic_shared();  // of each warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 first = (i64)blockIdx.x * kColumns;
  float sum[2] = {};
  for (i64 r = warp * kRowsAtATime; r < p.rows; r += kWarps * kRowsAtATime) {
    float value[kRowsAtATime][2];
#pragma unroll
    for (int i = 0; i < kRowsAtATime; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const i64 column = first + lane + 32 * c;
        const bool exists = r + i < p.rows && column < p.cols;
        value[i][c] = exists ? element_to_float(((const Element*)p.in)[(r + i) * p.stride + column]) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtATime; ++i) {
      sum[0] = __fadd_rn(sum[0], value[i][0]);
      sum[1] = __fadd_rn(sum[1], value[i][1]);
    }
  }
  sums[warp][lane] = sum[0];
  sums[warp][lane + 32] = sum[1];
  __syncthreads();
  const i64 column = first + threadIdx.x;
  if (threadIdx.x >= kColumns || column >= p.cols) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total = __fadd_rn(total, sums[w][threadIdx.x]);
  float* out = (float*)p.out + column;
  *out = p.accumulate ? __fadd_rn(*out, total) : total;
}

struct RoundSumsParams {
  u64 in, out;  // in: f32
  i64 in_stride, out_stride, rows, cols;
};

KERNEL(kThreads, 1, round_sums)(KERNEL_PARAMS(RoundSumsParams) p) {
  for (i64 r = blockIdx.y; r < p.rows; r += gridDim.y) {
    for (i64 c = (i64)blockIdx.x * kThreads + threadIdx.x; c < p.cols; c += (i64)gridDim.x * kThreads) {
      ((Element*)p.out)[r * p.out_stride + c] = float_to_element(((const float*)p.in)[r * p.in_stride + c]);
    }
  }
}
