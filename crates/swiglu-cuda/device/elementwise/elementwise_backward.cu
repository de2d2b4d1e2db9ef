// (∂L/∂gate, ∂L/∂up) from ∂L/∂h, gate and up: three values read and two written per element. The
// gradients lie like gate and up do, and may overwrite them: a thread reads what it replaces first.
#include "elementwise/elementwise.cuh"

struct BackwardParams {
  Tensor out_grad;            // ∂L/∂h
  Tensor gate, up;            // interleaved: `gate` is the packed tensor, `up` is not looked at
  Tensor gate_grad, up_grad;  // likewise
  Tiling tiling;
  Formula formula;
};

template <int BYTES>
struct Inputs {
  Values<BYTES> dh;
  Pair<BYTES> in;
};

template <int BYTES>
INLINE Inputs<BYTES> load_inputs(const BackwardParams& p, u32 row, u32 column) {
  return {load<BYTES>(element_address(p.out_grad, row, column)),
          load_pair<BYTES>(p.gate, p.up, p.tiling, row, column)};
}

template <int BYTES>
INLINE void store_gradients(const BackwardParams& p, u32 row, u32 column, const Inputs<BYTES>& in) {
  Pair<BYTES> grad;
#pragma unroll
  for (int i = 0; i < in.dh.kCount; ++i) {
    const Gradients d =
        gated_backward(in.dh.value[i], in.in.gate.value[i], in.in.up.value[i], p.formula);
    grad.gate.value[i] = d.gate;
    grad.up.value[i] = d.up;
  }
  store_pair<BYTES>(p.gate_grad, p.up_grad, p.tiling, row, column, grad);
}

template <int BYTES>
INLINE void backward(const BackwardParams& p) {
  for_each_vector<BYTES>(
      p.tiling, [&](u32 row, u32 column) { return load_inputs<BYTES>(p, row, column); },
      [&](u32 row, u32 column, const Inputs<BYTES>& in) { store_gradients<BYTES>(p, row, column, in); },
      [&](u32 row, u32 column) {
        store_gradients<kElementBytes>(p, row, column, load_inputs<kElementBytes>(p, row, column));
      });
}

// Two blocks of an SM at once: 64 registers for each thread.
KERNEL(kMostThreads, 2, elementwise_backward_16)(KERNEL_PARAMS(BackwardParams) p) { backward<16>(p); }
KERNEL(kMostThreads, 1, elementwise_backward_8)(KERNEL_PARAMS(BackwardParams) p) { backward<8>(p); }
KERNEL(kMostThreads, 1, elementwise_backward_4)(KERNEL_PARAMS(BackwardParams) p) { backward<4>(p); }
#if ELEMENT != 0
KERNEL(kMostThreads, 1, elementwise_backward_2)(KERNEL_PARAMS(BackwardParams) p) { backward<2>(p); }
#endif
