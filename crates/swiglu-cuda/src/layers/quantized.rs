//! The feed-forward block with quantised weights: they stay as they are in device memory, laid out
//! once for the decode kernel.

use std::marker::PhantomData;

use swiglu_core::quant::{
    BlockType, QuantizedMlpParams, QuantizedRef, QuantizedType, SCALE_BLOCK, e4m3_to_f32,
};
use swiglu_core::{
    DType, Element, Error as CoreError, MatrixMut, MatrixRef, Op, Path, Plan, Problem, f16,
};

use super::gated::workspace_part;
use super::plan::{Choice, choose};
use super::weights::padded;
use crate::activation::tensor;
use crate::context::Cuda;
use crate::error::{CudaError, Result};
use crate::kernels::decode_mlp::{BlockWeights, Call, Decode, Design, Format, MOST_TOKENS, Scales};
use crate::kernels::elementwise::Tensor;
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode};
use crate::memory::{DeviceBuffer, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef};
use crate::remembered::Remembered;
use crate::stream::Stream;
use crate::workspace::barrier_of;

/// The types of quantised weights that there are kernels for.
pub fn quantized_types() -> &'static [QuantizedType] {
    &[
        QuantizedType::Block(BlockType::Q8_0),
        QuantizedType::Block(BlockType::Q4_0),
        QuantizedType::I8,
        QuantizedType::F8E4m3,
        QuantizedType::F8E4m3Blocks,
    ]
}

/// Tokens that are computed together with quantised weights.
pub const fn quantized_tokens() -> usize {
    MOST_TOKENS
}

/// Refuses what no kernel computes with quantised weights, saying what would be computed: as
/// [`QuantizedMlp::new`], which knows the device's memory too.
///
/// # Errors
/// [`CoreError::Unsupported`].
pub fn expect_quantized(op: Op, dtype: DType, kind: QuantizedType) -> swiglu_core::Result<()> {
    let why = match (op, dtype) {
        (Op::GatedLinear | Op::Activation, _) => {
            "a CUDA device has kernels for them in whole feed-forward blocks (mlp)".to_owned()
        }
        (Op::Mlp, DType::F32) => {
            "a CUDA device multiplies them with f16 or bf16; choose one of these".to_owned()
        }
        (Op::Mlp, _) if quantized_types().contains(&kind) => return Ok(()),
        (Op::Mlp, _) => {
            let names: Vec<&str> = quantized_types().iter().map(|t| t.name()).collect();
            format!("a CUDA device has kernels for {}", names.join(", "))
        }
    };
    let what = format!("computing {op} of {dtype} with {kind} weights");
    Err(CoreError::Unsupported { what, why })
}

/// A feed-forward block with weights of a type in [`quantized_types`], x `[M, K]` → y `[M, K]` of T, f16
/// or bf16, packed for one [`Cuda`] device. Products are in T with sums in f32; the weights are exact,
/// and so are codes of 8 bits before their scales, which multiply sums in f32.
///
/// It is made for few tokens: more than 16 are computed 16 at a time, each time from all weights. So it
/// needs no memory beside the weights, whatever M is, and many tokens take long: decode the weights for
/// these.
#[derive(Debug)]
pub struct QuantizedMlp<T> {
    cuda: Cuda,
    problem: Problem,
    /// A design that tests and measurements insist on.
    forced: Option<Design>,
    gate_up: Rows,
    down: Rows,
    /// bg, then bu.
    biases: Option<DeviceBuffer<f32>>,
    down_bias: Option<DeviceBuffer<T>>,
    /// How one, two, … tokens are launched: choosing takes longer than launching.
    decodes: Remembered<usize, Decode, MOST_TOKENS>,
    values: PhantomData<T>,
}

/// Rows of quantised weights on the device. A row is whole units of 64 bytes; lane t of the four that
/// share a row of a unit has its 16 bytes at 16·t. Rows and scales are padded with zeros.
#[derive(Debug)]
struct Rows {
    /// Bytes, two in the bits of each value, as those of the scales.
    values: DeviceBuffer<f16>,
    scales: DeviceBuffer<f16>,
    /// Bytes from row to row.
    stride: usize,
    scale_stride: usize,
}

/// Elements of a block, and those of them that one lane multiplies.
const BLOCK: usize = 32;
const LANE: usize = 8;
const UNIT_BYTES: usize = 64;

impl Rows {
    fn new(stream: &Stream, matrices: &[QuantizedRef<'_>], format: Format) -> Result<Self> {
        let units = matrices[0].cols().div_ceil(format.blocks() * BLOCK);
        let stride = units * UNIT_BYTES;
        let scale_stride = match format {
            Format::Elements => 0,
            Format::Bytes | Format::Nibbles => units * format.scale_bytes(),
            Format::RowBytes | Format::RowE4m3 => size_of::<f32>(),
            Format::BlockE4m3 => stride.div_ceil(SCALE_BLOCK) * size_of::<f32>(),
        };
        let rows: usize = matrices.iter().map(QuantizedRef::rows).sum();
        let (mut values, mut scales) = (vec![0u8; rows * stride], vec![0u8; rows * scale_stride]);
        let all = matrices.iter().flat_map(|m| (0..m.rows()).map(move |r| (m, r)));
        let to = values
            .chunks_exact_mut(stride.max(1))
            .zip(scales.chunks_exact_mut(scale_stride.max(1)));
        for ((matrix, row), (values, scales)) in all.zip(to) {
            match format {
                Format::Elements | Format::Bytes | Format::Nibbles => {
                    lay_out_blocks(matrix.row(row), format, values, scales);
                }
                _ => lay_out_codes(matrix, row, format, values, scales),
            }
        }
        let upload = |bytes: &[u8]| {
            let halves = bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b));
            DeviceBuffer::from_host(stream, &halves.collect::<Vec<_>>())
        };
        Ok(Self { values: upload(&values)?, scales: upload(&scales)?, stride, scale_stride })
    }
}

/// Lays out a row of Q8_0 or Q4_0 blocks: see [`Rows`]. Of a lane's 16 bytes block b of a unit has
/// bytes 8b to 8b + 7, biased by 128; or word b, nibble i / 2 + 4·(i % 2) for element i of the lane's
/// eight, biased by 8 as in the file. Scales are f16; where a padded value is not 0, its scale is.
fn lay_out_blocks(row: &[u8], format: Format, values: &mut [u8], scales: &mut [u8]) {
    // An f16 scale, then the values.
    let bytes = 2 + UNIT_BYTES / format.blocks();
    for (block, from) in row.chunks_exact(bytes).enumerate() {
        scales[2 * block..][..2].copy_from_slice(&from[..2]);
        let (unit, within) = (block / format.blocks(), block % format.blocks());
        for i in 0..BLOCK {
            let (lane, element) = (i / LANE, i % LANE);
            let at = unit * UNIT_BYTES + lane * 16;
            match format {
                Format::Nibbles => {
                    let pair = from[2 + i % 16];
                    let nibble = if i < 16 { pair & 15 } else { pair >> 4 };
                    let place = element / 2 + 4 * (element % 2);
                    values[at + within * 4 + place / 2] |= nibble << (4 * (place % 2));
                }
                _ => values[at + within * LANE + element] = from[2 + i] ^ 0x80,
            }
        }
    }
}

/// Lays out a row of codes with scales beside them: blocks as those of Q8_0, integers biased as they
/// are. Of each four e4m3, elements 2, 0, 3 and 1 are the bytes in order: see the device file, which
/// knows no NaN. What it would make one of is one with a scale that is NaN, since any factor of it is.
fn lay_out_codes(
    matrix: &QuantizedRef<'_>,
    row: usize,
    format: Format,
    values: &mut [u8],
    scales: &mut [u8],
) {
    let (factors, columns) = matrix.row_scales(row);
    let integers = format == Format::RowBytes;
    if integers {
        values.fill(0x80);
    }
    let codes = matrix.row(row).chunks(columns.max(1));
    let scales = scales.as_chunks_mut::<4>().0;
    for (part, ((codes, &factor), scale)) in codes.zip(factors).zip(scales).enumerate() {
        let any_nan = !integers && codes.iter().any(|&code| e4m3_to_f32(code).is_nan());
        *scale = if any_nan { f32::NAN } else { factor }.to_le_bytes();
        for (i, &code) in (part * columns..).zip(codes) {
            let (block, within) = (i / BLOCK, i % BLOCK);
            let (lane, element) = (within / LANE, within % LANE);
            let at = block / 2 * UNIT_BYTES + lane * 16 + block % 2 * LANE;
            match integers {
                true => values[at + element] = code ^ 0x80,
                false if any_nan => {}
                false => values[at + element / 4 * 4 + [1, 3, 0, 2][element % 4]] = code,
            }
        }
    }
}

impl<T: Element> QuantizedMlp<T> {
    /// Lays out the weights.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree; [`CudaError::Unsupported`] for other types
    /// of weights, for T = f32, and where the device has too little shared memory;
    /// [`CudaError::OutOfMemory`].
    pub fn new(cuda: &Cuda, params: &QuantizedMlpParams<'_>) -> Result<Self> {
        Self::build(cuda, params, None)
    }

    /// As [`Self::new`], always by one design of the decode kernel: for tests and measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_design(
        cuda: &Cuda,
        params: &QuantizedMlpParams<'_>,
        design: Design,
    ) -> Result<Self> {
        Self::build(cuda, params, Some(design))
    }

    fn build(cuda: &Cuda, params: &QuantizedMlpParams<'_>, forced: Option<Design>) -> Result<Self> {
        params.validate()?;
        let problem = params.problem(1, T::DTYPE);
        let [gate_up, down] = Format::of_problem(&problem).map_err(|why| {
            CudaError::Unsupported { what: problem.to_string(), why: why.to_string() }
        })?;
        let stream = cuda.stream();
        let gated = &params.gated;
        let biases = match (gated.gate_bias, gated.up_bias) {
            (None, None) => None,
            (gate, up) => {
                let zeros = || vec![0.0; params.gated.intermediate()];
                let mut both = gate.map_or_else(zeros, <[f32]>::to_vec);
                both.extend(up.map_or_else(zeros, <[f32]>::to_vec));
                Some(DeviceBuffer::from_host(&stream, &both)?)
            }
        };
        let rounded = |b: &[f32]| b.iter().map(|&b| T::from_f32(b)).collect::<Vec<T>>();
        let down_bias = params.down_bias.map(|b| DeviceBuffer::from_host(&stream, &rounded(b)));
        let layer = Self {
            cuda: cuda.clone(),
            problem,
            forced,
            gate_up: Rows::new(&stream, &[gated.gate, gated.up], gate_up)?,
            down: Rows::new(&stream, &[params.down], down)?,
            biases,
            down_bias: down_bias.transpose()?,
            decodes: Remembered::new(),
            values: PhantomData,
        };
        if layer.problem.hidden > 0 && layer.problem.intermediate > 0 {
            // Fewer tokens take less of everything.
            layer.decode(MOST_TOKENS)?;
        }
        Ok(layer)
    }

    /// The device.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// How `m` tokens will be computed, more than 16 in passes.
    pub fn plan(&self, m: usize) -> Plan {
        self.cuda.plan(Problem { m, ..self.problem }, Some(Path::Fused))
    }

    /// The launches for up to 16 tokens.
    fn decode(&self, m: usize) -> Result<Decode> {
        self.decodes.get(m, || self.fit(m))
    }

    fn fit(&self, m: usize) -> Result<Decode> {
        let problem = Problem { m, ..self.problem };
        let planned = || choose(&self.cuda, &problem, Some(Path::Fused)).0;
        let design = match self.forced.map_or_else(planned, Choice::Decode) {
            Choice::Decode(design) => design,
            // What speaks against the design that needs the least.
            Choice::Fused(_) | Choice::Unfused => Design::TwoLaunches,
        };
        let decode = Decode::check_problem(design, &problem, self.cuda.decode_limits());
        decode.map_err(|why| CudaError::Unsupported {
            what: problem.to_string(),
            why: why.to_string(),
        })
    }

    /// How many of the next `rows` tokens are computed together, and how. Rows that cannot be read in
    /// place must fit into shared memory, and fewer do.
    fn pass(&self, rows: usize, x: Tensor) -> Result<(usize, Decode)> {
        let (decode, problem) = (self.decode(rows)?, Problem { m: rows, ..self.problem });
        match decode.check_x(x, &problem) {
            Ok(()) => Ok((rows, decode)),
            Err(_) if rows > 1 => self.pass(rows.div_ceil(2), x),
            Err(why) => {
                Err(CudaError::Unsupported { what: problem.to_string(), why: why.to_string() })
            }
        }
    }

    fn code(&self) -> GateCode {
        GateCode::new(&self.problem.activation, self.problem.numerics, T::DTYPE)
    }

    /// Elements from row to row of h in the workspace.
    fn h_stride(&self) -> usize {
        padded::<T>(self.problem.intermediate)
    }

    fn h_bytes(&self, m: usize) -> usize {
        workspace_part(m.min(MOST_TOKENS) * self.h_stride() * size_of::<T>())
    }

    /// As [`crate::Mlp::reserve`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn reserve(&self, stream: &Stream, m: usize) -> Result<()> {
        if self.problem.hidden.min(self.problem.intermediate) == 0 {
            return Ok(());
        }
        for m in 1..=m.min(MOST_TOKENS) {
            self.decode(m)?.prepare(&self.cuda, self.code())?;
        }
        self.cuda.reserve_workspace(stream, self.h_bytes(m))
    }

    /// Enqueues y = act(x·Wg + bg, x·Wu + bu)·Wd + bd on `stream`: without allocation, after the first
    /// call of a size, and without waiting.
    ///
    /// # Errors
    /// As [`crate::Mlp::forward`]; [`CudaError::Unsupported`] for an x whose rows are not whole 16
    /// bytes, one of which does not fit into shared memory.
    pub fn forward(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        x.expect_shape("x", [m, k])?;
        out.expect_shape("output", [m, k])?;
        x.expect_device("x", &self.cuda)?;
        out.expect_device("output", &self.cuda)?;
        self.cuda.expect_stream(stream)?;
        if m == 0 || k == 0 {
            return Ok(());
        }
        let y = tensor(&out.as_ref());
        if h == 0 {
            let bias = self.down_bias.as_ref().map(DeviceBuffer::device_ptr);
            // SAFETY: `out` spans memory of this device and is borrowed mutably; the bias lives as
            // long as `self`.
            return unsafe { fill_rows(stream, T::DTYPE, y, [m, k], bias) };
        }
        self.cuda.with_workspace(stream, self.h_bytes(m), |workspace| {
            let mut first = 0;
            while first < m {
                let from = |t: Tensor, stride: usize| Tensor {
                    data: t.data + (first * stride * size_of::<T>()) as u64,
                    ..t
                };
                let (x, y) = (from(tensor(&x), x.row_stride()), from(y, out.row_stride()));
                let (rows, decode) = self.pass(MOST_TOKENS.min(m - first), x)?;
                let call = Call { m: rows, x, y, ..self.call(workspace) };
                // SAFETY: the views span memory of this device, `out` is borrowed mutably, the
                // weights live as long as `self`, and the workspace has room for h behind the
                // stream's own word.
                unsafe { decode.launch(stream, &call) }?;
                first += rows;
            }
            Ok(())
        })
    }

    /// A call without its tokens.
    fn call(&self, workspace: u64) -> Call {
        let (k, h) = (self.problem.hidden, self.problem.intermediate);
        let (up, up_scales) = (h * self.gate_up.stride, h * self.gate_up.scale_stride);
        let [gate, scales] =
            [&self.gate_up.values, &self.gate_up.scales].map(DeviceBuffer::device_ptr);
        let weights = BlockWeights {
            gate,
            up: gate + up as u64,
            down: self.down.values.device_ptr(),
            gate_stride: self.gate_up.stride,
            down_stride: self.down.stride,
            scales: Scales {
                gate: scales,
                up: scales + up_scales as u64,
                down: self.down.scales.device_ptr(),
                gate_stride: self.gate_up.scale_stride.cast_signed() as i64,
                down_stride: self.down.scale_stride.cast_signed() as i64,
            },
            hidden: k,
            intermediate: h,
            biases: self.biases.as_ref().map(|b| {
                let gate = b.device_ptr();
                [gate, gate + (h * size_of::<f32>()) as u64]
            }),
            down_bias: self.down_bias.as_ref().map(DeviceBuffer::device_ptr),
        };
        Call {
            code: self.code(),
            formula: Formula::new(&self.problem.activation),
            m: 0,
            x: Tensor::new(0, 0),
            h: Tensor::new(workspace, self.h_stride()),
            y: Tensor::new(0, 0),
            weights,
            barrier: barrier_of(workspace),
        }
    }

    /// [`Self::forward`] for matrices on the host, which are copied to the device and back.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_host(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> Result<()> {
        x.expect_shape("x", [x.rows(), self.problem.hidden])?;
        out.expect_shape("output", [x.rows(), self.problem.hidden])?;
        let stream = self.cuda.stream();
        let x = DeviceMatrix::from_host(&stream, x)?;
        let mut y = DeviceMatrix::new(&stream, x.rows(), self.problem.hidden)?;
        self.forward(&stream, x.view(), y.view_mut())?;
        y.view().download(&stream, out)
    }
}
