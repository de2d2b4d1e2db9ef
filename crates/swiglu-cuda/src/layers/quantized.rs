//! The feed-forward block with quantised weights: they stay as they are in device memory, laid out
//! once for the decode kernel.

use std::marker::PhantomData;

use swiglu_core::quant::{BlockType, QuantizedMlpParams, QuantizedRef};
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
use crate::stream::Stream;
use crate::workspace::barrier_of;

/// The types of quantised weights that there are kernels for.
pub fn quantized_types() -> &'static [BlockType] {
    &[BlockType::Q8_0, BlockType::Q4_0]
}

/// Refuses what no kernel computes with quantised weights, saying what would be computed: as
/// [`QuantizedMlp::new`], which knows the device's memory too.
///
/// # Errors
/// [`CoreError::Unsupported`].
pub fn expect_quantized(op: Op, dtype: DType, block: BlockType) -> swiglu_core::Result<()> {
    let why = match (op, dtype) {
        (Op::GatedLinear | Op::Activation, _) => {
            "a CUDA device has kernels for them in whole feed-forward blocks (mlp)".to_owned()
        }
        (Op::Mlp, DType::F32) => {
            "a CUDA device multiplies them with f16 or bf16; choose one of these".to_owned()
        }
        (Op::Mlp, _) if quantized_types().contains(&block) => return Ok(()),
        (Op::Mlp, _) => {
            let names: Vec<&str> = quantized_types().iter().map(|b| b.name()).collect();
            format!("a CUDA device has kernels for {}", names.join(", "))
        }
    };
    let what = format!("computing {op} of {dtype} with {block} weights");
    Err(CoreError::Unsupported { what, why })
}

/// A feed-forward block with weights of Q8_0 or Q4_0, x `[M, K]` → y `[M, K]` of T, f16 or bf16, packed
/// for one [`Cuda`] device. Products are in T with sums in f32; the weights are exact.
///
/// It is made for few tokens: more than 16 are computed 16 at a time, each time from all weights.
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
    values: PhantomData<T>,
}

/// Rows of quantised weights on the device. A row is whole units of 64 bytes; lane t of the four that
/// share a row of a unit has its 16 bytes at 16·t. A row's scales are f16, as many as its units have
/// blocks. Both are padded with zeros: where a scale is 0, a value is.
#[derive(Debug)]
struct Rows {
    /// Bytes, two in the bits of each value.
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
        let blocks = matrices[0].cols() / BLOCK;
        let units = blocks.div_ceil(format.blocks());
        let (stride, scales) = (units * UNIT_BYTES, units * format.blocks());
        let rows: usize = matrices.iter().map(QuantizedRef::rows).sum();
        let mut values = vec![0u8; rows * stride];
        let mut factors = vec![f16::from_bits(0); rows * scales];
        let all = matrices.iter().flat_map(|m| (0..m.rows()).map(move |r| m.row(r)));
        let to =
            values.chunks_exact_mut(stride.max(1)).zip(factors.chunks_exact_mut(scales.max(1)));
        for (row, (values, factors)) in all.zip(to) {
            lay_out_row(row, format, values, factors);
        }
        let halves = values.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b));
        Ok(Self {
            values: DeviceBuffer::from_host(stream, &halves.collect::<Vec<_>>())?,
            scales: DeviceBuffer::from_host(stream, &factors)?,
            stride,
            scale_stride: 2 * scales,
        })
    }
}

/// Lays out a row of Q8_0 or Q4_0 blocks: see [`Rows`]. Of a lane's 16 bytes block b of a unit has
/// bytes 8b to 8b + 7, biased by 128; or word b, nibble i / 2 + 4·(i % 2) for element i of the lane's
/// eight, biased by 8 as in the file.
fn lay_out_row(row: &[u8], format: Format, values: &mut [u8], scales: &mut [f16]) {
    // An f16 scale, then the values.
    let bytes = 2 + UNIT_BYTES / format.blocks();
    for (block, from) in row.chunks_exact(bytes).enumerate() {
        scales[block] = f16::from_le_bytes([from[0], from[1]]);
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
    /// bytes and that does not fit into shared memory.
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
            for first in (0..m).step_by(MOST_TOKENS) {
                let rows = MOST_TOKENS.min(m - first);
                let from = |t: Tensor, stride: usize| Tensor {
                    data: t.data + (first * stride * size_of::<T>()) as u64,
                    ..t
                };
                let call = Call {
                    m: rows,
                    x: from(tensor(&x), x.row_stride()),
                    y: from(y, out.row_stride()),
                    ..self.call(workspace)
                };
                let (decode, problem) = (self.decode(rows)?, Problem { m: rows, ..self.problem });
                decode.check_x(call.x, &problem).map_err(|why| CudaError::Unsupported {
                    what: problem.to_string(),
                    why: why.to_string(),
                })?;
                // SAFETY: the views span memory of this device, `out` is borrowed mutably, the
                // weights live as long as `self`, and the workspace has room for h behind the
                // stream's own word.
                unsafe { decode.launch(stream, &call) }?;
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
