// The gate mathematics, once for every kernel: forward and derivative side by side.
//
//   h = min(f(min(gate, gate limit)), value limit) · (clamp(up, ±up limit) + offset)
//
// Chosen at compile time, so that inner loops have no dispatch:
//   GATE      0 silu x·σ(x), 1 x·σ(βx), 2 sigmoid, 3 relu, 4 gelu (erf), 5 gelu (tanh), 6 identity,
//             7 relu squared
//   FAST_EXP  0 = precise: correctly rounded division and CUDA's expf (within 2 ulp);
//             1 = fast: the special-function unit. Relative error of σ(z) below 2⁻¹⁷ for |z| ≤ 88:
//             2⁻²² from ex2 and 2⁻²³ from rcp, the rest from rounding the exponent z·log₂e.
//   ROUNDING  0 fused, 1 pre_round, 2 eager (PyTorch's order: each of its operations rounds to T)
//   CLAMP     0 = no limit and no offset
// β, the limits and the offset are values of the launch.
//
// In eager mode with the precise exponential each function is the sequence of IEEE operations that
// PyTorch's CUDA kernels perform, contractions to fused multiply-adds included, for equal bits.
// Explicit intrinsics keep the compiler from contracting otherwise than written.
#pragma once
#include "lib/element.cuh"

constexpr bool kFast = FAST_EXP != 0;
constexpr bool kEager = ROUNDING == 2;
constexpr bool kPreRound = ROUNDING >= 1;  // the linear maps' results are rounded to T

enum Gate { kSilu, kSiluBeta, kSigmoid, kRelu, kGeluErf, kGeluTanh, kIdentity, kRelu2 };
constexpr Gate kGate = (Gate)GATE;

struct Formula {
  float beta, gate_limit, value_limit, up_limit, offset;
};

// In eager mode the result of a PyTorch operation, else unchanged.
INLINE float step(float x) { return kEager ? round_to_element(x) : x; }

INLINE float exp_neg(float z) {
  return kFast ? ptx::exp2_approx(-1.44269504f * z) : expf(-z);
}
// σ(z)
INLINE float logistic(float z) {
  const float d = __fadd_rn(1.0f, exp_neg(z));
  return kFast ? ptx::reciprocal_approx(d) : __fdiv_rn(1.0f, d);
}
// x·σ(z)
INLINE float times_logistic(float x, float z) {
  const float d = __fadd_rn(1.0f, exp_neg(z));
  return kFast ? __fmul_rn(x, ptx::reciprocal_approx(d)) : __fdiv_rn(x, d);
}

constexpr float kSqrtHalf = 0.707106781f;          // 1/√2
constexpr float kSqrt2OverPi = 0.797884561f;       // √(2/π)
constexpr float kInvSqrt2Pi = 0.398942280f;        // 1/√(2π)
constexpr float kCubic = 0.044715f;

// √(2/π)(x + 0.044715x³)
INLINE float gelu_tanh_inner(float x) {
  const float cube = __fmul_rn(__fmul_rn(x, x), x);
  return __fmul_rn(kSqrt2OverPi, __fmaf_rn(kCubic, cube, x));
}

// Φ(x), the normal distribution function.
INLINE float normal_cdf(float x) {
  if constexpr (kEager) return __fmul_rn(0.5f, __fadd_rn(1.0f, erff(__fmul_rn(x, kSqrtHalf))));
  if constexpr (!kFast) return normcdff(x);
  // ½erfc(|x|/√2) = w·P(w)·exp(−x²/2), w = 1/(1 + |x|/√8), the polynomial of the CPU kernels.
  const float a = fminf(fabsf(x), 20.0f);
  const float w = ptx::reciprocal_approx(__fmaf_rn(a, 0.3535534f, 1.0f));
  float p = -0.05889093f;
  p = __fmaf_rn(p, w, 0.2837026f);
  p = __fmaf_rn(p, w, -0.4853849f);
  p = __fmaf_rn(p, w, 0.2759794f);
  p = __fmaf_rn(p, w, -0.02517844f);
  p = __fmaf_rn(p, w, 0.20207012f);
  p = __fmaf_rn(p, w, 0.24326095f);
  p = __fmaf_rn(p, w, 0.2823535f);
  p = __fmaf_rn(p, w, 0.28208768f);
  const float decay = exp_neg(__fmul_rn(__fmul_rn(a, 0.5f), a));
  const float tail = __fmul_rn(__fmul_rn(__fmul_rn(w, p), decay), 0.5f);
  // NaN in x must stay: fminf drops it.
  return x != x ? x : (x < 0.0f ? tail : __fsub_rn(1.0f, tail));
}

// max(x, 0): +0 for both zeros; NaN stays.
INLINE float relu(float x) { return x > 0.0f || x != x ? x : 0.0f; }

// f(x), with every PyTorch operation rounded to T in eager mode.
INLINE float gate_value(float x, const Formula& formula) {
  if constexpr (kGate == kSilu) return step(times_logistic(x, x));
  if constexpr (kGate == kSiluBeta) {
    const float z = step(__fmul_rn(formula.beta, x));
    // PyTorch has no such operation: x * sigmoid(beta * x) is three.
    return kEager ? step(__fmul_rn(x, step(logistic(z)))) : times_logistic(x, z);
  }
  if constexpr (kGate == kSigmoid) return step(logistic(x));
  if constexpr (kGate == kRelu) return relu(x);
  if constexpr (kGate == kRelu2) return step(__fmul_rn(relu(x), relu(x)));
  if constexpr (kGate == kGeluErf) {
    if constexpr (kEager) {
      const float half = __fmul_rn(x, 0.5f);
      return step(__fmul_rn(half, __fadd_rn(1.0f, erff(__fmul_rn(x, kSqrtHalf)))));
    }
    return __fmul_rn(x, normal_cdf(x));
  }
  if constexpr (kGate == kGeluTanh) {
    const float z = gelu_tanh_inner(x);
    if constexpr (kEager) return step(__fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, tanhf(z))));
    // ½(1 + tanh z) = σ(2z), which does not cancel in the negative tail.
    return times_logistic(x, __fadd_rn(z, z));
  }
  return x;
}

// ∂/∂x of f, times `dy`, as PyTorch's backward of that operation in eager mode.
INLINE float gate_derivative(float dy, float x, const Formula& formula) {
  if constexpr (kGate == kSilu) {
    // σ + xσ(1 − σ) = σ(1 + x(1 − σ))
    const float s = logistic(x);
    return step(__fmul_rn(__fmul_rn(dy, s), __fmaf_rn(x, __fsub_rn(1.0f, s), 1.0f)));
  }
  if constexpr (kGate == kSiluBeta) {
    if constexpr (kEager) {
      // The backward passes of three operations: x·s, s = σ(z), z = βx.
      const float s = step(logistic(step(__fmul_rn(formula.beta, x))));
      const float through_product = step(__fmul_rn(dy, s));
      const float ds = step(__fmul_rn(dy, x));
      const float dz = step(__fmul_rn(step(__fmul_rn(ds, step(__fsub_rn(1.0f, s)))), s));
      return step(__fadd_rn(through_product, step(__fmul_rn(dz, formula.beta))));
    }
    // σ(1 + βx(1 − σ))
    const float z = __fmul_rn(formula.beta, x), s = logistic(z);
    return __fmul_rn(__fmul_rn(dy, s), __fmaf_rn(z, __fsub_rn(1.0f, s), 1.0f));
  }
  if constexpr (kGate == kSigmoid) {
    // σ(1 − σ) from the stored result.
    const float s = step(logistic(x));
    return step(__fmul_rn(step(__fmul_rn(dy, step(__fsub_rn(1.0f, s)))), s));
  }
  // PyTorch takes 0 at 0, and lets a gradient pass a NaN.
  if constexpr (kGate == kRelu) return x <= 0.0f ? 0.0f : (!kEager && x != x ? x : dy);
  // The backward passes of two operations, the square and relu; 2x is a tensor between.
  if constexpr (kGate == kRelu2) return x <= 0.0f ? 0.0f : step(__fmul_rn(dy, step(__fadd_rn(x, x))));
  if constexpr (kGate == kGeluErf) {
    // Φ + xφ
    const float density = __fmul_rn(kFast ? exp_neg(__fmul_rn(__fmul_rn(0.5f, x), x))
                                          : expf(__fmul_rn(__fmul_rn(-0.5f, x), x)),
                                    kInvSqrt2Pi);
    if constexpr (kEager) {
      // As PyTorch's compiler contracts ½·(1 + erf) + x·φ: the product with ½ is the fused one.
      const float twice = __fadd_rn(1.0f, erff(__fmul_rn(x, kSqrtHalf)));
      return step(__fmul_rn(dy, __fmaf_rn(0.5f, twice, __fmul_rn(x, density))));
    }
    return step(__fmul_rn(dy, __fmaf_rn(x, density, normal_cdf(x))));
  }
  if constexpr (kGate == kGeluTanh) {
    const float z = gelu_tanh_inner(x);
    if constexpr (kEager) {
      const float t = tanhf(z);
      const float dz = __fmul_rn(kSqrt2OverPi, __fmaf_rn(3.0f * kCubic, __fmul_rn(x, x), 1.0f));
      const float left = __fmul_rn(0.5f, x), right = __fadd_rn(1.0f, t);
      const float dt = __fmaf_rn(-t, t, 1.0f);
      // Contracted as above.
      const float slope = __fmaf_rn(0.5f, right, __fmul_rn(__fmul_rn(left, dt), dz));
      return step(__fmul_rn(dy, slope));
    }
    // σ(2z) + x·2z′·σ(2z)(1 − σ(2z)) = s(1 + 2xz′(1 − s)). Past ±20 s(1 − s) is 0; the bound
    // keeps an overflowing 2xz′ out of the product.
    const float s = logistic(__fadd_rn(z, z));
    const float bounded = x > 20.0f ? 20.0f : (x < -20.0f ? -20.0f : x);
    const float slope = __fmaf_rn(3.0f * kCubic, __fmul_rn(bounded, bounded), 1.0f);
    const float w = __fmul_rn(__fmul_rn(2.0f * kSqrt2OverPi, bounded), slope);
    return __fmul_rn(__fmul_rn(dy, s), __fmaf_rn(w, __fsub_rn(1.0f, s), 1.0f));
  }
  return dy;
}

// min(gate, gate limit) and clamp(up, ±up limit) + offset; comparisons that are false for NaN keep it.
INLINE void clamp_inputs(float& gate, float& up, const Formula& formula) {
  if constexpr (CLAMP) {
    const float limit = formula.up_limit;
    gate = gate > formula.gate_limit ? formula.gate_limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    // A limit that T cannot represent is rounded, as a tensor of T would hold it.
    gate = step(gate);
    up = step(__fadd_rn(step(up), formula.offset));
  }
}

// f(gate) of a gate that is clamped, and its own limit.
INLINE float limited_value(float gate, const Formula& formula) {
  const float f = gate_value(gate, formula);
  if constexpr (!CLAMP) return f;
  return f > formula.value_limit ? step(formula.value_limit) : f;
}

// h before its rounding to T. `gate` and `up` are accumulators of a linear map or values of T; the
// rounding between the two is the caller's.
INLINE float gated(float gate, float up, const Formula& formula) {
  clamp_inputs(gate, up, formula);
  return __fmul_rn(limited_value(gate, formula), up);
}

// (∂/∂gate, ∂/∂up) of h times `dh`, before their rounding to T. At a clamp the derivative is
// PyTorch's: 1 on the bound and inside, 0 beyond.
struct Gradients {
  float gate, up;
};
INLINE Gradients gated_backward(float dh, float gate, float up, const Formula& formula) {
  bool gate_inside = !(CLAMP && gate > formula.gate_limit);
  bool up_inside = !(CLAMP && (up > formula.up_limit || up < -formula.up_limit));
  // PyTorch's clamp passes no gradient to a NaN.
  if (CLAMP && kEager) {
    gate_inside = gate_inside && gate == gate;
    up_inside = up_inside && up == up;
  }
  clamp_inputs(gate, up, formula);
  Gradients d;
  d.gate = gate_derivative(step(__fmul_rn(dh, up)), gate, formula);
  const float f = gate_value(gate, formula);
  if (CLAMP && f > formula.value_limit) gate_inside = false;
  d.up = __fmul_rn(dh, limited_value(gate, formula));
  if (!gate_inside) d.gate = 0.0f;
  if (!up_inside) d.up = 0.0f;
  return d;
}
