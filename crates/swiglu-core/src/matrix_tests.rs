use super::*;
use crate::layout::{Arrangement, GateUpWeights, Orientation, WeightLayout};

#[test]
fn strided_views_address_rows_and_refuse_short_buffers() {
    let data: Vec<i32> = (0..11).collect();
    let m = MatrixRef::with_stride(&data, 3, 3, 4).unwrap();
    assert_eq!(m.row(2), &[8, 9, 10]);
    assert_eq!(m.cols_range(1..3).unwrap().row(1), &[5, 6]);
    assert_eq!(m.rows_range(1..3).unwrap().row(0), &[4, 5, 6]);
    assert!(matches!(
        MatrixRef::with_stride(&data, 3, 4, 4),
        Err(Error::BufferTooShort { needed: 12, given: 11, .. })
    ));
    assert!(m.rows_range(2..4).is_err() && m.cols_range(usize::MAX..usize::MAX).is_err());
    let backwards = std::ops::Range { start: 2, end: 1 };
    assert!(m.cols_range(backwards).is_err() && m.rows_range(3..3).unwrap().rows() == 0);
}

#[test]
fn empty_and_huge_extents_are_decided_without_overflow() {
    let none: [f32; 0] = [];
    assert_eq!(MatrixRef::with_stride(&none, 0, 5, 7).unwrap().rows(), 0);
    assert!(MatrixRef::with_stride(&none, 4, 0, 7).unwrap().row(3).is_empty());
    assert!(matches!(
        MatrixRef::with_stride(&none, usize::MAX, 2, usize::MAX),
        Err(Error::TooLarge { .. })
    ));
    assert!(matches!(Matrix::<f32>::zeros(usize::MAX, 2), Err(Error::TooLarge { .. })));
    // Beyond any address space that processors implement.
    assert!(matches!(Matrix::<f32>::zeros(1 << 50, 1 << 8), Err(Error::OutOfMemory { .. })));
    assert!(matches!(Matrix::<f32>::room(usize::MAX, 2), Err(Error::TooLarge { .. })));
}

/// As many rows as there are numbers, without an element in them, take no time.
#[test]
fn rows_without_columns_are_not_gone_through() {
    let none: [f32; 0] = [];
    let tall = MatrixRef::with_stride(&none, usize::MAX, 0, 0).unwrap();
    tall.expect_finite("x").unwrap();
    assert_eq!(tall.to_dtype::<f32>().unwrap().shape(), [usize::MAX, 0]);
    let weights = GateUpWeights::separate(tall, tall, Orientation::OutIn).unwrap();
    let into = |arrangement| {
        weights.convert(WeightLayout { orientation: Orientation::InOut, arrangement })
    };
    into(Arrangement::Separate).unwrap();
    assert!(matches!(into(Arrangement::PackedGateFirst), Err(Error::TooLarge { .. })));
}

#[test]
fn copies_that_no_memory_holds_are_errors() {
    // Rows that overlap make a view as large as one likes of a few elements.
    let huge = MatrixRef::with_stride(&[0.0f32; 4], 1 << 56, 4, 0).unwrap();
    assert!(matches!(huge.to_dtype::<f32>(), Err(Error::OutOfMemory { .. })));
    let values = std::iter::repeat(0.0f32);
    let made = Matrix::from_values(values, 1 << 50, 1 << 8);
    assert!(matches!(made, Err(Error::OutOfMemory { .. })));
}

#[test]
fn values_fill_a_matrix_exactly() {
    let m = Matrix::from_values(0.., 2, 3).unwrap();
    assert_eq!(m.as_slice(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(m.try_clone().unwrap(), m);
    assert!(matches!(Matrix::from_values(0..5, 2, 3), Err(Error::Shape { .. })));
}

#[test]
fn elements_have_places_and_slices_are_rows() {
    let mut m = Matrix::from_values(0.., 2, 3).unwrap();
    m[(1, 0)] = 7;
    assert_eq!((m[(1, 0)], m.as_ref()[3], m[(0, 2)]), (7, 7, 2));
    assert!(std::panic::catch_unwind(|| m[(0, 3)]).is_err());
    assert_eq!(MatrixRef::row_vector(m.as_slice()).shape(), [1, 6]);
    let mut view = m.view_mut();
    MatrixMut::from(&mut view).row_mut(0)[0] = 9;
    assert_eq!(view.as_ref().row(0), [9, 1, 2]);
    let error = MatrixRef::named("down weight", m.as_slice(), 2, 2).unwrap_err();
    assert_eq!(error.to_string(), "down weight: expected 2×2 elements, given 6 elements");
}

#[test]
fn bytes_are_elements_where_they_lie_and_fit() {
    let floats = [1.0f32, -2.5, 3.0];
    let bytes: Vec<u8> = floats.iter().flat_map(|v| v.to_le_bytes()).collect();
    // A buffer with an address that suits no f32 but at every fourth byte.
    let mut buffer = vec![0u8; bytes.len() + 8];
    let aligned = buffer.as_ptr().align_offset(4);
    buffer[aligned..][..bytes.len()].copy_from_slice(&bytes);
    let there = &buffer[aligned..][..bytes.len()];
    let m = MatrixRef::<f32>::from_le_bytes(there, 1, 3).unwrap();
    assert_eq!(m.as_slice(), floats);
    let short = MatrixRef::<f32>::from_le_bytes(&there[1..], 1, 3);
    assert!(matches!(short, Err(Error::Shape { .. })), "{short:?}");
    let odd = MatrixRef::<f32>::from_le_bytes(&buffer[aligned + 1..][..8], 1, 2);
    assert!(matches!(odd, Err(Error::Misaligned { required: 4, .. })), "{odd:?}");
}

#[test]
fn outputs_with_overlapping_rows_are_refused() {
    let mut data = [0.0f32; 8];
    assert!(matches!(
        MatrixMut::with_stride(&mut data, 3, 3, 2),
        Err(Error::OverlappingRows { .. })
    ));
    assert!(MatrixMut::with_stride(&mut data, 1, 3, 0).is_ok());
}

#[test]
fn non_finite_values_are_located() {
    let data = [1.0f32, 2.0, 3.0, f32::NAN];
    let m = MatrixRef::new(&data, 2, 2).unwrap();
    assert!(matches!(m.expect_finite("x"), Err(Error::NonFinite { row: 1, col: 1, .. })));
}
