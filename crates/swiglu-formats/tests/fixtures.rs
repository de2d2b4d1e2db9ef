//! The two real layers: loading and a plain float64 feed-forward must give the outputs that come
//! with them.

use std::path::Path;

use swiglu_core::{Half, Matrix, Orientation, WeightLayout};
use swiglu_fixtures::{LAYERS, SMOLLM2_FILE, STORIES15M_FILE};
use swiglu_formats::{LayerWeights, LoadOptions, load_layer, read_matrix};

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// x `[M, K]` times w `[N, K]` transposed.
fn times_transposed(x: &Matrix<f64>, w: &Matrix<f64>) -> Matrix<f64> {
    let out = (0..x.rows())
        .flat_map(|m| (0..w.rows()).map(move |n| dot(x.view().row(m), w.view().row(n))))
        .collect();
    Matrix::from_vec(out, x.rows(), w.rows()).unwrap()
}

fn mlp(layer: &LayerWeights, x: &Matrix<f64>) -> Matrix<f64> {
    assert_eq!(layer.layout(), WeightLayout::HF);
    let w: Vec<_> = layer.stored_gate_up().iter().map(|m| m.to_matrix_f64().unwrap()).collect();
    let down = layer.stored_down().unwrap().to_matrix_f64().unwrap();
    let gate = times_transposed(x, &w[0]);
    let up = times_transposed(x, &w[1]);
    let h = gate.as_slice().iter().zip(up.as_slice());
    let h = h.map(|(&g, &u)| g / (1.0 + (-g).exp()) * u).collect();
    times_transposed(&Matrix::from_vec(h, x.rows(), w[0].rows()).unwrap(), &down)
}

fn relative_error(y: &Matrix<f64>, want: &Matrix<f64>) -> f64 {
    assert_eq!(y.shape(), want.shape());
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let d: Vec<f64> = y.as_slice().iter().zip(want.as_slice()).map(|(a, b)| a - b).collect();
    norm(&d) / norm(want.as_slice())
}

#[test]
fn smollm2_q4_1_reproduces_its_reference() {
    let path = Path::new(SMOLLM2_FILE);
    let layer = load_layer(path, &LoadOptions::new(28)).unwrap();
    assert_eq!((layer.hidden(), layer.intermediate()), (576, 1536));
    assert_eq!(layer.stored_dtype().to_string(), "Q4_1");
    assert_eq!(layer.architecture(), Some("llama"));
    layer.expect_finite().unwrap();
    assert!(layer.gate_up_view::<f32>().is_none());
    assert_eq!(layer.down::<f32>().unwrap().unwrap().1, Orientation::OutIn);
    let text = layer.describe();
    assert!(text.contains("576 → 1536 → 576, out-in separate") && text.contains("Q4_1"), "{text}");

    let get = |name: &str| {
        let file = "smollm2-135m-blk28/acts.safetensors";
        read_matrix(format!("{LAYERS}/{file}#{name}")).unwrap().to_f64().unwrap()
    };
    let y = mlp(&layer, &get("acts.layers.28.mlp_in"));
    let error = relative_error(&y, &get("acts.layers.28.mlp_out_f64ref"));
    assert!(error < 1e-12, "{error:e}");

    let e = load_layer(path, &LoadOptions::new(3)).unwrap_err();
    assert!(e.to_string().contains("layer 3 given, the file has layers 28"), "{e}");
}

#[test]
fn stories15m_reproduces_its_reference() {
    let layer = load_layer(Path::new(STORIES15M_FILE), &LoadOptions::default()).unwrap();
    assert_eq!((layer.hidden(), layer.intermediate()), (288, 768));
    layer.expect_finite().unwrap();

    let get =
        |name: &str| read_matrix(format!("{STORIES15M_FILE}#{name}")).unwrap().to_f64().unwrap();
    let y = mlp(&layer, &get("acts.layers.0.mlp_in"));
    let error = relative_error(&y, &get("acts.layers.0.mlp_out_f64ref"));
    assert!(error < 1e-12, "{error:e}");

    // Mapped and aligned: no copy.
    let view = layer.gate_up_view::<f32>().unwrap();
    let owned = layer.gate_up::<f32>().unwrap();
    assert_eq!(view.locate(Half::Up, 0).0.as_slice(), owned.tensors()[1].as_slice());
    let (down, _) = layer.down_view::<f32>().unwrap();
    assert_eq!(down.as_slice(), layer.down::<f32>().unwrap().unwrap().0.as_slice());
}
