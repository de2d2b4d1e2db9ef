// Every row of a [rows, cols] matrix becomes `row`, or zeros: what a linear map without input
// features leaves. Only ELEMENT matters of the options; the traffic is one write per element.
#include "lib/element.cuh"

constexpr int kThreads = 256;

struct FillRowsParams {
  u64 out, row;  // `row` is 0 for zeros
  i64 stride, rows, cols;
};

KERNEL(kThreads, 1, fill_rows)(KERNEL_PARAMS(FillRowsParams) p) {
  for (i64 r = blockIdx.y; r < p.rows; r += gridDim.y) {
    for (i64 c = (i64)blockIdx.x * kThreads + threadIdx.x; c < p.cols;
         c += (i64)gridDim.x * kThreads) {
      ((Element*)p.out)[r * p.stride + c] = p.row ? ((const Element*)p.row)[c] : (Element)0;
    }
  }
}
