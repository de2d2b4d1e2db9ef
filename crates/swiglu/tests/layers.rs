//! The façade as a user sees it: loading, packing, running and refusing.

// A helper of a test is a test: it ends by panicking.
#![allow(clippy::unwrap_used)]

mod common;

use common::{gguf, scaled};
use std::error::Error as StdError;

use swiglu::{
    Activation, Arrangement, BlockType, CallOptions, CoreError, DType, Device, ErrorKind,
    Explanation, FormatError, GateUpWeights, GatedActivation, GatedLinear, GatedLinearParams,
    HostWeights, Layer, LoadOptions, Matrix, MatrixRef, Mlp, MlpParams, MlpWeights, Model,
    Numerics, Op, Orientation, Path, QuantizedTypes, Rounding, TensorNames, bf16, f16,
};
use swiglu_core::bounds;
use swiglu_fixtures::{SMOLLM2_FILE as SMOLLM2, STORIES15M_FILE as STORIES};

fn input<T: swiglu::Element>(rows: usize, cols: usize) -> Matrix<T> {
    swiglu_core::random::normal_matrix(7, rows, cols, 1.0).unwrap()
}

#[test]
fn layers_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Device>();
    shared::<GatedActivation>();
    shared::<GatedLinear>();
    shared::<Mlp>();
    shared::<MlpWeights>();
    shared::<HostWeights<'_, bf16>>();
    shared::<swiglu::Error>();
    shared::<Model>();
}

fn runs_within_bounds<T: swiglu::Element>(weights: &MlpWeights) {
    let mlp = weights.clone().dtype(T::DTYPE).decoded().to(&Device::cpu().unwrap()).unwrap();
    assert_eq!((mlp.dtype(), mlp.out_features()), (T::DTYPE, mlp.hidden()));
    let x = input::<T>(3, mlp.hidden());
    let y = mlp.forward(&x).unwrap();
    let host = weights.host::<T>().unwrap();
    let judgement = bounds::mlp(x.view(), &host.mlp().unwrap()).unwrap().judge(y.view()).unwrap();
    assert!(judgement.passed(), "{}: {judgement:?}", T::DTYPE);
}

fn quantized_runs_within_bounds<T: swiglu::Element>() {
    let device = Device::cpu().unwrap();
    let weights = Mlp::load(SMOLLM2, 28).unwrap().dtype(T::DTYPE);
    let mlp = weights.to(&device).unwrap();
    let q4_1 = QuantizedTypes::of(Op::Mlp, BlockType::Q4_1);
    assert_eq!((mlp.plan(1).problem.quantized, mlp.dtype()), (Some(q4_1), T::DTYPE));
    let x = input::<T>(3, mlp.hidden());
    let y = mlp.forward(&x).unwrap();
    let blocks = weights.quantized_on(&device).unwrap();
    assert_eq!(blocks.types(), q4_1);
    let reference = bounds::quantized_mlp(x.view(), &blocks.mlp().unwrap()).unwrap();
    let judgement = reference.judge(y.view()).unwrap();
    assert!(judgement.passed(), "{}: {judgement:?}", T::DTYPE);
}

#[test]
fn quantised_files_stay_quantised_in_every_dtype() {
    quantized_runs_within_bounds::<f32>();
    quantized_runs_within_bounds::<f16>();
    quantized_runs_within_bounds::<bf16>();
    let device = Device::cpu().unwrap();
    let weights = Mlp::load(SMOLLM2, 28).unwrap();
    let explanation = weights.to(&device).unwrap().explain(1);
    assert_eq!(explanation.problem.weight_bytes(), 3.0 * 576.0 * 1536.0 * 20.0 / 32.0);
    let text = explanation.to_string();
    assert!(text.contains("weights as Q4_1") && text.contains("6.4 times the bytes"), "{text}");

    let decoded = weights.clone().decoded().to(&device).unwrap();
    assert_eq!(decoded.plan(1).problem.quantized, None);
    assert!(decoded.plan(1).reason.contains("decoded to f32"), "{}", decoded.plan(1).reason);
    let text = decoded.explain(1).to_string();
    assert!(text.contains("decoding was asked for"), "{text}");
    assert!(weights.decoded().quantized_on(&device).is_err());
}

#[test]
fn what_no_kernel_computes_with_is_decoded_and_says_why() {
    let device = Device::cpu().unwrap();
    let q =
        |block, seed| swiglu_core::random::quantized_matrix(seed, block, 256, 256, 0.06).unwrap();
    let file = |types: [BlockType; 3]| {
        let tensors: Vec<_> = ["gate", "up", "down"]
            .into_iter()
            .zip(types)
            .zip(1..)
            .map(|((name, block), seed)| {
                (format!("blk.0.ffn_{name}.weight"), block, q(block, seed).into_vec())
            })
            .collect();
        Mlp::load_from_bytes(gguf(&tensors), &LoadOptions::default()).unwrap()
    };
    let (q4_0, q8_0) = (BlockType::Q4_0, BlockType::Q8_0);
    let weights = file([q4_0, q8_0, q4_0]);
    let mlp = weights.to(&device).unwrap();
    assert_eq!(mlp.plan(1).problem.quantized, None);
    let text = mlp.explain(1).to_string();
    assert!(text.contains("Q4_0") && text.contains("must be of one type"), "{text}");
    let x = input::<f32>(2, 256);
    let host = weights.host::<f32>().unwrap();
    let reference = bounds::mlp(x.view(), &host.mlp().unwrap()).unwrap();
    assert!(reference.judge(mlp.forward(&x).unwrap().view()).unwrap().passed());

    // The down weight may be of another type, and a gated linear layer does not need it.
    let weights = file([BlockType::Q4_K, BlockType::Q4_K, BlockType::Q6_K]);
    let mlp = weights.to(&device).unwrap();
    assert_eq!(mlp.plan(1).problem.quantized.unwrap().to_string(), "Q4_K+Q6_K");
    let blocks = weights.quantized_on(&device).unwrap();
    let reference = bounds::quantized_mlp(x.view(), &blocks.mlp().unwrap()).unwrap();
    assert!(reference.judge(mlp.forward(&x).unwrap().view()).unwrap().passed());
    let gated =
        GatedLinear::from_quantized::<f32>(&device, &blocks.gated_linear().unwrap()).unwrap();
    assert_eq!(gated.plan(1).problem.quantized.unwrap().to_string(), "Q4_K");
}

/// Weights of 8 bits of a safetensors file: the CPU decodes them, says so, and computes with their values.
#[test]
fn codes_with_scales_beside_them_are_decoded_on_the_cpu() {
    let device = Device::cpu().unwrap();
    for (dtype, scales) in [("I8", [200, 1]), ("F8_E4M3", [200, 1]), ("F8_E4M3", [2, 2])] {
        let weights =
            Mlp::load_from_bytes(scaled(dtype, 200, scales), &LoadOptions::default()).unwrap();
        runs_within_bounds::<f32>(&weights);
        runs_within_bounds::<bf16>(&weights);
        let mlp = weights.clone().dtype(DType::Bf16).to(&device).unwrap();
        let plan = mlp.plan(1);
        assert_eq!(plan.problem.quantized, None);
        let why = format!("with {dtype}");
        assert!(
            plan.reason.contains(&why) && plan.reason.contains("the CPU has kernels"),
            "{plan}"
        );
        let refused = weights.quantized_on(&device).unwrap_err();
        assert!(matches!(refused.core(), Some(CoreError::Unsupported { .. })), "{refused}");
    }
}

#[test]
fn real_layers_run_in_every_dtype() {
    for (file, layer, dtype) in [(STORIES, 0, DType::F32), (SMOLLM2, 28, DType::F32)] {
        let weights = Mlp::load(file, layer).unwrap();
        assert_eq!(weights.resolved_dtype(), dtype);
        assert_eq!(weights.resolved_activation().unwrap(), Activation::SWIGLU);
        runs_within_bounds::<f32>(&weights);
        runs_within_bounds::<f16>(&weights);
        runs_within_bounds::<bf16>(&weights);
    }
}

#[test]
fn choices_reach_the_layer_and_its_plan() {
    let numerics = Numerics::precise(Rounding::Eager);
    let layer = GatedLinear::load(STORIES, 0)
        .unwrap()
        .dtype(DType::F16)
        .activation(Activation::CLAMPED_SWIGLU)
        .numerics(numerics)
        .to(&Device::cpu().unwrap())
        .unwrap();
    assert_eq!(layer.activation(), Activation::CLAMPED_SWIGLU);
    assert_eq!((layer.numerics(), layer.out_features()), (numerics, 768));
    let problem = layer.plan(5).problem;
    assert_eq!((problem.op, problem.m, problem.dtype), (Op::GatedLinear, 5, DType::F16));
    assert_eq!(problem.numerics, numerics);
}

#[test]
fn another_dtype_or_shape_is_refused_with_values() {
    let mlp = Mlp::load(STORIES, 0).unwrap().to(&Device::cpu().unwrap()).unwrap();
    let error = mlp.forward(&input::<bf16>(2, 288)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DType);
    assert!(matches!(
        error.core(),
        Some(CoreError::DType { expected: DType::F32, given: DType::Bf16, .. })
    ));
    let error = mlp.forward(&input::<f32>(2, 287)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shape);
    let mut short = Matrix::<f32>::zeros(1, 288).unwrap();
    let error = mlp.forward_into(&input::<f32>(2, 288), &mut short).unwrap_err();
    assert_eq!((error.kind(), error.what()), (ErrorKind::Shape, Some("output")));
    assert_eq!(error.given().zip(error.expected()), Some(("[1, 288]".into(), "[2, 288]".into())));
}

#[test]
fn missing_files_and_layers_are_not_found() {
    let error = Mlp::load("nowhere.safetensors", 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.path(), Some("nowhere.safetensors".as_ref()));
    assert!(error.source().is_some_and(|source| source.is::<std::io::Error>()));
    let error = Mlp::load(STORIES, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(matches!(error.format(), Some(FormatError::LayerOutOfRange { layer: 1, .. })));
    let names = TensorNames::default()
        .with_gate("model.layers.0.mlp.gate_proj.weight")
        .with_up("model.layers.0.mlp.up_proj.weight");
    let options = LoadOptions::default().with_names(names).with_orientation(Orientation::OutIn);
    let headless = Mlp::load_with(STORIES, &options).unwrap();
    let error = headless.to(&Device::cpu().unwrap()).unwrap_err();
    assert!(matches!(error.format(), Some(FormatError::IncompleteLayer { .. })), "{error}");
    assert!(GatedLinear::load_with(STORIES, &options).unwrap().to(&Device::cpu().unwrap()).is_ok());
}

#[test]
fn bytes_load_like_files() {
    let options = LoadOptions::new(28);
    let bytes = std::fs::read(SMOLLM2).unwrap();
    let from_bytes = Mlp::load_from_bytes(bytes, &options).unwrap();
    let from_file = Mlp::load(SMOLLM2, 28).unwrap();
    let (a, b) = (from_bytes.host::<bf16>().unwrap(), from_file.host::<bf16>().unwrap());
    assert_eq!(a.mlp().unwrap().down.row(3), b.mlp().unwrap().down.row(3));
}

fn small<K: swiglu::kind::Kind>(
    build: impl Fn(&MlpParams<'_, f32>) -> swiglu::Result<Layer<K>>,
) -> Layer<K> {
    let [gate, up, down] =
        [1, 2, 3].map(|seed| swiglu_core::random::normal_matrix::<f32>(seed, 24, 24, 0.2).unwrap());
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let params = MlpParams::new(
        GatedLinearParams::new(weights, Activation::SWIGLU),
        down.view(),
        Orientation::OutIn,
    )
    .with_rows(swiglu::RowParams::NONE);
    build(&params).unwrap()
}

#[test]
fn both_paths_agree_and_name_themselves() {
    let device = Device::cpu().unwrap();
    let x = input::<f32>(4, 24);
    for path in [Path::Fused, Path::Unfused] {
        small(|p| {
            let mlp = Mlp::with_path(&device, p, path)?;
            assert_eq!(mlp.plan(4).path, path);
            // From the numbers alone it is the same.
            let explanation = device.explain(p.problem(4), path)?;
            assert_eq!(explanation.plan, mlp.plan(4));
            let of_path = |c: &&swiglu::Candidate| c.name == path.to_string();
            let taken = explanation.candidates.iter().find(of_path).unwrap();
            assert!(taken.chosen && taken.reason == explanation.plan.reason, "{taken:?}");
            let judged = bounds::mlp(x.view(), p)?.judge(mlp.forward(&x)?.view())?;
            assert!(judged.passed(), "{path} {judged:?}");
            Ok(mlp)
        });
    }
}

#[test]
fn empty_batches_and_strided_rows_work() {
    let device = Device::cpu().unwrap();
    let layer = small(|p| GatedLinear::from_params(&device, &p.gated));
    assert_eq!(layer.forward(&input::<f32>(0, 24)).unwrap().shape(), [0, 24]);

    // Of no features any number of rows is nothing, and a plan of any ends.
    let none = MatrixRef::<f32>::new(&[], 0, 0).unwrap();
    let weights = GateUpWeights::separate(none, none, Orientation::OutIn).unwrap();
    let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
    let params = MlpParams::new(gated, none, Orientation::OutIn);
    let rows = MatrixRef::<f32>::new(&[], usize::MAX, 0).unwrap();
    let empty = Mlp::from_params(&device, &params).unwrap();
    assert_eq!(empty.forward(rows).unwrap().shape(), [usize::MAX, 0]);
    assert_eq!(layer.plan(usize::MAX).problem.m, usize::MAX);

    let x = input::<f32>(3, 24);
    let mut wide = vec![f32::NAN; 3 * 40];
    for r in 0..3 {
        wide[r * 40..r * 40 + 24].copy_from_slice(x.view().row(r));
    }
    let strided = MatrixRef::with_stride(&wide, 3, 24, 40).unwrap();
    assert_eq!(layer.forward(strided).unwrap(), layer.forward(&x).unwrap());
}

#[test]
fn explanations_are_data_and_text() {
    let device = Device::cpu().unwrap();
    let explanation = small(|p| Mlp::from_params(&device, p)).explain(2);
    assert_eq!(explanation.flops, 6.0 * 2.0 * 24.0 * 24.0);
    assert_eq!(explanation.candidates.iter().filter(|c| c.chosen).count(), 2);
    let text = explanation.to_string();
    assert!(text.contains("plan") && text.contains("FLOP per byte"), "{text}");
    // This workspace has its kernels optimised in every profile.
    assert!(explanation.notes.is_empty(), "{text}");
    let json = serde_json::to_string(&explanation).unwrap();
    let read: Explanation = serde_json::from_str(&json).unwrap();
    assert_eq!((read.plan, read.candidates), (explanation.plan, explanation.candidates));

    common::gradients_of_reglu(&GatedActivation::new(&device, Activation::REGLU));
    let act = GatedActivation::new(&device, Activation::GLU);
    let explanation = act.explain(2, 8, DType::F16, Arrangement::PackedGateFirst).unwrap();
    assert_eq!(explanation.compulsory_bytes, 2.0 * 3.0 * 8.0 * 2.0);
}

#[test]
fn a_call_keeps_its_limit_of_threads_and_changes_no_bit() {
    let mlp = Mlp::load(STORIES, 0).unwrap().to(&Device::cpu().unwrap()).unwrap();
    let x = input::<f32>(5, mlp.hidden());
    let expected = mlp.forward(&x).unwrap();
    let mut y = Matrix::<f32>::zeros(5, mlp.hidden()).unwrap();
    for most in [1, 2, 1000] {
        y.as_mut_slice().fill(f32::NAN);
        mlp.forward_opts(&x, &mut y, &CallOptions::default().with_max_threads(most)).unwrap();
        assert_eq!(y, expected, "{most} threads");
    }
    let none = CallOptions::default().with_max_threads(0);
    let error = mlp.forward_opts(&x, &mut y, &none).unwrap_err();
    assert!(matches!(error.core(), Some(CoreError::OutOfRange { what: "max_threads", .. })));
}

#[test]
fn layers_say_what_they_hold_and_devices_give_it_back() {
    let device = Device::cpu().unwrap();
    let mlp = Mlp::load(STORIES, 0).unwrap().to(&device).unwrap();
    let weights = 4 * 3 * mlp.hidden() * mlp.intermediate();
    assert!((weights..weights + weights / 8).contains(&mlp.weight_bytes()));
    let [one, many] = [1, 100].map(|m| mlp.workspace_bytes(m));
    assert!(one >= 4 * mlp.intermediate() && many >= 100 * one.min(4 * mlp.intermediate()));
    mlp.reserve(100, 2).unwrap();
    mlp.forward(&input::<f32>(100, mlp.hidden())).unwrap();
    assert_eq!((device.trim(), device.trim()), (2 * many, 0));
}

#[test]
fn a_model_is_opened_once_for_all_that_is_in_it() {
    let model = Model::open(STORIES).unwrap();
    let device = Device::cpu().unwrap();
    let again = model.clone();
    drop(model);
    assert!(again.names().iter().any(|name| name.ends_with("gate_proj.weight")));
    let from_model = again.mlp(&LoadOptions::default()).unwrap().to(&device).unwrap();
    let from_file = Mlp::load(STORIES, 0).unwrap().to(&device).unwrap();
    let x = Matrix::from_vec(vec![0.5f32; 2 * from_file.hidden()], 2, from_file.hidden()).unwrap();
    // Clones are the same layer.
    let y = from_model.clone().forward(&x).unwrap();
    assert_eq!(y.as_slice(), from_file.forward(&x).unwrap().as_slice());
    let gated = again.gated_linear(&LoadOptions::default()).unwrap().to(&device).unwrap();
    assert_eq!(gated.out_features(), from_file.intermediate());
    let missing = LoadOptions::new(7);
    assert_eq!(again.mlp(&missing).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn the_best_device_is_the_first_that_works() {
    let all = Device::probe();
    let (name, cpu) = all.last().unwrap();
    assert_eq!((name.as_str(), cpu.is_ok()), ("cpu", true));
    let first = all.iter().find_map(|(_, device)| device.as_ref().ok()).unwrap();
    assert_eq!(Device::best().unwrap().to_string(), first.to_string());
}

/// One failure goes to every request of a batch: a clone is the same error, in any thread.
#[test]
fn one_error_is_told_to_many() {
    fn sent<T: Clone + Send + Sync + StdError + 'static>(_: &T) {}
    let mlp = Mlp::load(STORIES, 0).unwrap().to(&Device::cpu().unwrap()).unwrap();
    let error = mlp.forward(&input::<f32>(2, 287)).unwrap_err();
    sent(&error);
    let told: Vec<String> = std::thread::scope(|s| {
        let all: Vec<_> = (0..3).map(|_| error.clone()).collect();
        let threads: Vec<_> = all.into_iter().map(|e| s.spawn(move || e.to_string())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(told.iter().all(|text| *text == error.to_string()), "{told:?}");
    assert_eq!(format!("{error:?}"), format!("Shape: {error}"));
}
