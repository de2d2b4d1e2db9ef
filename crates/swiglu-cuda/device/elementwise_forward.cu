// h = act(gate, up), element by element: each value is read once and h written once.
#include "elementwise.cuh"

struct ForwardParams {
  Tensor gate, up, out;  // interleaved: `gate` is the packed tensor, `up` is not looked at
  Tiling tiling;
  Formula formula;
};

template <int BYTES>
INLINE Pair<BYTES> load_inputs(const ForwardParams& p, i64 row, i64 column) {
  return load_pair<BYTES>(p.gate, p.up, p.tiling, row, column);
}

template <int BYTES>
INLINE void store_gated(const ForwardParams& p, i64 row, i64 column, const Pair<BYTES>& in) {
  Values<BYTES> h;
#pragma unroll
  for (int i = 0; i < h.kCount; ++i) h.value[i] = gated(in.gate.value[i], in.up.value[i], p.formula);
  store<BYTES>(element_address(p.out, row, column), h);
}

template <int BYTES>
INLINE void forward(const ForwardParams& p) {
  for_each_vector<BYTES>(
      p.tiling,
      [&](i64 row, i64 first, i64 step) {
        Pair<BYTES> in[kUnroll<BYTES>];
#pragma unroll
        for (int i = 0; i < kUnroll<BYTES>; ++i) in[i] = load_inputs<BYTES>(p, row, first + i * step);
#pragma unroll
        for (int i = 0; i < kUnroll<BYTES>; ++i) store_gated<BYTES>(p, row, first + i * step, in[i]);
      },
      [&](i64 row, i64 column) {
        store_gated<kElementBytes>(p, row, column, load_inputs<kElementBytes>(p, row, column));
      });
}

KERNEL(kThreads, 1, elementwise_forward_16)(KERNEL_PARAMS(ForwardParams) p) { forward<16>(p); }
KERNEL(kThreads, 1, elementwise_forward_8)(KERNEL_PARAMS(ForwardParams) p) { forward<8>(p); }
KERNEL(kThreads, 1, elementwise_forward_4)(KERNEL_PARAMS(ForwardParams) p) { forward<4>(p); }
#if ELEMENT != 0
KERNEL(kThreads, 1, elementwise_forward_2)(KERNEL_PARAMS(ForwardParams) p) { forward<2>(p); }
#endif

// Threads that a multiprocessor holds: fewer in the desktop and embedded members of a generation.
constexpr bool kSmaller = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 ||
                          __CUDA_ARCH__ == 1100 || __CUDA_ARCH__ >= 1200;
constexpr int kMaxThreads = kSmaller ? 1536 : 2048;

// Blocks that a multiprocessor holds at once: as many as its threads allow (32 registers each where there
// are 2048) if the code is short enough for that without spills, so that as many bytes as possible are in
// flight.
constexpr bool kShortCode = (kFast || kIsF32) && CLAMP == 0 && kGate != kGeluErf &&
                            (!kEager || (kGate != kSiluBeta && kGate != kGeluTanh));
constexpr int kResidents = kShortCode ? kMaxThreads / kThreads : 5;

KERNEL(kThreads, kResidents, elementwise_forward_dense)(KERNEL_PARAMS(ForwardParams) p) {
  for_each_vector_dense(
      p.tiling,
      [&](i64 column) { store_gated<16>(p, 0, column, load_inputs<16>(p, 0, column)); },
      [&](i64 column) {
        store_gated<kElementBytes>(p, 0, column, load_inputs<kElementBytes>(p, 0, column));
      });
}
