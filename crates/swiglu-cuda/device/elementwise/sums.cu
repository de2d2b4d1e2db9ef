// Sums of f32: of the columns of a matrix of T, which are the gradient of a bias; as values of T, which is what a
// product over two matrices of weights leaves; and of rows, for the gradients of their factors. Compile-time: ELEMENT, and
// SHARED_BYTES as the host computed them.
//
// Floors: bytes / bandwidth, one read of each element, and where results replace or round them one write. A block of `column_sums` has 64
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
  u64 scale;       // factors of the rows, of scaled sums
};

template <bool SCALED>
INLINE void column_sums_of(const ColumnSumsParams& p) {
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
        if (SCALED && exists) value[i][c] = __fmul_rn(value[i][c], ((const float*)p.scale)[r + i]);
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

KERNEL(kThreads, 1, column_sums)(KERNEL_PARAMS(ColumnSumsParams) p) { column_sums_of<false>(p); }
KERNEL(kThreads, 1, scaled_column_sums)(KERNEL_PARAMS(ColumnSumsParams) p) { column_sums_of<true>(p); }

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

// Between the product and the derivative of a backward pass that goes step by step: a row of dh, and of h, times its factor,
// where they lie, and the sum of h·dh before that.
struct ScaleRowsParams {
  u64 dh, h, scale, dots;  // none at address 0, of a factor 1
  i64 dh_stride, h_stride, rows, cols;
};

INLINE float warp_sum(float sum) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, mask));
  return sum;
}

// A warp for each row.
KERNEL(kThreads, 1, scale_rows)(KERNEL_PARAMS(ScaleRowsParams) p) {
  const i64 row = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const float scale = p.scale != 0 ? ((const float*)p.scale)[row] : 1.0f;
  Element* const dh = (Element*)p.dh + row * p.dh_stride;
  Element* const h = (Element*)p.h + row * p.h_stride;
  float dot = 0.0f;
  for (i64 c = threadIdx.x % 32; c < p.cols; c += 32) {
    const float d = element_to_float(dh[c]);
    if (p.scale != 0) dh[c] = float_to_element(__fmul_rn(d, scale));
    if (p.h == 0) continue;
    const float value = element_to_float(h[c]);
    if (p.scale != 0) h[c] = float_to_element(__fmul_rn(value, scale));
    dot = __fmaf_rn(value, d, dot);
  }
  dot = warp_sum(dot);
  if (threadIdx.x % 32 == 0 && p.dots != 0) ((float*)p.dots)[row] = dot;
}

// The gradients of the rows' factors, behind any backward pass: a row's sums of h·dh, `parts` of them `rows` apart, and of dy·b over the `cols` of a bias.
struct RowDotsParams {
  u64 dots, dy, bias, out;  // no bias at address 0
  i64 parts, dy_stride, rows, cols;
};

KERNEL(kThreads, 1, row_dots)(KERNEL_PARAMS(RowDotsParams) p) {
  const i64 row = (i64)blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  float sum = 0.0f;
#pragma unroll 8
  for (i64 i = threadIdx.x % 32; i < p.parts; i += 32) sum = __fadd_rn(sum, ((const float*)p.dots)[i * p.rows + row]);
  if (p.bias != 0) {
    const Element* const dy = (const Element*)p.dy + row * p.dy_stride;
    for (i64 c = threadIdx.x % 32; c < p.cols; c += 32)
      sum = __fmaf_rn(element_to_float(dy[c]), element_to_float(((const Element*)p.bias)[c]), sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) ((float*)p.out)[row] = sum;
}
