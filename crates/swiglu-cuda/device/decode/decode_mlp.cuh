// What the kernels for a whole feed-forward block share: the parameters and what becomes of sums.
#pragma once
#include "lib/gate.cuh"

struct DecodeMlpParams {
  u64 x, gate, up, down, h, y;
  i64 x_stride, h_stride, y_stride;  // elements from row to row
  i64 gate_stride, down_stride;      // bytes, of gate and up alike
  u64 gate_scales, up_scales, down_scales;  // of rows, floats, where weights have such
  u64 gate_bias, up_bias;  // 0: none
  u64 down_bias;           // elements; 0: none
  u64 barrier;             // a word that is 0 before its first use
  int m, k, features;
  // Shared memory behind the ring: partial sums, in one kernel scales of rows, then x with x_pitch bytes from token to token.
  u32 x_at, x_pitch;
  u32 x_wide;  // whether x can be read 16 bytes at a time
  u32 element_biases;  // whether biases of gate and up are elements, not floats
  Formula formula;
};

// A linear map's result as the activation sees it.
INLINE float pre_activation(const DecodeMlpParams& p, float sum, u64 bias, int feature) {
  if (bias != 0) {
    sum = __fadd_rn(sum, p.element_biases ? element_to_float(((const Element*)bias)[feature])
                                          : ((const float*)bias)[feature]);
  }
  return kPreRound ? round_to_element(sum) : sum;
}

// h of a feature from the sums of gate and up.
INLINE Element activated(const DecodeMlpParams& p, int feature, float gate, float up) {
  return float_to_element(gated(pre_activation(p, gate, p.gate_bias, feature),
                                pre_activation(p, up, p.up_bias, feature), p.formula));
}

// y of a token and column from its sum.
INLINE void store_output(const DecodeMlpParams& p, int token, int column, float sum) {
  if (p.down_bias != 0) {
    sum = __fadd_rn(sum, element_to_float(((const Element*)p.down_bias)[column]));
  }
  ((Element*)p.y)[token * p.y_stride + column] = float_to_element(sum);
}
