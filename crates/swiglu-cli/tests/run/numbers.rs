//! Values that are no numbers, or that an element type cannot hold.

use super::*;

#[test]
fn non_finite_values_run_where_they_are_allowed() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let mut values = vec![0.5f32; 12];
    values[7] = f32::NAN;
    let input = files.write("x.npy", npy(2, 6, &values));
    let output = files.name("y.npy");
    let report =
        run(&["--weights", &layer, "--input", &input, "--allow-non-finite", "--output", &output]);
    assert_eq!(report["passed"], true, "{report}");
    let y = npy_values(&files.path("y.npy"));
    assert!(y[..6].iter().all(|v| v.is_finite()) && y[6..].iter().all(|v| v.is_nan()), "{y:?}");
}

#[test]
fn values_that_are_no_numbers_are_compared_with_those_of_a_reference() {
    let files = Files::new();
    let layer = files.write("layer.safetensors", safetensors(&layer_tensors()));
    let mut values = vec![0.5f32; 18];
    (values[7], values[13]) = (f32::NAN, f32::INFINITY);
    let input = files.write("x.npy", npy(3, 6, &values));
    let output = files.name("y.npy");
    let args = ["run", "--weights", &layer, "--input", &input, "--allow-non-finite", "--json"];
    let against = |reference: &str, more: &[&str]| {
        let reference = ["--reference", reference, "--seconds", "0.01"];
        swiglu(&[&args[..], &reference, more].concat())
    };
    let written = swiglu(&[&args[..], &["--seconds", "0.01", "--output", &output]].concat());
    assert_eq!(written.code, Some(0), "{written:?}");
    for dtype in ["f32", "bf16"] {
        let ended = against(&output, &["--dtype", dtype]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let error = &ended.json()["error"];
        assert!(number(&error["limit"]) < 1e-1 && number(&error["max_abs"]) < 1e-1, "{error}");
    }
    // A number instead of a NaN, a NaN instead of a number, and a wrong number beside NaNs.
    let y = npy_values(&files.path("y.npy"));
    for (at, value, why) in [
        (6, 0.5, Some("element (1, 0) is NaN, expected 0.5")),
        (2, f32::NAN, Some("element (0, 2) is ")),
        (2, y[2] * 1.5, None),
    ] {
        let mut wrong = y.clone();
        wrong[at] = value;
        let wrong = files.write("wrong.npy", npy(3, 6, &wrong));
        let ended = against(&wrong, &[]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let unlike = &ended.json()["error"]["unlike"];
        match why {
            Some(why) => assert!(unlike.as_str().is_some_and(|u| u.contains(why)), "{unlike}"),
            None => assert!(unlike.is_null(), "{unlike}"),
        }
    }
}

/// A layer whose weights are so many times as large.
fn large_layer(files: &Files, factor: f32) -> String {
    let mut tensors = layer_tensors();
    tensors.iter_mut().flat_map(|t| &mut t.values).for_each(|value| *value *= factor);
    files.write("large.safetensors", safetensors(&tensors))
}

#[test]
fn a_weight_that_is_not_used_may_be_anything() {
    let files = Files::new();
    let mut tensors = layer_tensors();
    tensors[2].values[7] = f32::NAN;
    let path = files.write("nan.safetensors", safetensors(&tensors));
    let run = |op| swiglu(&["run", "--weights", &path, "--seconds", "0.01", "--op", op]);
    run("mlp").refused(&["down_proj.weight[0, 7] is NaN in the file", "--allow-non-finite"]);
    let ended = run("gated-linear");
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn numbers_beyond_an_element_type_are_told_as_such() {
    let files = Files::new();
    let run = |layer: &str, dtype: &str, more: &[&str]| {
        let args = ["run", "--weights", layer, "--seconds", "0.01", "--device", "cpu"];
        swiglu(&[&args, &["--dtype", dtype][..], more].concat())
    };
    // h is a product of two, and y one of three.
    let ended = run(&large_layer(&files, 1e14), "f32", &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in ["FAILED", "the exact value of element (0, ", "beyond the 3.403e38 of f32"] {
        assert!(ended.stdout.contains(part), "{part}: {ended:?}");
    }
    // Also where every bound admits it, which the table shows as an error without a size: nobody can use it.
    let mut x = [1.0; 6];
    x[2] = 1e38;
    let input = files.write("x.npy", npy(1, 6, &x));
    let ended = run(&large_layer(&files, 1.0), "f32", &["--input", &input]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in ["–", "the exact value of element (0, ", "beyond the 3.403e38 of f32"] {
        assert!(ended.stdout.contains(part), "{part}: {ended:?}");
    }
    // What was stored is finite; what rounding makes of it is not.
    let refused = run(&large_layer(&files, 1e6), "f16", &[]);
    refused.refused(&["weight[", "becomes", "in f16, whose largest number is 65504", "--dtype"]);
}

/// The layer with up weights so many times as large and down weights as much smaller.
fn large_h(files: &Files, factor: f32) -> String {
    let mut tensors = layer_tensors();
    tensors[1].values.iter_mut().for_each(|value| *value *= factor);
    tensors[2].values.iter_mut().for_each(|value| *value /= factor);
    files.write("large-h.safetensors", safetensors(&tensors))
}

#[test]
fn an_intermediate_beyond_half_precision_fails_and_rescaling_brings_it_back() {
    let files = Files::new();
    let input = files.write("x.npy", npy(1, 6, &[30.0; 6]));
    let layer = large_h(&files, 2f32.powi(12));
    let run = |more: &[&str]| {
        let args = ["run", "--weights", &layer, "--seconds", "0.01", "--device", "cpu"];
        swiglu(&[&args, &["--input", &input, "--dtype", "f16"][..], more].concat())
    };
    let ended = run(&[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in
        ["h reaches", "beyond the 6.550e4 of f16", "--dtype bf16 or --dtype f32", "--rescale"]
    {
        assert!(ended.stdout.contains(part), "{part}: {ended:?}");
    }
    let ended = run(&["--rescale", "12"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    run(&["--rescale", "12", "--activation", "clamped-swiglu"]).refused(&["leave --rescale out"]);
    run(&["--rescale", "99"]).refused(&["number = 99", "from -64 to 64"]);
}

#[test]
fn a_result_that_half_precision_cannot_hold_is_refused() {
    let files = Files::new();
    let run = |factor: f32| {
        let layer = large_layer(&files, factor);
        swiglu(&[
            "run",
            "--weights",
            &layer,
            "--seconds",
            "0.01",
            "--dtype",
            "f16",
            "--device",
            "cpu",
        ])
    };
    run(1e2).refused(&["the exact result reaches", "beyond the 6.550e4 of f16", "--dtype bf16"]);
    run(1e-2).refused(&["so small that", "is lost in f16", "--dtype f32"]);
}
