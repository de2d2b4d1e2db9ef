//! The family of gated activations, one parametric definition.

use std::f64::consts::{FRAC_1_SQRT_2, PI};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The function applied to the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum GateFn {
    /// x · σ(βx): SiLU for β = 1, also called Swish.
    Silu {
        /// β.
        beta: f32,
    },
    /// σ(x).
    Sigmoid,
    /// max(x, 0).
    Relu,
    /// max(x, 0)².
    Relu2,
    /// x · Φ(x), Φ the standard normal distribution function.
    GeluErf,
    /// ½x(1 + tanh(√(2/π)(x + 0.044715x³))).
    GeluTanh,
    /// x.
    Identity,
}

/// h = f(min(gate, L)) · (clamp(up, −L, L) + offset), with f a [`GateFn`].
///
/// Without a limit L = ∞, without an offset it is 0: Shazeer's GLU variants
/// (arXiv:2002.05202). With limit 7, offset 1 and β = 1.702 it is gpt-oss's clamped SwiGLU. A limit may
/// also be of the function's value in place of its argument, min(f(gate), L): Step and Ling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Activation {
    gate: GateFn,
    limit: Option<f32>,
    /// Whether the gate is limited behind its function.
    behind: bool,
    up_offset: f32,
}

/// The names [`Activation::from_str`] accepts.
pub const ACTIVATION_NAMES: &str = "swiglu, swiglu(beta=B), glu, reglu, reglu2, geglu, \
     geglu-tanh, bilinear, clamped-swiglu, clamped-swiglu(alpha=A,offset=O,limit=L), \
     swiglu(limit-behind=L)";

impl Activation {
    /// silu(gate) · up: Llama, Qwen, Mistral.
    pub const SWIGLU: Activation = Activation::plain(GateFn::Silu { beta: 1.0 });
    /// σ(gate) · up.
    pub const GLU: Activation = Activation::plain(GateFn::Sigmoid);
    /// max(gate, 0) · up.
    pub const REGLU: Activation = Activation::plain(GateFn::Relu);
    /// max(gate, 0)² · up: BitNet.
    pub const REGLU2: Activation = Activation::plain(GateFn::Relu2);
    /// gelu(gate) · up with the exact GELU.
    pub const GEGLU: Activation = Activation::plain(GateFn::GeluErf);
    /// gelu(gate) · up with the tanh approximation: Gemma.
    pub const GEGLU_TANH: Activation = Activation::plain(GateFn::GeluTanh);
    /// gate · up.
    pub const BILINEAR: Activation = Activation::plain(GateFn::Identity);
    /// gpt-oss: α = 1.702, offset 1, limit 7.
    pub const CLAMPED_SWIGLU: Activation =
        Activation::limited(GateFn::Silu { beta: 1.702 }, 7.0, 1.0);

    const fn plain(gate: GateFn) -> Self {
        Activation { gate, limit: None, behind: false, up_offset: 0.0 }
    }

    const fn limited(gate: GateFn, limit: f32, up_offset: f32) -> Self {
        Activation { gate, limit: Some(limit), behind: false, up_offset }
    }

    /// One of each kind, for tests and conformance.
    pub fn family() -> [Activation; 12] {
        [
            Activation::SWIGLU,
            Activation::plain(GateFn::Silu { beta: 1.702 }),
            Activation::GLU,
            Activation::REGLU,
            Activation::GEGLU,
            Activation::GEGLU_TANH,
            Activation::BILINEAR,
            Activation::CLAMPED_SWIGLU,
            Activation::limited(GateFn::GeluTanh, 2.5, -0.25),
            Activation::REGLU2,
            Activation::limited(GateFn::Relu2, 1.5, 0.5),
            Activation::limited(GateFn::Silu { beta: 1.0 }, 1.5, 0.0).limited_behind(),
        ]
    }

    /// x · σ(βx) · up.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if β is not finite.
    pub fn swiglu_beta(beta: f32) -> Result<Self> {
        Activation::new(GateFn::Silu { beta }, None, 0.0)
    }

    /// min(gate, limit) · σ(α · min(gate, limit)) · (clamp(up, ±limit) + offset).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if α or the offset is not finite or the limit is not positive.
    pub fn clamped_swiglu(alpha: f32, offset: f32, limit: f32) -> Result<Self> {
        Activation::new(GateFn::Silu { beta: alpha }, Some(limit), offset)
    }

    /// Any member of the family.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if β or the offset is not finite or the limit is not positive.
    pub fn new(gate: GateFn, limit: Option<f32>, up_offset: f32) -> Result<Self> {
        let refuse = |what, given: f32, expected: &str| {
            Err(Error::OutOfRange { what, given: given.to_string(), expected: expected.into() })
        };
        if let GateFn::Silu { beta } = gate
            && !beta.is_finite()
        {
            return refuse("activation beta", beta, "a finite number");
        }
        if !up_offset.is_finite() {
            return refuse("activation offset", up_offset, "a finite number");
        }
        if let Some(limit) = limit
            && !(limit > 0.0 && limit.is_finite())
        {
            return refuse("activation limit", limit, "a positive finite number");
        }
        Ok(Activation { gate, limit, behind: false, up_offset })
    }

    /// The same with the gate limited behind its function: min(f(gate), L) · clamp(up, ±L). Without a limit
    /// it is the same.
    #[must_use]
    pub const fn limited_behind(self) -> Self {
        Self { behind: self.limit.is_some(), ..self }
    }

    /// The gate function.
    pub fn gate(&self) -> GateFn {
        self.gate
    }
    /// L, where values are clamped.
    pub fn limit(&self) -> Option<f32> {
        self.limit
    }
    /// L where it is of the gate before its function, else infinity.
    pub fn gate_limit(&self) -> f32 {
        self.limit.filter(|_| !self.behind).unwrap_or(f32::INFINITY)
    }
    /// L where it is of the function's value, else infinity.
    pub fn value_limit(&self) -> f32 {
        self.limit.filter(|_| self.behind).unwrap_or(f32::INFINITY)
    }
    /// What is added to up after clamping.
    pub fn up_offset(&self) -> f32 {
        self.up_offset
    }

    /// The gate's argument, the function's value and up, each clamped, in float64.
    pub(crate) fn factors(&self, gate: f64, up: f64) -> [f64; 3] {
        // Comparisons that are false for NaN keep it.
        let at_most = |v: f64, limit: f32| if v > limit.into() { limit.into() } else { v };
        let g = at_most(gate, self.gate_limit());
        let f = at_most(self.gate.value(g), self.value_limit());
        let l = self.limit.unwrap_or(f32::INFINITY);
        let u = -at_most(-at_most(up, l), l);
        [g, f, u + f64::from(self.up_offset)]
    }

    /// h in float64.
    pub fn forward(&self, gate: f64, up: f64) -> f64 {
        let [_, f, u] = self.factors(gate, up);
        f * u
    }

    /// (∂h/∂gate, ∂h/∂up) in float64. At a clamp the derivative is that of PyTorch: 1 on the bound
    /// and inside, 0 beyond.
    pub fn derivative(&self, gate: f64, up: f64) -> (f64, f64) {
        let [g, f, u] = self.factors(gate, up);
        let beyond = |v: f64, limit: f32| v > f64::from(limit);
        let l = self.limit.unwrap_or(f32::INFINITY);
        let gate_beyond =
            beyond(gate, self.gate_limit()) || beyond(self.gate.value(g), self.value_limit());
        (
            if gate_beyond { 0.0 } else { self.gate.derivative(g) * u },
            if beyond(up.abs(), l) { 0.0 } else { f },
        )
    }
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl GateFn {
    /// The function in float64.
    pub fn value(self, x: f64) -> f64 {
        match self {
            GateFn::Silu { beta } => x * logistic(f64::from(beta) * x),
            GateFn::Sigmoid => logistic(x),
            // Written so that NaN stays NaN.
            GateFn::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            GateFn::Relu2 => GateFn::Relu.value(x).powi(2),
            GateFn::GeluErf => 0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2),
            GateFn::GeluTanh => x * logistic(2.0 * gelu_tanh_inner(x)),
            GateFn::Identity => x,
        }
    }

    /// Its derivative in float64.
    pub fn derivative(self, x: f64) -> f64 {
        match self {
            // d/dx xσ(βx) = σ + βxσ(1 − σ)
            GateFn::Silu { beta } => {
                let s = logistic(f64::from(beta) * x);
                s + f64::from(beta) * x * s * (1.0 - s)
            }
            // σ(1 − σ)
            GateFn::Sigmoid => {
                let s = logistic(x);
                s * (1.0 - s)
            }
            // PyTorch takes 0 at 0.
            GateFn::Relu => {
                if x > 0.0 {
                    1.0
                } else if x.is_nan() {
                    x
                } else {
                    0.0
                }
            }
            GateFn::Relu2 => 2.0 * GateFn::Relu.value(x),
            // Φ + xφ
            GateFn::GeluErf => {
                let phi = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
                0.5 * libm::erfc(-x * FRAC_1_SQRT_2) + x * phi
            }
            // σ(2z) + x·2z′·σ(2z)(1 − σ(2z)), z′ = √(2/π)(1 + 3·0.044715x²)
            GateFn::GeluTanh => {
                let s = logistic(2.0 * gelu_tanh_inner(x));
                let dz = (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
                s + x * 2.0 * dz * s * (1.0 - s)
            }
            GateFn::Identity => 1.0,
        }
    }

    /// How far f may be from f(x) where its argument is up to `error` from x: with sup |f′| times that,
    /// unless f′ has none.
    pub fn deviation(self, x: f64, error: f64) -> f64 {
        let steepest = match self {
            // max of σ + tσ(1 − σ) over t is 1.0998…, for every β.
            GateFn::Silu { .. } => 1.1,
            GateFn::Sigmoid => 0.25,
            GateFn::Relu | GateFn::Identity => 1.0,
            // |(x + e)² − x²| ≤ |e|(2|x| + |e|); from below 0 no more than e² is reached.
            GateFn::Relu2 => 2.0 * x.max(0.0) + error,
            // 1.12904… at √2 for the exact form, 1.1298… for the tanh form.
            GateFn::GeluErf | GateFn::GeluTanh => 1.13,
        };
        // Also where x is infinite.
        if error == 0.0 { 0.0 } else { steepest * error }
    }

    /// How far f′ may be from f′(x) where its argument is up to `error` from x: with sup |f″| times that, but for a step.
    pub fn derivative_deviation(self, x: f64, error: f64) -> f64 {
        let steepest = match self {
            // f″ = β(2σ′ + zσ″) of z = βx is largest at 0, where σ′ is ¼.
            GateFn::Silu { beta } => 0.5 * f64::from(beta).abs(),
            // 1/(6√3)
            GateFn::Sigmoid => 0.0963,
            GateFn::Relu => return if error > 0.0 && x.abs() <= error { 1.0 } else { 0.0 },
            GateFn::Relu2 => 2.0,
            // f″ = φ(2 − x²) is largest at 0, 0.79788…, for both forms.
            GateFn::GeluErf | GateFn::GeluTanh => 0.798,
            GateFn::Identity => 0.0,
        };
        if error == 0.0 { 0.0 } else { steepest * error }
    }
}

fn gelu_tanh_inner(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Activation::CLAMPED_SWIGLU {
            return f.pad("clamped-swiglu");
        }
        let mut parameters = Vec::new();
        let name = match (self.gate, self.limit.filter(|_| !self.behind)) {
            (GateFn::Silu { beta }, Some(_)) => {
                parameters.push(format!("alpha={beta}"));
                "clamped-swiglu"
            }
            (GateFn::Silu { beta }, None) => {
                if beta != 1.0 {
                    parameters.push(format!("beta={beta}"));
                }
                "swiglu"
            }
            (GateFn::Sigmoid, _) => "glu",
            (GateFn::Relu, _) => "reglu",
            (GateFn::Relu2, _) => "reglu2",
            (GateFn::GeluErf, _) => "geglu",
            (GateFn::GeluTanh, _) => "geglu-tanh",
            (GateFn::Identity, _) => "bilinear",
        };
        if self.up_offset != 0.0 || name == "clamped-swiglu" {
            parameters.push(format!("offset={}", self.up_offset));
        }
        if let Some(limit) = self.limit {
            let name = if self.behind { "limit-behind" } else { "limit" };
            parameters.push(format!("{name}={limit}"));
        }
        if parameters.is_empty() {
            f.pad(name)
        } else {
            f.pad(&format!("{name}({})", parameters.join(",")))
        }
    }
}

impl FromStr for Activation {
    type Err = Error;

    /// A name of [`ACTIVATION_NAMES`], with any of its parameters: `geglu-tanh(limit=10)`.
    fn from_str(s: &str) -> Result<Self> {
        let unknown = || Error::UnknownName {
            what: "activation",
            given: s.to_owned(),
            choices: ACTIVATION_NAMES.to_owned(),
        };
        let (name, parameters) = match s.split_once('(') {
            None => (s, ""),
            Some((name, rest)) => (name, rest.strip_suffix(')').ok_or_else(unknown)?),
        };
        let base = match name.trim() {
            "swiglu" | "silu" => Activation::SWIGLU,
            "glu" | "sigmoid" => Activation::GLU,
            "reglu" | "relu" => Activation::REGLU,
            "reglu2" | "relu2" => Activation::REGLU2,
            "geglu" | "gelu" => Activation::GEGLU,
            "geglu-tanh" | "geglu_tanh" | "gelu_tanh" | "gelu_pytorch_tanh" => {
                Activation::GEGLU_TANH
            }
            "bilinear" => Activation::BILINEAR,
            "clamped-swiglu" | "clamped_swiglu" => Activation::CLAMPED_SWIGLU,
            _ => return Err(unknown()),
        };
        let [mut beta, mut limit, mut behind, mut offset] = [None; 4];
        for pair in parameters.split(',').filter(|p| !p.trim().is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(unknown)?;
            let text = value.trim();
            let value: f32 = text.parse().map_err(|_| unknown())?;
            if value.is_infinite() && text.contains(|c: char| c.is_ascii_digit()) {
                return Err(Error::OutOfRange {
                    what: "activation parameter",
                    given: pair.trim().to_owned(),
                    expected: format!("a number of at most {:e}, as f32 holds", f32::MAX),
                });
            }
            let given = match (key.trim(), base.gate) {
                ("beta" | "alpha", GateFn::Silu { .. }) => &mut beta,
                ("offset", _) => &mut offset,
                ("limit", _) => &mut limit,
                ("limit-behind", _) => &mut behind,
                _ => return Err(unknown()),
            };
            // Which of two was meant nobody knows.
            if given.replace(value).is_some() {
                return Err(unknown());
            }
        }
        let gate = beta.map_or(base.gate, |beta| GateFn::Silu { beta });
        let offset = offset.unwrap_or(base.up_offset);
        match (behind, limit.or(base.limit)) {
            (None, limit) => Activation::new(gate, limit, offset),
            (behind, None) => Ok(Activation::new(gate, behind, offset)?.limited_behind()),
            (Some(_), Some(_)) => Err(unknown()),
        }
    }
}

impl From<Activation> for String {
    fn from(a: Activation) -> String {
        a.to_string()
    }
}

impl TryFrom<String> for Activation {
    type Error = Error;
    fn try_from(s: String) -> Result<Self> {
        s.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_through_text_and_serde() {
        for a in Activation::family() {
            assert_eq!(a.to_string().parse::<Activation>().unwrap(), a, "{a}");
            let json = serde_json::to_string(&a).unwrap();
            assert_eq!(serde_json::from_str::<Activation>(&json).unwrap(), a);
        }
    }

    #[test]
    fn bad_parameters_are_refused() {
        let twice = ["swiglu(beta=1,beta=2)", "swiglu(beta=1,alpha=1)", "glu(limit=1,limit=1)"];
        let unknown = ["swish", "swiglu(", "swiglu(beta)", "relu2(beta=2)", "swiglu(beta=x)"];
        for s in unknown.into_iter().chain(twice) {
            assert!(matches!(s.parse::<Activation>(), Err(Error::UnknownName { .. })), "{s}");
        }
        for s in ["swiglu(beta=nan)", "glu(limit=0)", "glu(limit=-1)", "glu(offset=inf)"] {
            assert!(matches!(s.parse::<Activation>(), Err(Error::OutOfRange { .. })), "{s}");
        }
    }

    /// Forward and derivative stand side by side: each derivative against a central difference.
    #[test]
    fn derivatives_match_differences() {
        let d = 1e-6;
        for a in Activation::family() {
            for i in -60..=60 {
                for up in [-3.3, -0.2, 0.0, 1.7] {
                    let g = f64::from(i) * 0.13 + 0.003;
                    let (dg, du) = a.derivative(g, up);
                    let ng = (a.forward(g + d, up) - a.forward(g - d, up)) / (2.0 * d);
                    let nu = (a.forward(g, up + d) - a.forward(g, up - d)) / (2.0 * d);
                    assert!((dg - ng).abs() < 1e-7 * (1.0 + ng.abs()), "{a} {g} {up} {dg} {ng}");
                    assert!((du - nu).abs() < 1e-7 * (1.0 + nu.abs()), "{a} {g} {up} {du} {nu}");
                }
            }
        }
    }

    /// Over every distance, and where the distance is that of the derivative.
    #[test]
    fn values_deviate_no_further_than_said() {
        for a in Activation::family() {
            let f = a.gate();
            for i in -60..=60 {
                let x = f64::from(i) * 0.13 + 0.003;
                for error in [0.0, 1e-9, 1e-3, 0.3, 2.0, 40.0] {
                    let bound = f.deviation(x, error);
                    for moved in [x - error, x - 0.5 * error, x + 0.5 * error, x + error] {
                        let d = (f.value(moved) - f.value(x)).abs();
                        assert!(d <= bound * (1.0 + 1e-12) + 1e-14, "{a}: {x} to {moved}");
                    }
                    assert!(f.derivative(x).abs() * error <= bound * (1.0 + 1e-12), "{a} at {x}");
                    let bound = f.derivative_deviation(x, error);
                    for moved in [x - error, x - 0.5 * error, x + 0.5 * error, x + error] {
                        let d = (f.derivative(moved) - f.derivative(x)).abs();
                        assert!(d <= bound * (1.0 + 1e-12) + 1e-14, "{a}: f′ from {x} to {moved}");
                    }
                }
                assert_eq!(f.deviation(x, f64::INFINITY), f64::INFINITY);
            }
            assert_eq!(f.deviation(f64::INFINITY, 0.0), 0.0);
        }
    }

    #[test]
    fn squares_are_of_what_is_above_zero() {
        let a = Activation::REGLU2;
        assert_eq!((a.forward(3.0, -2.0), a.derivative(3.0, -2.0)), (-18.0, (-12.0, 9.0)));
        assert_eq!((a.forward(-3.0, -2.0), a.derivative(-3.0, -2.0).1), (0.0, 0.0));
        assert_eq!(a.derivative(0.0, 2.0).0, 0.0);
        assert!(a.forward(f64::NAN, 1.0).is_nan() && a.derivative(f64::NAN, 1.0).0.is_nan());
        let names = ["reglu2", "relu2"].map(|name| name.parse::<Activation>().unwrap());
        assert_eq!(names, [a; 2]);
        assert_eq!("relu2(limit=1.5,offset=0.5)".parse::<Activation>().unwrap().gate(), a.gate());
    }

    #[test]
    fn a_limit_behind_the_function_is_of_its_value() {
        let a = Activation::new(GateFn::Silu { beta: 1.0 }, Some(2.0), 0.0).unwrap();
        let behind = a.limited_behind();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        // silu(2.1) is below 2, 2.1 is not.
        assert_eq!(behind.forward(2.1, 1.0), silu(2.1));
        assert_eq!(a.forward(2.1, 1.0), silu(2.0));
        assert_eq!(behind.forward(9.0, -5.0), -4.0);
        assert_eq!(behind.derivative(9.0, 1.0), (0.0, 2.0));
        assert_eq!(behind.derivative(1.0, 2.5).1, 0.0);
        assert!(behind.forward(f64::NAN, 1.0).is_nan());
        assert_eq!(Activation::SWIGLU.limited_behind(), Activation::SWIGLU);
        assert_eq!("silu(limit-behind=2)".parse::<Activation>().unwrap(), behind);
        assert!("silu(limit-behind=2,limit=2)".parse::<Activation>().is_err());
        assert!("clamped-swiglu(limit-behind=2)".parse::<Activation>().is_err());
    }

    #[test]
    fn clamped_swiglu_is_the_published_formula() {
        let a = Activation::CLAMPED_SWIGLU;
        let s = |x: f64| 1.0 / (1.0 + (-x).exp());
        let alpha = f64::from(1.702f32);
        assert_eq!(a.forward(9.0, -9.0), 7.0 * s(alpha * 7.0) * -6.0);
        assert_eq!(a.forward(-9.0, 3.0), -9.0 * s(alpha * -9.0) * 4.0);
        assert_eq!(a.derivative(9.0, 1.0).0, 0.0);
        assert_eq!(a.derivative(1.0, 7.5).1, 0.0);
    }
}
