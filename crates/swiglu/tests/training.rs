//! Training as a user sees it.

// A helper of a test is a test: it ends by panicking.
#![allow(clippy::unwrap_used)]

use swiglu::{
    Activation, CpuOptions, DType, Device, ErrorKind, GateUpWeights, GatedLinear,
    GatedLinearParams, Matrix, Mlp, MlpParams, Op, Orientation, Pass, Path, Problem, SavePolicy,
    StridedRef, Wanted, bf16,
};
use swiglu_core::bounds;

fn device() -> Device {
    Device::cpu_with(CpuOptions::default().with_threads(2)).unwrap()
}

struct Weights([Matrix<f32>; 3]);

impl Weights {
    fn new(seed: u64) -> Self {
        let of =
            |seed, rows, cols| swiglu_core::random::normal_matrix(seed, rows, cols, 0.2).unwrap();
        Self([of(seed, 40, 24), of(seed + 1, 40, 24), of(seed + 2, 24, 40)])
    }

    fn params(&self) -> MlpParams<'_, f32> {
        let [gate, up, down] = &self.0;
        let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
        let gated = GatedLinearParams::new(weights, Activation::GEGLU);
        MlpParams::new(gated, down.view(), Orientation::OutIn)
    }
}

/// y = Σ of all elements has one value as its gradient, which lies without strides.
#[test]
fn gradients_are_within_bounds_and_follow_updates() {
    let x = swiglu_core::random::normal_matrix::<f32>(9, 6, 24, 1.0).unwrap();
    let ones = StridedRef::new(&[1.0f32], [6, 24], [0, 0]).unwrap();
    let (old, new) = (Weights::new(1), Weights::new(5));
    let mut mlp = Mlp::for_training(&device(), &old.params(), SavePolicy::SaveGate).unwrap();
    let before = mlp.clone();
    assert_eq!(mlp.save_policy::<f32>().unwrap(), SavePolicy::SaveGate);
    for weights in [&old, &new] {
        mlp.update(&weights.params()).unwrap();
        let (y, saved) = mlp.forward_train(&x).unwrap();
        assert_eq!(
            (y, saved.tokens(), saved.kept_bytes()),
            (mlp.forward(&x).unwrap(), 6, 6 * 40 * 4)
        );
        let gradients = mlp.backward(saved.into_owned().unwrap(), ones, Wanted::ALL).unwrap();
        assert!(gradients.gate_bias.is_none());
        let dy = Matrix::from_vec(vec![1.0f32; 6 * 24], 6, 24).unwrap();
        let params = weights.params();
        let bounds =
            bounds::mlp_backward(x.view(), &params, dy.view(), swiglu::DType::F32, 0.0).unwrap();
        for (reference, m) in [
            (&bounds.dx, gradients.dx),
            (&bounds.gate, gradients.gate),
            (&bounds.up, gradients.up),
            (bounds.down.as_ref().unwrap(), gradients.down),
        ] {
            let judgement = reference.judge(m.unwrap().view()).unwrap();
            assert!(judgement.passed(), "{judgement:?}");
        }
    }
    // A clone is the layer as it was.
    assert!(before.forward(&x).unwrap() != mlp.forward(&x).unwrap());
    let layer = Mlp::from_params(&device(), &old.params()).unwrap();
    assert!(before.forward(&x).unwrap() == layer.forward(&x).unwrap());
}

/// Also where the layer is made anew, because a clone still has what was packed.
#[test]
fn a_chosen_path_stays_when_weights_change() {
    let (old, new) = (Weights::new(1), Weights::new(5));
    let train = |params: &_| {
        Mlp::for_training_with_path(&device(), params, SavePolicy::Save, Path::Unfused).unwrap()
    };
    let mut mlp = train(&old.params());
    let clone = mlp.clone();
    mlp.update(&new.params()).unwrap();
    assert_eq!([&mlp, &clone].map(|layer| layer.plan(3).path), [Path::Unfused; 2]);
    let x = swiglu_core::random::normal_matrix::<f32>(9, 6, 24, 1.0).unwrap();
    assert!(mlp.forward(&x).unwrap() == train(&new.params()).forward(&x).unwrap());
}

#[test]
fn a_gated_linear_layer_trains_by_itself() {
    let x = swiglu_core::random::normal_matrix::<f32>(9, 6, 24, 1.0).unwrap();
    let dh = swiglu_core::random::normal_matrix::<f32>(3, 6, 40, 1.0).unwrap();
    let weights = Weights::new(1);
    let params = weights.params().gated;
    let mut layer = GatedLinear::for_training(&device(), &params, SavePolicy::Recompute).unwrap();
    layer.update(&params).unwrap();
    let (_, saved) = layer.forward_train(&x).unwrap();
    let gradients = layer.backward(saved, &dh, Wanted::INPUT).unwrap();
    assert!(gradients.gate.is_none());
    let bounds =
        bounds::gated_linear_backward(x.view(), &params, dh.view(), swiglu::DType::F32, 0.0)
            .unwrap();
    assert!(bounds.dx.judge(gradients.dx.unwrap().view()).unwrap().passed());
}

#[test]
fn what_is_not_trained_says_so() {
    let weights = Weights::new(1);
    let x = Matrix::<f32>::zeros(2, 24).unwrap();
    let plain = Mlp::from_params(&device(), &weights.params()).unwrap();
    let error = plain.forward_train(&x).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("for_training"), "{error}");
    let mlp = Mlp::for_training(&device(), &weights.params(), SavePolicy::Save).unwrap();
    let error = mlp.forward_train(&Matrix::<bf16>::zeros(2, 24).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DType);
    for (op, pass, is_refused) in [
        (Op::Mlp, Pass::Backward, false),
        (Op::GatedLinear, Pass::Saving, false),
        (Op::Activation, Pass::Backward, true),
        (Op::Activation, Pass::Forward, false),
    ] {
        let problem = Problem::new(op, 2, 24, 40, DType::F32, Activation::SWIGLU).with_pass(pass);
        assert_eq!(device().plan(problem, None).is_err(), is_refused, "{op}");
        let experts = device().explain(problem.with_groups(4), None).unwrap_err();
        assert!(experts.to_string().contains("4 groups of tokens"), "{experts}");
    }
}
