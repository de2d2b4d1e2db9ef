use super::*;
use crate::layout::{GateUpWeights, Orientation};
use crate::numerics::Numerics;
use crate::random::{normal, normal_matrix};

struct Layer {
    gate: Matrix<f32>,
    up: Matrix<f32>,
    down: Matrix<f32>,
    biases: [Vec<f32>; 3],
    bias: bool,
}

impl Layer {
    fn new(k: usize, h: usize, bias: bool) -> Self {
        let v = |seed, n: usize| (0..n as u64).map(|i| normal(seed, i)).collect();
        Layer {
            gate: normal_matrix(1, h, k, 0.5).unwrap(),
            up: normal_matrix(2, h, k, 0.5).unwrap(),
            down: normal_matrix(3, k, h, 0.5).unwrap(),
            biases: [v(4, h), v(5, h), v(6, k)],
            bias,
        }
    }

    fn params(&self, activation: Activation) -> MlpParams<'_, f32> {
        let weights =
            GateUpWeights::separate(self.gate.view(), self.up.view(), Orientation::OutIn).unwrap();
        let b = |i: usize| self.bias.then(|| self.biases[i].as_slice());
        MlpParams {
            gated: GatedLinearParams {
                weights,
                gate_bias: b(0),
                up_bias: b(1),
                activation,
                numerics: Numerics::default(),
            },
            down: self.down.view(),
            down_orientation: Orientation::OutIn,
            down_bias: b(2),
            rows: crate::RowParams::NONE,
        }
    }
}

/// L = Σ c·y with fixed random c: its gradient against central differences in every parameter.
#[test]
fn mlp_gradients_match_differences() {
    let (m, k, h) = (3, 5, 4);
    for activation in Activation::family() {
        let mut layer = Layer::new(k, h, true);
        let mut x = normal_matrix::<f32>(7, m, k, 1.0).unwrap();
        let c =
            Matrix::from_vec((0..(m * k) as u64).map(|i| f64::from(normal(8, i))).collect(), m, k);
        let c = c.unwrap();
        let loss = |layer: &Layer, x: &Matrix<f32>| -> f64 {
            let y = mlp(x.view(), &layer.params(activation)).unwrap().y.value;
            y.as_slice().iter().zip(c.as_slice()).map(|(a, b)| a * b).sum()
        };
        let grad = mlp_backward(x.view(), &layer.params(activation), c.view()).unwrap();
        // A step that f32 parameters represent exactly around any value near 1.
        let d = 1.0 / 4096.0;
        macro_rules! check {
            ($name:literal, $slot:expr, $analytic:expr) => {
                for i in 0..$analytic.len() {
                    let kept = $slot[i];
                    $slot[i] = kept + d;
                    let (hi, up) = ($slot[i], loss(&layer, &x));
                    $slot[i] = kept - d;
                    let (lo, down) = ($slot[i], loss(&layer, &x));
                    $slot[i] = kept;
                    let numeric = (up - down) / (f64::from(hi) - f64::from(lo));
                    let error = (numeric - $analytic[i]).abs();
                    assert!(
                        error < 2e-4 * (1.0 + numeric.abs()),
                        "{activation} {} {i}: {numeric} {}",
                        $name,
                        $analytic[i]
                    );
                }
            };
        }
        check!("x", x.as_mut_slice(), grad.gated.dx.as_slice());
        check!("gate", layer.gate.as_mut_slice(), grad.gated.dgate_weight.as_slice());
        check!("up", layer.up.as_mut_slice(), grad.gated.dup_weight.as_slice());
        check!("down", layer.down.as_mut_slice(), grad.ddown.as_slice());
        check!("gate bias", layer.biases[0], grad.gated.dgate_bias);
        check!("up bias", layer.biases[1], grad.gated.dup_bias);
        check!("down bias", layer.biases[2], grad.ddown_bias);
    }
}

#[test]
fn a_hand_computed_layer() {
    let gate = Matrix::from_vec(vec![1.0f32, 2.0], 1, 2).unwrap();
    let up = Matrix::from_vec(vec![-1.0f32, 0.5], 1, 2).unwrap();
    let down = Matrix::from_vec(vec![3.0f32, -4.0], 2, 1).unwrap();
    let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
    let mut gated = GatedLinearParams::new(weights, Activation::REGLU);
    gated.gate_bias = Some(&[0.5]);
    let params = MlpParams {
        gated,
        down: down.view(),
        down_orientation: Orientation::OutIn,
        down_bias: Some(&[1.0, 0.0]),
        rows: crate::RowParams::NONE,
    };
    let x = Matrix::from_vec(vec![2.0f32, 1.0], 1, 2).unwrap();
    // gate 2 + 2 + ½ = 4.5, up −2 + ½ = −1.5, h = −6.75, y = [3h + 1, −4h]
    let out = mlp(x.view(), &params).unwrap();
    assert_eq!(out.gated.h.as_slice(), &[-6.75]);
    assert_eq!(out.y.value.as_slice(), &[-19.25, 27.0]);
    assert_eq!(out.gated.gate.magnitude.as_slice(), &[4.5]);
    assert_eq!(out.gated.up.magnitude.as_slice(), &[2.5]);
}

#[test]
fn shapes_are_checked() {
    let layer = Layer::new(4, 3, false);
    let params = layer.params(Activation::SWIGLU);
    let x = normal_matrix::<f32>(1, 2, 5, 1.0).unwrap();
    let e = mlp(x.view(), &params).unwrap_err().to_string();
    assert!(e.contains("[2, 4]") && e.contains("[2, 5]"), "{e}");
    let short = [0.0f32; 2];
    let params = MlpParams { down_bias: Some(&short), ..params };
    let x = normal_matrix::<f32>(1, 2, 4, 1.0).unwrap();
    assert!(mlp(x.view(), &params).unwrap_err().to_string().contains("down bias"));
}
