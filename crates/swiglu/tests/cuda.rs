//! The façade on a CUDA device: a GPU if the machine has one, else the simulated one.
#![cfg(feature = "cuda")]
// A helper of a test is a test: it ends by panicking, and says what was not run.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;
#[path = "../examples/graph.rs"]
#[allow(dead_code, reason = "its main is the example's")]
mod graph;

use std::path::{Path as FilePath, PathBuf};

use swiglu::cuda::{CudaError, DeviceMatrix, PinnedMatrix};
use swiglu::{
    Activation, BlockType, CallOptions, CoreError, DType, Device, Element, ErrorKind, GateUpRef,
    GatedActivation, GatedLinear, LoadOptions, Matrix, MatrixRef, Mlp, MlpWeights, Path, RowScale,
    bf16, f16,
};
use swiglu_core::{bounds, random};
use swiglu_cuda::library;

/// A real layer: in the project, or where a bundle of tests has it.
fn stories() -> PathBuf {
    let layers =
        std::env::var_os("SWIGLU_FIXTURES").unwrap_or_else(|| swiglu_fixtures::LAYERS.into());
    PathBuf::from(layers).join("stories15m-layer0/layer.safetensors")
}

fn has_gpu() -> bool {
    let simulated = std::env::var("SWIGLU_TEST_DEVICE").is_ok_and(|name| name == "sim");
    !simulated && ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| FilePath::new(path).exists())
}

/// The best device, or nothing after saying why there is none but the CPU.
fn device() -> Option<Device> {
    if !has_gpu() {
        match swiglu_cuda_sim::build() {
            Ok(simulator) => {
                library::prefer(simulator.directory());
            }
            Err(reason) => {
                swiglu_testing::not_run(reason);
                return None;
            }
        }
    }
    Some(Device::best().unwrap())
}

fn input<T: swiglu::Element>(rows: usize, cols: usize) -> Matrix<T> {
    random::normal_matrix(7, rows, cols, 1.0).unwrap()
}

#[test]
fn the_best_device_is_the_first_cuda_device() {
    let Some(device) = device() else { return };
    assert_eq!((device.name(), device.threads()), ("cuda", 1));
    assert!(device.to_string().starts_with("cuda:0 ("), "{device}");
    assert_eq!("cuda:0".parse::<Device>().unwrap().to_string(), device.to_string());
    let error = "cuda:77".parse::<Device>().unwrap_err();
    assert!(matches!(error.cuda(), Some(CudaError::DeviceIndex { given: 77, .. })), "{error}");
}

#[test]
fn layers_of_a_file_run_within_bounds_and_refuse_as_on_the_cpu() {
    let Some(device) = device() else { return };
    let weights = Mlp::load(stories(), 0).unwrap().dtype(DType::Bf16);
    let mlp = weights.to(&device).unwrap();
    let x = input::<bf16>(3, mlp.hidden());
    let y = mlp.forward(&x).unwrap();
    let host = weights.host::<bf16>().unwrap();
    let reference = bounds::mlp(x.view(), &host.mlp().unwrap()).unwrap();
    assert!(reference.judge(y.view()).unwrap().passed());
    // What every backend refuses is the same error.
    let error = mlp.forward(&input::<bf16>(3, 5)).unwrap_err();
    assert!(matches!(error.core(), Some(CoreError::Shape { .. })), "{error}");
    let error = mlp.forward(&input::<f32>(3, mlp.hidden())).unwrap_err();
    assert!(matches!(error.core(), Some(CoreError::DType { .. })), "{error}");
}

#[test]
fn layers_say_what_they_hold_and_calls_have_one_thread_of_the_host() {
    let Some(device) = device() else { return };
    let mlp = Mlp::load(stories(), 0).unwrap().dtype(DType::Bf16).to(&device).unwrap();
    let gated = GatedLinear::load(stories(), 0).unwrap().dtype(DType::Bf16).to(&device).unwrap();
    // Rows of these sizes need no padding.
    let weight = 2 * mlp.hidden() * mlp.intermediate();
    assert_eq!((mlp.weight_bytes(), gated.weight_bytes()), (3 * weight, 2 * weight));
    assert!(mlp.workspace_bytes(40) >= 40 * 2 * mlp.intermediate());
    mlp.reserve(3, 2).unwrap();
    let x = input::<bf16>(3, mlp.hidden());
    let mut y = Matrix::<bf16>::zeros(3, mlp.hidden()).unwrap();
    let options = CallOptions::default();
    mlp.forward_opts(&x, &mut y, &options.with_max_threads(1)).unwrap();
    assert_eq!(y, mlp.forward(&x).unwrap());
    let error = mlp.forward_opts(&x, &mut y, &options.with_max_threads(0)).unwrap_err();
    assert!(matches!(error.core(), Some(CoreError::OutOfRange { .. })), "{error}");
    assert_eq!(device.trim(), 0);
}

#[test]
fn resident_data_gives_the_same_bits_also_from_a_graph() {
    let Some(device) = device() else { return };
    let Device::Cuda(cuda) = &device else { return };
    let layer = GatedLinear::load(stories(), 0).unwrap().dtype(DType::Bf16).to(&device).unwrap();
    let x = input::<bf16>(2, layer.hidden());
    let expected = layer.forward(&x).unwrap();
    let stream = cuda.new_stream().unwrap();
    let resident = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let mut out = DeviceMatrix::<bf16>::zeros(&stream, 2, layer.out_features()).unwrap();
    layer.forward_on(&stream, resident.view(), out.view_mut()).unwrap();
    assert_eq!(out.to_host().unwrap().as_slice(), expected.as_slice());

    layer.reserve_on(&stream, 2).unwrap();
    out.buffer_mut().poison(0xFF).unwrap();
    let graph = stream.capture(|| layer.forward_on(&stream, resident.view(), out.view_mut()));
    let graph = graph.unwrap();
    // SAFETY: the layer and both matrices outlive the copy below, which waits.
    unsafe { graph.launch(&stream) }.unwrap();
    assert_eq!(out.to_host().unwrap().as_slice(), expected.as_slice());
}

#[test]
fn a_layer_on_the_cpu_has_no_stream() {
    let Some(Device::Cuda(cuda)) = device() else { return };
    let layer = GatedLinear::load(stories(), 0).unwrap().to(&Device::cpu().unwrap()).unwrap();
    let stream = cuda.stream();
    let x = DeviceMatrix::<f32>::zeros(&stream, 1, layer.hidden()).unwrap();
    let mut out = DeviceMatrix::<f32>::zeros(&stream, 1, layer.out_features()).unwrap();
    let error = layer.forward_on(&stream, x.view(), out.view_mut()).unwrap_err();
    assert!(matches!(error.core(), Some(CoreError::Unsupported { .. })), "{error}");
}

#[test]
fn activations_and_explanations_are_of_the_device() {
    let Some(device) = device() else { return };
    let act = GatedActivation::new(&device, Activation::REGLU);
    let (gate, up) = ([1.0f32, -1.0, 2.0, 3.0], [5.0, 6.0, 7.0, -8.0]);
    let [gate, up] = [&gate, &up].map(|m| MatrixRef::new(m, 2, 2).unwrap());
    let inputs = GateUpRef::separate(gate, up).unwrap();
    assert_eq!(act.forward(inputs).unwrap().as_slice(), [5.0, 0.0, 14.0, -24.0]);
    common::gradients_of_reglu(&act);

    let layer = GatedLinear::load(stories(), 0).unwrap().dtype(DType::F16).to(&device).unwrap();
    let explanation = layer.explain(40);
    assert_eq!(explanation.plan, layer.plan(40));
    assert_eq!(explanation.plan, device.plan(explanation.problem, None).unwrap());
    assert_eq!(explanation.candidates.iter().filter(|c| c.chosen).count(), 1);
    let unfused = device.plan(explanation.problem, Path::Unfused).unwrap();
    assert_eq!((unfused.path, unfused.backend.as_str()), (Path::Unfused, "cuda"));
}

/// A layer of `[256, 256]` weights of gate, up and down.
fn of_blocks(types: [BlockType; 3]) -> Vec<u8> {
    let tensor = |((name, block), seed): ((&str, BlockType), u64)| {
        let q = random::quantized_matrix(seed, block, 256, 256, 0.06).unwrap();
        (format!("blk.0.ffn_{name}.weight"), block, q.into_vec())
    };
    let tensors: Vec<_> =
        ["gate", "up", "down"].into_iter().zip(types).zip(1..).map(tensor).collect();
    common::gguf(&tensors)
}

fn computes_with_blocks<T: Element>(weights: &MlpWeights, device: &Device, m: usize) {
    let weights = weights.clone().dtype(T::DTYPE);
    let mlp = weights.to(device).unwrap();
    let blocks = weights.quantized_on(device).unwrap();
    assert_eq!(mlp.plan(m).problem.quantized, Some(blocks.types()));
    let x = input::<T>(m, 256);
    let reference = bounds::quantized_mlp(x.view(), &blocks.mlp().unwrap()).unwrap();
    let judgement = reference.judge(mlp.forward(&x).unwrap().view()).unwrap();
    assert!(judgement.passed(), "{} m = {m}: {judgement:?}", T::DTYPE);
}

/// A GGUF file's blocks are computed with as they are, with any number of tokens, and that is what plan
/// and explanation say.
#[test]
fn quantised_files_stay_quantised_where_there_is_a_kernel() {
    let Some(device) = device() else { return };
    let (q8, q4) = (BlockType::Q8_0, BlockType::Q4_0);
    for types in [[q8; 3], [q4; 3], [q4, q4, q8]] {
        let file = of_blocks(types);
        let weights = Mlp::load_from_bytes(file, &LoadOptions::default()).unwrap();
        for m in [1, 16, 37] {
            computes_with_blocks::<bf16>(&weights, &device, m);
        }
        computes_with_blocks::<f16>(&weights, &device, 2);
    }
    let weights = Mlp::load_from_bytes(of_blocks([q8; 3]), &LoadOptions::default()).unwrap();
    let weights = weights.dtype(DType::Bf16);
    let mlp = weights.to(&device).unwrap();
    for (m, passes) in [(1, 1), (16, 1), (37, 3)] {
        let explanation = mlp.explain(m);
        assert_eq!(explanation.plan, mlp.plan(m));
        assert_eq!(explanation.plan, device.plan(explanation.problem, Path::Fused).unwrap());
        // The one of every architecture, or those of sm_90a.
        let kernel = &explanation.plan.kernel;
        let kernels = ["decode_mlp", "sm90_decode_mlp", "sm90_held_mlp"];
        assert!(kernels.contains(&kernel.as_str()), "{kernel}");
        assert_eq!(explanation.plan.parameters["passes"], passes);
        assert_eq!(explanation.plan.reason.contains("3 times all weights"), passes == 3);
        let text = explanation.to_string();
        assert!(text.contains("weights as Q8_0") && text.contains("1.9 times"), "{text}");
        let chosen = explanation.candidates.iter().filter(|c| c.chosen);
        assert!(chosen.map(|c| c.name.as_str()).any(|name| name.starts_with(kernel.as_str())));
    }
}

/// Weights of 8 bits of a safetensors file, whose scales are of rows or of blocks.
#[test]
fn codes_with_scales_beside_them_stay_as_they_are() {
    let Some(device) = device() else { return };
    for (dtype, scales, name) in [
        ("I8", [256, 1], "I8"),
        ("I8", [1, 1], "I8"),
        ("F8_E4M3", [256, 1], "F8_E4M3"),
        ("F8_E4M3", [2, 2], "F8_E4M3_128x128"),
    ] {
        let file = common::scaled(dtype, 256, scales);
        let weights = Mlp::load_from_bytes(file, &LoadOptions::default()).unwrap();
        for m in [1, 20] {
            computes_with_blocks::<bf16>(&weights, &device, m);
            computes_with_blocks::<f16>(&weights, &device, m);
        }
        let mlp = weights.dtype(DType::F16).to(&device).unwrap();
        let text = mlp.explain(1).to_string();
        assert!(
            text.contains(&format!("weights as {name}")) && text.contains("2.0 times"),
            "{text}"
        );
    }
}

/// Everything else is decoded, with the reason; in memory it is refused.
#[test]
fn quantised_weights_without_a_kernel_are_decoded_and_say_why() {
    let Some(device) = device() else { return };
    let load =
        |block| Mlp::load_from_bytes(of_blocks([block; 3]), &LoadOptions::default()).unwrap();
    let decoded = |weights: MlpWeights, why: &str| {
        let mlp = weights.to(&device).unwrap();
        let plan = mlp.plan(2);
        assert_eq!(plan.problem.quantized, None);
        assert!(plan.reason.contains(why), "{plan}");
        assert!(mlp.explain(2).to_string().contains(why));
        let refused = weights.quantized_on(&device).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    };
    decoded(load(BlockType::Q6_K).dtype(DType::Bf16), "kernels for Q8_0, Q4_0, I8");
    decoded(load(BlockType::Q8_0), "choose one of these");
    decoded(load(BlockType::Q8_0).dtype(DType::Bf16).decoded(), "decoding was asked for");

    let file = of_blocks([BlockType::Q8_0; 3]);
    let weights = GatedLinear::load_from_bytes(file, &LoadOptions::default()).unwrap();
    let layer = weights.dtype(DType::Bf16).to(&device).unwrap();
    let plan = layer.plan(2);
    assert!(
        plan.problem.quantized.is_none() && plan.reason.contains("whole feed-forward"),
        "{plan}"
    );

    // A problem with weights that would be decoded is planned so.
    let quantised = Mlp::load_from_bytes(of_blocks([BlockType::Q6_K; 3]), &LoadOptions::default());
    let cpu = quantised.unwrap().dtype(DType::Bf16).to(&Device::cpu().unwrap()).unwrap();
    let plan = device.plan(cpu.plan(3).problem, None).unwrap();
    assert!(plan.problem.quantized.is_none() && plan.reason.contains("decoded to bf16"), "{plan}");
}

#[test]
fn the_example_of_a_graph_runs() {
    let Some(_device) = device() else { return };
    graph::run(&stories()).unwrap();
}

/// Page-locked matrices are used as others are, by layers and by copies, and their memory again by later ones.
#[test]
fn pinned_matrices_are_matrices_of_the_host() {
    let Some(device) = device() else { return };
    let Device::Cuda(cuda) = &device else { return };
    let mlp = Mlp::load(stories(), 0).unwrap().dtype(DType::Bf16).to(&device).unwrap();
    let k = mlp.hidden();
    let values = input::<bf16>(3, k);
    let expected = mlp.forward(&values).unwrap();
    let addresses: Vec<_> = (0..3)
        .map(|_| {
            let mut x = PinnedMatrix::<bf16>::zeros(cuda, 3, k).unwrap();
            let mut y = PinnedMatrix::<bf16>::zeros(cuda, 3, k).unwrap();
            assert!(x.as_slice().iter().chain(y.as_slice()).all(|v| v.to_bits() == 0));
            x.as_mut_slice().copy_from_slice(values.as_slice());
            mlp.forward_into(&x, &mut y).unwrap();
            assert_eq!(y.as_slice(), expected.as_slice());
            // Parts of it, and rows that are apart.
            let half =
                DeviceMatrix::from_host(&cuda.stream(), y.view().cols_range(1..k / 2).unwrap());
            let half = half.unwrap().to_host().unwrap();
            assert_eq!(half.view().row(2), &expected.view().row(2)[1..k / 2]);
            [x.as_slice().as_ptr().addr(), y.as_slice().as_ptr().addr()]
        })
        .map(|[x, y]| (x.min(y), x.max(y)))
        .collect();
    assert!(addresses.iter().all(|pair| *pair == addresses[0]), "{addresses:?}");
    // Another thread frees one that it did not make; one without elements has no memory.
    let moved = PinnedMatrix::<f32>::zeros(cuda, 5, 7).unwrap();
    std::thread::spawn(move || drop(moved)).join().unwrap();
    assert_eq!(PinnedMatrix::<f32>::zeros(cuda, 0, 7).unwrap().view().shape(), [0, 7]);
    assert_eq!((device.trim(), device.trim()), (2 * 3 * k * 2 + 5 * 7 * 4, 0));
    let error = PinnedMatrix::<f32>::zeros(cuda, usize::MAX, 7).unwrap_err();
    assert!(matches!(error, CudaError::Core(CoreError::TooLarge { .. })), "{error}");
    // The device may go before it.
    let mut last = PinnedMatrix::<f32>::zeros(cuda, 1, 4).unwrap();
    drop((mlp, device));
    last.as_mut_slice()[3] = 1.0;
}

#[test]
fn results_are_added_by_the_cpu_alone() {
    let Some(device) = device() else { return };
    let mlp = Mlp::load(stories(), 0).unwrap().to(&device).unwrap();
    let x = input::<f32>(2, mlp.hidden());
    let mut out = Matrix::<f32>::zeros(2, mlp.hidden()).unwrap();
    let error = mlp.forward_add_into(&x, RowScale::None, &mut out).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("forward_into"), "{error}");
}

/// A layer over lent weights copies them when it is asked to, and no other does.
#[test]
fn lent_weights_are_packed_when_that_is_asked_for() {
    use swiglu::cuda::DeviceGatedLinearParams;
    let Some(device) = device() else { return };
    let Device::Cuda(cuda) = &device else { panic!("{device}") };
    let stream = cuda.stream();
    let both = random::normal_matrix::<f32>(3, 2 * 24, 16, 0.3).unwrap();
    let there = DeviceMatrix::from_host(&stream, both.view()).unwrap();
    let act = Activation::SWIGLU;
    let params =
        DeviceGatedLinearParams::packed(there.view(), swiglu::Orientation::OutIn, act).unwrap();
    // SAFETY: the layer keeps the matrix's memory, and nothing writes it.
    let lent = unsafe { GatedLinear::from_device(cuda, &params) }.unwrap();
    let packed = lent.packed_on(&stream).unwrap();
    assert_eq!(lent.weight_bytes(), 0);
    assert!(packed.weight_bytes() >= 2 * 24 * 16 * 4);
    assert_eq!(packed.packed_on(&stream).unwrap().weight_bytes(), packed.weight_bytes());
    let x = input::<f32>(3, 16);
    let (a, b) = (lent.forward(&x).unwrap(), packed.forward(&x).unwrap());
    let near = a.as_slice().iter().zip(b.as_slice()).all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(near, "{a:?} {b:?}");
}

/// Gradients of a block on the device are within their bounds whatever is kept, and the same bits where both of gate and up
/// are computed again, as they were.
#[test]
fn a_block_trains() {
    use swiglu::{
        GateUpWeights, GatedLinearParams, MlpParams, Orientation, SavePolicy, StridedRef, Wanted,
    };
    let Some(device) = device() else { return };
    let [m, k, h] = [70, 64, 136];
    let matrix = |seed, rows, cols| {
        swiglu_core::random::normal_matrix::<bf16>(seed, rows, cols, 0.2).unwrap()
    };
    let (gate, up, down) = (matrix(1, h, k), matrix(2, h, k), matrix(3, k, h));
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let bias = [0.25; 136];
    let gated = GatedLinearParams::new(weights, Activation::GEGLU)
        .with_gate_bias(&bias[..])
        .with_up_bias(&bias[..]);
    let params = MlpParams::new(gated, down.view(), Orientation::OutIn);
    let x = input::<bf16>(m, k);
    let value = [bf16::from_f32(0.5)];
    let dy = StridedRef::new(&value, [m, k], [0, 0]).unwrap();
    let rows = Matrix::from_vec(vec![value[0]; m * k], m, k).unwrap();
    let bounds = bounds::mlp_backward(x.view(), &params, rows.view(), DType::Bf16, 0.0).unwrap();
    let mut all = Vec::new();
    for policy in SavePolicy::ALL {
        let layer = Mlp::for_training(&device, &params, policy).unwrap();
        assert_eq!(layer.save_policy::<bf16>().unwrap(), policy);
        let (y, saved) = layer.forward_train(&x).unwrap();
        assert_eq!(saved.kept_bytes(), policy.kept_bytes(m, h, DType::Bf16));
        let judgement = bounds::mlp(x.view(), &params).unwrap().judge(y.view()).unwrap();
        assert!(judgement.passed(), "{policy}: {judgement:?}");
        let gradients = layer.backward(saved, dy, Wanted::ALL).unwrap();
        let judged = [
            (&bounds.dx, gradients.dx.as_ref()),
            (&bounds.gate, gradients.gate.as_ref()),
            (&bounds.up, gradients.up.as_ref()),
            (bounds.down.as_ref().unwrap(), gradients.down.as_ref()),
        ];
        for (reference, gradient) in judged {
            let judgement = reference.judge(gradient.unwrap().view()).unwrap();
            assert!(judgement.passed(), "{policy}: {judgement:?}");
        }
        let biases =
            [(&bounds.gate_bias, &gradients.gate_bias), (&bounds.up_bias, &gradients.up_bias)];
        for (reference, gradient) in biases {
            let gradient = MatrixRef::new(gradient.as_ref().unwrap(), 1, h).unwrap();
            assert!(reference.judge(gradient).unwrap().passed(), "{policy}");
        }
        all.push(gradients);
    }
    assert!(all[0] == all[2], "computed again by the same kernel, they are others");
    let plain = Mlp::from_params(&device, &params).unwrap();
    let error = plain.forward_train(&x).unwrap_err();
    assert!(error.to_string().contains("for_training"), "{error}");
    // Of the same shapes, and of the same problem, as an update makes one.
    let made = |params| Mlp::for_training(&device, params, SavePolicy::Save).unwrap();
    let others = params.with_gated(gated.with_activation(Activation::SWIGLU));
    let mut layer = made(&params);
    let before = layer.forward_train(&x).unwrap().1;
    layer.update(&params).unwrap();
    let error = layer.update(&others).unwrap_err();
    assert!(error.to_string().contains("by swiglu of a layer of geglu"), "{error}");
    for saved in [before, made(&others).forward_train(&x).unwrap().1] {
        let error = layer.backward(saved, dy, Wanted::ALL).unwrap_err();
        assert!(error.to_string().contains("another layer kept"), "{error}");
    }
    let (_, saved) = layer.forward_train(&x).unwrap();
    assert!(layer.backward(saved, dy, Wanted::INPUT).unwrap().dx == all[0].dx);
}
