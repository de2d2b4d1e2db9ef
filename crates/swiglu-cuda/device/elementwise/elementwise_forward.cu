// h = act(gate, up), element by element: each value is read once and h written once.
#include "elementwise/elementwise.cuh"

struct ForwardParams {
  Tensor gate, up, out;  // interleaved: `gate` is the packed tensor, `up` is not looked at
  Tiling tiling;
  Formula formula;
};

template <int BYTES>
INLINE Pair<BYTES> load_inputs(const ForwardParams& p, u32 row, u32 column) {
  return load_pair<BYTES>(p.gate, p.up, p.tiling, row, column);
}

template <int BYTES>
INLINE void store_gated(const ForwardParams& p, u32 row, u32 column, const Pair<BYTES>& in) {
  Values<BYTES> h;
#pragma unroll
  for (int i = 0; i < h.kCount; ++i) h.value[i] = gated(in.gate.value[i], in.up.value[i], p.formula);
  store<BYTES>(element_address(p.out, row, column), h);
}

template <int BYTES>
INLINE void forward(const ForwardParams& p) {
  for_each_vector<BYTES>(
      p.tiling, [&](u32 row, u32 column) { return load_inputs<BYTES>(p, row, column); },
      [&](u32 row, u32 column, const Pair<BYTES>& in) { store_gated<BYTES>(p, row, column, in); },
      [&](u32 row, u32 column) {
        store_gated<kElementBytes>(p, row, column, load_inputs<kElementBytes>(p, row, column));
      });
}

// Blocks that an SM holds at once: as many as its threads allow (32 registers each where there
// are 2048) if the code is short enough for that without spills, so that as many bytes as possible are in
// flight; else 64 registers.
constexpr bool kShortCode = kArrangement == kApart && (kFast || kIsF32) && CLAMP == 0 &&
                            kGate != kGeluErf &&
                            (!kEager || (kGate != kSiluBeta && kGate != kGeluTanh));
constexpr int kResidents = kShortCode ? kResidentThreads / kMostThreads : 2;

#if ARRANGEMENT != 3
KERNEL(kMostThreads, kResidents, elementwise_forward_16)(KERNEL_PARAMS(ForwardParams) p) {
  forward<16>(p);
}
KERNEL(kMostThreads, 1, elementwise_forward_8)(KERNEL_PARAMS(ForwardParams) p) { forward<8>(p); }
#else
KERNEL(kMostThreads, kResidents, elementwise_forward_8)(KERNEL_PARAMS(ForwardParams) p) {
  forward<8>(p);
}
#endif
KERNEL(kMostThreads, 1, elementwise_forward_4)(KERNEL_PARAMS(ForwardParams) p) { forward<4>(p); }
#if ELEMENT != 0
KERNEL(kMostThreads, 1, elementwise_forward_2)(KERNEL_PARAMS(ForwardParams) p) { forward<2>(p); }
#endif
