//! The activation operation is defined to the bit: every kernel of the CPU must agree with the
//! definition. (A GPU has instructions of its own for exponential and division.)

use std::fmt;

use swiglu::{Activation, DType, Element, GateUpRef, Matrix, MatrixRef, Numerics, with_dtype};
use swiglu_core::conformance::Backend;
use swiglu_core::random;

pub(super) const NAME: &str = "activation bits";
/// Odd, so that every vector width has a tail.
const RANDOM_VALUES: usize = 1021;

/// Values where a shortcut would show, each with either sign: zero, subnormals, the ends of exp, overflow.
const MAGNITUDES: [f32; 11] = {
    const INF: f32 = f32::INFINITY;
    [0.0, 1e-45, 1e-38, 1.0, 7.0, 17.3, 88.8, 104.5, 65504.0, f32::MAX, INF]
};

pub(super) struct Bits {
    pub(super) dtype: DType,
    activation: Activation,
    numerics: Numerics,
    seed: u64,
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{NAME} {} {} {}", self.dtype, self.activation, self.numerics)
    }
}

impl Bits {
    pub(super) fn all(dtypes: &[DType], seed: u64) -> Vec<Self> {
        let pairs =
            dtypes.iter().flat_map(|&dtype| Activation::family().map(move |act| (dtype, act)));
        let of = |(dtype, activation)| {
            Numerics::all().map(move |numerics| Self { dtype, activation, numerics, seed })
        };
        pairs.flat_map(of).collect()
    }

    /// What a backend computes that is not what the definition gives.
    pub(super) fn fault(&self, backend: &impl Backend) -> Option<String> {
        with_dtype!(self.dtype, T => self.fault_of::<T>(backend))
            .unwrap_or_else(|error| Some(error.to_string()))
    }

    fn fault_of<T: Element>(&self, backend: &impl Backend) -> swiglu::Result<Option<String>> {
        let (gate, up) = inputs::<T>(self.seed);
        let [gates, ups] = [MatrixRef::row_vector(&gate), MatrixRef::row_vector(&up)];
        let mut out = Matrix::<T>::zeros(1, gate.len())?;
        let inputs = GateUpRef::separate(gates, ups)?;
        backend.activation(&self.activation, self.numerics, inputs, out.view_mut())?;
        Ok(self.compare(&gate, &up, out.as_slice()))
    }

    fn compare<T: Element>(&self, gate: &[T], up: &[T], out: &[T]) -> Option<String> {
        gate.iter().zip(up).zip(out).find_map(|((g, u), o)| {
            let (g, u, o) = (g.to_f32(), u.to_f32(), o.to_f32());
            let expected = self.activation.apply::<T>(self.numerics, g, u).to_f32();
            // The payload of a NaN is not defined.
            let same = o.to_bits() == expected.to_bits() || (o.is_nan() && expected.is_nan());
            let differs =
                || format!("act({g:?}, {u:?}) = {o:?}, the definition gives {expected:?}");
            (!same).then(differs)
        })
    }
}

/// Random values of several scales, then every special value, and no number, with every other.
fn inputs<T: Element>(seed: u64) -> (Vec<T>, Vec<T>) {
    let signed = MAGNITUDES.into_iter().flat_map(|v| [v, -v]);
    let special: Vec<T> = signed.chain([f32::NAN]).map(T::from_f32).collect();
    let scale = |i: usize| [0.01, 1.0, 8.0, 60.0][i % 4];
    let random = |stream: u64, i: usize| random::normal(seed ^ stream, i as u64) * scale(i);
    let random = |stream| (0..RANDOM_VALUES).map(move |i| T::from_f32(random(stream, i)));
    let (mut gate, mut up): (Vec<T>, Vec<T>) = random(0x67).zip(random(0x75)).unzip();
    for g in &special {
        gate.extend(special.iter().map(|_| *g));
        up.extend(&special);
    }
    (gate, up)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_bit_is_found() {
        let (gate, up) = inputs::<f32>(1);
        let (activation, numerics) = (Activation::GEGLU, Numerics::default());
        let pairs = gate.iter().zip(&up);
        let mut out: Vec<f32> = pairs.map(|(&g, &u)| activation.apply(numerics, g, u)).collect();
        let bits = Bits { dtype: DType::F32, activation, numerics, seed: 1 };
        assert_eq!(bits.compare(&gate, &up, &out), None);
        out[700] = f32::from_bits(out[700].to_bits() ^ 1);
        assert!(bits.compare(&gate, &up, &out).is_some());
    }
}
