use swiglu_core::random::quantized_matrix;
use swiglu_core::{
    Activation, Arrangement, BlockType, GateUpWeights, GatedLinearParams, MlpParams, Orientation,
    QuantizedType,
};

use super::reference::{biases, inputs};
use super::*;
use crate::case::{DeviceKind, Heat};
use crate::peer::protocol::{
    ACTIVATION_SCALE, STREAM_DOWN, STREAM_GATE, STREAM_OUT_GRAD, STREAM_UP, STREAM_X,
};

fn small(op: CaseOp) -> Case {
    Case {
        device: DeviceKind::Cpu,
        op,
        m: 5,
        hidden: if op.has_weights() { 24 } else { 0 },
        intermediate: 16,
        model: None,
        dtype: DType::F32,
        weights: None,
        activation: Activation::SWIGLU,
        numerics: Numerics::default(),
        arrangement: Arrangement::Separate,
        orientation: Orientation::OutIn,
        bias: false,
        heat: Heat::Hot,
    }
}

fn profile(role: Role) -> ProfileDef {
    ProfileDef {
        id: "p".into(),
        peer: "p".into(),
        options: serde_json::Map::new(),
        role,
        numerics: None,
    }
}

fn encoded(values: &[f32]) -> String {
    STANDARD.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// The judgement of all rows that are asked for of a case.
fn judged(case: &Case, profile: &ProfileDef, values: &[f32]) -> Judgement {
    let mut oracle = Oracle::new(case, 7);
    let rows = oracle.rows().to_vec();
    oracle.judge(profile, (case.output_shape(), DType::F32, &rows), &encoded(values)).unwrap()
}

/// The rows of a case, computed in f32 as any peer would.
fn honest(case: &Case) -> Vec<f32> {
    let promise = promise(&profile(Role::Ours), case);
    let references = Oracle::new(case, 7).reference(&promise).unwrap();
    references.iter().flat_map(|r| r.value.as_slice()).map(|v| *v as f32).collect()
}

#[test]
fn honest_rows_pass_and_wrong_ones_do_not() {
    let ops = [
        CaseOp::Activation,
        CaseOp::ActivationBackward,
        CaseOp::GatedLinear,
        CaseOp::Mlp,
        CaseOp::MlpTrain,
        CaseOp::Copy,
    ];
    for op in ops {
        let case = Case { bias: op.has_weights(), ..small(op) };
        let (mut values, ours) = (honest(&case), profile(Role::Ours));
        assert!(judged(&case, &ours, &values).passed(), "{op}");
        values[3] *= 1.001;
        let wrong = judged(&case, &ours, &values);
        assert!(!wrong.passed(), "{op}");
        assert!(complaint(&wrong, &[0]).contains("[0, 3]"), "{}", complaint(&wrong, &[0]));
        values[3] = f32::NAN;
        let nan = judged(&case, &ours, &values);
        assert!(!nan.passed(), "{op}");
        assert_eq!(metrics(&nan).worst_ratio, None);
    }
}

#[test]
fn both_gradients_are_judged() {
    let case = small(CaseOp::ActivationBackward);
    let (m, h) = (case.m, case.intermediate);
    let rows = rows_of(&case, 7);
    let judge = |values: &[f32]| judged(&case, &profile(Role::Ours), values);
    // From the inputs as a peer derives them, by the formulas that frameworks use.
    let tensor = |stream, scale| inputs::<f32>(7 ^ stream, &rows, h, scale).unwrap();
    let gate = tensor(STREAM_GATE, ACTIVATION_SCALE);
    let up = tensor(STREAM_UP, ACTIVATION_SCALE);
    let dh = tensor(STREAM_OUT_GRAD, 1.0);
    let (mut d_gate, mut d_up) = (Vec::new(), Vec::new());
    for ((g, u), d) in gate.as_slice().iter().zip(up.as_slice()).zip(dh.as_slice()) {
        let sigmoid = 1.0 / (1.0 + (-g).exp());
        d_gate.push(d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)));
        d_up.push(d * g * sigmoid);
    }
    let beside = |a: &[f32], b: &[f32]| -> Vec<f32> {
        (0..m).flat_map(|r| [&a[r * h..][..h], &b[r * h..][..h]].concat()).collect()
    };
    let honest = beside(&d_gate, &d_up);
    let judged = judge(&honest);
    assert!(judged.passed(), "{judged:?}");
    let mut wrong = honest.clone();
    wrong[h + 3] *= 1.001;
    let judged = judge(&wrong);
    assert!(!judged.passed() && judged.worst_at == (0, h + 3), "{judged:?}");
    assert!(!judge(&beside(&d_up, &d_gate)).passed(), "exchanged");
    assert!(!judge(&beside(&d_gate, &d_gate)).passed(), "one of them twice");
    let lacking: Vec<f32> = d_gate.iter().zip(dh.as_slice()).map(|(v, d)| v / d).collect();
    assert!(!judge(&beside(&lacking, &d_up)).passed(), "without the gradient of h");
}

/// The weights are those of the case's blocks, not of its element type.
#[test]
fn quantised_cases_have_the_reference_of_their_blocks() {
    let (k, h, block) = (64, 96, QuantizedType::Block(BlockType::Q4_1));
    let case =
        Case { hidden: k, intermediate: h, weights: Some(block), bias: true, ..small(CaseOp::Mlp) };
    let matrix = |stream, rows, cols: usize| {
        quantized_matrix(7 ^ stream, block, rows, cols, 1.0 / (cols as f32).sqrt())
            .and_then(|q| q.view().to_matrix::<f32>())
            .unwrap()
    };
    let (gate, up) = (matrix(STREAM_GATE, h, k), matrix(STREAM_UP, h, k));
    let down = matrix(STREAM_DOWN, k, h);
    let [gate_bias, up_bias, down_bias] = biases(&case, 7);
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn);
    let dense = MlpParams::new(
        GatedLinearParams::new(weights.unwrap(), case.activation)
            .with_gate_bias(gate_bias.as_deref())
            .with_up_bias(up_bias.as_deref()),
        down.view(),
        Orientation::OutIn,
    )
    .with_down_bias(down_bias.as_deref())
    .with_rows(swiglu_core::RowParams::NONE);
    let rows = rows_of(&case, 7);
    let x = inputs::<f32>(7 ^ STREAM_X, &rows, k, 1.0).unwrap();
    let y = swiglu_core::oracle::mlp(x.view(), &dense).unwrap().y.value;
    let y: Vec<f32> = y.as_slice().iter().map(|v| *v as f32).collect();
    let exact = judged(&case, &profile(Role::Ours), &y);
    assert!(exact.passed(), "{exact:?}");
    // Off by a thousandth: wrong for exact inputs, admitted for those of 8 bits.
    let off: Vec<f32> = y.iter().map(|v| v * 1.001).collect();
    assert!(!judged(&case, &profile(Role::Ours), &off).passed());
    let mut q8 = profile(Role::Peer);
    q8.options.insert("activations".into(), "q8".into());
    assert!(judged(&case, &q8, &off).passed());
}

#[test]
fn other_shapes_lengths_and_codes_are_refused() {
    let case = small(CaseOp::Copy);
    let mut oracle = Oracle::new(&case, 7);
    let rows = oracle.rows().to_vec();
    let p = profile(Role::Peer);
    let all = encoded(&honest(&case));
    let mut refused = |shape, dtype, rows: &[usize], data: &str| {
        oracle.judge(&p, (shape, dtype, rows), data).unwrap_err()
    };
    assert!(refused([5, 15], DType::F32, &rows, &all).contains("[5, 16]"));
    assert!(refused([5, 16], DType::F16, &rows, &all).contains("f16"));
    assert!(refused([5, 16], DType::F32, &[1], &all).contains("rows [1]"));
    assert!(refused([5, 16], DType::F32, &rows, "####").contains("base64"));
    assert!(refused([5, 16], DType::F32, &rows, "AAAA").contains("3 bytes"));
}

#[test]
fn rows_are_few_where_they_are_dear() {
    let case = Case { m: 5000, hidden: 4096, intermediate: 14336, ..small(CaseOp::GatedLinear) };
    let rows = rows_of(&case, 1);
    assert!((1..=5).contains(&rows.len()) && rows.contains(&4999), "{rows:?}");
    assert_eq!(rows_of(&small(CaseOp::Mlp), 1), [0, 1, 2, 3, 4]);
    let wide = Case { m: 9000, intermediate: 16384, ..small(CaseOp::Activation) };
    assert_eq!(rows_of(&wide, 1).len(), 4);
}

#[test]
fn others_are_judged_by_the_weakest_promise() {
    let case = small(CaseOp::Activation);
    let ours = promise(&profile(Role::Ours), &case);
    let exact = BlockInputs::Exact;
    assert_eq!(ours, Promise { numerics: case.numerics, roundoff: 0.0, inputs: exact });
    assert_eq!(promise(&profile(Role::Peer), &case).numerics.to_string(), "eager+fast");
    let mut tf32 = profile(Role::Peer);
    tf32.options.insert("tf32".into(), true.into());
    assert_eq!(promise(&tf32, &case).roundoff, TF32_ROUNDOFF);
    assert_eq!(promise(&tf32, &Case { dtype: DType::Bf16, ..case.clone() }).roundoff, 0.0);
    let mut q8 = profile(Role::Peer);
    q8.options.insert("activations".into(), "q8".into());
    assert_eq!(promise(&q8, &case).inputs, BlockInputs::EightBits);
}
