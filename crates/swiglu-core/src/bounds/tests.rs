use half::{bf16, f16};

use super::*;

fn judged(dtype: DType, value: f64) -> Judgement {
    fn judge<T: Element>(reference: &Reference) -> Judgement {
        let out = [T::from_f64(reference.value.as_slice()[0]), T::from_f64(1.0)];
        reference.judge(MatrixRef::new(&out, 1, 2).unwrap()).unwrap()
    }
    let value = Matrix::from_vec(vec![value, 1.0], 1, 2).unwrap();
    let bound = Matrix::from_vec(vec![f64::INFINITY; 2], 1, 2).unwrap();
    let reference = Reference { value, bound, frobenius_limit: f64::INFINITY };
    match dtype {
        DType::F32 => judge::<f32>(&reference),
        DType::F16 => judge::<f16>(&reference),
        DType::Bf16 => judge::<bf16>(&reference),
    }
}

/// What rounds to the largest number is no overflow.
#[test]
fn only_what_rounds_to_infinity_overflows() {
    for dtype in DType::ALL {
        let least = dtype.least_infinite();
        let below = f64::from_bits(least.to_bits() - 1);
        assert!(below > dtype.max_finite());
        assert_eq!(judged(dtype, below).overflow, None, "{dtype}");
        assert_eq!(judged(dtype, -below).overflow, None, "{dtype}");
        let overflow = judged(dtype, -least).overflow.unwrap();
        assert_eq!((overflow.at, overflow.value), ((0, 0), -least), "{dtype}");
    }
    let message = judged(DType::F16, 65520.0).overflow.unwrap().to_string();
    assert!(message.contains("6.552e4, beyond the 6.550e4 of f16"), "{message}");
}
