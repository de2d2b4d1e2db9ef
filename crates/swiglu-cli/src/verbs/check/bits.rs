//! The activation operation is defined to the bit: every kernel of the CPU must agree with the
//! definition. (A GPU has instructions of its own for exponential and division.)

use swiglu::{Activation, DType, Element, GateUpRef, Matrix, MatrixRef, Numerics, with_dtype};
use swiglu_core::conformance::Backend;
use swiglu_core::random;

use super::report::{Finding, Report, Subject};
use swiglu_cpu::CpuBackend;

/// Activations × numerics modes.
pub(super) const CASES: usize = 12 * 6;
/// The operation's name in a report.
pub(super) const NAME: &str = "activation bits";
/// Odd, so that every vector width has a tail.
const RANDOM_VALUES: usize = 1021;

/// Values where a shortcut would show, each with either sign: zero, subnormals, the ends of exp, overflow.
const MAGNITUDES: [f32; 11] = {
    const INF: f32 = f32::INFINITY;
    [0.0, 1e-45, 1e-38, 1.0, 7.0, 17.3, 88.8, 104.5, 65504.0, f32::MAX, INF]
};

/// Those, and no number.
fn special() -> Vec<f32> {
    let signed = MAGNITUDES.into_iter().flat_map(|v| [v, -v]);
    signed.chain([f32::NAN]).collect()
}

pub(super) fn check(
    backend: &CpuBackend,
    subject: &Subject,
    dtype: DType,
    seed: u64,
    report: &mut Report,
) -> anyhow::Result<()> {
    with_dtype!(dtype, T => check_as::<T>(backend, subject, seed, report))
}

fn check_as<T: Element>(
    backend: &CpuBackend,
    subject: &Subject,
    seed: u64,
    report: &mut Report,
) -> anyhow::Result<()> {
    let (gate, up) = inputs::<T>(seed);
    let view = MatrixRef::new(&gate, 1, gate.len())?;
    let inputs = GateUpRef::separate(view, MatrixRef::new(&up, 1, up.len())?)?;
    for act in Activation::family() {
        for numerics in Numerics::all() {
            let mut out = Matrix::<T>::zeros(1, gate.len())?;
            let finding = match backend.activation(&act, numerics, inputs, out.view_mut()) {
                Err(error) => Finding::fault(error.to_string()),
                Ok(()) => compare(&act, numerics, &gate, &up, out.as_slice()),
            };
            let case = || format!("{NAME} {} {act} {numerics}", T::DTYPE);
            report.add(subject, NAME, T::DTYPE, case, finding);
        }
    }
    Ok(())
}

/// Random values of several scales, then every special value with every other.
fn inputs<T: Element>(seed: u64) -> (Vec<T>, Vec<T>) {
    let scale = |i: usize| [0.01, 1.0, 8.0, 60.0][i % 4];
    let random = |stream: u64| {
        (0..RANDOM_VALUES)
            .map(move |i| T::from_f32(random::normal(seed ^ stream, i as u64) * scale(i)))
    };
    let (special, n) = (special(), special().len());
    let value = |i: usize| T::from_f32(special[i]);
    let pairs = 0..n * n;
    (
        random(0x67).chain(pairs.clone().map(|i| value(i / n))).collect(),
        random(0x75).chain(pairs.map(|i| value(i % n))).collect(),
    )
}

fn compare<T: Element>(
    act: &Activation,
    numerics: Numerics,
    gate: &[T],
    up: &[T],
    out: &[T],
) -> Finding {
    for ((g, u), o) in gate.iter().zip(up).zip(out) {
        let (g, u, o) = (g.to_f32(), u.to_f32(), o.to_f32());
        let expected = act.apply::<T>(numerics, g, u).to_f32();
        // The payload of a NaN is not defined.
        let same = o.to_bits() == expected.to_bits() || (o.is_nan() && expected.is_nan());
        if !same {
            return Finding::fault(format!(
                "act({g:?}, {u:?}) = {o:?}, the definition gives {expected:?}"
            ));
        }
    }
    Finding::exact()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_cases_is_that_of_the_family() {
        assert_eq!(CASES, Activation::family().len() * Numerics::all().count());
    }

    #[test]
    fn one_wrong_bit_is_found() {
        let (gate, up) = inputs::<f32>(1);
        let (act, numerics) = (Activation::GEGLU, Numerics::default());
        let pairs = gate.iter().zip(&up);
        let mut out: Vec<f32> = pairs.map(|(&g, &u)| act.apply(numerics, g, u)).collect();
        assert!(compare(&act, numerics, &gate, &up, &out).passed());
        out[700] = f32::from_bits(out[700].to_bits() ^ 1);
        assert!(!compare(&act, numerics, &gate, &up, &out).passed());
    }
}
