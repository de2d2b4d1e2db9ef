//! Whether a peer's rows are the case's result: the float64 oracle over the rows that were asked
//! for, with error bounds derived from the roundings that the profile promises.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rayon::prelude::*;
use swiglu_core::bounds::{self, BlockInputs, Judgement, Reference};
use swiglu_core::random::{bits, normal, quantized_matrix};
use swiglu_core::{
    DType, Element, GateUpRef, GateUpWeights, GatedLinearParams, Matrix, MlpParams, Numerics,
    Orientation, QuantizedGatedLinearParams, QuantizedMlpParams, QuantizedType, bf16, f16,
};

use crate::case::{Case, CaseOp};
use crate::definition::{ProfileDef, Role};
use crate::error::Result;
use crate::peer::protocol::{
    ACTIVATION_SCALE, MAX_VERIFIED, STREAM_BIAS, STREAM_DOWN, STREAM_GATE, STREAM_OUT_GRAD,
    STREAM_UP, STREAM_X,
};
use crate::record::ErrorMetrics;
use crate::stats;

/// Multiply-adds that the oracle may take for one case: a few seconds.
const BUDGET: f64 = 6e8;
/// More rows than this show nothing new.
const MAX_ROWS: usize = 64;
/// What truncation to TF32 may change a factor by.
const TF32_ROUNDOFF: f64 = 1.0 / 1024.0;

/// Elements that fit a little-endian stream.
trait Wire: Element {
    fn from_le(bytes: &[u8]) -> Self;
}

macro_rules! wire {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            fn from_le(bytes: &[u8]) -> Self {
                let mut buffer = [0; size_of::<$type>()];
                for (to, from) in buffer.iter_mut().zip(bytes) {
                    *to = *from;
                }
                <$type>::from_le_bytes(buffer)
            }
        }
    )*};
}
wire!(f32, f16, bf16);

/// Calls a generic function with the type of a dtype.
macro_rules! of_dtype {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::F16 => {
                type $t = f16;
                $body
            }
            _ => {
                type $t = bf16;
                $body
            }
        }
    };
}

/// The reference of one case, worked out once per promise of roundings.
#[derive(Debug)]
pub(crate) struct Oracle {
    case: Case,
    seed: u64,
    rows: Vec<usize>,
    known: Vec<(Promise, Reference)>,
}

/// What a profile is judged by.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Promise {
    numerics: Numerics,
    /// Whether factors of products may be rounded to TF32.
    tf32: bool,
    /// How inputs of products with quantised weights are taken.
    inputs: BlockInputs,
}

impl Oracle {
    pub(crate) fn new(case: &Case, seed: u64) -> Self {
        Self { case: case.clone(), seed, rows: rows_of(case, seed), known: Vec::new() }
    }

    /// The rows that peers are asked for.
    pub(crate) fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Judges the rows of a profile.
    ///
    /// # Errors
    /// The text says how the data differs from what was asked for, or why there is no reference.
    pub(crate) fn judge(
        &mut self,
        profile: &ProfileDef,
        (shape, dtype, rows): ([usize; 2], DType, &[usize]),
        data: &str,
    ) -> Result<Judgement, String> {
        let expected = self.case.output_shape();
        if shape != expected || dtype != self.case.dtype || rows != self.rows {
            return Err(format!(
                "the output is {dtype} {shape:?}, rows {rows:?}; expected {} {expected:?}, rows {:?}",
                self.case.dtype, self.rows
            ));
        }
        let bytes = STANDARD.decode(data).map_err(|e| format!("the rows are not base64: {e}"))?;
        let columns = expected[1];
        let needed = rows.len() * columns * dtype.size();
        if bytes.len() != needed {
            return Err(format!("the rows have {} bytes, expected {needed}", bytes.len()));
        }
        let count = self.rows.len();
        let reference = self.reference(profile).map_err(|e| e.to_string())?;
        of_dtype!(dtype, T => {
            let values = bytes.chunks_exact(size_of::<T>()).map(<T as Wire>::from_le).collect();
            Matrix::<T>::from_vec(values, count, columns)
                .and_then(|out| reference.judge(out.view()))
                .map_err(|e| e.to_string())
        })
    }

    fn reference(&mut self, profile: &ProfileDef) -> Result<&Reference> {
        let key = promise(profile, &self.case);
        let at = match self.known.iter().position(|(k, _)| *k == key) {
            Some(at) => at,
            None => {
                let case = Case { numerics: key.numerics, ..self.case.clone() };
                let (seed, rows) = (self.seed, self.rows.as_slice());
                let reference = of_dtype!(case.dtype, T => match case.weights {
                    Some(kind) => quantized::<T>(&case, kind, seed, rows, key.inputs),
                    None => {
                        let roundoff = if key.tf32 { TF32_ROUNDOFF } else { 0.0 };
                        reference::<T>(&case, seed, rows, roundoff)
                    }
                })?;
                self.known.push((key, reference));
                self.known.len() - 1
            }
        };
        Ok(&self.known[at].1)
    }
}

/// The roundings a profile is judged by. Its options say where it rounds factors of products: `tf32`,
/// and `activations = "q8"` for 8 bits in blocks beside quantised weights.
fn promise(profile: &ProfileDef, case: &Case) -> Promise {
    let weakest =
        Numerics { rounding: swiglu_core::Rounding::Eager, exp: swiglu_core::ExpMode::Fast };
    let default = if profile.role == Role::Ours { case.numerics } else { weakest };
    let tf32 = case.dtype == DType::F32
        && profile.options.get("tf32").and_then(serde_json::Value::as_bool) == Some(true);
    let inputs = match profile.options.get("activations").and_then(serde_json::Value::as_str) {
        Some("q8") => BlockInputs::EightBits,
        _ => BlockInputs::Exact,
    };
    Promise { numerics: profile.numerics.unwrap_or(default), tf32, inputs }
}

/// The first row, the last and some between: as many as the oracle and one reply can take.
fn rows_of(case: &Case, seed: u64) -> Vec<usize> {
    let [m, columns] = case.output_shape();
    let macs = match case.op {
        CaseOp::Activation | CaseOp::ActivationBackward | CaseOp::Copy => 1.0,
        CaseOp::GatedLinear | CaseOp::Mlp => case.flops() / 2.0 / m.max(1) as f64,
    };
    let affordable = (BUDGET / macs.max(1.0)) as usize;
    let count = affordable.min(MAX_VERIFIED / columns.max(1)).clamp(1, MAX_ROWS);
    if count >= m {
        return (0..m).collect();
    }
    let mut rows = std::collections::BTreeSet::from([m - 1]);
    let others = std::iter::once(0).chain((0..).map(|i| (bits(seed, i) % m as u64) as usize));
    for row in others {
        if rows.len() == count {
            break;
        }
        rows.insert(row);
    }
    rows.into_iter().collect()
}

/// A `[rows, cols]` matrix of a stream, made by all processors.
fn weight<T: Element>(stream: u64, rows: usize, cols: usize) -> swiglu_core::Result<Matrix<T>> {
    let scale = 1.0 / (cols.max(1) as f32).sqrt();
    let mut m = Matrix::zeros(rows, cols)?;
    m.as_mut_slice().par_chunks_mut(cols.max(1)).enumerate().for_each(|(r, row)| {
        for (c, v) in row.iter_mut().enumerate() {
            *v = T::from_f32(normal(stream, (r * cols + c) as u64) * scale);
        }
    });
    Ok(m)
}

/// Chosen rows of a stream's matrix.
fn inputs<T: Element>(
    stream: u64,
    rows: &[usize],
    cols: usize,
    scale: f32,
) -> swiglu_core::Result<Matrix<T>> {
    let element = |r: usize, c: usize| T::from_f32(normal(stream, (r * cols + c) as u64) * scale);
    let data = rows.iter().flat_map(|&r| (0..cols).map(move |c| element(r, c))).collect();
    Matrix::from_vec(data, rows.len(), cols)
}

fn reference<T: Element>(
    case: &Case,
    seed: u64,
    rows: &[usize],
    roundoff: f64,
) -> Result<Reference> {
    let (k, h) = (case.hidden, case.intermediate);
    let numerics = case.numerics;
    match case.op {
        CaseOp::Copy => {
            let x = inputs::<T>(seed ^ STREAM_X, rows, h, 1.0)?;
            let value = x.as_slice().iter().map(|v| v.to_f64()).collect();
            let value = Matrix::from_vec(value, rows.len(), h)?;
            Ok(Reference { bound: Matrix::zeros(rows.len(), h)?, value, frobenius_limit: 0.0 })
        }
        CaseOp::Activation | CaseOp::ActivationBackward => {
            let gate = inputs::<T>(seed ^ STREAM_GATE, rows, h, ACTIVATION_SCALE)?;
            let up = inputs::<T>(seed ^ STREAM_UP, rows, h, ACTIVATION_SCALE)?;
            let both = GateUpRef::separate(gate.view(), up.view())?;
            if case.op == CaseOp::Activation {
                return Ok(bounds::activation(&case.activation, numerics, &both)?);
            }
            let dh = inputs::<T>(seed ^ STREAM_OUT_GRAD, rows, h, 1.0)?;
            beside(&bounds::activation_backward(&case.activation, numerics, &both, dh.view())?)
        }
        CaseOp::GatedLinear | CaseOp::Mlp => {
            let x = inputs::<T>(seed ^ STREAM_X, rows, k, 1.0)?;
            let gate = weight::<T>(seed ^ STREAM_GATE, h, k)?;
            let up = weight::<T>(seed ^ STREAM_UP, h, k)?;
            let [gate_bias, up_bias, down_bias] = biases(case, seed);
            // How the weights lie does not change the result.
            let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn)?;
            let gated = GatedLinearParams {
                weights,
                gate_bias: gate_bias.as_deref(),
                up_bias: up_bias.as_deref(),
                activation: case.activation,
                numerics,
            };
            if case.op == CaseOp::GatedLinear {
                return Ok(bounds::gated_linear_with(x.view(), &gated, roundoff)?);
            }
            let down = weight::<T>(seed ^ STREAM_DOWN, k, h)?;
            let mlp = MlpParams {
                gated,
                down: down.view(),
                down_orientation: Orientation::OutIn,
                down_bias: down_bias.as_deref(),
            };
            Ok(bounds::mlp_with(x.view(), &mlp, roundoff)?)
        }
    }
}

/// The references of two gradients as that of one result, the columns of the first before those of the
/// second. Where each is within its own limit, both together are within the larger.
fn beside([gate, up]: &[Reference; 2]) -> Result<Reference> {
    let [rows, cols] = gate.value.shape();
    let joined = |a: &Matrix<f64>, b: &Matrix<f64>| {
        let data = (0..rows).flat_map(|r| [a.view().row(r), b.view().row(r)].concat()).collect();
        Matrix::from_vec(data, rows, 2 * cols)
    };
    Ok(Reference {
        value: joined(&gate.value, &up.value)?,
        bound: joined(&gate.bound, &up.bound)?,
        frobenius_limit: gate.frobenius_limit.max(up.frobenius_limit),
    })
}

/// The reference of a layer with quantised weights.
fn quantized<T: Element>(
    case: &Case,
    kind: QuantizedType,
    seed: u64,
    rows: &[usize],
    taken: BlockInputs,
) -> Result<Reference> {
    let (k, h) = (case.hidden, case.intermediate);
    let weight = |stream, rows, cols: usize| {
        quantized_matrix(seed ^ stream, kind, rows, cols, 1.0 / (cols.max(1) as f32).sqrt())
    };
    let x = inputs::<T>(seed ^ STREAM_X, rows, k, 1.0)?;
    let (gate, up) = (weight(STREAM_GATE, h, k)?, weight(STREAM_UP, h, k)?);
    let [gate_bias, up_bias, down_bias] = biases(case, seed);
    let gated = QuantizedGatedLinearParams {
        gate: gate.view(),
        up: up.view(),
        gate_bias: gate_bias.as_deref(),
        up_bias: up_bias.as_deref(),
        activation: case.activation,
        numerics: case.numerics,
    };
    if case.op == CaseOp::GatedLinear {
        return Ok(bounds::quantized_gated_linear_with(x.view(), &gated, taken)?);
    }
    let down = weight(STREAM_DOWN, k, h)?;
    let params = QuantizedMlpParams { gated, down: down.view(), down_bias: down_bias.as_deref() };
    Ok(bounds::quantized_mlp_with(x.view(), &params, taken)?)
}

/// bg, bu and bd of a case that has them.
fn biases(case: &Case, seed: u64) -> [Option<Vec<f32>>; 3] {
    [(0, case.intermediate), (1, case.intermediate), (2, case.hidden)].map(|(which, n)| {
        let stream = seed ^ STREAM_BIAS[which];
        case.bias.then(|| (0..n).map(|i| normal(stream, i as u64)).collect())
    })
}

/// As a record has it.
pub(crate) fn metrics(judgement: &Judgement) -> ErrorMetrics {
    let finite = |x: f64| x.is_finite().then(|| stats::rounded(x, 3));
    ErrorMetrics {
        relative_frobenius: finite(judgement.relative_frobenius),
        frobenius_limit: finite(judgement.frobenius_limit),
        worst_ratio: finite(judgement.worst_ratio),
    }
}

/// Why a judgement failed, in words.
pub(crate) fn complaint(judgement: &Judgement, rows: &[usize]) -> String {
    let (r, c) = judgement.worst_at;
    let row = rows.get(r).copied().unwrap_or(r);
    if judgement.worst_ratio > 1.0 {
        return format!(
            "the result is wrong: element [{row}, {c}] is off by {:.3e} times its bound",
            judgement.worst_ratio
        );
    }
    format!(
        "the result is not accurate enough: relative error {:.2e}, limit {:.2e}",
        judgement.relative_frobenius, judgement.frobenius_limit
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::tests::small;
    use swiglu_core::BlockType;

    fn profile(role: Role) -> ProfileDef {
        ProfileDef {
            id: "p".into(),
            peer: "p".into(),
            options: serde_json::Map::new(),
            role,
            numerics: None,
        }
    }

    fn encoded(values: &[f32]) -> String {
        STANDARD.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// The rows of a case, computed in f32 as any peer would.
    fn honest(case: &Case, seed: u64, rows: &[usize]) -> Vec<f32> {
        let reference = reference::<f32>(case, seed, rows, 0.0).unwrap();
        reference.value.as_slice().iter().map(|v| *v as f32).collect()
    }

    #[test]
    fn honest_rows_pass_and_wrong_ones_do_not() {
        let ops = [
            CaseOp::Activation,
            CaseOp::ActivationBackward,
            CaseOp::GatedLinear,
            CaseOp::Mlp,
            CaseOp::Copy,
        ];
        for op in ops {
            let case = Case { bias: op.has_weights(), ..small(op) };
            let mut oracle = Oracle::new(&case, 7);
            let rows = oracle.rows().to_vec();
            let mut values = honest(&case, 7, &rows);
            let ours = profile(Role::Ours);
            let told = (case.output_shape(), DType::F32, rows.as_slice());
            assert!(oracle.judge(&ours, told, &encoded(&values)).unwrap().passed(), "{op}");
            values[3] *= 1.001;
            let wrong = oracle.judge(&ours, told, &encoded(&values)).unwrap();
            assert!(!wrong.passed(), "{op}");
            assert!(complaint(&wrong, &rows).contains("[0, 3]"), "{}", complaint(&wrong, &rows));
            values[3] = f32::NAN;
            let nan = oracle.judge(&ours, told, &encoded(&values)).unwrap();
            assert!(!nan.passed(), "{op}");
            assert_eq!(metrics(&nan).worst_ratio, None);
        }
    }

    #[test]
    fn both_gradients_are_judged() {
        let case = small(CaseOp::ActivationBackward);
        let (m, h) = (case.m, case.intermediate);
        let mut oracle = Oracle::new(&case, 7);
        let rows = oracle.rows().to_vec();
        let mut judge = |values: &[f32]| {
            let told = (case.output_shape(), DType::F32, rows.as_slice());
            oracle.judge(&profile(Role::Ours), told, &encoded(values)).unwrap()
        };
        // From the inputs as a peer derives them, by the formulas that frameworks use.
        let tensor = |stream, scale| inputs::<f32>(7 ^ stream, &rows, h, scale).unwrap();
        let gate = tensor(STREAM_GATE, ACTIVATION_SCALE);
        let up = tensor(STREAM_UP, ACTIVATION_SCALE);
        let dh = tensor(STREAM_OUT_GRAD, 1.0);
        let (mut d_gate, mut d_up) = (Vec::new(), Vec::new());
        for ((g, u), d) in gate.as_slice().iter().zip(up.as_slice()).zip(dh.as_slice()) {
            let sigmoid = 1.0 / (1.0 + (-g).exp());
            d_gate.push(d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)));
            d_up.push(d * g * sigmoid);
        }
        let beside = |a: &[f32], b: &[f32]| -> Vec<f32> {
            (0..m).flat_map(|r| [&a[r * h..][..h], &b[r * h..][..h]].concat()).collect()
        };
        let honest = beside(&d_gate, &d_up);
        let judged = judge(&honest);
        assert!(judged.passed(), "{judged:?}");
        let mut wrong = honest.clone();
        wrong[h + 3] *= 1.001;
        let judged = judge(&wrong);
        assert!(!judged.passed() && judged.worst_at == (0, h + 3), "{judged:?}");
        assert!(!judge(&beside(&d_up, &d_gate)).passed(), "exchanged");
        assert!(!judge(&beside(&d_gate, &d_gate)).passed(), "one of them twice");
        let lacking: Vec<f32> = d_gate.iter().zip(dh.as_slice()).map(|(v, d)| v / d).collect();
        assert!(!judge(&beside(&lacking, &d_up)).passed(), "without the gradient of h");
    }

    /// The weights are those of the case's blocks, not of its element type.
    #[test]
    fn quantised_cases_have_the_reference_of_their_blocks() {
        let (k, h, block) = (64, 96, QuantizedType::Block(BlockType::Q4_1));
        let case = Case {
            hidden: k,
            intermediate: h,
            weights: Some(block),
            bias: true,
            ..small(CaseOp::Mlp)
        };
        let matrix = |stream, rows, cols: usize| {
            quantized_matrix(7 ^ stream, block, rows, cols, 1.0 / (cols as f32).sqrt())
                .and_then(|q| q.view().to_matrix::<f32>())
                .unwrap()
        };
        let (gate, up) = (matrix(STREAM_GATE, h, k), matrix(STREAM_UP, h, k));
        let down = matrix(STREAM_DOWN, k, h);
        let [gate_bias, up_bias, down_bias] = biases(&case, 7);
        let weights = GateUpWeights::separate(gate.view(), up.view(), Orientation::OutIn);
        let dense = MlpParams {
            gated: GatedLinearParams {
                gate_bias: gate_bias.as_deref(),
                up_bias: up_bias.as_deref(),
                ..GatedLinearParams::new(weights.unwrap(), case.activation)
            },
            down: down.view(),
            down_orientation: Orientation::OutIn,
            down_bias: down_bias.as_deref(),
        };
        let mut oracle = Oracle::new(&case, 7);
        let rows = oracle.rows().to_vec();
        let x = inputs::<f32>(7 ^ STREAM_X, &rows, k, 1.0).unwrap();
        let y = swiglu_core::oracle::mlp(x.view(), &dense).unwrap().y.value;
        let y: Vec<f32> = y.as_slice().iter().map(|v| *v as f32).collect();
        let told = (case.output_shape(), DType::F32, rows.as_slice());
        let judged = oracle.judge(&profile(Role::Ours), told, &encoded(&y)).unwrap();
        assert!(judged.passed(), "{judged:?}");
        // Off by a thousandth: wrong for exact inputs, admitted for those of 8 bits.
        let off: Vec<f32> = y.iter().map(|v| v * 1.001).collect();
        assert!(!oracle.judge(&profile(Role::Ours), told, &encoded(&off)).unwrap().passed());
        let mut q8 = profile(Role::Peer);
        q8.options.insert("activations".into(), "q8".into());
        assert!(oracle.judge(&q8, told, &encoded(&off)).unwrap().passed());
    }

    #[test]
    fn other_shapes_lengths_and_codes_are_refused() {
        let case = small(CaseOp::Copy);
        let mut oracle = Oracle::new(&case, 7);
        let rows = oracle.rows().to_vec();
        let p = profile(Role::Peer);
        let all = encoded(&honest(&case, 7, &rows));
        let mut refused = |shape, dtype, rows: &[usize], data: &str| {
            oracle.judge(&p, (shape, dtype, rows), data).unwrap_err()
        };
        assert!(refused([5, 15], DType::F32, &rows, &all).contains("[5, 16]"));
        assert!(refused([5, 16], DType::F16, &rows, &all).contains("f16"));
        assert!(refused([5, 16], DType::F32, &[1], &all).contains("rows [1]"));
        assert!(refused([5, 16], DType::F32, &rows, "####").contains("base64"));
        assert!(refused([5, 16], DType::F32, &rows, "AAAA").contains("3 bytes"));
    }

    #[test]
    fn rows_are_few_where_they_are_dear() {
        let case =
            Case { m: 5000, hidden: 4096, intermediate: 14336, ..small(CaseOp::GatedLinear) };
        let rows = rows_of(&case, 1);
        assert!((1..=5).contains(&rows.len()) && rows.contains(&4999), "{rows:?}");
        assert_eq!(rows_of(&small(CaseOp::Mlp), 1), [0, 1, 2, 3, 4]);
        let wide = Case { m: 9000, intermediate: 16384, ..small(CaseOp::Activation) };
        assert_eq!(rows_of(&wide, 1).len(), 4);
    }

    #[test]
    fn others_are_judged_by_the_weakest_promise() {
        let case = small(CaseOp::Activation);
        let ours = promise(&profile(Role::Ours), &case);
        let exact = BlockInputs::Exact;
        assert_eq!(ours, Promise { numerics: case.numerics, tf32: false, inputs: exact });
        assert_eq!(promise(&profile(Role::Peer), &case).numerics.to_string(), "eager+fast");
        let mut tf32 = profile(Role::Peer);
        tf32.options.insert("tf32".into(), true.into());
        assert!(promise(&tf32, &case).tf32);
        assert!(!promise(&tf32, &Case { dtype: DType::Bf16, ..case.clone() }).tf32);
        let mut q8 = profile(Role::Peer);
        q8.options.insert("activations".into(), "q8".into());
        assert_eq!(promise(&q8, &case).inputs, BlockInputs::EightBits);
    }
}
