//! Properties of the layers on random problems.

use proptest::prelude::*;
use swiglu_core::conformance::{Case, Parameters, QuantizedParameters, row_steps};
use swiglu_core::{
    Activation, Arrangement, BlockType, DType, Element, Error, GateUpWeights, GatedLinearParams,
    Matrix, MatrixMut, MatrixRef, Numerics, Op, Orientation, Path, Plan, QuantizedTypes, RowParams,
    WeightLayout, bf16, bounds, f16, random,
};
use swiglu_cpu::{Cpu, CpuOptions, GatedLinear, Isa, Mlp};
use swiglu_testing::{cases as cases_of, not_run};

fn cpu(isa: Isa, threads: usize) -> Cpu {
    Cpu::new(&CpuOptions::default().with_isa(isa).with_threads(threads)).unwrap()
}

fn facades() -> impl Strategy<Value = Isa> {
    prop::sample::select(Isa::available().collect::<Vec<_>>())
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (0usize..40, 0usize..150, 0usize..150);
    let kinds = (0usize..11, 0usize..6, 0usize..3, 0usize..5, 0usize..2);
    (shape, kinds, any::<bool>(), 0usize..20, any::<u64>()).prop_map(
        |(
            (m, hidden, intermediate),
            (act, numerics, dtype, arrangement, orientation),
            bias,
            padding,
            seed,
        )| {
            let arrangement = [
                Arrangement::Separate,
                Arrangement::PackedGateFirst,
                Arrangement::PackedUpFirst,
                Arrangement::Interleaved { group: 1 },
                Arrangement::Interleaved { group: intermediate.max(1) },
            ][arrangement];
            Case {
                op: Op::Mlp,
                m,
                hidden,
                intermediate,
                dtype: DType::ALL[dtype],
                activation: Activation::family()[act],
                numerics: Numerics::all().nth(numerics).unwrap(),
                layout: WeightLayout { orientation: Orientation::ALL[orientation], arrangement },
                bias,
                padding,
                scale: 1.0,
                seed,
                quantized: None,
            }
        },
    )
}

fn input<T: Element>(case: &Case) -> Matrix<T> {
    random::normal_matrix(case.seed, case.m, case.hidden + case.padding, 1.0).unwrap()
}

/// Rows of `cols` values in a wider buffer.
fn strided<T: Element>(m: &Matrix<T>, cols: usize) -> MatrixRef<'_, T> {
    MatrixRef::with_stride(m.as_slice(), m.rows(), cols, m.cols()).unwrap()
}

fn bits<T: Element>(m: &Matrix<T>) -> Vec<u32> {
    m.as_slice().iter().map(|v| v.to_f32().to_bits()).collect()
}

/// Gated linear and MLP within their bounds; the MLP is exactly the two linear maps one after the
/// other, with h rounded between them; threads do not change a bit.
fn layers_agree<T: Element>(isa: Isa, case: &Case) -> Result<(), TestCaseError> {
    let parameters = Parameters::<T>::new(case).unwrap();
    let x = input::<T>(case);
    let x = strided(&x, case.hidden);
    let gated = GatedLinear::new(&cpu(isa, 1), &parameters.gated()).unwrap();
    let mut h = Matrix::<T>::zeros(case.m, case.intermediate).unwrap();
    gated.forward(x, h.view_mut()).unwrap();
    let judged = bounds::gated_linear(x, &parameters.gated()).unwrap().judge(h.view()).unwrap();
    prop_assert!(judged.passed(), "{isa} {case} gated: {judged:?}");

    let run = |threads: usize| {
        let mut y = Matrix::<T>::zeros(case.m, case.hidden).unwrap();
        let mlp = Mlp::new(&cpu(isa, threads), &parameters.mlp()).unwrap();
        mlp.forward(x, y.view_mut()).unwrap();
        y
    };
    let y = run(1);
    let judged = bounds::mlp(x, &parameters.mlp()).unwrap().judge(y.view()).unwrap();
    prop_assert!(judged.passed(), "{isa} {case} mlp: {judged:?}");
    prop_assert_eq!(bits(&y), bits(&run(3)), "threads");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases_of(200), failure_persistence: None, ..Default::default() })]
    #[test]
    fn random_problems_stay_within_their_bounds(isa in facades(), case in cases()) {
        match case.dtype {
            DType::F32 => layers_agree::<f32>(isa, &case)?,
            DType::F16 => layers_agree::<f16>(isa, &case)?,
            DType::Bf16 => layers_agree::<bf16>(isa, &case)?,
            other => prop_assert!(false, "no test for {}", other),
        }
    }
}

fn case(m: usize, hidden: usize, intermediate: usize) -> Case {
    Case { bias: true, ..Case::new(Op::Mlp, [m, hidden, intermediate], DType::F32) }
}

/// A plan is made from the numbers alone, and it is the layer's.
#[test]
fn plans_need_no_weights() {
    let device = cpu(Isa::detect(), 2);
    for m in [0, 1, 16, 700, 9000] {
        let case = case(m, 300, 41);
        let parameters = Parameters::<f32>::new(&case).unwrap();
        for path in [Path::Fused, Path::Unfused] {
            let gated = GatedLinear::with_path(&device, &parameters.gated(), path).unwrap();
            let mlp = Mlp::with_path(&device, &parameters.mlp(), path).unwrap();
            for (plan, problem) in [
                (gated.plan(m), parameters.gated().problem(m)),
                (mlp.plan(m), parameters.mlp().problem(m)),
            ] {
                let mut made = device.plan(problem, path).unwrap();
                // The unfused path has no `fused` rounding, and its layer says so.
                made.problem.numerics = plan.problem.numerics;
                assert_eq!(made, plan);
            }
        }
    }
}

/// The same of a block with row steps, whose plan says why gate or h passes through memory.
#[test]
fn plans_follow_the_row_steps() {
    let device = cpu(Isa::detect(), 2);
    let parameters = Parameters::<f32>::new(&case(700, 300, 41)).unwrap();
    for steps in row_steps().unwrap() {
        let params = parameters.mlp().with_rows(RowParams::new(steps));
        let plan = Mlp::new(&device, &params).unwrap().plan(700);
        let mut made = device.plan(params.problem(700), Path::Fused).unwrap();
        made.problem.numerics = plan.problem.numerics;
        assert_eq!(made, plan);
        assert_eq!(plan.problem.rows, steps);
        assert_eq!(plan.path == Path::Unfused, steps.sparsity.is_some(), "{plan}");
        assert_eq!(plan.reason.contains("normalised"), steps.norm.is_some(), "{}", plan.reason);
    }
}

/// A row's bits do not follow the number of rows, with batch-invariant sums, and are those of one thread.
#[test]
fn row_steps_are_of_each_row_alone() {
    let case = Case { numerics: Numerics::default().with_batch_invariance(), ..case(40, 96, 72) };
    let parameters = Parameters::<f32>::new(&case).unwrap();
    let x = random::normal_matrix::<f32>(1, 40, 96, 1.0).unwrap();
    for steps in row_steps().unwrap() {
        let params = parameters.mlp().with_rows(RowParams::new(steps));
        let of = |threads, rows: usize| {
            let mlp = Mlp::new(&cpu(Isa::detect(), threads), &params).unwrap();
            let mut y = Matrix::<f32>::zeros(rows, 96).unwrap();
            let x = MatrixRef::new(&x.as_slice()[..rows * 96], rows, 96).unwrap();
            mlp.forward(x, y.view_mut()).unwrap();
            y
        };
        let all = of(2, 40);
        for (threads, rows) in [(1, 40), (2, 1), (2, 7)] {
            assert_eq!(
                of(threads, rows).as_slice(),
                &all.as_slice()[..rows * 96],
                "{steps} {rows}"
            );
        }
    }
}

/// A row that holds NaN or an infinity spoils itself and no other row.
#[test]
fn non_finite_rows_stay_alone() {
    let case = case(29, 70, 90);
    let parameters = Parameters::<f32>::new(&case).unwrap();
    for isa in Isa::available() {
        let mlp = Mlp::new(&cpu(isa, 2), &parameters.mlp()).unwrap();
        let mut x = input::<f32>(&case);
        let mut clean = Matrix::<f32>::zeros(29, 70).unwrap();
        mlp.forward(x.view(), clean.view_mut()).unwrap();
        x.as_mut_slice()[7 * 70 + 3] = f32::NAN;
        x.as_mut_slice()[20 * 70] = f32::INFINITY;
        let mut out = Matrix::<f32>::zeros(29, 70).unwrap();
        mlp.forward(x.view(), out.view_mut()).unwrap();
        for row in 0..29 {
            let (o, c) = (out.view().row(row), clean.view().row(row));
            match row {
                7 => assert!(o.iter().all(|v| v.is_nan()), "{isa}"),
                20 => assert!(o.iter().all(|v| !v.is_finite()), "{isa}"),
                _ => assert_eq!(o, c, "{isa} row {row}"),
            }
        }
    }
}

/// Rows cut into several passes over the weights give the same bits as one row at a time.
#[test]
fn many_rows_have_the_bits_of_single_rows() {
    let case = Case { bias: true, ..Case::new(Op::Mlp, [700, 2100, 33], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let x = input::<bf16>(&case);
    let mut all = Matrix::<bf16>::zeros(700, 33).unwrap();
    for isa in Isa::available() {
        let layer = GatedLinear::new(&cpu(isa, 2), &parameters.gated()).unwrap();
        assert!(layer.plan(4000).parameters["passes"] > 1, "{}", layer.plan(4000));
        layer.forward(x.view(), all.view_mut()).unwrap();
        // Bits follow the order of summation, which the height of a block does not change except for
        // few rows: several sums run side by side for one to three, and there are no tiles.
        let count = if isa == Isa::AmxBf16 { 40 } else { 12 };
        let mut some = Matrix::<bf16>::zeros(count, 33).unwrap();
        for first in [0, 348, 700 - count] {
            layer
                .forward(x.view().rows_range(first..first + count).unwrap(), some.view_mut())
                .unwrap();
            let same = &all.as_slice()[first * 33..(first + count) * 33];
            assert_eq!(some.as_slice(), same, "{isa}, row {first}");
        }
    }
}

/// Passes are of nearly the same size: a last one of few rows would be summed in another order. The exact
/// sums are zero, so that what comes out is the order's rounding errors.
#[test]
fn equal_rows_of_a_call_have_equal_bits() {
    let twice = |m: &Matrix<bf16>, sign: f32| {
        let twice = |row: usize| {
            let row = m.view().row(row).iter();
            row.clone().copied().chain(row.map(|v| bf16::from_f32(sign * v.to_f32())))
        };
        let values = (0..m.rows()).flat_map(twice).collect();
        Matrix::from_vec(values, m.rows(), 2 * m.cols()).unwrap()
    };
    let normal = |seed, rows, cols| random::normal_matrix::<bf16>(seed, rows, cols, 1.0).unwrap();
    for [m, hidden, intermediate] in [[2049, 200, 70], [3841, 200, 70], [65281, 200, 33]] {
        let weights = [1, 2].map(|seed| twice(&normal(seed, intermediate, hidden / 2), 1.0));
        let [gate, up] = weights.each_ref().map(Matrix::view);
        let weights = GateUpWeights::separate(gate, up, Orientation::OutIn).unwrap();
        let params = GatedLinearParams::new(weights, Activation::BILINEAR);
        let row = twice(&normal(3, 1, hidden / 2), -1.0);
        let x = Matrix::from_vec(row.as_slice().repeat(m), m, hidden).unwrap();
        let mut h = Matrix::<bf16>::zeros(m, intermediate).unwrap();
        for isa in Isa::available() {
            let layer = GatedLinear::new(&cpu(isa, 2), &params).unwrap();
            layer.forward(x.view(), h.view_mut()).unwrap();
            let first = h.view().row(0);
            assert!(first.iter().any(|v| v.to_f32() != 0.0), "{isa}: there are rounding errors");
            for row in 1..m {
                assert_eq!(h.view().row(row), first, "{isa}, row {row} of {m}");
            }
        }
    }
}

/// Tiles over several chunks of inputs, with rows, inputs and features left over, and with so many
/// rows that panels share chunks of them.
#[test]
fn tiles_take_any_number_of_rows_and_inputs() {
    let isa = Isa::AmxBf16;
    if !isa.is_available() {
        not_run(format_args!("this machine lacks {isa}"));
        return;
    }
    for [m, hidden, intermediate] in
        [[16, 512, 64], [33, 600, 70], [50, 257, 300], [300, 1400, 300], [300, 290, 1400]]
    {
        let case = Case { dtype: DType::Bf16, padding: 3, ..case(m, hidden, intermediate) };
        layers_agree::<bf16>(isa, &case).unwrap();
        let problem = Parameters::<bf16>::new(&case).unwrap().mlp().problem(m);
        let plan = cpu(isa, 1).plan(problem, Path::Fused).unwrap();
        assert!(plan.reason.contains("AMX"), "{case}");
        let pass = m.div_ceil(m.div_ceil(256));
        let expected = [if pass > 16 { 32 } else { 16 }, pass.div_ceil(32), m.div_ceil(pass)];
        let names = ["tile_rows", "row_blocks", "passes"];
        assert_eq!(names.map(|name| plan.parameters[name]), expected, "{case}");
    }
}

/// The same in bfloat16, where tiles are filled up with zeros.
#[test]
fn non_finite_values_stay_alone_in_bf16() {
    let case = Case { dtype: DType::Bf16, bias: false, ..case(29, 70, 90) };
    for isa in Isa::available() {
        let run = |x: &Matrix<bf16>, parameters: &Parameters<bf16>| {
            let layer = GatedLinear::new(&cpu(isa, 2), &parameters.gated()).unwrap();
            let mut h = Matrix::<bf16>::zeros(29, 90).unwrap();
            layer.forward(x.view(), h.view_mut()).unwrap();
            h
        };
        let parameters = Parameters::<bf16>::new(&case).unwrap();
        let mut x = input::<bf16>(&case);
        let clean = run(&x, &parameters);
        x.as_mut_slice()[7 * 70 + 69] = bf16::NAN;
        x.as_mut_slice()[28 * 70] = bf16::INFINITY;
        let spoilt = run(&x, &parameters);
        for row in 0..29 {
            let (s, c) = (spoilt.view().row(row), clean.view().row(row));
            match row {
                7 => assert!(s.iter().all(|v| v.is_nan()), "{isa}"),
                28 => assert!(s.iter().all(|v| !v.is_finite()), "{isa}"),
                _ => assert_eq!(s, c, "{isa} row {row}"),
            }
        }
    }
}

/// What a call leaves in a layer's buffers spoils no later call, whatever their numbers of rows: H is odd,
/// so that rows of h in 16 bits end with half a pair.
fn earlier_calls_leave_no_trace<T: Element>(isa: Isa, path: Path) {
    const ROWS: usize = 8;
    let case = Case { dtype: T::DTYPE, bias: false, ..case(ROWS, 40, 33) };
    let parameters = Parameters::<T>::new(&case).unwrap();
    let layer = || Mlp::with_path(&cpu(isa, 1), &parameters.mlp(), path).unwrap();
    let run = |mlp: &Mlp<T>, x: MatrixRef<'_, T>| {
        let mut y = Matrix::<T>::zeros(x.rows(), case.hidden).unwrap();
        mlp.forward(x, y.view_mut()).unwrap();
        y
    };
    let clean = input::<T>(&case);
    for value in [f32::NAN, f32::INFINITY] {
        let mut spoilt = clean.clone();
        for row in 0..ROWS {
            spoilt.as_mut_slice()[row * case.hidden] = T::from_f32(value);
        }
        for first in [ROWS, 3, 1] {
            for then in [1, 3, 4, 5, ROWS] {
                let mlp = layer();
                let y = run(&mlp, spoilt.view().rows_range(0..first).unwrap());
                assert!(y.as_slice().iter().any(|v| !v.to_f32().is_finite()), "{isa} {path}");
                let x = clean.view().rows_range(0..then).unwrap();
                let what = format!("{} {isa} {path}: {then} rows after {first}", T::DTYPE);
                assert_eq!(bits(&run(&mlp, x)), bits(&run(&layer(), x)), "{what} of {value}");
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_do_not_stay_in_a_layer() {
    for isa in Isa::available() {
        for path in [Path::Fused, Path::Unfused] {
            earlier_calls_leave_no_trace::<f32>(isa, path);
            earlier_calls_leave_no_trace::<f16>(isa, path);
            earlier_calls_leave_no_trace::<bf16>(isa, path);
        }
    }
}

/// One layer, many callers at once: every call gets the bits of a lone one.
#[test]
fn a_layer_can_be_called_from_many_threads() {
    let case = case(5, 300, 400);
    let parameters = Parameters::<f32>::new(&case).unwrap();
    let mlp = Mlp::new(&cpu(Isa::detect(), 2), &parameters.mlp()).unwrap();
    let x = input::<f32>(&case);
    let mut expected = Matrix::<f32>::zeros(5, 300).unwrap();
    mlp.forward(x.view(), expected.view_mut()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let mut out = Matrix::<f32>::zeros(5, 300).unwrap();
                    mlp.forward(x.view(), out.view_mut()).unwrap();
                    assert_eq!(out, expected);
                }
            });
        }
    });
}

#[test]
fn bad_arguments_are_refused_before_anything_is_written() {
    let case = case(3, 20, 24);
    let parameters = Parameters::<f32>::new(&case).unwrap();
    let device = cpu(Isa::detect(), 1);
    let mlp = Mlp::new(&device, &parameters.mlp()).unwrap();
    let x = Matrix::<f32>::zeros(3, 21).unwrap();
    let mut out = vec![7.0f32; 60];
    let e = mlp.forward(x.view(), MatrixMut::new(&mut out, 3, 20).unwrap()).unwrap_err();
    assert_eq!(e.to_string(), "x: expected [3, 20], given [3, 21]");
    let x = Matrix::<f32>::zeros(3, 20).unwrap();
    let e = mlp.forward(x.view(), MatrixMut::new(&mut out[..40], 2, 20).unwrap()).unwrap_err();
    assert_eq!(e.to_string(), "output: expected [3, 20], given [2, 20]");
    assert!(out.iter().all(|&v| v == 7.0));
    let none = CpuOptions::default().with_threads(0);
    assert!(Cpu::new(&none).unwrap_err().to_string().contains("threads = 0"));
    let unfused = Mlp::with_path(&device, &parameters.mlp(), Path::Unfused).unwrap();
    assert_eq!(unfused.plan(3).path, Path::Unfused);
}

/// Quantised weights: a plan that needs no weights, the bits of one thread on three (the case is large
/// enough that they take part), of a row alone among the few that are not worth decoding for, and a
/// row that is not finite spoils itself alone.
/// Rows that overlap make weights of any size of a few values: more than there are addresses for is refused, not wrapped around.
#[test]
fn weights_that_no_memory_holds_are_refused() {
    let cpu = cpu(Isa::Portable, 1);
    let values = vec![0.5f32; 1 << 12];
    for (rows, cols) in [(1 << 41, 1 << 12), (1 << 62, 1), ((1 << 41) + 2, 1 << 12)] {
        let tall = MatrixRef::with_stride(&values, rows, cols, 0).unwrap();
        for orientation in [Orientation::InOut, Orientation::OutIn] {
            let weights = GateUpWeights::separate(tall, tall, orientation).unwrap();
            let params = GatedLinearParams::new(weights, Activation::SWIGLU);
            let made = GatedLinear::new(&cpu, &params).map(drop);
            assert!(matches!(made, Err(Error::OutOfMemory { .. })), "{rows}×{cols} {orientation}");
        }
    }
    // Without features there is nothing to hold, nor to go through.
    let none = MatrixRef::with_stride(&values[..0], 1 << 40, 0, 0).unwrap();
    let weights = GateUpWeights::separate(none, none, Orientation::OutIn).unwrap();
    GatedLinear::new(&cpu, &GatedLinearParams::new(weights, Activation::SWIGLU)).unwrap();
}

#[test]
fn quantised_layers_keep_rows_apart() {
    let types = QuantizedTypes::new(BlockType::Q6_K, Some(BlockType::Q4_1));
    let case = Case { quantized: Some(types), ..case(3, 512, 512) };
    let parameters = QuantizedParameters::new::<f32>(&case, types).unwrap();
    let params = parameters.mlp().unwrap();
    for isa in Isa::available() {
        let mlp = |threads| Mlp::<f32>::quantized(&cpu(isa, threads), &params).unwrap();
        let (one, three) = (mlp(1), mlp(3));
        let of_bf16 = Mlp::<bf16>::quantized(&cpu(isa, 1), &params).unwrap();
        for m in [0, 1, 9, 40, 3000] {
            let made = |dtype| cpu(isa, 1).plan(params.problem(m, dtype), Path::Fused).unwrap();
            assert_eq!(made(DType::F32), one.plan(m), "{isa}");
            assert_eq!(made(DType::Bf16), of_bf16.plan(m), "{isa}");
        }
        assert!(one.plan(3).reason.contains("fixed-point"), "{isa}");
        assert!(three.plan(3).threads > 1, "{isa}");
        let says = |plan: Plan, what: &str| plan.reason.contains(what);
        let pairs = isa >= Isa::Avx512Bf16;
        assert_eq!(says(of_bf16.plan(40), "as bfloat16 integers"), pairs, "{isa}");
        assert!(says(one.plan(40), "decoded"), "{isa}");
        // Without byte products gate and up in Q6_K are decoded for fewer rows than a down projection in Q4_1.
        assert_eq!(says(one.plan(4), "decoded"), !pairs, "{isa}");
        assert_eq!(says(one.plan(4), "; down: quantised weights as integers"), !pairs, "{isa}");
        let run = |mlp: &Mlp<f32>, x: MatrixRef<'_, f32>| {
            let mut y = Matrix::<f32>::zeros(x.rows(), case.hidden).unwrap();
            mlp.forward(x, y.view_mut()).unwrap();
            y
        };
        let mut x = input::<f32>(&case);
        let clean = run(&one, x.view());
        assert_eq!(bits(&clean), bits(&run(&three, x.view())), "{isa}");
        for row in 0..case.m {
            let alone = run(&one, x.view().rows_range(row..row + 1).unwrap());
            assert_eq!(alone.as_slice(), clean.view().row(row), "{isa} row {row}");
        }
        x.as_mut_slice()[case.hidden + 7] = f32::INFINITY;
        let spoilt = run(&three, x.view());
        for row in 0..case.m {
            let (s, c) = (spoilt.view().row(row), clean.view().row(row));
            match row {
                1 => assert!(s.iter().all(|v| !v.is_finite()), "{isa}"),
                _ => assert_eq!(s, c, "{isa} row {row}"),
            }
        }
    }
}
