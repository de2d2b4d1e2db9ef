//! The gate mathematics, written once over [`F32Lanes`]: every CPU kernel evaluates these
//! definitions, so a numerics mode means the same bits in each of them.
//!
//! Sources: exp by range reduction to |r| ≤ ln 2 / 2 (Cody and Waite) and a minimax polynomial
//! fitted for this crate; erfc(t) = w·P(w)·exp(−t²), w = 1/(1 + t/2), with P fitted likewise
//! (the form of Abramowitz and Stegun 7.1.26); GELU-tanh through ½(1 + tanh z) = σ(2z).
//!
//! Each function stands beside its derivative, so that one is not changed without the other: that is why the file is longer
//! than others.

use std::f32::consts::LOG2_E;
use std::marker::PhantomData;

use crate::activation::{Activation, GateFn};
use crate::dtype::Element;
use crate::lanes::F32Lanes;
use crate::numerics::{ExpMode, Numerics, Rounding};

/// The leading bits of ln 2: the product with any |n| < 2⁹ is exact.
const LN2_HIGH: f32 = 0.693_145_75;
/// ln 2 − [`LN2_HIGH`].
const LN2_LOW: f32 = 1.428_606_8e-6;

#[inline(always)]
fn polynomial<V: F32Lanes, const N: usize>(x: V, coefficients: [f32; N]) -> V {
    let mut acc = V::splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        acc = acc.mul_add(x, V::splat(coefficients[i]));
    }
    acc
}

/// exp(x) within 1 ulp over the whole range; 0 and infinity beyond it.
#[inline(always)]
pub fn exp_precise<V: F32Lanes>(x: V) -> V {
    // Past these bounds the result is 0 or infinity anyway; NaN passes (see `F32Lanes::max`).
    let x = V::splat(89.0).min(V::splat(-105.0).max(x));
    let n = x.mul(V::splat(LOG2_E)).round_even();
    let r = n.neg_mul_add(V::splat(LN2_HIGH), x);
    let r = n.neg_mul_add(V::splat(LN2_LOW), r);
    // exp(r) = 1 + r + r²·q(r); relative error of the polynomial 2⁻²⁸.
    let q =
        polynomial(r, [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_717_5, 0.001_381_459_6]);
    let tail = q.mul_add(r.mul(r), r);
    tail.add(V::splat(1.0)).scale_by_power_of_two(n)
}

/// exp(−z) with relative error below 2⁻¹⁷ for |z| ≤ 70; infinity where the exact value exceeds the
/// range of `f32`, 2⁻¹²⁶ where it is below.
#[inline(always)]
fn exp_neg_fast<V: F32Lanes>(z: V) -> V {
    // NaN passes (see `F32Lanes::max`).
    let t = V::splat(128.0).min(V::splat(-126.0).max(z.mul(V::splat(-LOG2_E))));
    let n = t.round_even();
    let f = t.sub(n);
    // 2ᶠ on |f| ≤ ½ with the constant term exactly 1. So at t = 128 the result has an empty mantissa
    // and exponent 128, which is infinity, and just below it p < 1 and the result is finite.
    let p = polynomial(f, [1.0, 0.693_124_2, 0.240_240_99, 0.055_906_43, 0.009_582_851]);
    p.add_exponent(n)
}

/// An evaluation of the exponential.
pub trait Exp: Copy {
    /// σ(z) = 1 / (1 + exp(−z)).
    fn logistic<V: F32Lanes>(z: V) -> V;
    /// x · σ(z).
    fn times_logistic<V: F32Lanes>(x: V, z: V) -> V;
    /// exp(−s) for s ≥ 0.
    fn exp_neg<V: F32Lanes>(s: V) -> V;
}

/// [`ExpMode::Precise`].
#[derive(Clone, Copy)]
pub struct Precise;

impl Exp for Precise {
    #[inline(always)]
    fn logistic<V: F32Lanes>(z: V) -> V {
        V::splat(1.0).div(V::splat(1.0).add(exp_precise(z.neg())))
    }
    #[inline(always)]
    fn times_logistic<V: F32Lanes>(x: V, z: V) -> V {
        x.div(V::splat(1.0).add(exp_precise(z.neg())))
    }
    #[inline(always)]
    fn exp_neg<V: F32Lanes>(s: V) -> V {
        exp_precise(s.neg())
    }
}

/// [`ExpMode::Fast`].
#[derive(Clone, Copy)]
pub struct Fast;

impl Exp for Fast {
    #[inline(always)]
    fn logistic<V: F32Lanes>(z: V) -> V {
        V::splat(1.0).div(V::splat(1.0).add(exp_neg_fast(z)))
    }
    #[inline(always)]
    fn times_logistic<V: F32Lanes>(x: V, z: V) -> V {
        x.div(V::splat(1.0).add(exp_neg_fast(z)))
    }
    #[inline(always)]
    fn exp_neg<V: F32Lanes>(s: V) -> V {
        // Beyond its range 0: a factor of any size may follow.
        exp_neg_fast(s).sub(V::splat(f32::MIN_POSITIVE))
    }
}

/// A gate function of one argument.
pub trait Gate: Copy {
    /// The gate in `f32`.
    fn gate<V: F32Lanes>(self, x: V) -> V;

    /// The gate with every PyTorch operation rounded to T: one rounding where PyTorch has the
    /// function as one operation.
    #[inline(always)]
    fn gate_eager<V: F32Lanes, T: Element>(self, x: V) -> V {
        T::round_lanes(self.gate(x))
    }

    /// The gate's derivative in `f32`.
    fn derivative<V: F32Lanes>(self, x: V) -> V;

    /// `df` times the derivative, with every operation of PyTorch's backward pass rounded to T: one rounding where PyTorch
    /// has the function as one operation.
    #[inline(always)]
    fn backward_eager<V: F32Lanes, T: Element>(self, x: V, df: V) -> V {
        T::round_lanes(df.mul(self.derivative(x)))
    }
}

/// σ(x) + x·z′·σ(1 − σ), the derivative of x·σ(z(x)), with z′ given as x·z′.
#[inline(always)]
fn times_logistic_derivative<V: F32Lanes>(s: V, x_dz: V) -> V {
    // σ(1 + x·z′·(1 − σ))
    s.mul(x_dz.mul_add(V::splat(1.0).sub(s), V::splat(1.0)))
}

/// 0, or NaN for NaN.
#[inline(always)]
fn zero_or_nan<V: F32Lanes>(x: V) -> V {
    V::splat(0.0).min(V::splat(0.0).max(x))
}

/// x · σ(x).
#[derive(Clone, Copy)]
pub struct Silu<E>(E);
impl<E: Exp> Gate for Silu<E> {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        E::times_logistic(x, x)
    }
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        times_logistic_derivative(E::logistic(x), x)
    }
}

/// x · σ(βx).
#[derive(Clone, Copy)]
pub struct SiluBeta<E>(E, f32);
impl<E: Exp> Gate for SiluBeta<E> {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        E::times_logistic(x, x.mul(V::splat(self.1)))
    }
    /// `x * torch.sigmoid(beta * x)`: three operations, three roundings.
    #[inline(always)]
    fn gate_eager<V: F32Lanes, T: Element>(self, x: V) -> V {
        let z = T::round_lanes(x.mul(V::splat(self.1)));
        T::round_lanes(x.mul(T::round_lanes(E::logistic(z))))
    }
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        let z = x.mul(V::splat(self.1));
        times_logistic_derivative(E::logistic(z), z)
    }
    /// The backward passes of the three operations: x·s, s = σ(z), z = βx.
    #[inline(always)]
    fn backward_eager<V: F32Lanes, T: Element>(self, x: V, df: V) -> V {
        let beta = V::splat(self.1);
        let s = T::round_lanes(E::logistic(T::round_lanes(x.mul(beta))));
        let through_product = T::round_lanes(df.mul(s));
        let ds = T::round_lanes(df.mul(x));
        let dz = T::round_lanes(ds.mul(V::splat(1.0).sub(s)).mul(s));
        T::round_lanes(through_product.add(T::round_lanes(dz.mul(beta))))
    }
}

/// σ(x).
#[derive(Clone, Copy)]
pub struct Sigmoid<E>(E);
impl<E: Exp> Gate for Sigmoid<E> {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        E::logistic(x)
    }
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        let s = E::logistic(x);
        s.mul(V::splat(1.0).sub(s))
    }
}

/// max(x, 0).
#[derive(Clone, Copy)]
pub struct Relu;
impl Gate for Relu {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        V::splat(0.0).max(x)
    }
    /// 0 at 0, as PyTorch has it.
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        let not_above = V::splat(0.0).sub(x);
        not_above.select_positive(V::splat(0.0), V::splat(1.0)).add(zero_or_nan(x))
    }
}

/// max(x, 0)². PyTorch squares in one operation, and max rounds nothing.
#[derive(Clone, Copy)]
pub struct Relu2;
impl Gate for Relu2 {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        let r = V::splat(0.0).max(x);
        r.mul(r)
    }
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        let r = V::splat(0.0).max(x);
        r.add(r)
    }
}

/// x · Φ(x) = max(x, 0) − ½|x| · erfc(|x|/√2): no cancellation in the negative tail.
#[derive(Clone, Copy)]
pub struct GeluErf<E>(E);

impl<E: Exp> GeluErf<E> {
    /// a = |x|, erfc(a/√2) and exp(−a²/2), both 0 past 20; above it a is 20, which keeps ∞ · 0 out of products that
    /// are 0 there. −∞ · 0 is PyTorch's value.
    #[inline(always)]
    fn tail<V: F32Lanes>(x: V) -> [V; 3] {
        let a = x.neg().max(V::splat(20.0).min(x));
        // w = 1/(1 + ½·|x|/√2)
        let w = V::splat(1.0).div(a.mul_add(V::splat(0.353_553_4), V::splat(1.0)));
        let p = polynomial(
            w,
            [
                0.282_087_68,
                0.282_353_5,
                0.243_260_95,
                0.202_070_12,
                -0.025_178_44,
                0.275_979_4,
                -0.485_384_9,
                0.283_702_6,
                -0.058_890_93,
            ],
        );
        let e = E::exp_neg(a.mul(V::splat(0.5)).mul(a));
        [a, w.mul(p).mul(e), e]
    }
}

impl<E: Exp> Gate for GeluErf<E> {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        let [a, erfc, _] = Self::tail(x);
        a.mul(V::splat(0.5)).neg_mul_add(erfc, V::splat(0.0).max(x))
    }
    /// Φ + xφ, which is PyTorch's NaN at ±∞: ∞ · 0.
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        let [_, erfc, e] = Self::tail(x);
        let below = erfc.mul(V::splat(0.5));
        // φ = exp(−x²/2)/√(2π)
        let x_phi = x.mul(V::splat(0.398_942_3)).mul(e);
        x.select_positive(V::splat(1.0).sub(below), below).add(x_phi)
    }
}

/// ½x(1 + tanh(√(2/π)(x + 0.044715x³))) = x · σ(2√(2/π)(x + 0.044715x³)).
#[derive(Clone, Copy)]
pub struct GeluTanh<E>(E);
impl<E: Exp> Gate for GeluTanh<E> {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        // 2√(2/π) and 2√(2/π)·0.044715
        let inner = x.mul(x).mul_add(V::splat(0.071_354_814), V::splat(1.595_769));
        E::times_logistic(x, x.mul(inner))
    }
    /// σ + x·z′·σ(1 − σ), z′ = 2√(2/π)(1 + 3·0.044715x²). Past ±20 it is 0 or 1, at ±∞ PyTorch's NaN; that PyTorch has NaN
    /// from where x³ overflows on is no property of the function.
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, x: V) -> V {
        let bounded = V::splat(20.0).min(V::splat(-20.0).max(x));
        let x = x.mul_add(V::splat(0.0), bounded);
        let square = x.mul(x);
        let inner = square.mul_add(V::splat(0.071_354_814), V::splat(1.595_769));
        let dz = square.mul_add(V::splat(0.214_064_44), V::splat(1.595_769));
        times_logistic_derivative(E::logistic(x.mul(inner)), x.mul(dz))
    }
}

/// x.
#[derive(Clone, Copy)]
pub struct Identity;
impl Gate for Identity {
    #[inline(always)]
    fn gate<V: F32Lanes>(self, x: V) -> V {
        x
    }
    #[inline(always)]
    fn derivative<V: F32Lanes>(self, _: V) -> V {
        V::splat(1.0)
    }
}

/// A complete gated activation: clamping, gate, offset and product, as a function of gate and up
/// lanes.
pub trait GatedMath: Copy {
    /// h before its rounding to T, which every mode ends with and the caller does as it stores.
    fn apply<V: F32Lanes>(self, gate: V, up: V) -> V;

    /// ∂L/∂gate and ∂L/∂up from ∂L/∂h, before their rounding to T. At a clamp the derivative is 1 on the bound and inside,
    /// 0 beyond.
    fn backward<V: F32Lanes>(self, gate: V, up: V, dh: V) -> [V; 2];
}

#[derive(Clone, Copy)]
struct Clamp {
    active: bool,
    gate_limit: f32,
    value_limit: f32,
    up_limit: f32,
    offset: f32,
}

impl Clamp {
    #[inline(always)]
    fn inputs<V: F32Lanes>(self, gate: V, up: V) -> (V, V) {
        // The bound is the first operand of `min` and `max`, so NaN passes through.
        let limit = V::splat(self.up_limit);
        (V::splat(self.gate_limit).min(gate), limit.min(limit.neg().max(up)))
    }

    #[inline(always)]
    fn value<V: F32Lanes>(self, value: V) -> V {
        V::splat(self.value_limit).min(value)
    }

    /// `derivative` where `x` is at most `limit`, else 0; NaN stays NaN.
    #[inline(always)]
    fn within<V: F32Lanes>(limit: f32, x: V, derivative: V) -> V {
        if limit == f32::INFINITY {
            return derivative;
        }
        V::splat(limit).sub(x).select_positive(derivative, zero_or_nan(x))
    }

    /// The derivatives of gate and up through the clamps, given the arguments as they were and the function's value.
    #[inline(always)]
    fn through<V: F32Lanes>(self, [gate, up, value]: [V; 3], [dgate, dup]: [V; 2]) -> [V; 2] {
        let dgate = Self::within(self.value_limit, value, dgate);
        [Self::within(self.gate_limit, gate, dgate), Self::within(self.up_limit, up.abs(), dup)]
    }
}

#[derive(Clone, Copy)]
struct Once<G> {
    gate: G,
    clamp: Clamp,
}

impl<G: Gate> GatedMath for Once<G> {
    #[inline(always)]
    fn apply<V: F32Lanes>(self, gate: V, up: V) -> V {
        let (mut g, mut u) = (gate, up);
        if self.clamp.active {
            (g, u) = self.clamp.inputs(g, u);
            u = u.add(V::splat(self.clamp.offset));
        }
        let mut f = self.gate.gate(g);
        if self.clamp.active {
            f = self.clamp.value(f);
        }
        f.mul(u)
    }

    #[inline(always)]
    fn backward<V: F32Lanes>(self, gate: V, up: V, dh: V) -> [V; 2] {
        let (mut g, mut u) = (gate, up);
        if self.clamp.active {
            (g, u) = self.clamp.inputs(g, u);
            u = u.add(V::splat(self.clamp.offset));
        }
        let f = self.gate.gate(g);
        let dgate = dh.mul(u).mul(self.gate.derivative(g));
        if !self.clamp.active {
            return [dgate, dh.mul(f)];
        }
        self.clamp.through([gate, up, f], [dgate, dh.mul(self.clamp.value(f))])
    }
}

#[derive(Clone, Copy)]
struct EachStep<G, T> {
    gate: G,
    clamp: Clamp,
    to: PhantomData<T>,
}

impl<G: Gate, T: Element> EachStep<G, T> {
    /// Gate and up as they are factors.
    #[inline(always)]
    fn inputs<V: F32Lanes>(self, gate: V, up: V) -> [V; 2] {
        if !self.clamp.active {
            return [gate, up];
        }
        let (g, u) = self.clamp.inputs(gate, up);
        // A limit that T cannot represent is itself rounded, as a tensor of T would hold it.
        let u = T::round_lanes(T::round_lanes(u).add(V::splat(self.clamp.offset)));
        [T::round_lanes(g), u]
    }

    /// The function's value behind its limit.
    #[inline(always)]
    fn limited<V: F32Lanes>(self, f: V) -> V {
        if self.clamp.active { T::round_lanes(self.clamp.value(f)) } else { f }
    }
}

impl<G: Gate, T: Element> GatedMath for EachStep<G, T> {
    #[inline(always)]
    fn apply<V: F32Lanes>(self, gate: V, up: V) -> V {
        let [g, u] = self.inputs(gate, up);
        self.limited(self.gate.gate_eager::<V, T>(g)).mul(u)
    }

    #[inline(always)]
    fn backward<V: F32Lanes>(self, gate: V, up: V, dh: V) -> [V; 2] {
        let [g, u] = self.inputs(gate, up);
        let f = self.gate.gate_eager::<V, T>(g);
        let df = T::round_lanes(dh.mul(u));
        let dgate = self.gate.backward_eager::<V, T>(g, df);
        let dup = dh.mul(self.limited(f));
        if self.clamp.active {
            self.clamp.through([gate, up, f], [dgate, dup])
        } else {
            [dgate, dup]
        }
    }
}

/// Code that runs with one concrete [`GatedMath`], so that its inner loop has no dispatch.
pub trait WithGatedMath {
    /// What it returns.
    type Output;
    /// Runs with the chosen mathematics.
    fn run<M: GatedMath>(self, math: M) -> Self::Output;
}

impl Activation {
    /// Calls `f` with the mathematics of this activation in `numerics` for the element type T.
    #[inline(always)]
    pub fn with_math<T: Element, F: WithGatedMath>(&self, numerics: Numerics, f: F) -> F::Output {
        match numerics.exp {
            ExpMode::Precise => self.with_exp::<T, Precise, F>(numerics.rounding, Precise, f),
            ExpMode::Fast => self.with_exp::<T, Fast, F>(numerics.rounding, Fast, f),
        }
    }

    #[inline(always)]
    fn with_exp<T: Element, E: Exp, F: WithGatedMath>(
        &self,
        rounding: Rounding,
        exp: E,
        f: F,
    ) -> F::Output {
        match self.gate() {
            GateFn::Silu { beta: 1.0 } => self.with_gate::<T, _, F>(rounding, Silu(exp), f),
            GateFn::Silu { beta } => self.with_gate::<T, _, F>(rounding, SiluBeta(exp, beta), f),
            GateFn::Sigmoid => self.with_gate::<T, _, F>(rounding, Sigmoid(exp), f),
            GateFn::Relu => self.with_gate::<T, _, F>(rounding, Relu, f),
            GateFn::Relu2 => self.with_gate::<T, _, F>(rounding, Relu2, f),
            GateFn::GeluErf => self.with_gate::<T, _, F>(rounding, GeluErf(exp), f),
            GateFn::GeluTanh => self.with_gate::<T, _, F>(rounding, GeluTanh(exp), f),
            GateFn::Identity => self.with_gate::<T, _, F>(rounding, Identity, f),
        }
    }

    #[inline(always)]
    fn with_gate<T: Element, G: Gate, F: WithGatedMath>(
        &self,
        rounding: Rounding,
        gate: G,
        f: F,
    ) -> F::Output {
        let clamp = Clamp {
            active: self.limit().is_some() || self.up_offset() != 0.0,
            gate_limit: self.gate_limit(),
            value_limit: self.value_limit(),
            up_limit: self.limit().unwrap_or(f32::INFINITY),
            offset: self.up_offset(),
        };
        // For f32 every rounding step is the identity, and the composed form of x·σ(βx) would only
        // differ from the fused one by its last bit: one definition serves all three modes. The type is asked in a
        // constant, so that kernels of the other are not compiled for it.
        if const { !matches!(T::DTYPE, crate::DType::F32) } && rounding == Rounding::Eager {
            f.run(EachStep { gate, clamp, to: PhantomData::<T> })
        } else {
            f.run(Once { gate, clamp })
        }
    }

    /// One element of the activation operation with the bits every CPU kernel produces. `gate` and
    /// `up` are accumulators (or values of T); the linear maps' rounding in
    /// [`Rounding::PreRound`] and [`Rounding::Eager`] is the caller's.
    pub fn apply<T: Element>(&self, numerics: Numerics, gate: f32, up: f32) -> T {
        struct One(f32, f32);
        impl WithGatedMath for One {
            type Output = f32;
            fn run<M: GatedMath>(self, math: M) -> f32 {
                math.apply(self.0, self.1)
            }
        }
        T::from_f32(self.with_math::<T, One>(numerics, One(gate, up)))
    }

    /// (∂L/∂gate, ∂L/∂up) of one element from ∂L/∂h, with the bits every CPU kernel produces; arguments as of
    /// [`Self::apply`].
    pub fn apply_backward<T: Element>(
        &self,
        numerics: Numerics,
        [gate, up, dh]: [f32; 3],
    ) -> [T; 2] {
        struct One([f32; 3]);
        impl WithGatedMath for One {
            type Output = [f32; 2];
            fn run<M: GatedMath>(self, math: M) -> [f32; 2] {
                let [gate, up, dh] = self.0;
                math.backward(gate, up, dh)
            }
        }
        self.with_math::<T, One>(numerics, One([gate, up, dh])).map(T::from_f32)
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
