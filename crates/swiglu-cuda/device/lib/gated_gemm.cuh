// What the fused gated GEMM kernels share: the epilogue.
#pragma once
#include "lib/gate.cuh"
#include "lib/tiles.cuh"

// BIAS: 0 = the linear maps have none, 1 = floats, zero-padded to whole tiles, 2 = elements of a caller's, as many as
// features. ORIENTATION: 0 = weights [out, in], 1 = [in, out].
// SAVE: whether the pre-activations are stored too, as values of T, for a backward pass.
constexpr bool kBias = BIAS != 0;
constexpr bool kSave = SAVE != 0;
constexpr bool kInOut = ORIENTATION == 1;

struct EpilogueParams {
  u64 h;  // [m, features]
  i64 h_stride;
  u64 gate_bias, up_bias;  // where BIAS is 2, 0: none
  u64 gate, up;            // [m, features], with SAVE
  i64 gate_stride, up_stride;
  Formula formula;
};

// A linear map's result as the activation sees it.
INLINE float pre_activation(float x) { return kPreRound ? round_to_element(x) : x; }
INLINE float pre_activation(float sum, float bias) {
  return pre_activation(kBias ? __fadd_rn(sum, bias) : sum);
}

struct BiasPair {
  float value[2];
};
// A caller's bias of a column; behind the last feature 0. Without a branch: of sums that begin with one the compiler does
// not know that they are complete before the products, and lets these run one by one.
INLINE float load_bias(u64 biases, int column, const Extents& extents) {
  typedef ptx::Raw<kElementBytes> Bits;
  const bool exists = biases != 0 && column < extents.features;
  return unpack(ptx::load_global_if(exists, (const Bits*)biases + column)).value[0];
}
// The biases of an even column and the next.
INLINE BiasPair load_biases(u64 biases, int column, const Extents& extents) {
  if constexpr (!kBias) return {};
  if constexpr (BIAS == 2) {
    return {load_bias(biases, column, extents), load_bias(biases, column + 1, extents)};
  }
  const ptx::Raw<8> raw = *(const ptx::Raw<8>*)(biases + (u64)column * 4);
  return {ptx::as_float(raw.word[0]), ptx::as_float(raw.word[1])};
}

INLINE void store_pair(const OutputPair& h, const EpilogueParams& e, const Extents& extents, int row,
                       int column) {
  store_pair(h, e.h, e.h_stride, extents, row, column);
}

// h of a row, at an even column and the next, from the linear maps' results g and u as the activation sees
// them.
INLINE OutputPair activate_pair(const OutputPair& g, const OutputPair& u, const EpilogueParams& e,
                                const Extents& extents, int row, int column) {
  if constexpr (kSave) {
    store_pair(g, e.gate, e.gate_stride, extents, row, column);
    store_pair(u, e.up, e.up_stride, extents, row, column);
  }
  return {gated(g.value[0], u.value[0], e.formula), gated(g.value[1], u.value[1], e.formula)};
}
// The same from the sums of their products.
INLINE OutputPair activate_pair(float gate0, float gate1, float up0, float up1, const EpilogueParams& e,
                                const Extents& extents, int row, int column) {
  const BiasPair gate = load_biases(e.gate_bias, column, extents);
  const BiasPair up = load_biases(e.up_bias, column, extents);
  const OutputPair g = {pre_activation(gate0, gate.value[0]), pre_activation(gate1, gate.value[1])};
  const OutputPair u = {pre_activation(up0, up.value[0]), pre_activation(up1, up.value[1])};
  return activate_pair(g, u, e, extents, row, column);
}
