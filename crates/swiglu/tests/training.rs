//! Training as a user sees it.

// A helper of a test is a test: it ends by panicking.
#![allow(clippy::unwrap_used)]

use swiglu::{
    Activation, CallOptions, CpuOptions, DType, Device, ErrorKind, GateUpWeights, GatedLinear,
    GatedLinearParams, GradientsMut, Matrix, Mlp, MlpParams, Op, Orientation, Pass, Path, Problem,
    RowScale, SavePolicy, StridedRef, Wanted, bf16,
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

/// An expert's output is weighed by a router: the gradients of scale ⊙ y, and of the weights, which y need not be kept for.
#[test]
fn factors_of_rows_and_their_gradients() {
    let x = swiglu_core::random::normal_matrix::<f32>(9, 6, 24, 1.0).unwrap();
    let dy = swiglu_core::random::normal_matrix::<f32>(3, 6, 24, 1.0).unwrap();
    let weights = Weights::new(1);
    let params = weights.params();
    let factors = [0.5, 0.0, -1.5, 0.25, 3.0, 0.1];
    let mlp = Mlp::for_training(&device(), &params, SavePolicy::Save).unwrap();
    let (_, saved) = mlp.forward_train(&x).unwrap();
    let (mut dx, mut of_factors) = (Matrix::<f32>::zeros(6, 24).unwrap(), [f32::NAN; 6]);
    let into = GradientsMut::default()
        .with_dx(&mut dx)
        .with_row_scale(RowScale::Rows(&factors))
        .with_row_scale_grad(&mut of_factors);
    mlp.backward_into(saved, &dy, into, &CallOptions::default()).unwrap();
    let given = (dy.view(), RowScale::Rows(&factors));
    let bounds = bounds::scaled_mlp_backward(x.view(), &params, given, DType::F32, 0.0).unwrap();
    assert!(bounds.dx.judge(dx.view()).unwrap().passed());
    let of_factors = Matrix::from_vec(of_factors.to_vec(), 1, 6).unwrap();
    assert!(bounds.row_scale.unwrap().judge(of_factors.view()).unwrap().passed());
    // Of another number of rows, and of a layer whose result is h.
    let (_, saved) = mlp.forward_train(&x).unwrap();
    let into = GradientsMut::<f32>::default().with_row_scale(RowScale::Rows(&factors[1..]));
    let error = mlp.backward_into(saved, &dy, into, &CallOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "row scale: expected [6], given [5]");
    let gated = GatedLinear::for_training(&device(), &params.gated, SavePolicy::Save).unwrap();
    let (h, saved) = gated.forward_train(&x).unwrap();
    let into = GradientsMut::<f32>::default().with_row_scale(RowScale::Factor(2.0));
    let error = gated.backward_into(saved, &h, into, &CallOptions::default()).unwrap_err();
    assert!(error.to_string().contains("multiply the gradient of h"), "{error}");
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

/// Whether a clone still has the weights, for which others are packed elsewhere, or not.
#[test]
fn an_update_changes_values_and_nothing_else() {
    let weights = Weights::new(1);
    let params = weights.params();
    let bias = [0.5f32; 40];
    let square =
        Weights([0, 1, 2].map(|i| swiglu_core::random::normal_matrix(i, 24, 24, 0.2).unwrap()));
    let turned = MlpParams::new(square.params().gated, square.0[2].view(), Orientation::InOut);
    let with = |gated: GatedLinearParams<'_, f32>| -> String {
        let mut said = String::new();
        for is_shared in [false, true] {
            let mut mlp = Mlp::for_training(&device(), &params, SavePolicy::Save).unwrap();
            let clone = is_shared.then(|| mlp.clone());
            let before = mlp.plan(1).problem;
            let error =
                mlp.update(&MlpParams::new(gated, params.down, Orientation::OutIn)).unwrap_err();
            assert_eq!((error.kind(), mlp.plan(1).problem), (ErrorKind::Unsupported, before));
            assert!(said.is_empty() || said == error.to_string(), "{said} and {error}");
            said = error.to_string();
            drop(clone);
        }
        said
    };
    let gated = params.gated;
    assert!(
        with(gated.with_activation(Activation::SWIGLU))
            .contains("an update by swiglu of a layer of geglu")
    );
    assert!(with(gated.with_gate_bias(&bias[..])).contains("by biases of a layer of no biases"));
    let invariant = gated.numerics.with_batch_invariance();
    assert!(with(gated.with_numerics(invariant)).contains("batch-invariant"));
    for is_shared in [false, true] {
        let mut mlp = Mlp::for_training(&device(), &params, SavePolicy::Save).unwrap();
        let clone = is_shared.then(|| mlp.clone());
        let error = mlp.update(&square.params()).unwrap_err().to_string();
        assert!(error.contains("intermediate=24 of a layer of intermediate=40"), "{error}");
        let mut mlp = Mlp::for_training(&device(), &square.params(), SavePolicy::Save).unwrap();
        let other = is_shared.then(|| mlp.clone());
        let error = mlp.update(&turned).unwrap_err().to_string();
        assert!(error.contains("a down weight that lies in-out"), "{error}");
        drop((clone, other));
    }
}

#[test]
fn another_element_type_is_refused_by_the_name_of_what_has_it() {
    let weights = Weights::new(1);
    let mut mlp = Mlp::for_training(&device(), &weights.params(), SavePolicy::Save).unwrap();
    let [gate, up, down] = weights.0.each_ref().map(|m| m.view().to_dtype::<bf16>().unwrap());
    let gate_up = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let gated = GatedLinearParams::new(gate_up, Activation::SWIGLU);
    let params = MlpParams::new(gated, down.view(), Orientation::OutIn);
    let said = [
        mlp.update(&params).unwrap_err(),
        mlp.save_policy::<bf16>().unwrap_err(),
        mlp.forward_train(&Matrix::<bf16>::zeros(2, 24).unwrap()).unwrap_err(),
    ];
    for (error, what) in said.iter().zip(["the weights", "T", "x"]) {
        assert!(error.to_string().starts_with(&format!("{what}: expected f32")), "{error}");
    }
}

#[test]
fn what_another_layer_kept_is_refused() {
    let (old, new) = (Weights::new(1), Weights::new(5));
    let x = swiglu_core::random::normal_matrix::<f32>(9, 3, 24, 1.0).unwrap();
    let dy = swiglu_core::random::normal_matrix::<f32>(10, 3, 24, 1.0).unwrap();
    let made = |weights: &Weights, policy| {
        Mlp::for_training(&device(), &weights.params(), policy).unwrap()
    };
    let mut mlp = made(&old, SavePolicy::Save);
    let kept = |mlp: &Mlp| mlp.forward_train(&x).unwrap().1;
    let refused = |mlp: &Mlp, saved| {
        let error = mlp.backward(saved, &dy, Wanted::ALL).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("another layer"), "{error}");
    };
    refused(&made(&new, SavePolicy::Save), kept(&mlp));
    refused(&made(&old, SavePolicy::SaveGate), kept(&mlp));
    // A clone is the same layer, until one of them changes.
    let clone = mlp.clone();
    clone.backward(kept(&mlp), &dy, Wanted::ALL).unwrap();
    let before = [kept(&mlp), kept(&mlp)];
    mlp.update(&new.params()).unwrap();
    let [first, second] = before;
    refused(&mlp, first);
    clone.backward(second, &dy, Wanted::ALL).unwrap();
    drop(clone);
    let before = kept(&mlp);
    mlp.update(&old.params()).unwrap();
    refused(&mlp, before);
    mlp.backward(kept(&mlp), &dy, Wanted::ALL).unwrap();
}
