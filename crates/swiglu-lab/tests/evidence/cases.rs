use swiglu_core::{BlockType, DType};
use swiglu_lab::{Case, CaseOp, DeviceKind, Heat};

fn small(op: CaseOp) -> Case {
    Case { heat: Heat::Hot, ..Case::new(DeviceKind::Cpu, op, [5, 24, 16], DType::F32) }
}

#[test]
fn a_case_travels_as_names() {
    let case = small(CaseOp::GatedLinear);
    let json = serde_json::to_value(&case).unwrap();
    assert_eq!(json["numerics"], "fused+precise");
    assert_eq!(json["arrangement"], "separate");
    assert_eq!(json["orientation"], "out-in");
    assert_eq!(json["device"], "cpu");
    assert!(json.get("weights").is_none());
    assert_eq!(serde_json::from_value::<Case>(json).unwrap(), case);
    let quantized = Case { weights: Some(BlockType::Q6_K.into()), ..case };
    let json = serde_json::to_value(&quantized).unwrap();
    assert_eq!(json["weights"], "Q6_K");
    assert_eq!(serde_json::from_value::<Case>(json).unwrap(), quantized);
}

#[test]
fn keys_name_what_matters() {
    assert_eq!(
        small(CaseOp::Mlp).key(),
        "mlp m=5 hidden=24 intermediate=16 f32 swiglu fused+precise separate out-in hot"
    );
    assert_eq!(small(CaseOp::Copy).key(), "copy m=5 intermediate=16 f32 hot");
    assert_eq!(
        small(CaseOp::ActivationBackward).key(),
        "activation-backward m=5 intermediate=16 f32 swiglu fused+precise separate hot"
    );
    let biased = Case { bias: true, ..small(CaseOp::Mlp) };
    assert_ne!(biased.key(), small(CaseOp::Mlp).key());
    let quantized = Case { weights: Some(BlockType::Q4_0.into()), ..small(CaseOp::Mlp) };
    assert!(quantized.key().contains(" f32 weights=Q4_0 "), "{quantized}");
}

#[test]
fn gradients_read_three_tensors_and_write_two() {
    let case = Case { dtype: DType::Bf16, ..small(CaseOp::ActivationBackward) };
    assert_eq!(serde_json::to_value(&case).unwrap()["op"], "activation-backward");
    assert_eq!(case.output_shape(), [5, 32]);
    assert_eq!(case.compulsory_bytes(), 5.0 * (5 * 16 * 2) as f64);
    assert_eq!(case.flops(), 2.0 * (5 * 16) as f64);
    assert!(case.problem().is_none());
    let forward = small(CaseOp::Activation);
    assert_eq!(forward.compulsory_bytes(), 3.0 * (5 * 16 * 4) as f64);
}
