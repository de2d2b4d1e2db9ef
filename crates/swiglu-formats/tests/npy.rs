//! npy: reading, writing, refusing.

use crate::support::*;
use half::{bf16, f16};
use proptest::prelude::*;
use std::path::Path;
use swiglu_core::{Element, Matrix, MatrixRef};
use swiglu_formats::{DynMatrix, FormatError, matrix_from_npy_bytes, npy as format, read_matrix};

fn dict(descr: &str, fortran: bool, shape: &str) -> String {
    let order = if fortran { "True" } else { "False" };
    format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}")
}

#[test]
fn versions_types_and_orders_are_read() {
    let v = ramp(6, 1);
    for version in [1, 2, 3] {
        for (descr, dtype) in [("<f4", "F32"), ("<f2", "F16"), ("<f8", "F64")] {
            let file = npy(version, &dict(descr, false, "(2, 3)"), &encode(dtype, &v));
            let m = matrix_from_npy_bytes(file).unwrap();
            assert_eq!(m.shape(), [2, 3]);
            assert_eq!(m.dtype_name(), dtype.to_lowercase());
            assert_eq!(m.to::<f32>().unwrap().as_slice(), v);
        }
    }
    // Fortran order: columns are adjacent.
    let file = npy(1, &dict("<f4", true, "(2, 3)"), &encode("F32", &v));
    let m = matrix_from_npy_bytes(file).unwrap();
    assert_eq!(m.shape(), [2, 3]);
    assert_eq!(m.to::<f32>().unwrap().as_slice(), [v[0], v[2], v[4], v[1], v[3], v[5]]);
    // One extent is a row, whatever the order; three are flattened.
    for fortran in [false, true] {
        let file = npy(1, &dict("<f4", fortran, "(6,)"), &encode("F32", &v));
        assert_eq!(matrix_from_npy_bytes(file).unwrap().shape(), [1, 6]);
    }
    let file = npy(1, &dict("<f4", false, "(1, 2, 3)"), &encode("F32", &v));
    assert_eq!(matrix_from_npy_bytes(file).unwrap().shape(), [2, 3]);
    // No rows, and the spacing and quotes of other writers.
    let other = r#"{"shape":(0,3),"fortran_order":False,"descr":"<f4"}"#;
    assert_eq!(matrix_from_npy_bytes(npy(1, other, &[])).unwrap().shape(), [0, 3]);
    let file = npy(1, &dict("<f4", true, "(0, 3L)"), &[]);
    assert_eq!(matrix_from_npy_bytes(file).unwrap().shape(), [0, 3]);
}

#[test]
fn other_types_say_what_to_do() {
    for (descr, hint) in [
        ("'|V2'", "bfloat16"),
        // What NumPy writes for ml_dtypes.bfloat16, float8_e4m3fn and float8_e5m2.
        ("'<V2'", "view(ml_dtypes.bfloat16)"),
        ("'<V1'", "float8"),
        ("'<f1'", "float8"),
        ("'|V7'", "no name"),
        ("'<i4'", "signed integers"),
        ("'>i8'", "signed integers"),
        ("'|u1'", "unsigned integers"),
        ("'|b1'", "booleans"),
        ("'<c8'", "a.real"),
        ("'<f16'", "long double"),
        ("'|O'", "np.stack"),
        ("'<U8'", "text"),
        ("'|S3'", "text"),
        ("'<M8[ns]'", "dates"),
        ("''", "unknown"),
        ("[('a', '<f4'), ('b]', '<i4', (2,))]", "a['NAME']"),
        ("[('a', [('b', '<f4')])]", "a record"),
    ] {
        let dict = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (1, 1), }}");
        let e = matrix_from_npy_bytes(npy(1, &dict, &[0; 4])).unwrap_err();
        assert!(matches!(e, FormatError::UnsupportedDtype { .. }), "{e}");
        let text = e.to_string();
        assert!(text.contains(hint) && text.contains("np.save("), "{text}");
    }
}

#[test]
fn floats_of_the_other_byte_order_are_read() {
    let v = ramp(6, 3);
    for (descr, dtype, size) in [(">f4", "F32", 4), (">f2", "F16", 2), (">f8", "F64", 8)] {
        let mut data = encode(dtype, &v);
        data.chunks_mut(size).for_each(<[u8]>::reverse);
        for (fortran, shape) in [(false, "(2, 3)"), (true, "(2, 3)"), (false, "(1, 2, 1, 3)")] {
            let m = matrix_from_npy_bytes(npy(1, &dict(descr, fortran, shape), &data)).unwrap();
            let want = if fortran { [0, 2, 4, 1, 3, 5].map(|i| v[i]).to_vec() } else { v.clone() };
            assert_eq!(m.to::<f32>().unwrap().as_slice(), want);
        }
    }
}

#[test]
fn bfloat16_is_read_where_it_is_named() {
    let v = ramp(6, 4);
    let file = npy(1, &dict("bfloat16", false, "(2, 3)"), &encode("BF16", &v));
    let m = matrix_from_npy_bytes(file).unwrap();
    assert_eq!((m.dtype_name(), m.to::<f32>().unwrap().as_slice()), ("bf16", &v[..]));
}

/// Extents before the last count rows, in C order whatever the order of the file.
#[test]
fn any_number_of_leading_extents_counts_rows() {
    let extents = [2usize, 3, 1, 4, 5];
    let total: usize = extents.iter().product();
    let v = ramp(total, 5);
    // Where the element of these C-order indices is in Fortran order.
    let fortran: Vec<f32> = {
        let mut out = vec![0.0; total];
        for (at, &value) in v.iter().enumerate() {
            let (mut rest, mut index) = (at, [0; 5]);
            for d in (0..5).rev() {
                index[d] = rest % extents[d];
                rest /= extents[d];
            }
            let place = (0..5).rev().fold(0, |place, d| place * extents[d] + index[d]);
            out[place] = value;
        }
        out
    };
    for (order, data) in [(false, &v), (true, &fortran)] {
        let file = npy(1, &dict("<f4", order, "(2, 3, 1, 4, 5)"), &encode("F32", data));
        let m = matrix_from_npy_bytes(file).unwrap();
        assert_eq!(m.shape(), [24, 5]);
        assert_eq!(m.to::<f32>().unwrap().as_slice(), v);
    }
    let e = matrix_from_npy_bytes(npy(1, &dict("<f4", false, "()"), &[0; 4])).unwrap_err();
    assert!(e.to_string().contains("at least one extent"), "{e}");
}

#[test]
fn a_second_array_in_a_file_is_named() {
    let one = npy(1, &dict("<f4", false, "(1, 1)"), &[0; 4]);
    let e = matrix_from_npy_bytes([one.clone(), one].concat()).unwrap_err().to_string();
    assert!(e.contains("another array behind it"), "{e}");
}

#[test]
fn other_files_of_arrays_say_what_makes_npy_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let zip = |entry: &str| {
        let mut out = b"PK\x03\x04".to_vec();
        out.resize(26, 0);
        out.extend_from_slice(&[entry.len() as u8, 0, 0, 0]);
        out.extend_from_slice(entry.as_bytes());
        out
    };
    let floats = encode("F32", &ramp(6, 6));
    for (name, bytes, said) in [
        ("x.npz", zip("acts.npy"), "np.save('x.npy', np.load('x.npz')['acts'])"),
        ("x.pt", zip("x/data.pkl"), "torch.load('x.pt')"),
        ("y.npy", zip("x/data.pkl"), "torch.load('y.npy')"),
        ("x.txt", b"-8.02e-1 1.5\n".to_vec(), "np.loadtxt(FILE)"),
        ("x.csv", b"0.5,1.5\n".to_vec(), "delimiter=','"),
        ("x.md", b"# Activations\n".to_vec(), "text, which begins with"),
        ("x.json", b"{\"x\": [1, 2]}".to_vec(), "text, which begins with"),
        ("x.bin", floats.clone(), "np.fromfile(FILE, '<f4')"),
        ("x.npy", floats, "np.fromfile"),
        ("e.npy", Vec::new(), "the file is empty"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let e = read_matrix(&path).unwrap_err().to_string();
        assert!(e.contains(said), "{name}: {e}");
    }
}

#[test]
fn malicious_headers_are_refused() {
    let huge = "9".repeat(400);
    let shapes = [
        "(18446744073709551615, 2)",
        "(18446744073709551616, 1)",
        "(4611686018427387904, 1)",
        "(-1, 2)",
        "(2.0, 2)",
        "(2 3)",
        "(,)",
        "(2, 2",
        "2",
        "[2, 2]",
        "()",
        "(9223372036854775807, 0)",
        "(0, 9223372036854775807)",
        &huge,
        &format!("({})", "1, ".repeat(100)),
    ];
    for shape in shapes {
        for fortran in [false, true] {
            let file = npy(1, &dict("<f4", fortran, shape), &[0; 4]);
            let e = matrix_from_npy_bytes(file).unwrap_err();
            assert!(e.to_string().len() < 500, "{e}");
        }
    }
    for text in [
        "",
        "{",
        "}",
        "{}",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1), 'x': 1}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1, 1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1)} import os",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (1, 1)}",
        "{'descr': [('a', '<f4'), 'fortran_order': False, 'shape': (1, 1)}",
        "{'descr': '<f4\\', 'fortran_order': False, 'shape': (1, 1)}",
        "{'descr': '<f4",
        "{'descr'",
    ] {
        let e = matrix_from_npy_bytes(npy(1, text, &[0; 4])).unwrap_err();
        assert!(matches!(e, FormatError::Malformed { .. }), "{text}: {e}");
    }
    let mut long = b"\x93NUMPY\x02\x00".to_vec();
    long.extend_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(matrix_from_npy_bytes(long), Err(FormatError::Malformed { .. })));
    let version = b"\x93NUMPY\x04\x00aaaaaaaa";
    assert!(matches!(matrix_from_npy_bytes(version), Err(FormatError::Malformed { .. })));
}

#[test]
fn truncation_and_trailing_bytes_are_refused() {
    for version in [1, 2] {
        let file = npy(version, &dict("<f4", false, "(2, 3)"), &encode("F32", &ramp(6, 1)));
        for len in 0..file.len() {
            let e = matrix_from_npy_bytes(file[..len].to_vec()).unwrap_err();
            assert!(matches!(e, FormatError::Truncated { .. }), "{len}: {e}");
        }
        let longer = [file, vec![0]].concat();
        let e = matrix_from_npy_bytes(longer).unwrap_err().to_string();
        assert!(e.contains("24 bytes") && e.contains("25 bytes"), "{e}");
    }
}

#[test]
fn writing_is_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("y.npy");
    let a = Matrix::from_vec(ramp(6, 1), 2, 3).unwrap();
    let b = Matrix::from_vec(ramp(6, 2), 3, 2).unwrap();
    format::write(&path, a.view(), false).unwrap();
    let first = std::fs::read(&path).unwrap();
    let e = format::write(&path, b.view(), false).unwrap_err();
    assert!(matches!(e, FormatError::AlreadyExists { .. }), "{e}");
    assert_eq!(std::fs::read(&path).unwrap(), first);
    format::write(&path, b.view(), true).unwrap();
    assert_eq!(read_matrix(path.to_str().unwrap()).unwrap(), DynMatrix::F32(b.clone()));

    #[cfg(unix)]
    {
        // What a link leads to is replaced, not the link; one that leads nowhere is refused.
        let link = dir.path().join("link.npy");
        std::os::unix::fs::symlink("y.npy", &link).unwrap();
        format::write(&link, a.view(), true).unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(read_matrix(path.to_str().unwrap()).unwrap(), DynMatrix::F32(a.clone()));
        std::fs::rename(&path, dir.path().join("z.npy")).unwrap();
        for overwrite in [false, true] {
            let e = format::write(&link, a.view(), overwrite).unwrap_err().to_string();
            assert!(e.contains("link.npy"), "{e}");
        }
        std::fs::remove_file(&link).unwrap();
        std::fs::rename(dir.path().join("z.npy"), &path).unwrap();
    }

    let e = format::write(dir.path(), a.view(), true).unwrap_err();
    assert!(matches!(e, FormatError::NotAFile { .. }), "{e}");
    let e = format::write(&dir.path().join("no/such/y.npy"), a.view(), false).unwrap_err();
    assert!(matches!(e, FormatError::Io { .. }), "{e}");
    // Nothing half-written is left.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn outputs_have_ordinary_permissions_and_devices_stay() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("y.npy");
    let plain = dir.path().join("plain");
    let m = Matrix::from_vec(vec![1.0f32], 1, 1).unwrap();
    format::write(&path, m.view(), false).unwrap();
    std::fs::write(&plain, "").unwrap();
    let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), mode(&plain));
    let e = format::write(Path::new("/dev/null"), m.view(), true).unwrap_err();
    assert!(matches!(e, FormatError::NotAFile { .. }), "{e}");
}

fn round_trip<T: Element>(values: &[f32], rows: usize, cols: usize) {
    let m = Matrix::from_vec(values.iter().map(|&v| T::from_f32(v)).collect(), rows, cols).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.npy");
    format::write(&path, m.view(), false).unwrap();
    let data_at = std::fs::read(&path).unwrap().len()
        - rows * cols * if T::DTYPE.size() == 2 && T::DTYPE.name() == "f16" { 2 } else { 4 };
    assert_eq!(data_at % 64, 0);
    let back = read_matrix(path.to_str().unwrap()).unwrap();
    assert_eq!(back.to::<T>().unwrap(), m);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(swiglu_testing::cases(48)))]
    #[test]
    fn written_matrices_read_back(
        rows in 0usize..5, cols in 0usize..5, seed in 0usize..100, stride in 0usize..3
    ) {
        let values = ramp(rows * cols, seed);
        round_trip::<f32>(&values, rows, cols);
        round_trip::<f16>(&values, rows, cols);
        round_trip::<bf16>(&values, rows, cols);
        let wide: Vec<f64> = ramp(rows * (cols + stride), seed).into_iter().map(f64::from).collect();
        let view = MatrixRef::with_stride(&wide, rows, cols, cols + stride).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.npy");
        format::write_f64(&path, view, false).unwrap();
        let back = read_matrix(path.to_str().unwrap()).unwrap().to_f64().unwrap();
        for r in 0..rows {
            prop_assert_eq!(back.view().row(r), view.row(r));
        }
    }
}
