//! The activation operation: one pass over gate and up.
//!
//! Large results are written past the caches, which saves reading the lines they overwrite; inputs are prefetched ahead, where
//! that is faster than leaving it to the processor (`simd::learn`). Interleaved inputs are separated tile by tile in the
//! first-level cache, so one loop serves every arrangement.
//!
//! Floors, what was measured and what was tried: docs/kernels/cpu.md.

mod backward;

use std::ops::Range;

use swiglu_core::{
    Activation, Arrangement, Element, GateUpRef, MatrixMut, Numerics, Op, Orientation, Path, Plan,
    Problem, Result, WeightLayout,
};

use crate::compiled;
use crate::cpu::Cpu;
use crate::panels::SendPtr;
use crate::simd::{Fetch, Math, MathKernel, Simd};
use crate::team::Step;

/// Elements of a unit of work.
const SEGMENT: usize = 32 << 10;
/// Elements separated at a time.
const TILE: usize = 512;
/// From this traffic on the result will not be found in cache anyway and is streamed past it.
const STREAM_FROM_BYTES: usize = 16 << 20;
/// Bytes between a load and the prefetch for a later one.
const AHEAD: usize = 4 << 10;
/// Packed rows up to this size are prefetched whole, one row ahead, into the second-level cache.
const ROW_AHEAD_BYTES: usize = 256 << 10;

/// Inputs and output as rows of segments.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a, T> {
    activation: Activation,
    numerics: Numerics,
    inputs: GateUpRef<'a, T>,
    out: SendPtr<T>,
    out_stride: usize,
    cols: usize,
    stream: bool,
}

impl Cpu {
    /// h = act(gate, up), `[M, H]`.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if `out` is not `[M, H]`.
    pub fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        out.expect_shape("output", [inputs.rows(), inputs.intermediate()])?;
        let (m, h) = (inputs.rows(), inputs.intermediate());
        let out_stride = out.row_stride();
        let dense = inputs.arrangement() == Arrangement::Separate
            && out_stride == h
            && inputs.tensors().iter().all(|t| t.row_stride() == h);
        // Dense rows are one long row: no tails but the last.
        let (rows, cols) = if dense { (m.min(1), m * h) } else { (m, h) };
        let task = Task {
            activation: *act,
            numerics,
            inputs,
            out: SendPtr(out.as_mut_slice().as_mut_ptr()),
            out_stride,
            cols,
            stream: streams(m, h, size_of::<T>()),
        };
        let segments = cols.div_ceil(SEGMENT);
        let run = |units: Range<usize>, _: usize| {
            // SAFETY: the instruction set was checked when the device was made; segments are
            // disjoint parts of the output and inside every operand.
            unsafe { compiled::activation(self.isa(), Segments { task, units, segments }) }
        };
        let work = (0.0, 3.0 * (m * h * size_of::<T>()) as f64);
        self.run_work(work, &[Step { units: rows * segments, run: &run }]);
        Ok(())
    }

    /// The problem of applying `act` to `[m, intermediate]` inputs.
    pub fn activation_problem<T: Element>(
        act: &Activation,
        numerics: Numerics,
        inputs: &GateUpRef<'_, T>,
    ) -> Problem {
        Problem::new(Op::Activation, inputs.rows(), 0, inputs.intermediate(), T::DTYPE, *act)
            .with_numerics(numerics)
            .with_layout(WeightLayout {
                orientation: Orientation::OutIn,
                arrangement: inputs.arrangement(),
            })
    }
}

/// The plan of the activation operation.
pub(crate) fn plan(cpu: &Cpu, problem: Problem) -> Plan {
    let stream = streams(problem.m, problem.intermediate, problem.dtype.size());
    let reason = if stream {
        "one pass over gate and up; the result exceeds the caches and is written past them"
    } else {
        "one pass over gate and up; the result fits the caches and stays there"
    };
    let workers = cpu.workers(0.0, problem.compulsory_bytes());
    let parameters = [("streaming_stores", usize::from(stream))];
    cpu.make_plan(problem, Path::Fused, workers, &parameters, reason)
}

fn streams(m: usize, h: usize, element: usize) -> bool {
    3 * m * h * element >= STREAM_FROM_BYTES
}

/// A range of segments.
pub(crate) struct Segments<'a, T> {
    task: Task<'a, T>,
    units: Range<usize>,
    segments: usize,
}

impl<T: Element> MathKernel for Segments<'_, T> {
    type Element = T;

    fn activation(&self) -> (Activation, Numerics) {
        (self.task.activation, self.task.numerics)
    }

    #[inline(always)]
    unsafe fn run<S: Simd, M: Math<S>>(&self, math: M) {
        let &Segments { task, ref units, segments } = self;
        let mut tile = Tile { gate: [T::default(); TILE], up: [T::default(); TILE] };
        for unit in units.clone() {
            let (row, start) = (unit / segments, unit % segments * SEGMENT);
            let end = task.cols.min(start + SEGMENT);
            let mut at = start;
            while at < end {
                // SAFETY: row and columns lie inside the operands; no other unit writes this part.
                unsafe {
                    let operands = task.operands(row, at, end, &mut tile);
                    let out = task.out.get().add(row * task.out_stride + at);
                    piece::<S, T, M>(math, &operands, out, task.stream);
                    at += operands.count;
                }
            }
        }
        if task.stream {
            S::fence();
        }
    }
}

/// Where column `col` of a half in groups lies, from the half's first.
#[inline(always)]
fn in_groups(col: usize, group: usize) -> usize {
    match group {
        1 => 2 * col,
        _ => col / group * 2 * group + col % group,
    }
}

/// Gate and up elements that were interleaved.
struct Tile<T> {
    gate: [T; TILE],
    up: [T; TILE],
}

/// Adjacent gate and up elements, and where the ones that will be read after them lie.
struct Operands<T> {
    gate: *const T,
    up: *const T,
    next: Next<T>,
    count: usize,
}

/// Only ever prefetched: it may lie outside the tensors.
#[derive(Clone, Copy)]
enum Next<T> {
    /// Two streams: where gate and up go on after these operands.
    Apart(*const T, *const T),
    /// One stream of both: as many elements as the operands together have.
    Together(*const T),
}

impl<T: Element> Task<'_, T> {
    /// Gate and up of columns `at ..`, as many up to `end` as are adjacent. Interleaved ones are
    /// separated into `tile` first.
    #[inline(always)]
    unsafe fn operands(
        &self,
        row: usize,
        at: usize,
        end: usize,
        tile: &mut Tile<T>,
    ) -> Operands<T> {
        let [first, second] = self.inputs.tensors();
        let (h, stride) = (self.inputs.intermediate(), first.row_stride());
        // SAFETY: the caller's row and columns lie inside the tensors.
        unsafe {
            let a = first.as_slice().as_ptr().add(row * stride);
            let b = match self.inputs.arrangement() {
                Arrangement::Separate => second.as_slice().as_ptr().add(row * second.row_stride()),
                Arrangement::PackedGateFirst | Arrangement::PackedUpFirst => a.add(h),
                Arrangement::Interleaved { group } => {
                    return self.separated(a, at, TILE.min(end - at), group, tile);
                }
            };
            let after = |p: *const T, stride: usize| match end == self.cols {
                true => p.wrapping_add(stride),
                false => p.wrapping_add(end),
            };
            let operand =
                [(a.add(at), after(a, stride)), (b.add(at), after(b, second.row_stride()))];
            let [(gate, next_gate), (up, next_up)] = match self.inputs.arrangement() {
                Arrangement::PackedUpFirst => [operand[1], operand[0]],
                _ => operand,
            };
            let whole_row = self.inputs.arrangement().is_packed() && end - at == h;
            let next = match whole_row && 2 * h * size_of::<T>() <= ROW_AHEAD_BYTES {
                true => Next::Together(next_gate.min(next_up)),
                false => Next::Apart(next_gate, next_up),
            };
            Operands { gate, up, next, count: end - at }
        }
    }

    /// `count` interleaved elements of each half, separated into `tile`.
    #[inline(always)]
    unsafe fn separated(
        &self,
        row: *const T,
        at: usize,
        count: usize,
        group: usize,
        tile: &mut Tile<T>,
    ) -> Operands<T> {
        for (i, (g, u)) in tile.gate[..count].iter_mut().zip(&mut tile.up[..count]).enumerate() {
            let from = in_groups(at + i, group);
            // SAFETY: the row holds 2H elements and `at + i` is below H.
            unsafe { (*g, *u) = (*row.add(from), *row.add(from + group)) };
        }
        let next = Next::Together(row.wrapping_add(2 * (at + count)));
        Operands { gate: tile.gate.as_ptr(), up: tile.up.as_ptr(), next, count }
    }
}

/// Adjacent elements: pairs of vectors, before and after them single ones.
#[inline(always)]
unsafe fn piece<S: Simd, T: Element, M: Math<S>>(
    math: M,
    operands: &Operands<T>,
    out: *mut T,
    stream: bool,
) {
    let (pair, count) = (2 * S::LANES, operands.count);
    // Streamed stores are aligned; a pair of vectors is at least a cache line of T.
    let head = if stream { out.align_offset(pair * size_of::<T>()).min(count) } else { 0 };
    let tail = head + (count - head) / pair * pair;
    // SAFETY: head, pairs and tail partition the caller's `count` elements.
    unsafe {
        if stream {
            pairs::<S, T, M, true>(math, operands, out, head, tail);
        } else {
            pairs::<S, T, M, false>(math, operands, out, head, tail);
        }
        for (from, to) in [(0, head), (tail, count)] {
            for i in (from..to).step_by(S::LANES) {
                let n = S::LANES.min(to - i);
                let (gate, up) = (operands.gate.add(i), operands.up.add(i));
                partial::<S, T, M>(math, gate, up, out.add(i), n);
            }
        }
    }
}

/// Elements `from .. to`, a whole number of pairs.
#[inline(always)]
unsafe fn pairs<S: Simd, T: Element, M: Math<S>, const STREAM: bool>(
    math: M,
    operands: &Operands<T>,
    out: *mut T,
    from: usize,
    to: usize,
) {
    let pair = 2 * S::LANES;
    for i in (from..to).step_by(pair) {
        prefetch::<S, T>(operands, i, pair * size_of::<T>());
        // SAFETY: pairs end at `to`.
        unsafe {
            let g = S::load_pair::<T>(operands.gate.add(i));
            let u = S::load_pair::<T>(operands.up.add(i));
            let h = [math.gated(g[0], u[0]), math.gated(g[1], u[1])];
            S::store_pair::<T, STREAM>(out.add(i), h);
        }
    }
}

/// Asks for what will be read some time after element `i`, `bytes` of gate and as many of up.
#[inline(always)]
fn prefetch<S: Simd, T: Element>(operands: &Operands<T>, i: usize, bytes: usize) {
    let lines = |p: *const T, bytes: usize, fetch: Fetch| {
        for line in (0..bytes).step_by(64) {
            S::prefetch(p.cast::<u8>().wrapping_add(line), fetch);
        }
    };
    match operands.next {
        Next::Together(next) => lines(next.wrapping_add(2 * i), 2 * bytes, Fetch::Second),
        Next::Apart(next_gate, next_up) => {
            let later = i + AHEAD / size_of::<T>();
            let at = |now: *const T, next: *const T| match later < operands.count {
                true => now.wrapping_add(later),
                false => next.wrapping_add(later - operands.count),
            };
            lines(at(operands.gate, next_gate), bytes, Fetch::Once);
            lines(at(operands.up, next_up), bytes, Fetch::Once);
        }
    }
}

/// Up to a vector of elements, through buffers, with the same arithmetic.
#[inline(always)]
unsafe fn partial<S: Simd, T: Element, M: Math<S>>(
    math: M,
    gate: *const T,
    up: *const T,
    out: *mut T,
    count: usize,
) {
    let (mut g, mut u) = ([T::default(); 64], [T::default(); 64]);
    // SAFETY: count ≤ LANES ≤ 64 elements are read and written.
    unsafe {
        std::ptr::copy_nonoverlapping(gate, g.as_mut_ptr(), count);
        std::ptr::copy_nonoverlapping(up, u.as_mut_ptr(), count);
        let h = math.gated(S::load::<T>(g.as_ptr()), S::load::<T>(u.as_ptr()));
        S::store::<T>(g.as_mut_ptr(), h);
        std::ptr::copy_nonoverlapping(g.as_ptr(), out, count);
    }
}
