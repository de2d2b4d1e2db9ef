use super::*;
use crate::activation::GateFn;
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

/// A complex number, as far as a complex step needs it: the imaginary part carries a derivative without a difference.
#[derive(Clone, Copy)]
struct Complex(f64, f64);

impl Complex {
    fn add(self, b: Self) -> Self {
        Self(self.0 + b.0, self.1 + b.1)
    }
    fn mul(self, b: Self) -> Self {
        Self(self.0 * b.0 - self.1 * b.1, self.0 * b.1 + self.1 * b.0)
    }
    fn scaled(self, by: f64) -> Self {
        Self(self.0 * by, self.1 * by)
    }
    fn exp(self) -> Self {
        Self(self.0.exp() * self.1.cos(), self.0.exp() * self.1.sin())
    }
    /// 1 / (1 + exp(−z)).
    fn logistic(self) -> Self {
        let Complex(a, b) = Self(1.0, 0.0).add(self.scaled(-1.0).exp());
        Self(a, -b).scaled(1.0 / (a * a + b * b))
    }
    /// The smaller by real part, as a clamp takes it.
    fn at_most(self, limit: f64) -> Self {
        if self.0 > limit { Self(limit, 0.0) } else { self }
    }

    /// The gate's function; none where it has no complex continuation in elementary functions.
    fn gate(self, f: GateFn) -> Option<Self> {
        let above = if self.0 > 0.0 { self } else { Self(0.0, 0.0) };
        Some(match f {
            GateFn::Silu { beta } => self.mul(self.scaled(f64::from(beta)).logistic()),
            GateFn::Sigmoid => self.logistic(),
            GateFn::Relu => above,
            GateFn::Relu2 => above.mul(above),
            GateFn::GeluErf => return None,
            GateFn::GeluTanh => {
                let cube = self.mul(self).mul(self).scaled(0.044_715);
                let inner = self.add(cube).scaled((2.0 / std::f64::consts::PI).sqrt());
                self.mul(inner.scaled(2.0).logistic())
            }
            GateFn::Identity => self,
        })
    }

    fn activation(act: &Activation, gate: Self, up: Self) -> Option<Self> {
        let limit = f64::from(act.limit().unwrap_or(f32::INFINITY));
        let f = gate.at_most(act.gate_limit().into()).gate(act.gate())?;
        let up = up.at_most(limit).scaled(-1.0).at_most(limit).scaled(-1.0);
        Some(f.at_most(act.value_limit().into()).mul(up.add(Self(act.up_offset().into(), 0.0))))
    }
}

/// L = Σ c·y in complex numbers, where parameter `i` of all parameters in order (x, gate, up, down, biases) has a small
/// imaginary part: that of L is the derivative, to float64's accuracy.
fn complex_loss(
    layer: &Layer,
    x: &Matrix<f32>,
    c: &Matrix<f64>,
    act: &Activation,
    i: usize,
) -> Option<f64> {
    const STEP: f64 = 1e-100;
    let (m, k_len, h_len) = (x.rows(), x.cols(), layer.gate.rows());
    let flat = [x, &layer.gate, &layer.up, &layer.down].map(Matrix::as_slice);
    let all = flat.into_iter().chain(layer.biases.iter().map(Vec::as_slice)).flatten();
    let all: Vec<Complex> = all
        .enumerate()
        .map(|(at, v)| Complex(f64::from(*v), if at == i { STEP } else { 0.0 }))
        .collect();
    let starts = [m * k_len, h_len * k_len, h_len * k_len, k_len * h_len, h_len, h_len, k_len];
    let mut rest = all.as_slice();
    let [x, gate, up, down, gate_bias, up_bias, down_bias] = starts.map(|n| {
        let (part, after) = rest.split_at(n);
        rest = after;
        part
    });
    let mut loss = Complex(0.0, 0.0);
    for t in 0..m {
        let pre = |w: &[Complex], bias: &[Complex], j: usize| {
            (0..k_len).fold(bias[j], |sum, k| sum.add(x[t * k_len + k].mul(w[j * k_len + k])))
        };
        let h = (0..h_len)
            .map(|j| Complex::activation(act, pre(gate, gate_bias, j), pre(up, up_bias, j)))
            .collect::<Option<Vec<_>>>()?;
        for k in 0..k_len {
            let y = (0..h_len).fold(down_bias[k], |sum, j| sum.add(h[j].mul(down[k * h_len + j])));
            loss = loss.add(y.scaled(c[(t, k)]));
        }
    }
    Some(loss.1 / STEP)
}

/// Every gradient against a complex step, which has no error of a difference: what is left is float64's.
#[test]
fn mlp_gradients_match_complex_steps() {
    let (m, k, h) = (3, 5, 4);
    let (layer, x) = (Layer::new(k, h, true), normal_matrix::<f32>(7, m, k, 1.0).unwrap());
    let c = (0..(m * k) as u64).map(|i| f64::from(normal(8, i)));
    let c = Matrix::from_values(c, m, k).unwrap();
    let mut checked = 0;
    for act in Activation::family() {
        let grad = mlp_backward(x.view(), &layer.params(act), c.view()).unwrap();
        let gated = &grad.gated;
        let analytic = [
            gated.dx.as_slice(),
            gated.dgate_weight.as_slice(),
            gated.dup_weight.as_slice(),
            grad.ddown.as_slice(),
            &gated.dgate_bias,
            &gated.dup_bias,
            &grad.ddown_bias,
        ];
        for (i, &analytic) in analytic.into_iter().flatten().enumerate() {
            let Some(stepped) = complex_loss(&layer, &x, &c, &act, i) else { continue };
            let error = (stepped - analytic).abs();
            // Sums of some hundred products of numbers below 10.
            assert!(
                error < 1e4 * f64::EPSILON * (1.0 + analytic.abs()),
                "{act} {i}: {stepped} {analytic}"
            );
            checked += 1;
        }
    }
    // All but the exact GELU, which central differences check.
    assert_eq!(checked, 11 * (15 + 20 + 20 + 20 + 4 + 4 + 5));
}
