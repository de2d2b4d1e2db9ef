//! The activation operation and its gradients have the bits of the scalar definition on every façade: a numerics mode means
//! the same everywhere.

// A helper of a test may unwrap as a test does.

use swiglu_core::{
    Activation, Arrangement, Element, Error, GateUpMut, GateUpRef, Half, Matrix, MatrixMut,
    MatrixRef, Numerics, bf16, f16, random,
};
use swiglu_cpu::{Cpu, CpuOptions, Isa};

/// Ordinary values, every kind of special one, and random bit patterns.
fn values() -> Vec<f32> {
    let mut v = vec![
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        -f32::from_bits(0x7F_FFFF),
        f32::MAX,
        65504.0,
        65519.9,
        65520.0,
        1.0 + f32::EPSILON,
        3.389_531_4e38,
        6.0e-8,
        2.98e-8,
        -88.9,
        88.9,
    ];
    v.extend((0..4096).map(|i| f32::from_bits(random::bits(3, i) as u32)));
    v.extend((0..4096).map(|i| random::normal(4, i) * 8.0));
    v
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn check<T: Element>(isa: Isa) {
    let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(1)).unwrap();
    let v: Vec<T> = values().into_iter().map(T::from_f32).collect();
    let n = v.len() - 17;
    let (gate, up) =
        (MatrixRef::new(&v[..n], 1, n).unwrap(), MatrixRef::new(&v[17..], 1, n).unwrap());
    for act in Activation::family() {
        for numerics in Numerics::all() {
            let mut out = Matrix::<T>::zeros(1, n).unwrap();
            let inputs = GateUpRef::separate(gate, up).unwrap();
            cpu.activation(&act, numerics, inputs, out.view_mut()).unwrap();
            for (i, got) in out.as_slice().iter().enumerate() {
                let (g, u) = (v[i].to_f32(), v[i + 17].to_f32());
                let want = act.apply::<T>(numerics, g, u).to_f32();
                assert!(
                    same(got.to_f32(), want),
                    "{isa} {act} {numerics}({g:e}, {u:e}) = {got:?} not {want:e}"
                );
            }
        }
    }
}

#[test]
fn activations_have_the_defined_bits_on_every_facade() {
    for isa in Isa::available() {
        check::<f32>(isa);
        check::<f16>(isa);
        check::<bf16>(isa);
    }
}

/// A matrix whose rows are `gap` elements apart, and its parts.
struct Wide<T> {
    values: Vec<T>,
    shape: [usize; 2],
    stride: usize,
}

impl<T: Element> Wide<T> {
    const GUARD: f32 = -77.0;

    fn new([rows, cols]: [usize; 2], gap: usize, value: impl Fn(usize) -> T) -> Self {
        let stride = cols + gap;
        let guard = T::from_f32(Self::GUARD);
        let at = |i: usize| if i % stride < cols { value(i) } else { guard };
        Self { values: (0..rows * stride).map(at).collect(), shape: [rows, cols], stride }
    }

    fn view(&self) -> MatrixRef<'_, T> {
        let [rows, cols] = self.shape;
        MatrixRef::with_stride(&self.values, rows, cols, self.stride).unwrap()
    }

    fn view_mut(&mut self) -> MatrixMut<'_, T> {
        let [rows, cols] = self.shape;
        MatrixMut::with_stride(&mut self.values, rows, cols, self.stride).unwrap()
    }

    fn gaps_are_untouched(&self) -> bool {
        let gap = |row: &[T]| row[self.shape[1]..].iter().all(|v| v.to_f32() == Self::GUARD);
        self.values.chunks(self.stride).all(gap)
    }
}

fn gradients<T: Element>(
    cpu: &Cpu,
    act: &Activation,
    numerics: Numerics,
    (arrangement, [m, h], gap): (Arrangement, [usize; 2], usize),
) {
    let v = values();
    let value = |seed: usize| {
        let v = &v;
        move |i: usize| T::from_f32(v[(i.wrapping_mul(31) + seed) % v.len()])
    };
    let packed = arrangement.is_packed();
    let cols = if packed { 2 * h } else { h };
    let (first, second) = (Wide::new([m, cols], gap, value(1)), Wide::new([m, h], gap, value(17)));
    let dh = Wide::new([m, h], gap, |i| T::from_f32(random::normal(9, i as u64)));
    let poison = |_| T::from_f32(f32::NAN);
    let (mut d_first, mut d_second) =
        (Wide::new([m, cols], gap, poison), Wide::new([m, h], gap, poison));
    let inputs = match packed {
        true => GateUpRef::packed(first.view(), arrangement).unwrap(),
        false => GateUpRef::separate(first.view(), second.view()).unwrap(),
    };
    let grads = match packed {
        true => GateUpMut::packed(d_first.view_mut(), arrangement).unwrap(),
        false => GateUpMut::separate(d_first.view_mut(), d_second.view_mut()).unwrap(),
    };
    cpu.activation_backward(act, numerics, dh.view(), inputs, grads).unwrap();
    assert!(d_first.gaps_are_untouched() && d_second.gaps_are_untouched());
    let out = match packed {
        true => GateUpRef::packed(d_first.view(), arrangement).unwrap(),
        false => GateUpRef::separate(d_first.view(), d_second.view()).unwrap(),
    };
    for (i, j) in (0..m).flat_map(|i| (0..h).map(move |j| (i, j))) {
        let given = [Half::Gate, Half::Up].map(|half| inputs.at(half, i, j).to_f32());
        let of = [given[0], given[1], dh.view().row(i)[j].to_f32()];
        let want: [T; 2] = act.apply_backward(numerics, of);
        let got = [Half::Gate, Half::Up].map(|half| out.at(half, i, j));
        assert!(
            got.iter().zip(&want).all(|(a, b)| same(a.to_f32(), b.to_f32())),
            "{} {act} {numerics} {arrangement} {m}x{h}+{gap}: of {of:?} {got:?} not {want:?}",
            cpu.isa()
        );
    }
}

#[test]
fn gradients_have_the_defined_bits_on_every_facade() {
    let arrangements = [
        Arrangement::Separate,
        Arrangement::PackedGateFirst,
        Arrangement::PackedUpFirst,
        Arrangement::Interleaved { group: 1 },
        Arrangement::Interleaved { group: 5 },
        Arrangement::Interleaved { group: 40 },
    ];
    for isa in Isa::available() {
        for (turn, act) in Activation::family().into_iter().enumerate() {
            for (i, numerics) in Numerics::all().enumerate() {
                let cpu = Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(1)).unwrap();
                let how = arrangements[(turn + i) % arrangements.len()];
                let (shape, gap) = ([[3, 40], [1, 280], [5, 120]][(turn + i / 2) % 3], 7 * (i % 2));
                gradients::<f32>(&cpu, &act, numerics, (how, shape, gap));
                gradients::<f16>(&cpu, &act, numerics, (how, shape, gap));
                gradients::<bf16>(&cpu, &act, numerics, (how, shape, gap));
            }
        }
    }
    // More than a segment and than a tile, of rows that are one and that are not, by several threads.
    let cpu = Cpu::new(&CpuOptions::default().with_threads(3)).unwrap();
    let (act, numerics) = (Activation::SWIGLU, Numerics::default_for(bf16::DTYPE));
    for how in arrangements {
        for (shape, gap) in [([3, 33_000], 0), ([2, 40_000], 3), ([700, 280], 0)] {
            gradients::<bf16>(&cpu, &act, numerics, (how, shape, gap));
        }
    }
}

#[test]
fn gradients_of_other_shapes_and_arrangements_are_refused() {
    let cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let mut places = [0; 3].map(|_| Matrix::<f32>::zeros(2, 8).unwrap());
    let [given, into, other] = &mut places;
    let numerics = Numerics::default_for(f32::DTYPE);
    let mut backward = |dh: MatrixRef<'_, f32>, how| {
        let inputs = GateUpRef::packed(given.view(), Arrangement::PackedGateFirst).unwrap();
        let grads = match how {
            Some(how) => GateUpMut::packed(into.view_mut(), how).unwrap(),
            None => GateUpMut::separate(into.view_mut(), other.view_mut()).unwrap(),
        };
        cpu.activation_backward(&Activation::SWIGLU, numerics, dh, inputs, grads)
    };
    let dh = Matrix::<f32>::zeros(2, 4).unwrap();
    let shape = |outcome, name: &str| match outcome {
        Err(Error::Shape { what, .. }) => assert_eq!(what, name),
        other => panic!("{other:?}"),
    };
    assert!(backward(dh.view(), Some(Arrangement::PackedGateFirst)).is_ok());
    for how in [Some(Arrangement::PackedUpFirst), None] {
        shape(backward(dh.view(), how), "gradients of gate and up");
    }
    let narrow = Matrix::<f32>::zeros(2, 3).unwrap();
    shape(backward(narrow.view(), Some(Arrangement::PackedGateFirst)), "gradient of the output");
    let mut odd = Matrix::<f32>::zeros(2, 7).unwrap();
    assert!(GateUpMut::packed(odd.view_mut(), Arrangement::PackedGateFirst).is_err());
}
