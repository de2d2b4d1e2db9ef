//! Plans of a device that follow measurements.

use super::*;

/// A device whose plans follow the records of a directory.
pub(super) fn device(dir: &Path) -> Option<Cuda> {
    let tuning = TuningOptions { dir: Some(dir.to_owned()), disabled: false };
    let options = CudaOptions { tuning, ..common::options()? };
    Some(Cuda::with_options(&options).unwrap())
}

#[test]
fn plans_follow_the_fastest_way_that_does_what_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    // What is shipped may have a note too.
    let of_dir = |note: &&String| note.contains(&*dir.path().to_string_lossy());
    assert_eq!(cuda.tuning_notes().iter().find(of_dir), None);
    let before = cuda.plan(problem(16), None).unwrap();
    let options = TuningOptions { dir: Some(dir.path().to_owned()), disabled: false };
    // One that the model would not take, the unfused path before it, and before that one which
    // does not compute this at all.
    let kernel = "mma_gated_gemm 128x64";
    assert_ne!(before.parameters["tile_m"], 128, "{before}");
    let times = [("simt_gated_gemm 128x64", 1.0), ("cublaslt + elementwise", 2.0), (kernel, 3.0)];
    let kept = cuda.keep_tuning(&options, vec![entry(16, &times)]).unwrap();
    assert_eq!(kept.1, None);
    let cuda = device(dir.path()).unwrap();
    let chosen = |problem: Problem, path| {
        let candidates = cuda.candidates(&problem, path);
        let plan = cuda.plan(problem, path).unwrap();
        let chosen: Vec<_> = candidates.into_iter().filter(|c| c.chosen).collect();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].reason, plan.reason);
        (chosen[0].name.clone(), plan.reason, chosen[0].measured_us)
    };
    let unfused = chosen(problem(16), None);
    assert_eq!((unfused.0.as_str(), unfused.2), ("cublaslt + elementwise", Some(2.0)));
    assert_eq!(unfused.1, "the fastest, measured");
    let fused = problem(9).with_numerics(Numerics::default());
    let (name, reason, time) = chosen(fused, None);
    assert_eq!((name.as_str(), time), (kernel, None));
    assert_eq!(reason, "the least time expected from measurements of 64/96 with 16 tokens");
    assert_eq!(chosen(problem(16), Some(swiglu_core::Path::Fused)).0, kernel);
    // Nothing was measured for so few.
    assert_eq!(
        cuda.plan(problem(7), None).unwrap().reason,
        device_without().plan(problem(7), None).unwrap().reason
    );
    assert!(cuda.tuning_notes()[0].contains("1 problems measured"), "{:?}", cuda.tuning_notes());
    // A damaged record is said and not used.
    std::fs::write(kept.0, "no record").unwrap();
    let cuda = device(dir.path()).unwrap();
    assert_eq!(cuda.plan(problem(16), None).unwrap(), before);
    let note = &cuda.tuning_notes()[0];
    assert!(note.contains("not used: it is damaged"), "{note}");
}

/// The device with a record in which this algorithm for the problem was the fastest, before a fused kernel.
fn where_fastest(way: &str, problem: Problem, cuda: &Cuda, dir: &std::path::Path) -> Cuda {
    let options = TuningOptions { dir: Some(dir.to_owned()), disabled: false };
    let measured = entry(problem.m, &[(way, 1.0), ("mma_gated_gemm 128x64", 2.0)]);
    cuda.keep_tuning(&options, vec![Entry { problem, ..measured }]).unwrap();
    device(dir).unwrap()
}

/// Where f32 sums between two steps were the fastest: what cuBLASLt takes goes through it, and what it does not
/// take, or what has to be written beside h, through a fused kernel.
#[test]
fn sums_between_are_planned_and_have_a_fused_kernel_behind_them() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let (m, k, h) = (13, 67, 45);
    let case = Case { bias: true, ..Case::new(Op::GatedLinear, [m, k, h], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let params = parameters.gated();
    let name = "cublaslt f32 + elementwise";
    let cuda = where_fastest(name, params.problem(16), &cuda, dir.path());
    let layer = GatedLinear::new(&cuda, &params).unwrap();
    let plan = layer.plan(m);
    assert_eq!((plan.kernel.as_str(), plan.path), (name, swiglu_core::Path::Unfused));
    assert_eq!(plan.problem, params.problem(m));
    let fused = GatedLinear::with_path(&cuda, &params, swiglu_core::Path::Fused).unwrap();
    let stream = cuda.stream();
    let x = random::normal_matrix::<bf16>(1, m, k, 1.0).unwrap();
    let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let forward = |layer: &GatedLinear<bf16>, x| {
        let mut out = DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap();
        layer.forward(&stream, x, out.view_mut()).unwrap();
        out.to_host().unwrap()
    };
    let judge = |x: MatrixRef<'_, bf16>, out: &Matrix<bf16>| {
        let judgement = bounds::gated_linear(x, &params).unwrap().judge(out.view()).unwrap();
        assert!(judgement.passed(), "{judgement:?}");
    };
    layer.reserve(&stream, m).unwrap();
    let host = x.to_host().unwrap();
    // Rows one element apart, which overlap.
    let overlapping = DeviceMatrixRef::with_stride(x.buffer(), m, k, 1).unwrap();
    // What was reserved is enough for a capture, also of what goes to the other kernel.
    let mut captured = DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap();
    let graph =
        stream.capture(|| layer.forward(&stream, overlapping, captured.view_mut())).unwrap();
    // SAFETY: what the graph reads and writes lives on.
    unsafe { graph.launch(&stream) }.unwrap();
    judge(host.view(), &forward(&layer, x.view()));
    let values: Vec<bf16> =
        (0..m).flat_map(|i| host.as_slice()[i..i + k].iter().copied()).collect();
    let out = forward(&layer, overlapping);
    judge(Matrix::from_vec(values, m, k).unwrap().view(), &out);
    assert_eq!(out, forward(&fused, overlapping));
    assert_eq!(out, captured.to_host().unwrap());
    // What a backward pass needs is written by the kernel that would be chosen without sums.
    let mut saved = [(); 3].map(|()| DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap());
    let [out, gate, up] = saved.each_mut().map(DeviceMatrix::view_mut);
    layer.forward_saving(&stream, x.view(), out, [gate, up]).unwrap();
    assert_eq!(saved[0].to_host().unwrap(), forward(&fused, x.view()));
}

/// Where values of T between two steps are as asked for: what cuBLASLt does not take goes through a fused kernel also
/// where pre-activations are saved, but not where the path was asked for.
#[test]
fn what_cublaslt_does_not_take_is_saved_by_a_fused_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let Some(cuda) = device(dir.path()) else { return };
    let (m, k, h) = (5, 40, 24);
    let numerics = Numerics::default().with_rounding(Rounding::PreRound);
    let case = Case { numerics, ..Case::new(Op::GatedLinear, [m, k, h], DType::Bf16) };
    let parameters = Parameters::<bf16>::new(&case).unwrap();
    let params = parameters.gated();
    let name = "cublaslt + elementwise";
    let cuda = where_fastest(name, params.problem(8), &cuda, dir.path());
    let stream = cuda.stream();
    let x = random::normal_matrix::<bf16>(1, m, k, 1.0).unwrap();
    let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let overlapping = DeviceMatrixRef::with_stride(x.buffer(), m, k, 1).unwrap();
    let save = |layer: &GatedLinear<bf16>| {
        let mut saved = [(); 3].map(|()| DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap());
        let [out, gate, up] = saved.each_mut().map(DeviceMatrix::view_mut);
        layer.forward_saving(&stream, overlapping, out, [gate, up])?;
        Ok::<_, CudaError>(saved.map(|matrix| matrix.to_host().unwrap()))
    };
    let planned = GatedLinear::new(&cuda, &params).unwrap();
    assert_eq!(planned.plan(m).kernel, name);
    let on = |path| GatedLinear::with_path(&cuda, &params, path).unwrap();
    assert_eq!(save(&planned).unwrap(), save(&on(swiglu_core::Path::Fused)).unwrap());
    let refused = save(&on(swiglu_core::Path::Unfused)).unwrap_err();
    assert!(matches!(refused, CudaError::Unsupported { .. }), "{refused}");
}

fn device_without() -> Cuda {
    common::device().unwrap()
}
