//! What holds between backward passes to the bit, whatever the gradients are; what they are, the conformance suite judges.

use crate::row_scale::train_scaled;
use swiglu_core::conformance::{Case, Parameters};
use swiglu_core::random::normal_matrix;
use swiglu_core::{
    Accumulate, Activation, Arrangement, DType, Element, Error, GradientMut, Gradients,
    GradientsMut, Matrix, MatrixMut, MatrixRef, MlpParams, Numerics, Op, Orientation, Rounding,
    RowScale, SavePolicy, StridedRef, Wanted, bf16, f16,
};
use swiglu_cpu::{CallOptions, Cpu, CpuOptions, GatedLinear, LentMlp, Mlp};

/// Shapes that are no square, with odd H: 172 and more are several panels of every façade.
pub(crate) const SHAPES: [[usize; 3]; 3] = [[7, 33, 31], [9, 48, 172], [37, 20, 3420]];

pub(crate) fn cpu(threads: usize) -> Cpu {
    Cpu::new(&CpuOptions::default().with_threads(threads)).unwrap()
}

/// A case with biases.
pub(crate) fn case<T: Element>(shape: [usize; 3], rounding: Rounding) -> Case {
    let numerics = Numerics::default_for(T::DTYPE).with_rounding(rounding);
    Case { bias: true, numerics, ..Case::new(Op::Mlp, shape, T::DTYPE) }
}

fn train<T: Element>(
    cpu: &Cpu,
    params: &MlpParams<'_, T>,
    policy: SavePolicy,
    x: &Matrix<T>,
    dy: &Matrix<T>,
) -> (Matrix<T>, Gradients<T>) {
    let layer = Mlp::for_training(cpu, params, policy).unwrap();
    let mut y = Matrix::zeros(x.rows(), x.cols()).unwrap();
    let saved = layer.forward_train(x.view(), y.view_mut(), &CallOptions::default()).unwrap();
    assert_eq!(
        saved.kept_bytes(),
        policy.kept_bytes(x.rows(), params.gated.weights.intermediate(), T::DTYPE)
    );
    (y, layer.backward(saved, dy, Wanted::ALL).unwrap())
}

pub(crate) fn inputs<T: Element>([m, k, _]: [usize; 3], rows: u64) -> [Matrix<T>; 2] {
    [3, 4].map(|seed| normal_matrix(seed ^ rows, m, k, 1.0).unwrap())
}

fn rounded<T: Element>(m: &Matrix<T>, factor: f32) -> Matrix<T> {
    let values = m.as_slice().iter().map(|v| T::from_f32(v.to_f32() * factor));
    Matrix::from_values(values, m.rows(), m.cols()).unwrap()
}

fn scaled<T: Element>(g: &Gradients<T>, factor: f32) -> Gradients<T> {
    let mut out = g.clone();
    for m in [&mut out.dx, &mut out.gate, &mut out.up, &mut out.down].into_iter().flatten() {
        *m = rounded(m, factor);
    }
    let biases = [&mut out.gate_bias, &mut out.up_bias, &mut out.down_bias];
    biases.into_iter().flatten().for_each(|b| b.iter_mut().for_each(|v| *v *= factor));
    out
}

/// f16 is left out: gradients of its size are subnormal there, and lose bits when they become smaller.
#[test]
fn a_power_of_two_of_dy_is_one_of_the_gradients() {
    fn check<T: Element>() {
        for (shape, rounding) in SHAPES.into_iter().zip(Rounding::ALL) {
            let parameters = Parameters::<T>::new(&case::<T>(shape, rounding)).unwrap();
            let [x, dy] = inputs::<T>(shape, 0);
            let of = |dy: &Matrix<T>| train(&cpu(2), &parameters.mlp(), SavePolicy::Save, &x, dy).1;
            let once = of(&dy);
            for factor in [4.0, 0.125] {
                assert!(of(&rounded(&dy, factor)) == scaled(&once, factor), "{shape:?} {rounding}");
            }
            assert!(of(&rounded(&dy, 4.0)) != once);
        }
    }
    check::<f32>();
    check::<bf16>();
}

fn permuted<T: Element>(m: &Matrix<T>) -> Matrix<T> {
    let rows = (0..m.rows()).map(|i| (i * 3 + 2) % m.rows());
    let values = rows.flat_map(|i| m.view().row(i).to_vec());
    Matrix::from_values(values, m.rows(), m.cols()).unwrap()
}

#[test]
fn permuted_tokens_permute_dx() {
    fn check<T: Element>() {
        // Numbers of tokens that three and five have no part of.
        for shape in [[7, 33, 31], [11, 48, 172], [37, 20, 3420]] {
            let parameters = Parameters::<T>::new(&case::<T>(shape, Rounding::Fused)).unwrap();
            let [x, dy] = inputs::<T>(shape, 0);
            let of = |x: &Matrix<T>, dy: &Matrix<T>| {
                let (_, gradients) = train(&cpu(2), &parameters.mlp(), SavePolicy::SaveGate, x, dy);
                gradients.dx.unwrap()
            };
            let (once, other) = (of(&x, &dy), of(&permuted(&x), &permuted(&dy)));
            assert!(once != other && permuted(&once) == other, "{} {shape:?}", T::DTYPE);
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// Tokens that nothing depends on add exact zeros, wherever a pair or a chunk of tokens ends.
#[test]
fn appended_tokens_without_a_gradient_change_no_gradient_of_weights() {
    fn check<T: Element>() {
        for (shape, more) in SHAPES.into_iter().zip([1, 4, 30]) {
            let [m, k, h] = shape;
            let parameters = Parameters::<T>::new(&case::<T>(shape, Rounding::Fused)).unwrap();
            let [x, dy] = inputs::<T>(shape, 0);
            let longer = |a: &Matrix<T>, b: &[T]| {
                let values = a.as_slice().iter().chain(b).copied();
                Matrix::from_values(values, m + more, k).unwrap()
            };
            let zeros = vec![T::default(); more * k];
            let more_x = longer(&x, inputs::<T>([more, k, h], 9)[0].as_slice());
            let more_dy = longer(&dy, &zeros);
            let of = |x: &Matrix<T>, dy: &Matrix<T>| {
                let (_, mut gradients) = train(&cpu(2), &parameters.mlp(), SavePolicy::Save, x, dy);
                gradients.dx = None;
                gradients
            };
            assert!(of(&x, &dy) == of(&more_x, &more_dy), "{} {shape:?}", T::DTYPE);
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// The same results whatever was kept, on any number of threads, in every mode and with every activation; and y is that of
/// a forward pass without.
#[test]
fn policies_and_threads_change_no_bit() {
    fn check<T: Element>() {
        for (i, activation) in Activation::family().into_iter().enumerate() {
            let shape = SHAPES[i % 2];
            let layer = case::<T>(shape, Rounding::ALL[i % 3]);
            let orientation = Orientation::ALL[i % 2];
            let layout = swiglu_core::WeightLayout { orientation, ..layer.layout };
            let parameters = Parameters::<T>::new(&Case { activation, layout, ..layer }).unwrap();
            let params = parameters.mlp();
            let [x, dy] = inputs::<T>(shape, 0);
            let results = SavePolicy::ALL.map(|policy| {
                let [one, two] =
                    [1, 2].map(|threads| train(&cpu(threads), &params, policy, &x, &dy));
                assert!(one == two, "{activation} {policy}");
                one
            });
            assert!(results[0] == results[1] && results[0] == results[2], "{activation}");
            let mut y = Matrix::zeros(x.rows(), x.cols()).unwrap();
            Mlp::new(&cpu(1), &params).unwrap().forward(x.view(), y.view_mut()).unwrap();
            assert!(y == results[0].0, "{activation}");
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// ⟨dy, J·v⟩ = ⟨Jᵀ·dy, v⟩ for the Jacobian of y by x, by differences of the float64 oracle: extents that all differ catch a
/// square that lies the other way round.
#[test]
fn the_backward_pass_is_the_adjoint_of_the_forward_pass() {
    let shape = [5, 24, 40];
    let parameters = Parameters::<f32>::new(&case::<f32>(shape, Rounding::Fused)).unwrap();
    let [x, dy] = inputs::<f32>(shape, 0);
    let v = normal_matrix::<f32>(17, 5, 24, 1.0).unwrap();
    // Exact in f32 around values below 4 with steps of 2⁻¹⁰ of multiples of 2⁻¹⁰.
    let coarse = |m: &Matrix<f32>| {
        let values = m.as_slice().iter().map(|v| (v * 1024.0).round() / 1024.0);
        Matrix::from_values(values, m.rows(), m.cols()).unwrap()
    };
    let (x, v) = (coarse(&x), coarse(&v));
    let moved = |step: f32| {
        let sums = x.as_slice().iter().zip(v.as_slice()).map(|(x, v)| x + step * v);
        let x = Matrix::from_values(sums, 5, 24).unwrap();
        swiglu_core::oracle::mlp(x.view(), &parameters.mlp()).unwrap().y.value
    };
    let directional = |step: f32| {
        let pairs = [moved(step), moved(-step)];
        let terms = dy.as_slice().iter().zip(pairs[0].as_slice().iter().zip(pairs[1].as_slice()));
        let sum: f64 = terms.map(|(dy, (a, b))| f64::from(*dy) * (a - b)).sum();
        sum / f64::from(2.0 * step)
    };
    let [forward, coarser] = [1.0 / 1024.0, 1.0 / 512.0].map(directional);
    let (_, gradients) = train(&cpu(2), &parameters.mlp(), SavePolicy::Save, &x, &dy);
    let params = parameters.mlp();
    let reference =
        swiglu_core::bounds::mlp_backward(x.view(), &params, dy.view(), DType::F32, 0.0).unwrap();
    let (dx, bound) = (gradients.dx.unwrap(), reference.dx.reference.bound);
    let pairs = || dx.as_slice().iter().zip(v.as_slice());
    let backward: f64 = pairs().map(|(d, v)| f64::from(*d) * f64::from(*v)).sum();
    let off: f64 =
        bound.as_slice().iter().zip(v.as_slice()).map(|(b, v)| b * f64::from(v.abs())).sum();
    // The error of a difference is a quarter of one with twice its step: a third of what they differ by.
    let tolerance = off + (coarser - forward).abs();
    assert!((forward - backward).abs() < tolerance, "{forward} {backward} {tolerance}");
    assert!(tolerance < 1e-3 * backward.abs(), "{backward} {tolerance}");
}

/// Whatever else is wanted, each gradient has the same bits.
#[test]
fn every_subset_of_gradients_is_a_part_of_all() {
    for op_is_block in [true, false] {
        let shape = [7, 33, 31];
        let parameters = Parameters::<bf16>::new(&case::<bf16>(shape, Rounding::PreRound)).unwrap();
        let x = normal_matrix::<bf16>(3, 7, 33, 1.0).unwrap();
        let columns = if op_is_block { 33 } else { 31 };
        let dy = normal_matrix::<bf16>(4, 7, columns, 1.0).unwrap();
        let (block, gated) = (parameters.mlp(), parameters.gated());
        let block = Mlp::for_training(&cpu(2), &block, SavePolicy::Save).unwrap();
        let gated = GatedLinear::for_training(&cpu(2), &gated, SavePolicy::Save).unwrap();
        let of = |wanted: Wanted| {
            let mut out = Matrix::zeros(7, columns).unwrap();
            let options = CallOptions::default();
            if op_is_block {
                let saved = block.forward_train(x.view(), out.view_mut(), &options).unwrap();
                return block.backward(saved, &dy, wanted).unwrap();
            }
            let saved = gated.forward_train(x.view(), out.view_mut(), &options).unwrap();
            gated.backward(saved, &dy, wanted).unwrap()
        };
        let all = of(Wanted::ALL);
        assert_eq!(all.down.is_some(), op_is_block);
        for bits in 0..32u32 {
            let is = |bit: u32| bits >> bit & 1 == 1;
            let wanted = Wanted::NONE.with_dx(is(0)).with_gate(is(1)).with_up(is(2));
            let wanted = wanted.with_down(is(3)).with_biases(is(4));
            let mut expected = all.clone();
            let drop = |m: &mut Option<Matrix<bf16>>, wanted| *m = m.take().filter(|_| wanted);
            drop(&mut expected.dx, is(0));
            drop(&mut expected.gate, is(1));
            drop(&mut expected.up, is(2));
            drop(&mut expected.down, is(3));
            if !is(4) {
                (expected.gate_bias, expected.up_bias, expected.down_bias) = (None, None, None);
            }
            assert!(of(wanted) == expected, "{wanted:?}");
        }
    }
}

/// What lies otherwise in memory is the same gradient.
#[test]
fn strides_of_dy_change_no_bit() {
    let [m, k, h] = [9, 48, 172];
    let parameters = Parameters::<f16>::new(&case::<f16>([m, k, h], Rounding::Eager)).unwrap();
    let params = parameters.mlp();
    let layer = Mlp::for_training(&cpu(2), &params, SavePolicy::Save).unwrap();
    let x = normal_matrix::<f16>(3, m, k, 1.0).unwrap();
    let of = |dy: StridedRef<'_, f16>| {
        let mut y = Matrix::zeros(m, k).unwrap();
        let saved = layer.forward_train(x.view(), y.view_mut(), &CallOptions::default()).unwrap();
        layer.backward(saved, dy, Wanted::ALL).unwrap()
    };
    let values = normal_matrix::<f16>(4, m, k + 5, 1.0).unwrap();
    let dense = |at: &dyn Fn(usize, usize) -> f16| {
        let places = (0..m).flat_map(|i| (0..k).map(move |j| (i, j)));
        Matrix::from_values(places.map(|(i, j)| at(i, j)), m, k).unwrap()
    };
    let data = values.as_slice();
    for strides in [[k + 5, 1], [1, m], [0, 1], [0, 0], [1, 0], [3, 2]] {
        let strided = StridedRef::new(data, [m, k], strides).unwrap();
        let same = dense(&|i, j| data[i * strides[0] + j * strides[1]]);
        assert!(of(strided) == of((&same).into()), "{strides:?}");
    }
}

/// Memory that a call takes may hold anything, and what it gives back is not looked at again.
#[test]
fn what_stands_in_memory_changes_no_bit() {
    let shape = [9, 33, 31];
    let parameters = Parameters::<bf16>::new(&case::<bf16>(shape, Rounding::Fused)).unwrap();
    let [x, dy] = inputs::<bf16>(shape, 0);
    let cpu = cpu(2);
    let fresh = SavePolicy::ALL.map(|policy| train(&cpu, &parameters.mlp(), policy, &x, &dy));
    // A larger layer of the same device, all of whose values are NaN, leaves its traces in every block.
    let large = [40, 90, 200];
    let other = Parameters::<bf16>::new(&case::<bf16>(large, Rounding::Fused)).unwrap();
    let none = |rows, cols| Matrix::from_vec(vec![bf16::NAN; rows * cols], rows, cols).unwrap();
    for (policy, fresh) in SavePolicy::ALL.into_iter().zip(&fresh) {
        let (y, lost) = train(&cpu, &other.mlp(), policy, &none(40, 90), &none(40, 90));
        assert!(y.as_slice()[0].is_nan() && lost.gate.unwrap().as_slice()[0].is_nan());
        assert!(cpu.workspace_bytes() > 0);
        assert!(train(&cpu, &parameters.mlp(), policy, &x, &dy) == *fresh, "{policy}");
    }
    assert!(cpu.trim() > 0 && cpu.workspace_bytes() == 0);
}

/// Several passes forward before the first backward keep what is theirs, in any order, with x borrowed or copied.
#[test]
fn passes_keep_what_is_theirs() {
    let shape = [7, 33, 31];
    let parameters = Parameters::<f32>::new(&case::<f32>(shape, Rounding::Fused)).unwrap();
    let params = parameters.mlp();
    let cpu = cpu(2);
    let layer = Mlp::for_training(&cpu, &params, SavePolicy::Save).unwrap();
    let pairs: Vec<[Matrix<f32>; 2]> = (0..3).map(|i| inputs(shape, i << 8)).collect();
    let expected: Vec<_> =
        pairs.iter().map(|[x, dy]| train(&cpu, &params, SavePolicy::Save, x, dy).1).collect();
    assert!(expected[0] != expected[1]);
    let mut y = Matrix::zeros(7, 33).unwrap();
    let mut saved: Vec<_> = pairs
        .iter()
        .map(|[x, _]| layer.forward_train(x.view(), y.view_mut(), &CallOptions::default()).unwrap())
        .collect();
    let owned = saved.remove(1).into_owned().unwrap();
    let last = saved.pop().unwrap();
    assert!(layer.backward(last, &pairs[2][1], Wanted::ALL).unwrap() == expected[2]);
    assert!(layer.backward(owned, &pairs[1][1], Wanted::ALL).unwrap() == expected[1]);
    let first = saved.pop().unwrap();
    assert!(layer.backward(first, &pairs[0][1], Wanted::ALL).unwrap() == expected[0]);
}

/// Gradients of weights of no tokens are zeros, or leave the sums as they are.
#[test]
fn no_tokens_write_zeros_or_leave_sums_alone() {
    let shape = [0, 33, 31];
    let parameters = Parameters::<bf16>::new(&case::<bf16>(shape, Rounding::Fused)).unwrap();
    let params = parameters.mlp();
    let layer = Mlp::for_training(&cpu(2), &params, SavePolicy::Save).unwrap();
    let empty = Matrix::<bf16>::zeros(0, 33).unwrap();
    for (accumulate, left) in [(Accumulate::Overwrite, 0.0), (Accumulate::Add, 7.0)] {
        let mut gate = Matrix::from_vec(vec![7.0f32; 31 * 33], 31, 33).unwrap();
        let mut down = Matrix::from_vec(vec![bf16::from_f32(7.0); 31 * 33], 33, 31).unwrap();
        let mut bias = vec![7.0; 33];
        let mut y = Matrix::zeros(0, 33).unwrap();
        let options = CallOptions::default();
        let saved = layer.forward_train(empty.view(), y.view_mut(), &options).unwrap();
        let into = GradientsMut::default().with_gate_f32(&mut gate).with_down(&mut down);
        let into = into.with_down_bias(&mut bias).with_accumulate(accumulate);
        layer.backward_into(saved, &empty, into, &options).unwrap();
        assert_eq!(gate.as_slice(), vec![left; 31 * 33]);
        assert_eq!(down.as_slice(), vec![bf16::from_f32(left); 31 * 33]);
        assert_eq!(bias, vec![left; 33]);
    }
}

/// Small whole numbers, whose products and sums are exact in every type.
fn whole<T: Element>(seed: u64, rows: usize, cols: usize) -> Matrix<T> {
    let value = |i| T::from_f32((swiglu_core::random::bits(seed, i) % 5) as f32 - 2.0);
    Matrix::from_values((0..(rows * cols) as u64).map(value), rows, cols).unwrap()
}

/// A product over tokens outside of a layer: written where nothing is read before, or added.
#[test]
fn a_weight_gradient_is_the_sum_over_tokens() {
    fn of<T: Element>(cpu: &Cpu) {
        for [m, n, k] in [[0, 3, 5], [1, 33, 31], [37, 172, 20], [5, 0, 4], [5, 4, 0]] {
            let (grads, inputs) = (whole::<T>(1, m, n), whole::<T>(2, m, k));
            for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                let add = accumulate == Accumulate::Add;
                let held: Matrix<T> = whole(3, n, k);
                let before =
                    |r: usize, c: usize| if add { held.view().row(r)[c].to_f32() } else { 0.0 };
                let poisoned = |v: &T| if add { v.to_f32() } else { f32::NAN };
                let start = || held.as_slice().iter().map(poisoned);
                let mut narrow = Matrix::from_values(start().map(T::from_f32), n, k).unwrap();
                let mut wide = Matrix::from_values(start(), n, k).unwrap();
                let places =
                    [GradientMut::Element(narrow.view_mut()), GradientMut::F32(wide.view_mut())];
                for place in places {
                    cpu.weight_gradient(grads.view(), inputs.view(), place, accumulate).unwrap();
                }
                for (r, c) in (0..n).flat_map(|r| (0..k).map(move |c| (r, c))) {
                    let products = (0..m).map(|t| {
                        grads.view().row(t)[r].to_f32() * inputs.view().row(t)[c].to_f32()
                    });
                    let exact = products.sum::<f32>() + before(r, c);
                    let found = (narrow.view().row(r)[c].to_f32(), wide.view().row(r)[c]);
                    assert_eq!(found, (exact, exact), "{m}x{n}x{k} {accumulate:?} {r} {c}");
                }
            }
        }
    }
    let cpu = cpu(2);
    of::<f32>(&cpu);
    of::<bf16>(&cpu);
    of::<f16>(&cpu);
    let (grads, inputs) = (whole::<f32>(1, 4, 3), whole::<f32>(2, 4, 5));
    let mut wrong = whole::<f32>(3, 5, 3);
    let place = GradientMut::F32(wrong.view_mut());
    let refused = cpu.weight_gradient(grads.view(), inputs.view(), place, Accumulate::Add);
    assert!(matches!(refused, Err(Error::Shape { .. })), "{refused:?}");
}

/// 256 + 1 is 256 in bfloat16: sums over many calls are those of `f32`.
#[test]
fn sums_in_f32_keep_what_bfloat16_loses() {
    let one = |rows, cols| Matrix::from_vec(vec![bf16::ONE; rows * cols], rows, cols).unwrap();
    let (w, x) = (one(1, 1), one(1, 1));
    let weights =
        swiglu_core::GateUpWeights::separate(w.view(), w.view(), Orientation::OutIn).unwrap();
    let gated = swiglu_core::GatedLinearParams::new(weights, Activation::BILINEAR);
    let params = MlpParams::new(gated, w.view(), Orientation::OutIn);
    let layer = Mlp::for_training(&cpu(1), &params, SavePolicy::Save).unwrap();
    let mut wide = Matrix::from_vec(vec![256.0f32], 1, 1).unwrap();
    let mut narrow = Matrix::from_vec(vec![bf16::from_f32(256.0)], 1, 1).unwrap();
    let options = CallOptions::default();
    let mut y = one(1, 1);
    for _ in 0..2 {
        let saved = layer.forward_train(x.view(), y.view_mut(), &options).unwrap();
        let into = GradientsMut::default().with_gate_f32(&mut wide).with_up(&mut narrow);
        layer.backward_into(saved, &x, into.with_accumulate(Accumulate::Add), &options).unwrap();
    }
    assert_eq!((wide.as_slice(), narrow.as_slice()), (&[258.0][..], &[bf16::from_f32(256.0)][..]));
}

/// A layer with other weights in the memory of those before is one that was made of them.
#[test]
fn updated_weights_are_as_new_ones() {
    let shape = [7, 33, 31];
    for (policy, orientation) in
        SavePolicy::ALL.into_iter().zip([0, 1, 0].map(|i| Orientation::ALL[i]))
    {
        let layer = case::<bf16>(shape, Rounding::Fused);
        let layout = swiglu_core::WeightLayout { orientation, ..layer.layout };
        let of = |seed| Parameters::<bf16>::new(&Case { seed, layout, ..layer }).unwrap();
        let (old, new) = (of(1), of(2));
        let [x, dy] = inputs::<bf16>(shape, 0);
        let mut trained = Mlp::for_training(&cpu(2), &old.mlp(), policy).unwrap();
        let bytes = (trained.weight_bytes(), trained.training_bytes());
        trained.update(&new.mlp()).unwrap();
        assert_eq!((trained.weight_bytes(), trained.training_bytes()), bytes);
        let mut y = Matrix::zeros(7, 33).unwrap();
        let saved = trained.forward_train(x.view(), y.view_mut(), &CallOptions::default()).unwrap();
        let gradients = trained.backward(saved, &dy, Wanted::ALL).unwrap();
        assert!((y, gradients) == train(&cpu(2), &new.mlp(), policy, &x, &dy), "{policy}");
        let other = Parameters::<bf16>::new(&case::<bf16>([7, 33, 32], Rounding::Fused)).unwrap();
        assert!(matches!(trained.update(&other.mlp()), Err(Error::Unsupported { .. })));
    }
}

/// A block that packs its weights in each call has the bits of one that keeps packed copies, whatever stands in the memory that
/// calls share, and leaves gate and up as they are.
#[test]
fn lent_weights_change_no_bit() {
    fn check<T: Element>(shape: [usize; 3], threads: usize) {
        let [m, k, h] = shape;
        let arrangements = [Arrangement::Separate, Arrangement::PackedGateFirst]
            .into_iter()
            .chain([Arrangement::Interleaved { group: 1 }]);
        for (arrangement, orientation) in
            arrangements.flat_map(|a| Orientation::ALL.map(|orientation| (a, orientation)))
        {
            let layer = case::<T>(shape, Rounding::PreRound);
            let layout = swiglu_core::WeightLayout { arrangement, orientation };
            let parameters = Parameters::<T>::new(&Case { layout, ..layer }).unwrap();
            let (cpu, options, params) = (cpu(threads), CallOptions::default(), parameters.mlp());
            let [x, dy] = inputs::<T>(shape, 0);
            let (y, gradients) = train(&cpu, &params, SavePolicy::Save, &x, &dy);
            let lent = LentMlp::new(&cpu, params).unwrap();
            for rest in 0..2 {
                // Of a larger matrix, between columns that stay.
                let poison = T::from_f32(f32::NAN);
                let mut both = Matrix::from_values(
                    std::iter::repeat_n(poison, m * (2 * h + rest)),
                    m,
                    2 * h + rest,
                )
                .unwrap();
                let mut out = Matrix::from_values(vec![poison; m * k], m, k).unwrap();
                let wide = 2 * h + rest;
                let kept = MatrixMut::with_stride(both.as_mut_slice(), m, 2 * h, wide).unwrap();
                lent.forward(x.view(), out.view_mut(), Some(kept), &options).unwrap();
                assert!(out == y, "{shape:?} {layout:?}");
                let mut again = Matrix::from_values(vec![poison; m * 2 * h], m, 2 * h).unwrap();
                lent.pre_activations(x.view(), again.view_mut(), &options).unwrap();
                let kept = both.view().cols_range(0..2 * h).unwrap();
                assert!((0..m).all(|i| kept.row(i) == again.view().row(i)), "{shape:?} {layout:?}");
                let mut out = Matrix::from_values(vec![poison; m * k], m, k).unwrap();
                lent.forward(x.view(), out.view_mut(), None, &options).unwrap();
                assert!(out == y, "without gate and up: {shape:?} {layout:?}");
                for wanted in [Wanted::ALL, Wanted::INPUT, Wanted::NONE.with_down(true)] {
                    let shapes = Mlp::for_training(&cpu, &params, SavePolicy::Save).unwrap();
                    let shapes = shapes.gradient_shapes().unwrap();
                    let mut found = Gradients::zeros(m, &shapes, wanted, true).unwrap();
                    lent.backward(x.view(), &dy, kept, found.as_mut(), &options).unwrap();
                    let of = |is: bool, all: &Option<Matrix<T>>| all.clone().filter(|_| is);
                    assert!(found.dx == of(wanted.dx, &gradients.dx), "{shape:?} {layout:?}");
                    assert!(found.gate == of(wanted.gate, &gradients.gate));
                    assert!(found.up == of(wanted.up, &gradients.up));
                    assert!(found.down == of(wanted.down, &gradients.down));
                    if wanted.biases {
                        assert_eq!(found.gate_bias, gradients.gate_bias);
                        assert_eq!(found.up_bias, gradients.up_bias);
                        assert_eq!(found.down_bias, gradients.down_bias);
                    }
                }
                let factors: Vec<f32> = (0..m).map(|row| 0.3 * row as f32 - 0.7).collect();
                let layer = Mlp::for_training(&cpu, &params, SavePolicy::Save).unwrap();
                let scale = RowScale::Rows(&factors);
                for wanted in [Wanted::ALL, Wanted::NONE] {
                    let expected = train_scaled(&layer, [&x, &dy], scale, wanted);
                    let shapes = layer.gradient_shapes().unwrap();
                    let mut found = Gradients::zeros(m, &shapes, wanted, true).unwrap();
                    let mut of_factors = vec![f32::NAN; m];
                    let into =
                        found.as_mut().with_row_scale(scale).with_row_scale_grad(&mut of_factors);
                    lent.backward(x.view(), &dy, kept, into, &options).unwrap();
                    assert!((found, of_factors) == expected, "{shape:?} {layout:?}");
                }
                assert!((0..m).all(|i| kept.row(i) == again.view().row(i)), "gate and up changed");
            }
        }
    }
    for (i, shape) in SHAPES.into_iter().chain([[0, 5, 3], [1, 1, 1]]).enumerate() {
        check::<f32>(shape, 1 + i % 2);
        check::<bf16>(shape, 1 + i % 3);
        check::<f16>(shape, 2);
    }
    let parameters = Parameters::<f32>::new(&case::<f32>([2, 33, 31], Rounding::Fused)).unwrap();
    let (cpu, options, params) = (cpu(1), CallOptions::default(), parameters.mlp());
    let [x, dy] = inputs::<f32>([2, 33, 31], 0);
    let lent = LentMlp::new(&cpu, params).unwrap();
    let narrow = Matrix::<f32>::zeros(2, 61).unwrap();
    let refused = lent.backward(x.view(), &dy, narrow.view(), GradientsMut::default(), &options);
    assert_eq!(refused.unwrap_err().to_string(), "gate and up: expected [2, 62], given [2, 61]");
    let steps = swiglu_core::conformance::row_steps().unwrap();
    let rows = swiglu_core::OwnedRowParams::new(steps[0], None, None);
    let refused = LentMlp::new(&cpu, params.with_rows(rows.view()));
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

#[test]
fn what_nothing_computes_is_refused_by_name() {
    let shape = [2, 33, 31];
    let parameters = Parameters::<f32>::new(&case::<f32>(shape, Rounding::Fused)).unwrap();
    let params = parameters.mlp();
    let (cpu, options) = (cpu(1), CallOptions::default());
    let [x, dy] = inputs::<f32>(shape, 0);
    let mut y = Matrix::zeros(2, 33).unwrap();
    let mut plain = Mlp::new(&cpu, &params).unwrap();
    let error = plain.forward_train(x.view(), y.view_mut(), &options).unwrap_err().to_string();
    assert!(error.contains("for_training"), "{error}");
    assert!(plain.update(&params).unwrap_err().to_string().contains("for_training"));
    let layer = Mlp::for_training(&cpu, &params, SavePolicy::Save).unwrap();
    let mut forward = || layer.forward_train(x.view(), y.view_mut(), &options).unwrap();
    let error = layer.backward(
        forward(),
        MatrixRef::new(&dy.as_slice()[..33], 1, 33).unwrap(),
        Wanted::ALL,
    );
    assert_eq!(error.unwrap_err().to_string(), "dy: expected [2, 33], given [1, 33]");
    let mut wrong = Matrix::<f32>::zeros(33, 31).unwrap();
    let into = GradientsMut::default().with_gate(&mut wrong);
    let error = layer.backward_into(forward(), &dy, into, &options).unwrap_err().to_string();
    assert!(error.contains("dw_gate") && error.contains("[31, 33]"), "{error}");
    let saved = forward();
    let numerics = Numerics::default_for(DType::F32).with_batch_invariance();
    let gated = params.gated.with_numerics(numerics);
    let other = Mlp::for_training(&cpu, &params.with_gated(gated), SavePolicy::Save).unwrap();
    assert!(matches!(other.backward(saved, &dy, Wanted::ALL), Err(Error::Unsupported { .. })));
    let steps = swiglu_core::conformance::row_steps().unwrap();
    let rows = swiglu_core::OwnedRowParams::new(steps[0], None, None);
    let refused = Mlp::for_training(&cpu, &params.with_rows(rows.view()), SavePolicy::Save);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}
