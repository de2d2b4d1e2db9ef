use rayon::prelude::*;
use swiglu_core::{BlockType, QuantizedType};

use super::*;
use crate::case::{DeviceKind, Heat};
use crate::peer::protocol::{
    ACTIVATION_SCALE, STREAM_GATE, STREAM_OUT_GRAD, STREAM_UP, normal_rows,
};

fn small(op: CaseOp) -> Case {
    Case { heat: Heat::Hot, ..Case::new(DeviceKind::Cpu, op, [5, 24, 16], DType::F32) }
}

fn profile(role: Role) -> ProfileDef {
    ProfileDef { id: "p".into(), role, ..ProfileDef::default() }
}

/// This is a profile of another with an option.
fn told(option: &str, value: impl Into<serde_json::Value>) -> ProfileDef {
    let options = serde_json::Map::from_iter([(option.to_owned(), value.into())]);
    ProfileDef { options, ..profile(Role::Peer) }
}

fn encoded(values: &[f32]) -> String {
    STANDARD.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// The judgement of all rows that are asked for of a case.
fn judged(case: &Case, profile: &ProfileDef, values: &[f32]) -> Judgement {
    let mut oracle = Oracle::new(case, 7);
    let rows = oracle.rows.clone();
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
    let tensor =
        |stream, scale| normal_rows::<f32>(7 ^ stream, rows.par_iter().copied(), h, scale).unwrap();
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

/// Off by a thousandth is wrong for exact inputs, and admitted for those of 8 bits.
#[test]
fn quantised_cases_are_judged_by_how_inputs_are_taken() {
    let weights = Some(QuantizedType::Block(BlockType::Q4_1));
    let case = Case { hidden: 64, intermediate: 96, weights, bias: true, ..small(CaseOp::Mlp) };
    let exact = honest(&case);
    assert!(judged(&case, &profile(Role::Ours), &exact).passed());
    let off: Vec<f32> = exact.iter().map(|v| v * 1.001).collect();
    assert!(!judged(&case, &profile(Role::Ours), &off).passed());
    assert!(judged(&case, &told("activations", "q8"), &off).passed());
}

#[test]
fn other_shapes_lengths_and_codes_are_refused() {
    let case = small(CaseOp::Copy);
    let mut oracle = Oracle::new(&case, 7);
    let rows = oracle.rows.clone();
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
    let tf32 = told("tf32", true);
    assert_eq!(promise(&tf32, &case).roundoff, TF32_ROUNDOFF);
    assert_eq!(promise(&tf32, &Case { dtype: DType::Bf16, ..case.clone() }).roundoff, 0.0);
    assert_eq!(promise(&told("activations", "q8"), &case).inputs, BlockInputs::EightBits);
}
