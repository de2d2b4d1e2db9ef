//! The feed-forward block with quantised weights: they stay as they are in device memory, laid out
//! once for the decode kernel.

use std::marker::PhantomData;
use std::sync::Arc;

use swiglu_core::quant::{BlockType, QuantizedMlpParams, QuantizedRef, QuantizedType, SCALE_BLOCK};
use swiglu_core::{
    DType, Element, Error as CoreError, MatrixMut, MatrixRef, Op, Path, Plan, Problem, f16,
};

use super::gated::workspace_part;
use super::weights::padded;
use crate::device::context::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::CapturedCall;
use crate::device::memory::{
    Access, Allocation, DeviceBuffer, DeviceMatrix, DeviceMatrixMut, DeviceMatrixRef,
};
use crate::device::stream::Stream;
use crate::device::workspace::{DeviceScratch, Work};
use crate::kernels::decode_mlp::{BlockWeights, Call, Decode, Design, Format, MOST_TOKENS, Scales};
use crate::kernels::elementwise::Tensor;
use crate::kernels::fill_rows::fill_rows;
use crate::kernels::gate::{Formula, GateCode, expect_gate};
use crate::layers::activation::tensor;
use crate::plan::{ByTokens, Choice, choose, expect_numerics, expect_row_steps};

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
        (Op::Mlp, DType::F32) => {
            "a CUDA device multiplies them with f16 or bf16; choose one of these".to_owned()
        }
        (Op::Mlp, _) if quantized_types().contains(&kind) => return Ok(()),
        (Op::Mlp, _) => {
            let names: Vec<&str> = quantized_types().iter().map(|t| t.name()).collect();
            format!("a CUDA device has kernels for {}", names.join(", "))
        }
        _ => "a CUDA device has kernels for them in whole feed-forward blocks (mlp)".to_owned(),
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
    /// What all of it lies in.
    allocation: Arc<Allocation>,
    /// How one, two, … tokens are launched: choosing takes longer than launching.
    decodes: ByTokens<Decode>,
    values: PhantomData<T>,
}

/// Rows of quantised weights on the device: whole units of 64 bytes, padded with zeros, with the scales of
/// blocks between them, see [`Format`]. Lane t of the four that share a row of a unit has its 16 bytes at 16·t.
#[derive(Debug)]
struct Rows {
    /// Bytes, two in the bits of each value.
    values: DeviceBuffer<f16>,
    /// Of whole rows, where they have one.
    scales: DeviceBuffer<f32>,
    /// Bytes from row to row.
    stride: usize,
}

/// Elements of a block, and those of them that one lane multiplies.
const BLOCK: usize = 32;
const LANE: usize = 8;
/// Elements that the largest unit multiplies: rows of h are whole units.
const MOST_UNIT: usize = 4 * BLOCK;

impl Rows {
    fn new(
        allocation: &Arc<Allocation>,
        stream: &Stream,
        matrices: &[QuantizedRef<'_>],
        format: Format,
        dtype: DType,
    ) -> Result<Self> {
        let stride = format.bytes_of(format.units(matrices[0].cols()));
        let rows: usize = matrices.iter().map(QuantizedRef::rows).sum();
        let mut values = vec![0u8; rows * stride];
        let all = matrices.iter().flat_map(|m| (0..m.rows()).map(move |r| (m, r)));
        let mut scales = Vec::new();
        for ((matrix, row), to) in all.zip(values.chunks_exact_mut(stride.max(1))) {
            match format {
                Format::Elements | Format::Bytes | Format::Nibbles => {
                    lay_out_blocks(matrix.row(row), format, to);
                }
                Format::RowBytes => scales.push(lay_out_integers(matrix, row, to)),
                Format::RowE4m3 => scales.extend(lay_out_e4m3(matrix, row, format, dtype, to)),
                Format::BlockE4m3 => {
                    let factors = lay_out_e4m3(matrix, row, format, dtype, to);
                    for (part, factor) in factors.into_iter().enumerate() {
                        let unit = part * SCALE_BLOCK / (format.blocks() * BLOCK);
                        let at = format.scales_at(unit);
                        to[at..][..4].copy_from_slice(&factor.to_le_bytes());
                    }
                }
            }
        }
        let halves = values.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b));
        let values = DeviceBuffer::together(allocation, stream, &halves.collect::<Vec<_>>())?;
        let scales = DeviceBuffer::together(allocation, stream, &scales)?;
        Ok(Self { values, scales, stride })
    }
}

/// Where a lane's eight elements of a block begin in a row of bytes: of its 16 of a unit a block has eight.
fn lane_at(format: Format, block: usize, lane: usize) -> usize {
    format.unit_at(block / 2) + lane * 16 + block % 2 * LANE
}

/// Integers of eight bits of a lane, biased by 128.
fn biased(codes: [u8; LANE]) -> [u8; LANE] {
    (u64::from_ne_bytes(codes) ^ 0x8080_8080_8080_8080).to_ne_bytes()
}

/// Lays out a row of Q8_0 or Q4_0 blocks: see [`Rows`]. Of a lane's 16 bytes block b of a unit has
/// bytes 8b to 8b + 7, biased by 128; or word b, nibble i / 2 + 4·(i % 2) for element i of the lane's
/// eight, biased by 8 as in the file. Scales are f16; where a padded value is not 0, its scale is.
fn lay_out_blocks(row: &[u8], format: Format, to: &mut [u8]) {
    // An f16 scale, then the values.
    let bytes = if format == Format::Nibbles { 2 + BLOCK / 2 } else { 2 + BLOCK };
    for (block, from) in row.chunks_exact(bytes).enumerate() {
        let (unit, within) = (block / format.blocks(), block % format.blocks());
        let (scale, codes) = from.split_at(2);
        to[format.scales_at(unit) + 2 * within..][..2].copy_from_slice(scale);
        if format == Format::Nibbles {
            let at = format.unit_at(unit) + within * 4;
            // A block's first half is in the lower nibbles, its second in the upper.
            for (lane, shift) in [0, 0, 4, 4].into_iter().enumerate() {
                let nibbles = codes[lane % 2 * LANE..][..LANE].iter().enumerate();
                let word = nibbles.fold(0, |word, (i, &pair)| {
                    word | u32::from(pair >> shift & 15) << (4 * (i / 2 + 4 * (i % 2)))
                });
                to[at + lane * 16..][..4].copy_from_slice(&word.to_le_bytes());
            }
        } else {
            for (lane, &codes) in codes.as_chunks().0.iter().enumerate() {
                to[lane_at(format, block, lane)..][..LANE].copy_from_slice(&biased(codes));
            }
        }
    }
}

/// Codes of eight bits as lanes have them, of which `first` is the first one's place in its row: where the eight of
/// each begin in a row of the format, and these, the last lane's filled up with `none`.
fn lanes(
    codes: &[u8],
    first: usize,
    format: Format,
    none: u8,
) -> impl Iterator<Item = (usize, [u8; LANE])> {
    codes.chunks(LANE).zip(first / LANE..).map(move |(codes, lane)| {
        let mut eight = [none; LANE];
        eight[..codes.len()].copy_from_slice(codes);
        (lane_at(format, lane / (BLOCK / LANE), lane % (BLOCK / LANE)), eight)
    })
}

/// Lays out a row of integers, as blocks of Q8_0; returns its scale.
fn lay_out_integers(matrix: &QuantizedRef<'_>, row: usize, to: &mut [u8]) -> f32 {
    to.fill(0x80);
    for (at, codes) in lanes(matrix.row(row), 0, Format::RowBytes, 0) {
        to[at..][..LANE].copy_from_slice(&biased(codes));
    }
    matrix.row_scales(row).0[0]
}

/// Lays out a row of e4m3, four of a lane's eight in a word; returns its scales. The device file knows no NaN:
/// what it would make one of is one with a scale that is NaN, since any factor of it is.
fn lay_out_e4m3(
    matrix: &QuantizedRef<'_>,
    row: usize,
    format: Format,
    dtype: DType,
    to: &mut [u8],
) -> Vec<f32> {
    let (factors, columns) = matrix.row_scales(row);
    let codes = matrix.row(row).chunks(columns.max(1));
    let parts = codes.zip(factors).enumerate().map(|(part, (codes, &factor))| {
        if codes.iter().any(|&code| e4m3_is_nan(code)) {
            return f32::NAN;
        }
        for (at, [a, b, c, d, e, f, g, h]) in lanes(codes, part * columns, format, 0) {
            let words = [e4m3_word([a, b, c, d], dtype), e4m3_word([e, f, g, h], dtype)];
            to[at..][..LANE].copy_from_slice(words.map(u32::to_le_bytes).as_flattened());
        }
        factor
    });
    parts.collect()
}

/// Whether an e4m3 is no number: all bits but the sign's are 1.
fn e4m3_is_nan(code: u8) -> bool {
    code & 0x7F == 0x7F
}

/// Four e4m3 in a word, as the device file unpacks them for a type: the first two in halves of their own, the other
/// two in the bits that these leave.
fn e4m3_word([a, b, c, d]: [u8; 4], dtype: DType) -> u32 {
    let pair = |low: u8, high: u8| u32::from(low) | u32::from(high) << 16;
    let (first, second) = (pair(a, b), pair(c, d));
    let (sign, magnitude) = (0x0080_0080, 0x007F_007F);
    let [first, second] = match dtype {
        DType::F16 => [
            (first & sign) << 8 | (first & magnitude) << 7,
            (second & sign) << 7 | second & magnitude,
        ],
        _ => [
            (first & sign) << 8 | (first & magnitude) << 4,
            (second & 0x0070_0070) << 8 | (second & sign) << 4 | second & 0x000F_000F,
        ],
    };
    first | second
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

    /// As [`Self::new`], always by one design of the decode kernel: for tests and measurements. A call
    /// with more tokens than the design takes is refused.
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
        expect_row_steps(params.rows.steps)?;
        let problem = params.problem(1, T::DTYPE);
        expect_numerics(problem.op, problem.numerics)?;
        expect_gate(&problem.activation, problem.dtype)?;
        let [gate_up, down] = Format::of_problem(&problem).map_err(|why| {
            CudaError::Unsupported { what: problem.to_string(), why: why.to_string() }
        })?;
        let stream = cuda.stream();
        let allocation = Allocation::new(cuda.memory(), stream.raw_stream());
        let gated = &params.gated;
        let biases = match (gated.gate_bias, gated.up_bias) {
            (None, None) => None,
            (gate, up) => {
                let zeros = || vec![0.0; params.gated.intermediate()];
                let mut both = gate.map_or_else(zeros, <[f32]>::to_vec);
                both.extend(up.map_or_else(zeros, <[f32]>::to_vec));
                Some(DeviceBuffer::together(&allocation, &stream, &both)?)
            }
        };
        let rounded = |b: &[f32]| b.iter().map(|&b| T::from_f32(b)).collect::<Vec<T>>();
        let down_bias =
            params.down_bias.map(|b| DeviceBuffer::together(&allocation, &stream, &rounded(b)));
        let layer = Self {
            cuda: cuda.clone(),
            problem,
            forced,
            gate_up: Rows::new(&allocation, &stream, &[gated.gate, gated.up], gate_up, T::DTYPE)?,
            down: Rows::new(&allocation, &stream, &[params.down], down, T::DTYPE)?,
            biases,
            down_bias: down_bias.transpose()?,
            allocation,
            decodes: ByTokens::new(),
            values: PhantomData,
        };
        if layer.problem.hidden > 0 && layer.problem.intermediate > 0 {
            // Some design takes as many tokens as any: fewer take less of everything. One that was asked for
            // may take fewer; a call with more is refused.
            layer.decode(if forced.is_some() { 1 } else { MOST_TOKENS })?;
        }
        Ok(layer)
    }

    /// The device.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// How `m` tokens will be computed, more than 16 in passes.
    pub fn plan(&self, m: usize) -> Plan {
        self.cuda.plan(self.problem.with_m(m), Some(Path::Fused))
    }

    /// The launches for up to 16 tokens.
    fn decode(&self, m: usize) -> Result<Decode> {
        self.decodes.get(m, || self.fit(m))
    }

    fn fit(&self, m: usize) -> Result<Decode> {
        let problem = self.problem.with_m(m);
        let planned = || choose(&self.cuda, &problem, Some(Path::Fused)).0;
        let design = match self.forced.map_or_else(planned, Choice::Decode) {
            Choice::Decode(design) => design,
            // What speaks against the design that needs the least.
            Choice::Fused(_) | Choice::Unfused(_) | Choice::Skinny(_) => Design::TwoLaunches,
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
        let (decode, problem) = (self.decode(rows)?, self.problem.with_m(rows));
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
        padded::<T>(self.problem.intermediate.next_multiple_of(MOST_UNIT))
    }

    fn h_bytes(&self, m: usize) -> usize {
        workspace_part(m.min(MOST_TOKENS) * self.h_stride() * size_of::<T>())
    }

    /// Bytes of the weights and biases in device memory.
    pub fn weight_bytes(&self) -> usize {
        self.allocation.bytes()
    }

    /// Bytes of scratch memory that a call with `m` tokens uses.
    pub fn workspace_bytes(&self, m: usize) -> usize {
        self.h_bytes(m)
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
        self.forward_in(stream, None, x, out)
    }

    /// As [`Self::forward`], in scratch memory of the caller, of at least [`Self::workspace_bytes`]: warmed up on one
    /// stream, the same call can be captured by other code on another, and its graph launched on a third.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`swiglu_core::Error::OutOfRange`] for too little scratch memory.
    pub fn forward_with(
        &self,
        stream: &Stream,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
        scratch: &mut DeviceScratch<'_>,
    ) -> Result<()> {
        self.forward_in(stream, Some(scratch), x, out)
    }

    fn forward_in(
        &self,
        stream: &Stream,
        scratch: Option<&DeviceScratch<'_>>,
        x: DeviceMatrixRef<'_, T>,
        out: DeviceMatrixMut<'_, T>,
    ) -> Result<()> {
        let (m, k, h) = (x.rows(), self.problem.hidden, self.problem.intermediate);
        self.cuda.expect_stream(stream)?;
        out.expect_shape("output", [m, k])?;
        x.admit("x", [m, k], stream)?;
        out.admit("output", [m, k], stream)?;
        self.allocation.order(stream.raw_stream(), Access::Read)?;
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
        self.cuda.with_workspace(stream, scratch, self.h_bytes(m), |work| {
            let mut first = 0;
            while first < m {
                let from = |t: Tensor, stride: usize| Tensor {
                    data: t.data + (first * stride * size_of::<T>()) as u64,
                    ..t
                };
                let (x, y) = (from(tensor(&x), x.row_stride()), from(y, out.row_stride()));
                let (rows, decode) = self.pass(MOST_TOKENS.min(m - first), x)?;
                let call = Call { m: rows, x, y, ..self.call(work) };
                // SAFETY: the views span memory of this device, `out` is borrowed mutably, the
                // weights live as long as `self`, and the workspace has room for h behind the
                // call's own word.
                unsafe { decode.launch(stream, &call) }?;
                first += rows;
            }
            Ok(())
        })
    }

    /// A call without its tokens.
    fn call(&self, work: Work) -> Call {
        let (k, h) = (self.problem.hidden, self.problem.intermediate);
        let up = h * self.gate_up.stride;
        let up_scales = if self.gate_up.scales.is_empty() { 0 } else { h * size_of::<f32>() };
        let gate = self.gate_up.values.device_ptr();
        let scales = self.gate_up.scales.device_ptr();
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
            h: Tensor::new(work.ptr, self.h_stride()),
            y: Tensor::new(0, 0),
            weights,
            barrier: work.barrier,
        }
    }

    /// Captures a call with `x` on `stream` as a graph that owns both matrices and keeps the weights, with scratch memory
    /// of its own: it can be launched on every stream, also after this layer was dropped.
    ///
    /// # Errors
    /// As [`Self::forward`] and [`Stream::capture`].
    pub fn capture(
        &self,
        stream: &Stream,
        x: DeviceMatrix<T>,
        out: DeviceMatrix<T>,
    ) -> Result<CapturedCall<T>> {
        self.reserve(stream, x.rows())?;
        stream.capture_call(x, out, |x, out| self.forward(stream, x, out))
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
