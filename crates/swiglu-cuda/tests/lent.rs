//! Weights that stay where the caller has them: every layout and stride, within the bounds of packed ones.

// A generic helper is not seen as a test.
#![allow(clippy::unwrap_used)]

use crate::common::{device, partly};
use half::{bf16, f16};
use swiglu_core::{
    Activation, Element, GateUpWeights, GatedLinearParams, Gradients, Matrix, MatrixRef, MlpParams,
    Orientation, Path, SavePolicy, StridedRef, Wanted, bounds, random,
};
use swiglu_cuda::{
    Candidate, Cuda, DeviceBuffer, DeviceGatedLinearParams, DeviceMatrix, DeviceMatrixRef,
    DeviceMlpParams, GatedLinear, Mlp,
};

/// A matrix on the host, and on the device with gaps of NaN between its rows and in front of it.
struct Weight<T> {
    host: Matrix<T>,
    buffer: DeviceBuffer<T>,
    first: usize,
    stride: usize,
}

impl<T: Element> Weight<T> {
    fn new(cuda: &Cuda, seed: u64, [rows, cols]: [usize; 2], gap: usize, first: usize) -> Self {
        let host = random::normal_matrix::<T>(seed, rows, cols, 0.1).unwrap();
        let stride = cols + gap;
        let mut values = vec![T::from_f32(f32::NAN); first + rows * stride];
        for row in 0..rows {
            values[first + row * stride..][..cols].copy_from_slice(host.view().row(row));
        }
        let buffer = DeviceBuffer::from_host(&cuda.stream(), &values).unwrap();
        Self { host, buffer, first, stride }
    }

    fn view(&self) -> DeviceMatrixRef<'_, T> {
        let (rows, cols) = (self.host.rows(), self.host.cols());
        let whole = DeviceMatrixRef::with_stride(&self.buffer, 1, self.buffer.len(), 0).unwrap();
        let part = whole.cols_range(self.first..self.buffer.len()).unwrap();
        // SAFETY: a part of the buffer, which outlives the view.
        unsafe {
            let cuda = self.buffer.stream().cuda();
            DeviceMatrixRef::from_raw(cuda, part.device_ptr(), rows, cols, self.stride).unwrap()
        }
    }
}

const ACTIVATIONS: [Activation; 3] =
    [Activation::SWIGLU, Activation::GEGLU_TANH, Activation::BILINEAR];

fn judged<T: Element>(
    cuda: &Cuda,
    m: usize,
    [k, h]: [usize; 2],
    [gap, first]: [usize; 2],
    orientation: Orientation,
) {
    let stream = cuda.new_stream().unwrap();
    let weight =
        |seed, out, inn| Weight::<T>::new(cuda, seed, orientation.shape(out, inn), gap, first);
    let [gate, up, down] = [weight(1, h, k), weight(2, h, k), weight(3, k, h)];
    let x = random::normal_matrix::<T>(4, m, k, 1.0).unwrap();
    let x_there = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let activation = ACTIVATIONS[(m + k + h) % ACTIVATIONS.len()];
    let of_host = GatedLinearParams::new(
        GateUpWeights::separate(gate.host.view(), up.host.view(), orientation).unwrap(),
        activation,
    );
    let lent =
        DeviceGatedLinearParams::separate(gate.view(), up.view(), orientation, activation).unwrap();
    let what = format!("{} m {m} k {k} h {h} gap {gap} first {first} {orientation}", T::DTYPE);
    // SAFETY: the weights outlive the layers, and nothing writes them.
    let layer = unsafe { GatedLinear::from_device(cuda, &lent) }.unwrap();
    let mut out = DeviceMatrix::<T>::new(&stream, m, h).unwrap();
    out.buffer_mut().poison(0xFF).unwrap();
    layer.forward(&stream, x_there.view(), out.view_mut()).unwrap();
    let reference = bounds::gated_linear(x.view(), &of_host).unwrap();
    let judgement = reference.judge(out.to_host().unwrap().view()).unwrap();
    assert!(judgement.passed(), "{what}: {judgement:?}");
    // The kernels that copy rows in the pieces that there are, also where a plan has others.
    let problem = layer.plan(m).problem;
    let candidates = cuda.candidates(&problem, None);
    let copies = |way: &&Candidate| way.name.starts_with("mma") && way.refusal.is_none();
    if let Some(way) = candidates.iter().find(copies) {
        out.buffer_mut().poison(0xFF).unwrap();
        layer.forward_by(&stream, way, x_there.view(), out.view_mut()).unwrap();
        let judgement = reference.judge(out.to_host().unwrap().view()).unwrap();
        assert!(judgement.passed(), "{what} by {way}: {judgement:?}");
    }

    let of_host = MlpParams::new(of_host, down.host.view(), orientation);
    let lent = DeviceMlpParams::new(lent, down.view(), orientation).unwrap();
    // SAFETY: as above.
    let mlp = unsafe { Mlp::from_device(cuda, &lent) }.unwrap();
    let mut out = DeviceMatrix::<T>::new(&stream, m, k).unwrap();
    out.buffer_mut().poison(0xFF).unwrap();
    mlp.forward(&stream, x_there.view(), out.view_mut()).unwrap();
    let reference = bounds::mlp(x.view(), &of_host).unwrap();
    let judgement = reference.judge(out.to_host().unwrap().view()).unwrap();
    assert!(judgement.passed(), "block {what}: {judgement:?}, {}", mlp.plan(m).reason);
}

#[test]
fn lent_weights_of_every_layout_are_within_bounds() {
    let Some(cuda) = device() else { return };
    // A kernel for each type, layout and width of copies is compiled: the simulator has a part of them.
    let tokens: &[usize] = if partly() { &[5] } else { &[1, 5, 33] };
    for orientation in Orientation::ALL {
        for &m in tokens {
            // Whole 16 bytes; rows apart by whole ones; rows that end, begin, or lie apart elsewhere.
            for ([k, h], place) in [
                ([64, 96], [0, 0]),
                ([64, 96], [8, 8]),
                ([64, 96], [3, 0]),
                ([64, 96], [8, 1]),
                ([43, 37], [0, 0]),
                ([44, 30], [4, 8]),
            ] {
                judged::<bf16>(&cuda, m, [k, h], place, orientation);
                if place == [0, 0] || m == 5 && !partly() {
                    judged::<f16>(&cuda, m, [k, h], place, orientation);
                    judged::<f32>(&cuda, m, [k, h], place, orientation);
                }
            }
        }
    }
}

#[test]
fn one_matrix_of_both_gives_the_bits_of_the_packed_layer_and_a_changed_weight_is_seen() {
    let Some(cuda) = device() else { return };
    let stream = cuda.new_stream().unwrap();
    let (k, h) = (64, 96);
    for orientation in Orientation::ALL {
        let [rows, cols] = orientation.shape(2 * h, k);
        let both = random::normal_matrix::<bf16>(1, rows, cols, 0.1).unwrap();
        let mut there = DeviceMatrix::from_host(&stream, both.view()).unwrap();
        let lend = |there: &DeviceMatrix<bf16>| {
            let lent =
                DeviceGatedLinearParams::packed(there.view(), orientation, Activation::SWIGLU)
                    .unwrap();
            // SAFETY: the layer keeps the matrix's memory, and its calls are waited for before that is written.
            unsafe { GatedLinear::from_device(&cuda, &lent) }.unwrap()
        };
        let layer = lend(&there);
        for (seed, m) in [(1, 1), (2, 33), (3, 33)] {
            let both = random::normal_matrix::<bf16>(seed, rows, cols, 0.1).unwrap();
            there.view_mut().upload(&stream, both.view()).unwrap();
            let view = both.view();
            let part = |range: std::ops::Range<usize>| match orientation {
                Orientation::OutIn => {
                    MatrixRef::with_stride(&view.as_slice()[range.start * cols..], h, k, cols)
                }
                Orientation::InOut => {
                    MatrixRef::with_stride(&view.as_slice()[range.start..], k, h, cols)
                }
            };
            let (gate, up) = (part(0..h).unwrap(), part(h..2 * h).unwrap());
            let weights = GateUpWeights::separate(gate, up, orientation).unwrap();
            let owned =
                GatedLinear::new(&cuda, &GatedLinearParams::new(weights, Activation::SWIGLU))
                    .unwrap();
            let x = random::normal_matrix::<bf16>(9, m, k, 1.0).unwrap();
            let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
            let results = [&layer, &owned].map(|layer| {
                let mut out = DeviceMatrix::<bf16>::zeros(&stream, m, h).unwrap();
                layer.forward(&stream, x.view(), out.view_mut()).unwrap();
                out.to_host().unwrap()
            });
            assert_eq!(results[0].as_slice(), results[1].as_slice(), "{orientation}, seed {seed}");
        }
        // What was lent by a matrix stays until the layer is dropped.
        drop(there);
        let mut out = DeviceMatrix::<bf16>::zeros(&stream, 1, h).unwrap();
        let x = DeviceMatrix::<bf16>::zeros(&stream, 1, k).unwrap();
        layer.forward(&stream, x.view(), out.view_mut()).unwrap();
        assert!(out.to_host().unwrap().as_slice().iter().all(|v| v.to_f32() == 0.0));
    }
}

#[test]
fn ways_for_few_tokens_refuse_lent_weights_that_lie_otherwise() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let (k, h) = (43, 96);
    let matrix = |rows, cols| DeviceMatrix::<bf16>::zeros(&stream, rows, cols).unwrap();
    let (both, down) = (matrix(2 * h, k), matrix(k, h));
    let act = Activation::SWIGLU;
    let gated = DeviceGatedLinearParams::packed(both.view(), Orientation::OutIn, act).unwrap();
    let lent = DeviceMlpParams::new(gated, down.view(), Orientation::OutIn).unwrap();
    // SAFETY: the layer keeps the matrices' memory, and nothing writes it.
    let mlp = unsafe { Mlp::from_device(&cuda, &lent) }.unwrap();
    let (x, mut out) = (matrix(1, k), matrix(1, k));
    let mut refused = 0;
    for way in
        cuda.candidates(&mlp.plan(1).problem, None).iter().filter(|way| way.refusal.is_none())
    {
        if let Err(error) = mlp.forward_by(&stream, way, x.view(), out.view_mut()) {
            refused += usize::from(error.to_string().contains("lent"));
        }
    }
    assert!(refused > 0);
    assert!(mlp.plan(1).reason.contains("16 bytes"), "{}", mlp.plan(1).reason);
    // Of rows that no kernel copies in few pieces, one that does is planned where it rounds as asked.
    for m in [1, 33, 512] {
        let plan = mlp.plan(m);
        assert!(plan.kernel.starts_with("cublaslt f32"), "{m}: {} ({})", plan.kernel, plan.reason);
        assert_eq!(plan.path, Path::Unfused);
    }
}

#[test]
fn packed_weights_of_every_width_go_as_they_are_planned() {
    let Some(cuda) = device() else { return };
    for (k, h) in [(64, 96), (43, 37), (44, 30)] {
        let both = random::normal_matrix::<bf16>(1, 2 * h, k, 0.1).unwrap();
        let (gate, up) = both.as_slice().split_at(h * k);
        let [gate, up] = [gate, up].map(|w| MatrixRef::new(w, h, k).unwrap());
        let down = random::normal_matrix::<bf16>(2, k, h, 0.1).unwrap();
        let weights = GateUpWeights::separate(gate, up, Orientation::OutIn).unwrap();
        let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
        let params = MlpParams::new(gated, down.view(), Orientation::OutIn);
        let mlp = Mlp::new(&cuda, &params).unwrap();
        for m in [1, 5, 40] {
            let planned = cuda.plan(params.problem(m), None).unwrap();
            assert_eq!(mlp.plan(m), planned, "{k} {h} {m}");
            assert_eq!(mlp.design(m).is_some(), planned.kernel.contains("decode"), "{planned:?}");
        }
    }
}

#[test]
fn what_cannot_be_lent_is_refused_with_the_reason() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    let matrix = |rows, cols| DeviceMatrix::<f32>::zeros(&stream, rows, cols).unwrap();
    let (gate, wide, other) = (matrix(8, 4), matrix(8, 6), matrix(7, 4));
    let act = Activation::SWIGLU;
    let up = wide.view().cols_range(0..4).unwrap();
    let error =
        DeviceGatedLinearParams::separate(gate.view(), up, Orientation::OutIn, act).unwrap_err();
    assert!(error.to_string().contains("one stride"), "{error}");
    let error =
        DeviceGatedLinearParams::separate(gate.view(), other.view(), Orientation::OutIn, act)
            .unwrap_err();
    assert!(error.to_string().contains("up weight: expected [8, 4]"), "{error}");
    let error = DeviceGatedLinearParams::packed(other.view(), Orientation::OutIn, act).unwrap_err();
    assert!(error.to_string().contains("even number"), "{error}");
    let gated = DeviceGatedLinearParams::packed(gate.view(), Orientation::OutIn, act).unwrap();
    let error = DeviceMlpParams::new(gated, gate.view(), Orientation::OutIn).unwrap_err();
    assert!(error.to_string().contains("down weight: expected [4, 4]"), "{error}");
}

/// A bias in device memory, without anything behind it, and as the oracle takes it.
fn bias<T: Element>(cuda: &Cuda, seed: u64, len: usize) -> (DeviceMatrix<T>, Vec<f32>) {
    let host = random::normal_matrix::<T>(seed, 1, len, 0.5).unwrap();
    let there = DeviceMatrix::from_host(&cuda.stream(), host.view()).unwrap();
    (there, host.as_slice().iter().map(|b| b.to_f32()).collect())
}

fn judged_with_biases<T: Element>(cuda: &Cuda, m: usize, [k, h]: [usize; 2], both: bool) {
    let stream = cuda.new_stream().unwrap();
    let orientation = Orientation::OutIn;
    let weight = |seed, out, inn| Weight::<T>::new(cuda, seed, [out, inn], 0, 0);
    let [gate, up, down] = [weight(1, h, k), weight(2, h, k), weight(3, k, h)];
    let [(bg, bg_host), (bu, bu_host)] = [4, 5].map(|seed| bias::<T>(cuda, seed, h));
    let (bd, bd_host) = bias::<T>(cuda, 6, k);
    let x = random::normal_matrix::<T>(7, m, k, 1.0).unwrap();
    let x_there = DeviceMatrix::from_host(&stream, x.view()).unwrap();
    let activation = Activation::SWIGLU;
    let mut of_host = GatedLinearParams::new(
        GateUpWeights::separate(gate.host.view(), up.host.view(), orientation).unwrap(),
        activation,
    );
    (of_host.gate_bias, of_host.up_bias) = (both.then_some(&bg_host[..]), Some(&bu_host[..]));
    let gate_bias = both.then(|| bg.view());
    let lent = DeviceGatedLinearParams::separate(gate.view(), up.view(), orientation, activation)
        .and_then(|lent| lent.biases(gate_bias, Some(bu.view())))
        .unwrap();
    // SAFETY: the weights outlive the layers, and nothing writes them.
    let layer = unsafe { GatedLinear::from_device(cuda, &lent) }.unwrap();
    let packed = layer.packed(&stream).unwrap();
    let reference = bounds::gated_linear(x.view(), &of_host).unwrap();
    for (which, layer) in [("lent", &layer), ("packed", &packed)] {
        let what = format!("{which} {} m {m} k {k} h {h} both {both}", T::DTYPE);
        let mut out = DeviceMatrix::<T>::new(&stream, m, h).unwrap();
        out.buffer_mut().poison(0xFF).unwrap();
        layer.forward(&stream, x_there.view(), out.view_mut()).unwrap();
        let judgement = reference.judge(out.to_host().unwrap().view()).unwrap();
        assert!(judgement.passed(), "{what}: {judgement:?}");
        // As a training pass stores them.
        let mut saved = [(); 2].map(|()| DeviceMatrix::<T>::new(&stream, m, h).unwrap());
        let [gate_out, up_out] = &mut saved;
        let kept = [gate_out.view_mut(), up_out.view_mut()];
        layer.forward_saving(&stream, x_there.view(), out.view_mut(), kept).unwrap();
        let judgement = reference.judge(out.to_host().unwrap().view()).unwrap();
        assert!(judgement.passed(), "saving {what}: {judgement:?}");
    }

    let mut of_host = MlpParams::new(of_host, down.host.view(), orientation);
    of_host.down_bias = Some(&bd_host);
    let lent = DeviceMlpParams::new(lent, down.view(), orientation)
        .and_then(|lent| lent.down_bias(bd.view()))
        .unwrap();
    // SAFETY: as above.
    let mlp = unsafe { Mlp::from_device(cuda, &lent) }.unwrap();
    let packed = mlp.packed(&stream).unwrap();
    assert_eq!(mlp.weight_bytes(), 0);
    assert!(packed.weight_bytes() >= 3 * k * h * size_of::<T>());
    assert!(mlp.plan(m).problem.bias);
    let reference = bounds::mlp(x.view(), &of_host).unwrap();
    for (which, mlp) in [("lent", &mlp), ("packed", &packed)] {
        let mut out = DeviceMatrix::<T>::new(&stream, m, k).unwrap();
        out.buffer_mut().poison(0xFF).unwrap();
        mlp.forward(&stream, x_there.view(), out.view_mut()).unwrap();
        let judgement = reference.judge(out.to_host().unwrap().view()).unwrap();
        assert!(judgement.passed(), "{which} block m {m} k {k} h {h}: {judgement:?}");
    }
}

#[test]
fn lent_biases_of_elements_are_added_and_a_packed_copy_computes_the_same() {
    let Some(cuda) = device() else { return };
    for (m, shape) in [(1, [64, 96]), (5, [43, 37]), (150, [64, 96])] {
        judged_with_biases::<bf16>(&cuda, m, shape, true);
        if m == 5 || !partly() {
            judged_with_biases::<bf16>(&cuda, m, shape, false);
            judged_with_biases::<f16>(&cuda, m, shape, true);
            judged_with_biases::<f32>(&cuda, m, shape, false);
        }
    }
}

#[test]
fn a_packed_copy_of_lent_weights_does_not_see_what_is_written_to_them() {
    let Some(cuda) = device() else { return };
    let stream = cuda.stream();
    for orientation in Orientation::ALL {
        let [rows, cols] = orientation.shape(2 * 24, 16);
        let both = random::normal_matrix::<f32>(1, rows, cols, 0.3).unwrap();
        let mut both = DeviceMatrix::from_host(&stream, both.view()).unwrap();
        let [rows, cols] = orientation.shape(16, 24);
        let down = random::normal_matrix::<f32>(2, rows, cols, 0.3).unwrap();
        let down = DeviceMatrix::from_host(&stream, down.view()).unwrap();
        let gated =
            DeviceGatedLinearParams::packed(both.view(), orientation, Activation::GEGLU).unwrap();
        let lent = DeviceMlpParams::new(gated, down.view(), orientation).unwrap();
        // SAFETY: the layer keeps the matrices' memory, and its calls are waited for before that is written.
        let mlp = unsafe { Mlp::from_device(&cuda, &lent) }.unwrap();
        let packed = mlp.packed(&stream).unwrap();
        let x = random::normal_matrix::<f32>(3, 3, 16, 1.0).unwrap();
        let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
        let run = |mlp: &Mlp<f32>| {
            let mut out = DeviceMatrix::<f32>::zeros(&stream, 3, 16).unwrap();
            mlp.forward(&stream, x.view(), out.view_mut()).unwrap();
            out.to_host().unwrap().as_slice().to_vec()
        };
        let before = run(&packed);
        let near =
            run(&mlp).iter().zip(&before).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + b.abs()));
        assert!(near, "{orientation}");
        both.buffer_mut().poison(0).unwrap();
        assert!(run(&mlp).iter().all(|&y| y == 0.0), "{orientation}");
        assert_eq!(run(&packed), before, "{orientation}");
    }
}

#[test]
fn a_packed_copy_of_a_packed_block_trains_as_the_block_does() {
    let Some(cuda) = device() else { return };
    let [gate, up] = [1, 2].map(|s| random::normal_matrix::<f32>(s, 16, 16, 0.3).unwrap());
    let down = random::normal_matrix::<f32>(3, 16, 16, 0.3).unwrap();
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let gated = GatedLinearParams::new(weights, Activation::SWIGLU);
    for orientation in Orientation::ALL {
        let block = Mlp::new(&cuda, &MlpParams::new(gated, down.view(), orientation)).unwrap();
        let block = block.for_training(SavePolicy::SaveGate).unwrap();
        let copy = block.packed(&cuda.stream()).unwrap();
        assert_eq!(copy.policy(), block.policy());
        // Which way a square gradient lies its shape does not say.
        let x = random::normal_matrix::<f32>(4, 5, 16, 1.0).unwrap();
        let dy = StridedRef::from(x.view());
        let gradient = |block: &Mlp<f32>| {
            let mut y = Matrix::zeros(5, 16).unwrap();
            let saved = block.forward_saving_host(x.view(), y.view_mut()).unwrap();
            let shapes = block.gradient_shapes().unwrap();
            let mut all = Gradients::zeros(5, &shapes, Wanted::ALL, false).unwrap();
            block.backward_host(saved, dy, all.as_mut()).unwrap();
            all.down.unwrap()
        };
        assert_eq!(gradient(&copy), gradient(&block), "{orientation}");
    }
}

#[test]
fn lent_rows_that_overlap_are_read_where_a_kernel_can() {
    let Some(cuda) = device() else { return };
    let (stream, [h, k]) = (cuda.stream(), [32, 24]);
    let values = random::normal_matrix::<f32>(1, 1, (h - 1) * (k - 1) + k, 0.3).unwrap();
    let rows = MatrixRef::with_stride(values.as_slice(), h, k, k - 1).unwrap();
    let there = DeviceBuffer::from_host(&stream, values.as_slice()).unwrap();
    let there = DeviceMatrixRef::with_stride(&there, h, k, k - 1).unwrap();
    let lent = DeviceGatedLinearParams::separate(there, there, Orientation::OutIn, Activation::GLU);
    let weights = GateUpWeights::separate(rows, rows, Orientation::OutIn).unwrap();
    let packed =
        GatedLinear::new(&cuda, &GatedLinearParams::new(weights, Activation::GLU)).unwrap();
    // SAFETY: the layer is dropped before the buffer.
    let layer = unsafe { GatedLinear::from_device(&cuda, &lent.unwrap()) }.unwrap();
    for m in [1, 5, 200] {
        let x = random::normal_matrix::<f32>(2, m, k, 1.0).unwrap();
        let x = DeviceMatrix::from_host(&stream, x.view()).unwrap();
        let run = |layer: &GatedLinear<f32>| {
            let mut out = DeviceMatrix::<f32>::zeros(&stream, m, h).unwrap();
            layer.forward(&stream, x.view(), out.view_mut()).unwrap();
            out.to_host().unwrap().as_slice().to_vec()
        };
        let near = run(&layer)
            .iter()
            .zip(run(&packed))
            .all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + b.abs()));
        assert!(near, "{m}");
    }
}

#[test]
fn lent_biases_of_other_lengths_are_refused() {
    let Some(cuda) = device() else { return };
    let matrix = |rows, cols| DeviceMatrix::<f32>::zeros(&cuda.stream(), rows, cols).unwrap();
    let (both, down, bias) = (matrix(16, 4), matrix(4, 8), matrix(1, 7));
    let gated =
        DeviceGatedLinearParams::packed(both.view(), Orientation::OutIn, Activation::SWIGLU)
            .unwrap();
    let error = gated.biases(None, Some(bias.view())).unwrap_err();
    assert!(error.to_string().contains("up bias: expected [1, 8], given [1, 7]"), "{error}");
    let block = DeviceMlpParams::new(gated, down.view(), Orientation::OutIn).unwrap();
    let error = block.down_bias(bias.view()).unwrap_err();
    assert!(error.to_string().contains("down bias: expected [1, 4], given [1, 7]"), "{error}");
}
