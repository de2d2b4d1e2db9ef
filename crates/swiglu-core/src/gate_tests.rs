use super::*;
use crate::{DType, ExpMode, Rounding, bf16, f16};

/// The distance in units of the last place of the float64 value rounded to `f32`.
fn ulps(got: f32, want: f64) -> f64 {
    let spacing = |x: f32| {
        let x = x.abs().max(f32::MIN_POSITIVE);
        f64::from(f32::from_bits(x.to_bits() + 1)) - f64::from(x)
    };
    (f64::from(got) - want).abs() / spacing(want as f32)
}

/// Floats of every exponent, both signs: a stride through the bit patterns.
fn floats(stride: u32) -> impl Iterator<Item = f32> {
    (0..u32::MAX / stride).map(move |i| f32::from_bits(i * stride)).filter(|x| x.is_finite())
}

#[test]
fn exp_is_within_one_ulp_everywhere() {
    let mut worst = (0.0, 0.0);
    for x in floats(9973) {
        let want = f64::from(x).exp();
        let got = exp_precise(x);
        if want > f64::from(f32::MAX) * (1.0 + 6e-8) {
            assert_eq!(got, f32::INFINITY, "{x}");
        } else {
            let e = ulps(got, want);
            if e > worst.0 {
                worst = (e, x);
            }
        }
    }
    assert!(worst.0 <= 1.0, "{worst:?}");
    assert_eq!(exp_precise(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp_precise(f32::NEG_INFINITY), 0.0);
    assert!(exp_precise(f32::NAN).is_nan());
    assert_eq!(exp_precise(0.0f32), 1.0);
}

#[test]
fn the_fast_logistic_is_within_its_stated_error() {
    let mut worst = 0.0f64;
    for x in floats(9973).filter(|x| x.abs() < 70.0) {
        let want = 1.0 / (1.0 + (-f64::from(x)).exp());
        worst = worst.max((f64::from(Fast::logistic(x)) / want - 1.0).abs());
    }
    assert!(worst < 1.0 / f64::from(1 << 17), "2^{}", worst.log2());
    assert_eq!(Fast::times_logistic(-3e38f32, -3e38), 0.0);
    assert_eq!(Fast::times_logistic(3e38f32, 3e38), 3e38);
    assert!(Fast::times_logistic(f32::NEG_INFINITY, f32::NEG_INFINITY).is_nan());
    assert!(Fast::logistic(f32::NAN).is_nan());
}

/// Each gate in `f32` against float64: relative to max(|f|, floor), with the growth that rounding
/// the exponent causes.
#[test]
fn gates_are_accurate_over_their_range() {
    for act in Activation::family() {
        let mut worst = (0.0f64, 0.0f32);
        for x in floats(99_991).filter(|x| x.abs() < 1e4) {
            let got: f32 = act.apply::<f32>(Numerics::precise(Rounding::Fused), x, 1.0);
            let want = act.forward(f64::from(x), 1.0);
            let error = (f64::from(got) - want).abs() / (want.abs() + 1e-30);
            let exponent = crate::bounds::exponent(act.gate(), f64::from(x));
            let allowed = (8.0 + 4.0 * exponent) * DType::F32.unit_roundoff();
            if want.abs() > 1e-30 && error / allowed > worst.0 {
                worst = (error / allowed, x);
            }
        }
        assert!(worst.0 <= 1.0, "{act}: {worst:?}");
    }
}

#[test]
fn specials_follow_pytorch() {
    let n = Numerics::precise(Rounding::Fused);
    let swiglu = |g, u| Activation::SWIGLU.apply::<f32>(n, g, u);
    assert_eq!(swiglu(f32::INFINITY, 1.0), f32::INFINITY);
    assert!(swiglu(f32::NEG_INFINITY, 1.0).is_nan(), "-inf/(1+inf) as in torch.nn.functional.silu");
    assert!(swiglu(-1e30, 1.0) == 0.0 && swiglu(-1e30, 1.0).is_sign_negative());
    assert!(swiglu(0.0, f32::INFINITY).is_nan());
    for act in Activation::family() {
        for numerics in Numerics::all() {
            for (g, u) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
                assert!(act.apply::<f32>(numerics, g, u).is_nan(), "{act} {numerics} {g} {u}");
                assert!(act.apply::<bf16>(numerics, g, u).is_nan(), "{act} {numerics} {g} {u}");
            }
            for g in [f32::INFINITY, f32::NEG_INFINITY] {
                let [got, want] =
                    [act.apply::<f32>(numerics, g, 1.0), act.forward(g.into(), 1.0) as f32];
                assert!(
                    got == want || got.is_nan() && want.is_nan(),
                    "{act} {numerics} {g}: {got} {want}"
                );
            }
            // Where the exponential leaves the range of `f32` it is wrong by no more than its smallest number.
            for g in [-12.5f32, -13.1, -13.2, -13.25, -87.2, -88.5] {
                let got: f32 = act.apply::<f32>(numerics, g, 1e36);
                let want = act.forward(g.into(), 1e36);
                let exponent = crate::bounds::exponent(act.gate(), g.into()).min(90.0);
                let relative = (8.0 + 4.0 * exponent) * DType::F32.unit_roundoff() + 2f64.powi(-16);
                let bound = 1e36 * (f64::from(g.abs()) * 2.4e-38) + relative * want.abs();
                assert!(
                    (f64::from(got) - want).abs() <= bound,
                    "{act} {numerics} {g}: {got} {want}"
                );
            }
            // What is far out is 0, whatever it is multiplied with.
            for g in [-200.0, -1e4, -3e38] {
                let [got, want] =
                    [act.apply::<f32>(numerics, g, 1e38), act.forward(g.into(), 1e38) as f32];
                assert_eq!(got, want, "{act} {numerics} {g}");
            }
        }
    }
}

#[test]
fn modes_round_where_they_say() {
    let (g, u) = (bf16::from_f32(1.2421875), bf16::from_f32(-3.25));
    let silu = f64::from(g.to_f32()) / (1.0 + (-f64::from(g.to_f32())).exp());
    let eager = bf16::from_f64(bf16::from_f64(silu).to_f64() * u.to_f64());
    let fused = bf16::from_f64(silu * u.to_f64());
    assert_ne!(eager, fused, "the example must tell the modes apart");
    let run = |r| Activation::SWIGLU.apply::<bf16>(Numerics::precise(r), g.to_f32(), u.to_f32());
    assert_eq!(run(Rounding::Eager), eager);
    assert_eq!(run(Rounding::Fused), fused);
    assert_eq!(run(Rounding::PreRound), fused);
}

#[test]
fn rounding_lanes_are_the_types_conversions() {
    for x in floats(65_521) {
        assert_eq!(bf16::round_lanes(x).to_bits(), bf16::from_f32(x).to_f32().to_bits());
        assert_eq!(f16::round_lanes(x).to_bits(), f16::from_f32(x).to_f32().to_bits());
    }
    assert_eq!(DType::F32, <f32 as Element>::DTYPE);
}

/// Each derivative in `f32` against float64, relative to the largest term it is a sum of.
#[test]
fn derivatives_are_accurate_over_their_range() {
    for act in Activation::family() {
        for (exp, exp_error) in [(ExpMode::Precise, 0.0), (ExpMode::Fast, 2f64.powi(-16))] {
            let numerics = Numerics::precise(Rounding::Fused).with_exp(exp);
            let up = 1.0 - act.up_offset();
            for x in floats(99_991).filter(|x| x.abs() < 1e4) {
                let [dgate, dup] = act.apply_backward::<f32>(numerics, [x, up, 1.0]);
                let wide = f64::from(x);
                let (want_gate, want_up) = act.derivative(wide, f64::from(up));
                let exponent = crate::bounds::exponent(act.gate(), wide).min(90.0);
                let size = (1.0 + exponent).max(want_gate.abs());
                let allowed = (16.0 + 8.0 * exponent) * DType::F32.unit_roundoff() + exp_error;
                let error = (f64::from(dgate) - want_gate).abs();
                assert!(error <= allowed * size + 1e-37, "{act} {exp}: {x}: {dgate} {want_gate}");
                let error = (f64::from(dup) - want_up).abs();
                assert!(
                    error <= allowed * want_up.abs() + 1e-35 * (1.0 + wide.abs()),
                    "{act} {exp}: {x}: {dup} {want_up}"
                );
            }
        }
    }
}

#[test]
fn derivatives_at_clamps_and_of_no_number() {
    let n = Numerics::precise(Rounding::Fused);
    let clamped = |g, u| Activation::CLAMPED_SWIGLU.apply_backward::<f32>(n, [g, u, 1.0]);
    let limit = 7.0f32;
    let beyond = f32::from_bits(limit.to_bits() + 1);
    assert!(clamped(limit, 1.0)[0] > 0.9 && clamped(beyond, 1.0)[0] == 0.0);
    for sign in [1.0, -1.0] {
        assert!(clamped(1.0, sign * limit)[1] > 0.8 && clamped(1.0, sign * beyond)[1] == 0.0);
    }
    assert_eq!(clamped(f32::INFINITY, 1.0)[0], 0.0);
    let relu = |g| Activation::REGLU.apply_backward::<f32>(n, [g, 2.0, 3.0]);
    assert_eq!([relu(0.0), relu(-0.0), relu(1e-45)], [[0.0, 0.0], [0.0, 0.0], [6.0, 3.0 * 1e-45]]);
    for act in Activation::family() {
        for numerics in Numerics::all() {
            let of = |given| act.apply_backward::<bf16>(numerics, given);
            assert!(of([f32::NAN, 1.0, 1.0])[1].is_nan(), "{act} {numerics}");
            assert!(of([1.0, f32::NAN, 1.0])[0].is_nan(), "{act} {numerics}");
            assert!(of([1.0, 1.0, f32::NAN])[1].is_nan(), "{act} {numerics}");
            // PyTorch's values there, and those of the definition in float64.
            for g in [f32::INFINITY, f32::NEG_INFINITY] {
                let [got, got_16] = [
                    act.apply_backward::<f32>(numerics, [g, 1.0, 1.0])[0],
                    of([g, 1.0, 1.0])[0].to_f32(),
                ];
                let want = act.derivative(g.into(), 1.0).0 as f32;
                let same = |got: f32| got == want || got.is_nan() && want.is_nan();
                assert!(same(got) && same(got_16), "{act} {numerics} {g}: {got} {got_16} {want}");
            }
        }
    }
    // Far out, where an intermediate value of PyTorch's overflows, it is the function's.
    for act in [Activation::GEGLU, Activation::GEGLU_TANH] {
        let slope = |g: f32| act.apply_backward::<f32>(n, [g, 1.0, 1.0])[0];
        assert_eq!([20.0, 1e20, f32::MAX].map(slope), [1.0; 3], "{act}");
        assert_eq!([-20.0, -1e20, f32::MIN].map(slope), [0.0; 3], "{act}");
    }
}

/// The modes differ, and each is what it says.
#[test]
fn backward_modes_round_where_they_say() {
    let silu = crate::GateFn::Silu { beta: 1.0 };
    let mut differ = 0;
    for i in 0..50 {
        let given = [1, 2, 3].map(|seed| bf16::from_f32(crate::random::normal(seed, i)).to_f32());
        let run = |r| Activation::SWIGLU.apply_backward::<bf16>(Numerics::precise(r), given);
        let [g, u, dh] = given.map(f64::from);
        let once = [dh * u * silu.derivative(g), dh * silu.value(g)].map(bf16::from_f64);
        let (df, f) = (bf16::from_f64(dh * u).to_f64(), bf16::from_f64(silu.value(g)).to_f64());
        let stepped = [df * silu.derivative(g), dh * f].map(bf16::from_f64);
        assert_eq!([run(Rounding::Fused), run(Rounding::PreRound)], [once; 2], "{i}");
        assert_eq!(run(Rounding::Eager), stepped, "{i}");
        differ += usize::from(once != stepped);
    }
    assert!(differ > 10, "{differ}");
}
