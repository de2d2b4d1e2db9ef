//! Launches `device/elementwise/elementwise_forward.cu` and `device/elementwise/elementwise_backward.cu`.

use swiglu_core::DType;

use super::NamedVariant;
use super::gate::{Formula, GateCode};
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::jit::{KernelFile, Variant, define, kernel_file};
use crate::device::launch::{LaunchConfig, launch};
use crate::device::stream::Stream;

static FORWARD: KernelFile = kernel_file!("elementwise", "elementwise_forward.cu");
static BACKWARD: KernelFile = kernel_file!("elementwise", "elementwise_backward.cu");

/// Threads of a block, see `device/elementwise/elementwise.cuh`, and of one where whole blocks would leave
/// SMs without work.
const THREADS: u32 = 512;
const FEW_THREADS: u32 = 128;
/// Backward in f32, where fewer at a time are faster.
const F32_BACKWARD_THREADS: u32 = 256;
/// From so many vectors on blocks are whole.
const MANY_VECTORS: u32 = 1 << 16;
/// Bytes of an operand that a thread has under way, in vectors of one access each.
const BYTES_IN_FLIGHT: u64 = 16;
/// The widest access to h beside sums, see `device/elementwise/elementwise.cuh`.
const BYTES_BESIDE_SUMS: u64 = 8;
/// The most columns, and the most vectors, of a launch: kernels count them in 32 bits and divide
/// numbers below 2³¹.
const MOST: u64 = 1 << 30;

/// An extent or stride as kernels take it. None reaches the sign bit: allocations do not.
pub(crate) fn signed(n: usize) -> i64 {
    n.cast_signed() as i64
}

/// A `[rows, cols]` tensor on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tensor {
    /// Address of the first element.
    pub(crate) data: u64,
    /// Elements from row to row.
    pub(crate) stride: i64,
}

impl Tensor {
    pub(crate) fn new(data: u64, stride: usize) -> Self {
        Self { data, stride: signed(stride) }
    }

    /// From an element on. Extents of memory stay below 2⁶³.
    fn from(self, row: u64, column: u64, size: u64) -> Self {
        let elements = row * self.stride.cast_unsigned() + column;
        Self { data: self.data + elements * size, ..self }
    }
}

/// What is in memory of gate and up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stored {
    /// Values of T.
    Elements,
    /// The f32 sums of a linear map, which are not rounded to a T of 16 bits.
    Sums,
}

impl Stored {
    /// Bytes of each value, where T is `dtype`.
    pub(crate) fn size(self, dtype: DType) -> usize {
        match self {
            Stored::Elements => dtype.size(),
            Stored::Sums => size_of::<f32>(),
        }
    }
}

/// How gate and up lie, with the tensors that hold them: `up` is not read where they are
/// interleaved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GateUp {
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    /// Features per group where they are interleaved in one tensor, else 0, as for sums.
    pub(crate) group: usize,
    pub(crate) stored: Stored,
}

/// The arrangement of [`Stored::Sums`].
const SUMS: u8 = 3;

impl GateUp {
    fn arrangement(&self) -> u8 {
        match (self.stored, self.group) {
            (Stored::Sums, _) => SUMS,
            (Stored::Elements, 0) => 0,
            (Stored::Elements, 1) => 2,
            (Stored::Elements, _) => 1,
        }
    }

    /// Bytes of the widest access to values of T beside these.
    fn widest(&self) -> u64 {
        match self.stored {
            Stored::Elements => 16,
            Stored::Sums => BYTES_BESIDE_SUMS,
        }
    }

    fn tensors(&self) -> impl Iterator<Item = Tensor> {
        let up = (self.group == 0).then_some(self.up);
        std::iter::once(self.gate).chain(up)
    }
}

/// As in `device/elementwise/elementwise.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tiling {
    cols: u32,
    vectors: u32,
    total: u32,
    group: u32,
    multiplier: u32,
    shift: u32,
}

#[repr(C)]
struct ForwardParams {
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    tiling: Tiling,
    formula: Formula,
}

#[repr(C)]
struct BackwardParams {
    out_grad: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_grad: Tensor,
    up_grad: Tensor,
    tiling: Tiling,
    formula: Formula,
}

/// What both directions compute on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) code: GateCode,
    pub(crate) formula: Formula,
}

/// h = act(gate, up).
///
/// # Safety
/// The tensors are memory of the stream's device that stays valid until the kernel has run, `out`
/// overlaps no other tensor except an equal one of as large values, and its rows do not overlap.
pub(crate) unsafe fn forward(
    stream: &Stream,
    extent: Extent,
    inputs: GateUp,
    out: Tensor,
) -> Result<()> {
    let cut = Cut::new(&extent, &[inputs], &[out])?;
    let variant = variant(&FORWARD, extent.code, inputs.arrangement());
    for part in cut.parts(MOST) {
        let function = stream.cuda().function(&variant, forward_entry(cut.bytes), 0)?;
        let inputs = cut.within(inputs, &part);
        let params = ForwardParams {
            gate: inputs.gate,
            up: inputs.up,
            out: out.from(part.row, part.column, cut.size),
            tiling: part.tiling,
            formula: extent.formula,
        };
        // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
        unsafe { launch(stream, &function, &cut.launch(&part.tiling, THREADS), &params) }?;
    }
    Ok(())
}

fn forward_entry(bytes: u64) -> &'static str {
    match bytes {
        16 => "elementwise_forward_16",
        8 => "elementwise_forward_8",
        4 => "elementwise_forward_4",
        _ => "elementwise_forward_2",
    }
}

/// (∂L/∂gate, ∂L/∂up) from ∂L/∂h; `grads` lie as `inputs` do and may be the same memory.
///
/// # Safety
/// As [`forward`], for the tensors of `grads`.
pub(crate) unsafe fn backward(
    stream: &Stream,
    extent: Extent,
    out_grad: Tensor,
    inputs: GateUp,
    grads: GateUp,
) -> Result<()> {
    let cut = Cut::new(&extent, &[inputs, grads], &[out_grad])?;
    let entry = match cut.bytes {
        16 => "elementwise_backward_16",
        8 => "elementwise_backward_8",
        4 => "elementwise_backward_4",
        _ => "elementwise_backward_2",
    };
    let variant = variant(&BACKWARD, extent.code, inputs.arrangement());
    let threads = if extent.code.dtype() == DType::F32 { F32_BACKWARD_THREADS } else { THREADS };
    for part in cut.parts(MOST) {
        let function = stream.cuda().function(&variant, entry, 0)?;
        let [inputs, grads] = [inputs, grads].map(|pair| cut.within(pair, &part));
        let params = BackwardParams {
            out_grad: out_grad.from(part.row, part.column, cut.size),
            gate: inputs.gate,
            up: inputs.up,
            gate_grad: grads.gate,
            up_grad: grads.up,
            tiling: part.tiling,
            formula: extent.formula,
        };
        // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
        unsafe { launch(stream, &function, &cut.launch(&part.tiling, threads), &params) }?;
    }
    Ok(())
}

/// The device file of [`forward`].
pub(crate) fn forward_file() -> &'static KernelFile {
    &FORWARD
}

fn variant(file: &'static KernelFile, code: GateCode, arrangement: u8) -> Variant {
    let [a, b, c, d, e] = code.defines();
    Variant::new(file, [a, b, c, d, e, define("ARRANGEMENT", arrangement)])
}

/// The kernels of an element type: every code for tensors apart, SwiGLU for the interleaved ones, and those
/// that round no sums for sums.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut codes = GateCode::all(dtype);
    // Without a linear map before it, `pre_round` is `fused`.
    codes.retain(|code| !code.name().contains("pre_round"));
    for (i, code) in codes.into_iter().enumerate() {
        let arrangements = if i == 0 { 0..=2 } else { 0..=0 };
        for arrangement in arrangements {
            all.extend([&FORWARD, &BACKWARD].map(|file| named(file, code, arrangement)));
        }
        if dtype != DType::F32 && !code.rounds_between() {
            all.push(named(&FORWARD, code, SUMS));
        }
    }
    all
}

/// Gate and up apart, as [`forward`] is compiled for them.
fn apart(stored: Stored) -> GateUp {
    let none = Tensor { data: 0, stride: 0 };
    GateUp { gate: none, up: none, group: 0, stored }
}

/// Compiles what [`forward`] of gate and up apart would.
pub(crate) fn prepare_forward(cuda: &Cuda, code: GateCode, stored: Stored) -> Result<()> {
    let inputs = apart(stored);
    let variant = variant(&FORWARD, code, inputs.arrangement());
    // The one that a call on matrices of this library takes.
    cuda.function(&variant, forward_entry(inputs.widest()), 0).map(drop)
}

/// What [`prepare_forward`] compiles.
pub(crate) fn needed(code: GateCode, stored: Stored) -> NamedVariant {
    named(&FORWARD, code, apart(stored).arrangement())
}

fn named(file: &'static KernelFile, code: GateCode, arrangement: u8) -> NamedVariant {
    const ARRANGEMENTS: [&str; 4] = ["apart", "grouped", "alternating", "sums"];
    NamedVariant {
        name: format!("{} {}", code.name(), ARRANGEMENTS[usize::from(arrangement)]),
        variant: variant(file, code, arrangement),
    }
}

/// A problem cut into accesses.
#[derive(Debug, PartialEq)]
struct Cut {
    /// Bytes per access.
    bytes: u64,
    /// Bytes per element, and per value of gate and up.
    size: u64,
    stored: u64,
    /// Where rows follow each other without a gap they are one long row, which has one tail, not many.
    rows: u64,
    cols: u64,
    /// Features per interleaving group, or 0.
    group: u64,
}

/// What one launch computes of a [`Cut`]: most have one part.
#[derive(Debug, PartialEq)]
struct Part {
    row: u64,
    column: u64,
    tiling: Tiling,
}

impl Cut {
    fn new(extent: &Extent, pairs: &[GateUp], single: &[Tensor]) -> Result<Self> {
        let (rows, cols) = (extent.rows as u64, extent.cols as u64);
        let dtype = extent.code.dtype();
        let size = dtype.size() as u64;
        let stored = pairs.first().map_or(size, |p| p.stored.size(dtype) as u64);
        let group = pairs.first().map_or(0, |p| p.group) as u64;
        if group > MOST {
            return Err(CudaError::Unsupported {
                what: format!("gate and up interleaved in groups of {group} features"),
                why: format!("kernels count to {MOST}; expected smaller groups, or packed halves"),
            });
        }
        let packed = |pair: &GateUp| cols * if pair.group > 0 { 2 } else { 1 };
        let dense = rows == 1
            || single.iter().all(|t| t.stride.cast_unsigned() == cols)
                && pairs.iter().all(|p| p.tensors().all(|t| t.stride.cast_unsigned() == packed(p)));
        let (rows, cols) = if dense { (1, rows * cols) } else { (rows, cols) };
        // As if sums were elements: an access to them is so many times as wide.
        let element = |t: Tensor| Tensor { data: t.data / (stored / size), ..t };
        let addresses = pairs.iter().flat_map(GateUp::tensors).map(element);
        // Bits that are set in none are what everything is a multiple of.
        let mut bits = pairs.iter().map(GateUp::widest).fold(16, u64::min);
        for tensor in addresses.chain(single.iter().copied()) {
            bits |= tensor.data;
            if rows > 1 {
                bits |= tensor.stride.cast_unsigned() * size;
            }
        }
        if group > 1 {
            bits |= group * size;
        }
        Ok(Self { bytes: 1 << bits.trailing_zeros(), size, stored, rows, cols, group })
    }

    /// Parts of at most `most` columns and vectors, but whole vectors and interleaving groups.
    fn parts(&self, most: u64) -> impl Iterator<Item = Part> {
        let count = self.bytes / self.size;
        // Groups of more than one feature are whole vectors.
        let whole = count.max(self.group);
        let columns = (most / whole * whole).max(whole);
        let rows = (most / self.cols.min(columns).div_ceil(count).max(1)).max(1);
        let starts = move |end: u64, step: u64| (0..end.div_ceil(step)).map(move |i| i * step);
        starts(self.rows, rows).flat_map(move |row| {
            starts(self.cols, columns).map(move |column| {
                let rows = (self.rows - row).min(rows);
                let cols = (self.cols - column).min(columns);
                let vectors = cols.div_ceil(count);
                let [multiplier, shift] = reciprocal(vectors as u32);
                let [cols, vectors, total, group] =
                    [cols, vectors, rows * vectors, self.group].map(|n| n as u32);
                let tiling = Tiling { cols, vectors, total, group, multiplier, shift };
                Part { row, column, tiling }
            })
        })
    }

    /// Gate and up from where a part begins.
    fn within(&self, pair: GateUp, part: &Part) -> GateUp {
        // Parts begin with a group, whose gate is twice as far in the packed row.
        let column = part.column * if pair.group > 0 { 2 } else { 1 };
        let [gate, up] = [pair.gate, pair.up].map(|t| t.from(part.row, column, self.stored));
        GateUp { gate, up, ..pair }
    }

    fn launch(&self, tiling: &Tiling, threads: u32) -> LaunchConfig {
        let block = if tiling.total < MANY_VECTORS { FEW_THREADS } else { threads };
        let vectors = block * (BYTES_IN_FLIGHT / self.bytes) as u32;
        let grid = [tiling.total.div_ceil(vectors), 1, 1];
        LaunchConfig { grid, block, ..LaunchConfig::default() }
    }
}

/// `[multiplier, shift]`, so that `n / divisor` is `(n * multiplier) >> shift` for every n below 2³¹:
/// with 2^(l-1) < divisor <= 2^l the multiplier exceeds 2^(31+l) / divisor by at most 1, which adds less than
/// n / 2^(31+l) < 1 / divisor to the quotient.
fn reciprocal(divisor: u32) -> [u32; 2] {
    let bits = divisor.next_power_of_two().trailing_zeros();
    let shift = 31 + bits;
    [((1u64 << shift) / u64::from(divisor) + 1) as u32, shift]
}

#[cfg(test)]
mod tests;
