//! How gate and up weights, or gate and up activations, lie in memory: a type, never a guess.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::matrix::{Matrix, MatrixMut, MatrixRef, rows_with_elements};

/// Which dimension of a weight matrix is the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Orientation {
    /// `[out, in]`: one row per output feature, as `torch.nn.Linear` and GGUF store it.
    OutIn,
    /// `[in, out]`: one row per input feature, as `x · W` is written.
    InOut,
}

impl Orientation {
    /// Both orientations.
    pub const ALL: [Orientation; 2] = [Orientation::OutIn, Orientation::InOut];

    /// `[rows, cols]` of a matrix from `input` to `output` features.
    pub fn shape(self, output: usize, input: usize) -> [usize; 2] {
        match self {
            Orientation::OutIn => [output, input],
            Orientation::InOut => [input, output],
        }
    }
}

impl fmt::Display for Orientation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Orientation::OutIn => "out-in",
            Orientation::InOut => "in-out",
        })
    }
}

impl FromStr for Orientation {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "out-in" | "oi" => Ok(Orientation::OutIn),
            "in-out" | "io" => Ok(Orientation::InOut),
            _ => Err(Error::UnknownName {
                what: "orientation",
                given: s.to_owned(),
                choices: "out-in, in-out".into(),
            }),
        }
    }
}

/// Gate or up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// The half the activation is applied to.
    Gate,
    /// The half it is multiplied with.
    Up,
}

/// How gate and up features of width H share one or two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrangement {
    /// Two tensors of H features.
    Separate,
    /// One tensor of 2H features: H gate features, then H up features.
    PackedGateFirst,
    /// One tensor of 2H features: H up features, then H gate features.
    PackedUpFirst,
    /// One tensor of 2H features: `group` gate features, `group` up features, and so on.
    /// `group` divides H. gpt-oss is `group` 1.
    Interleaved {
        /// Adjacent features of one half, 1 at least.
        #[serde(deserialize_with = "not_zero")]
        group: usize,
    },
}

fn not_zero<'de, D: Deserializer<'de>>(group: D) -> std::result::Result<usize, D::Error> {
    NonZeroUsize::deserialize(group).map(NonZeroUsize::get)
}

impl Arrangement {
    /// Checks the arrangement against `intermediate` features.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if an interleaving group is 0 or does not divide `intermediate`.
    pub fn validate(self, intermediate: usize) -> Result<()> {
        match self {
            Arrangement::Interleaved { group }
                if group == 0 || !intermediate.is_multiple_of(group) =>
            {
                Err(Error::OutOfRange {
                    what: "interleaving group",
                    given: group.to_string(),
                    expected: format!("a divisor of the intermediate size {intermediate}"),
                })
            }
            _ => Ok(()),
        }
    }

    /// Where feature `h` of `half` is: `(tensor, feature)`, with tensor 0 the gate or the packed
    /// one and tensor 1 the separate up. The single definition all conversions go through.
    #[inline]
    pub fn locate(self, half: Half, h: usize, intermediate: usize) -> (usize, usize) {
        match (self, half) {
            (Arrangement::Separate, Half::Gate) => (0, h),
            (Arrangement::Separate, Half::Up) => (1, h),
            (Arrangement::PackedGateFirst, Half::Gate) | (Arrangement::PackedUpFirst, Half::Up) => {
                (0, h)
            }
            (Arrangement::PackedGateFirst, Half::Up) | (Arrangement::PackedUpFirst, Half::Gate) => {
                (0, intermediate + h)
            }
            (Arrangement::Interleaved { group }, half) => {
                let base = (h / group) * 2 * group + h % group;
                (0, if half == Half::Gate { base } else { base + group })
            }
        }
    }

    /// Whether gate and up share one tensor.
    pub fn is_packed(self) -> bool {
        self != Arrangement::Separate
    }
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arrangement::Separate => f.pad("separate"),
            Arrangement::PackedGateFirst => f.pad("gate-first"),
            Arrangement::PackedUpFirst => f.pad("up-first"),
            Arrangement::Interleaved { group } => f.pad(&format!("interleaved-{group}")),
        }
    }
}

impl FromStr for Arrangement {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let unknown = || Error::UnknownName {
            what: "arrangement",
            given: s.to_owned(),
            choices: "separate, gate-first, up-first, interleaved-G (G a positive integer)".into(),
        };
        match s {
            "separate" => Ok(Arrangement::Separate),
            "gate-first" => Ok(Arrangement::PackedGateFirst),
            "up-first" => Ok(Arrangement::PackedUpFirst),
            "interleaved" => Ok(Arrangement::Interleaved { group: 1 }),
            _ => {
                let group = s.strip_prefix("interleaved-").ok_or_else(unknown)?;
                let group: usize = group.parse().map_err(|_| unknown())?;
                if group == 0 { Err(unknown()) } else { Ok(Arrangement::Interleaved { group }) }
            }
        }
    }
}

/// Orientation and arrangement of gate and up weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WeightLayout {
    /// Which dimension is the row.
    pub orientation: Orientation,
    /// How gate and up share tensors.
    pub arrangement: Arrangement,
}

impl WeightLayout {
    /// Two `[out, in]` matrices: Hugging Face Llama, GGUF.
    pub const HF: WeightLayout =
        WeightLayout { orientation: Orientation::OutIn, arrangement: Arrangement::Separate };
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.orientation, self.arrangement)
    }
}

fn refuse_tensor_count(arrangement: Arrangement, given: usize) -> Error {
    let expected =
        if arrangement.is_packed() { "1 packed tensor" } else { "2 tensors, gate and up" };
    Error::Shape {
        what: format!("{arrangement} arrangement"),
        expected: expected.into(),
        given: format!("{given}"),
    }
}

/// Gate and up weights as they lie in memory, with their layout checked against the shapes.
#[derive(Debug, Clone, Copy)]
pub struct GateUpWeights<'a, T> {
    layout: WeightLayout,
    tensors: [MatrixRef<'a, T>; 2],
    hidden: usize,
    intermediate: usize,
}

impl<'a, T: Element> GateUpWeights<'a, T> {
    /// Weights in two tensors of the same shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes differ.
    pub fn separate(
        gate: MatrixRef<'a, T>,
        up: MatrixRef<'a, T>,
        orientation: Orientation,
    ) -> Result<Self> {
        up.expect_shape("up weight", gate.shape())?;
        let [intermediate, hidden] = orientation.shape(gate.rows(), gate.cols());
        let layout = WeightLayout { orientation, arrangement: Arrangement::Separate };
        Ok(Self { layout, tensors: [gate, up], hidden, intermediate })
    }

    /// Weights in one tensor of 2H features.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of features is odd or the arrangement is
    /// [`Arrangement::Separate`]; [`Error::OutOfRange`] if an interleaving group does not divide H.
    pub fn packed(tensor: MatrixRef<'a, T>, layout: WeightLayout) -> Result<Self> {
        if !layout.arrangement.is_packed() {
            return Err(refuse_tensor_count(layout.arrangement, 1));
        }
        let [features, hidden] = layout.orientation.shape(tensor.rows(), tensor.cols());
        if !features.is_multiple_of(2) {
            return Err(Error::Shape {
                what: format!("packed gate and up weight ({layout})"),
                expected: "an even number of output features".into(),
                given: features.to_string(),
            });
        }
        layout.arrangement.validate(features / 2)?;
        Ok(Self { layout, tensors: [tensor, tensor], hidden, intermediate: features / 2 })
    }

    /// The layout.
    pub fn layout(&self) -> WeightLayout {
        self.layout
    }
    /// K, the number of input features.
    pub fn hidden(&self) -> usize {
        self.hidden
    }
    /// H, the number of output features.
    pub fn intermediate(&self) -> usize {
        self.intermediate
    }

    /// The tensor that holds feature `h` of `half`, and that feature's index in it.
    #[inline]
    pub fn locate(&self, half: Half, h: usize) -> (MatrixRef<'a, T>, usize) {
        let (tensor, feature) = self.layout.arrangement.locate(half, h, self.intermediate);
        (self.tensors[tensor], feature)
    }

    /// The weight from input feature `k` to feature `h` of `half`.
    #[inline]
    pub fn at(&self, half: Half, h: usize, k: usize) -> T {
        let (tensor, feature) = self.locate(half, h);
        match self.layout.orientation {
            Orientation::OutIn => tensor.row(feature)[k],
            Orientation::InOut => tensor.row(k)[feature],
        }
    }

    /// The weights to feature `h` of `half` from each input feature, exactly.
    pub(crate) fn widen(&self, half: Half, h: usize, to: &mut [f64])
    where
        T: Element,
    {
        let (tensor, feature) = self.locate(half, h);
        match self.layout.orientation {
            Orientation::OutIn => tensor.widen_row(feature, to),
            Orientation::InOut => tensor.widen_column(feature, to),
        }
    }

    /// A copy in another layout.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the target's interleaving group does not divide H.
    pub fn convert(&self, target: WeightLayout) -> Result<OwnedGateUp<T>> {
        target.arrangement.validate(self.intermediate)?;
        // Matrices, and the features of each beside H.
        let (count, halves) = if target.arrangement.is_packed() { (1, 2) } else { (2, 1) };
        let (rows, cols) = (self.intermediate, self.hidden);
        let features = rows.checked_mul(halves).ok_or_else(|| {
            let what = "packed gate and up weight".into();
            Error::TooLarge { what, rows, cols, row_stride: cols }
        })?;
        let [rows, cols] = target.orientation.shape(features, self.hidden);
        let mut tensors =
            (0..count).map(|_| Matrix::zeros(rows, cols)).collect::<Result<Vec<_>>>()?;
        for half in [Half::Gate, Half::Up] {
            for h in 0..rows_with_elements(self.intermediate, self.hidden) {
                let (tensor, feature) = target.arrangement.locate(half, h, self.intermediate);
                let out = tensors[tensor].as_mut_slice();
                for k in 0..self.hidden {
                    let at = match target.orientation {
                        Orientation::OutIn => feature * cols + k,
                        Orientation::InOut => k * cols + feature,
                    };
                    out[at] = self.at(half, h, k);
                }
            }
        }
        Ok(OwnedGateUp { layout: target, tensors })
    }

    /// Refuses NaN and infinities.
    ///
    /// # Errors
    /// [`Error::NonFinite`] with the position in the stored tensor.
    pub fn expect_finite(&self) -> Result<()> {
        if self.layout.arrangement.is_packed() {
            return self.tensors[0].expect_finite("gate and up weight");
        }
        self.tensors[0].expect_finite("gate weight")?;
        self.tensors[1].expect_finite("up weight")
    }
}

/// Owned gate and up weights.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedGateUp<T> {
    layout: WeightLayout,
    tensors: Vec<Matrix<T>>,
}

impl<T: Element> OwnedGateUp<T> {
    /// Takes ownership of one (packed) or two (separate: gate, up) tensors.
    ///
    /// # Errors
    /// As [`GateUpWeights::separate`] and [`GateUpWeights::packed`].
    pub fn new(tensors: Vec<Matrix<T>>, layout: WeightLayout) -> Result<Self> {
        let this = Self { layout, tensors };
        match (layout.arrangement.is_packed(), this.tensors.as_slice()) {
            (true, [one]) => GateUpWeights::packed(one.view(), layout).map(drop)?,
            (false, [gate, up]) => {
                GateUpWeights::separate(gate.view(), up.view(), layout.orientation).map(drop)?;
            }
            (_, other) => return Err(refuse_tensor_count(layout.arrangement, other.len())),
        }
        Ok(this)
    }

    /// A borrowed view.
    pub fn view(&self) -> GateUpWeights<'_, T> {
        let first = self.tensors[0].view();
        let last = self.tensors[self.tensors.len() - 1].view();
        let features = if self.layout.arrangement.is_packed() { 2 } else { 1 };
        let [out, hidden] = self.layout.orientation.shape(first.rows(), first.cols());
        GateUpWeights {
            layout: self.layout,
            tensors: [first, last],
            hidden,
            intermediate: out / features,
        }
    }

    /// The tensors: one packed, or gate and up.
    pub fn tensors(&self) -> &[Matrix<T>] {
        &self.tensors
    }
}

/// Gate and up pre-activations `[M, H]` as the activation operation reads them.
#[derive(Debug, Clone, Copy)]
pub struct GateUpRef<'a, T> {
    arrangement: Arrangement,
    tensors: [MatrixRef<'a, T>; 2],
    intermediate: usize,
}

impl<'a, T> GateUpRef<'a, T> {
    /// Two `[M, H]` matrices, each with its own row stride.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes differ.
    pub fn separate(gate: MatrixRef<'a, T>, up: MatrixRef<'a, T>) -> Result<Self> {
        up.expect_shape("up", gate.shape())?;
        Ok(Self {
            arrangement: Arrangement::Separate,
            intermediate: gate.cols(),
            tensors: [gate, up],
        })
    }

    /// One `[M, 2H]` matrix.
    ///
    /// # Errors
    /// As [`GateUpWeights::packed`].
    pub fn packed(tensor: MatrixRef<'a, T>, arrangement: Arrangement) -> Result<Self>
    where
        T: Copy,
    {
        if !arrangement.is_packed() {
            return Err(refuse_tensor_count(arrangement, 1));
        }
        if !tensor.cols().is_multiple_of(2) {
            return Err(Error::Shape {
                what: format!("packed gate and up ({arrangement})"),
                expected: "an even number of columns".into(),
                given: tensor.cols().to_string(),
            });
        }
        arrangement.validate(tensor.cols() / 2)?;
        Ok(Self { arrangement, intermediate: tensor.cols() / 2, tensors: [tensor, tensor] })
    }

    /// How gate and up share columns.
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }
    /// M.
    pub fn rows(&self) -> usize {
        self.tensors[0].rows()
    }
    /// H.
    pub fn intermediate(&self) -> usize {
        self.intermediate
    }
    /// The tensors: the packed one twice, or gate and up.
    pub fn tensors(&self) -> [MatrixRef<'a, T>; 2]
    where
        T: Copy,
    {
        self.tensors
    }
    /// Element `(m, h)` of `half`.
    pub fn at(&self, half: Half, m: usize, h: usize) -> T
    where
        T: Copy,
    {
        let (tensor, column) = self.arrangement.locate(half, h, self.intermediate);
        self.tensors[tensor].row(m)[column]
    }
}

/// Where the gradients of gate and up go: as [`GateUpRef`], written.
#[derive(Debug)]
pub struct GateUpMut<'a, T> {
    arrangement: Arrangement,
    intermediate: usize,
    first: MatrixMut<'a, T>,
    second: Option<MatrixMut<'a, T>>,
}

impl<'a, T> GateUpMut<'a, T> {
    /// Two `[M, H]` matrices, each with its own row stride.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes differ.
    pub fn separate(gate: MatrixMut<'a, T>, up: MatrixMut<'a, T>) -> Result<Self> {
        up.expect_shape("up", gate.shape())?;
        let intermediate = gate.cols();
        let arrangement = Arrangement::Separate;
        Ok(Self { arrangement, intermediate, first: gate, second: Some(up) })
    }

    /// One `[M, 2H]` matrix.
    ///
    /// # Errors
    /// As [`GateUpWeights::packed`].
    pub fn packed(tensor: MatrixMut<'a, T>, arrangement: Arrangement) -> Result<Self>
    where
        T: Copy,
    {
        let intermediate = GateUpRef::packed(tensor.as_ref(), arrangement)?.intermediate;
        Ok(Self { arrangement, intermediate, first: tensor, second: None })
    }

    /// How gate and up share columns.
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }
    /// M.
    pub fn rows(&self) -> usize {
        self.first.rows()
    }
    /// H.
    pub fn intermediate(&self) -> usize {
        self.intermediate
    }
    /// The packed tensor, or that of the gate and that of up.
    pub fn tensors_mut(&mut self) -> (MatrixMut<'_, T>, Option<MatrixMut<'_, T>>) {
        (self.first.reborrow(), self.second.as_mut().map(MatrixMut::reborrow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arrangements() -> impl Strategy<Value = Arrangement> {
        prop_oneof![
            Just(Arrangement::Separate),
            Just(Arrangement::PackedGateFirst),
            Just(Arrangement::PackedUpFirst),
            (1usize..5).prop_map(|group| Arrangement::Interleaved { group }),
        ]
    }

    fn layouts() -> impl Strategy<Value = WeightLayout> {
        (arrangements(), prop::bool::ANY).prop_map(|(arrangement, oi)| WeightLayout {
            orientation: if oi { Orientation::OutIn } else { Orientation::InOut },
            arrangement,
        })
    }

    fn divisor_of(a: Arrangement, h: usize) -> bool {
        a.validate(h).is_ok()
    }

    proptest! {
        /// Every feature has one place, and every place one feature.
        #[test]
        fn locate_is_a_bijection(a in arrangements(), h in 0usize..24) {
            prop_assume!(divisor_of(a, h));
            let mut seen = std::collections::BTreeSet::new();
            for half in [Half::Gate, Half::Up] {
                for i in 0..h {
                    let (t, f) = a.locate(half, i, h);
                    let features = if a.is_packed() { 2 * h } else { h };
                    prop_assert!(f < features);
                    prop_assert!(seen.insert((t, f)));
                }
            }
            prop_assert_eq!(seen.len(), 2 * h);
        }

        /// Converting to any layout and back gives the same weights, seen through the view and
        /// element by element in memory.
        #[test]
        fn conversion_round_trips(a in layouts(), b in layouts(), h in 0usize..13, k in 0usize..7) {
            prop_assume!(divisor_of(a.arrangement, h) && divisor_of(b.arrangement, h));
            let gate = Matrix::from_vec((0..h * k).map(|i| i as f32).collect(), h, k).unwrap();
            let up = Matrix::from_vec((0..h * k).map(|i| -1.0 - i as f32).collect(), h, k).unwrap();
            let source = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn).unwrap();
            let in_a = source.convert(a).unwrap();
            let in_b = in_a.view().convert(b).unwrap();
            prop_assert_eq!(in_b.view().intermediate(), h);
            prop_assert_eq!(&in_b.view().convert(a).unwrap(), &in_a);
            let back = in_b.view().convert(WeightLayout::HF).unwrap();
            prop_assert_eq!(back.tensors(), &[gate, up]);
        }
    }

    #[test]
    fn names_round_trip() {
        for a in [
            Arrangement::Separate,
            Arrangement::PackedGateFirst,
            Arrangement::PackedUpFirst,
            Arrangement::Interleaved { group: 3 },
        ] {
            assert_eq!(a.to_string().parse::<Arrangement>().unwrap(), a);
        }
        assert!("interleaved-0".parse::<Arrangement>().is_err());
        assert!("gatefirst".parse::<Arrangement>().unwrap_err().to_string().contains("gate-first"));
    }

    #[test]
    fn bad_packings_are_refused() {
        let m = Matrix::<f32>::zeros(3, 4).unwrap();
        let layout = |arrangement| WeightLayout { orientation: Orientation::OutIn, arrangement };
        assert!(GateUpWeights::packed(m.view(), layout(Arrangement::PackedGateFirst)).is_err());
        assert!(GateUpWeights::packed(m.view(), layout(Arrangement::Separate)).is_err());
        let m = Matrix::<f32>::zeros(6, 4).unwrap();
        let e = GateUpWeights::packed(m.view(), layout(Arrangement::Interleaved { group: 2 }));
        assert!(e.unwrap_err().to_string().contains("divisor of the intermediate size 3"));
    }
}
