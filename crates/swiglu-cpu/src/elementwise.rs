//! The activation operation: one pass over gate and up.
//!
//! Large results are written past the caches, which saves reading the lines they overwrite; inputs
//! are prefetched a little ahead. Interleaved inputs are separated tile by tile in the first-level
//! cache, so one loop serves every arrangement.

use std::ops::Range;

use swiglu_core::gate::{GatedMath, WithGatedMath};
use swiglu_core::{
    Activation, Arrangement, Element, Error, GateUpRef, MatrixMut, Numerics, Op, Orientation, Path,
    Plan, Problem, Result, WeightLayout,
};

use crate::cpu::Cpu;
use crate::panels::SendPtr;
use crate::simd::{self, Fetch, Kernel, Simd};
use crate::team::Step;

/// Elements of a unit of work.
const SEGMENT: usize = 32 << 10;
/// Elements separated at a time.
const TILE: usize = 512;
/// From this traffic on the result will not be found in cache anyway and is streamed past it.
const STREAM_FROM_BYTES: usize = 16 << 20;
/// Bytes between a load and the prefetch for a later one.
const AHEAD: usize = 4 << 10;

/// Inputs and output as rows of segments.
#[derive(Clone, Copy)]
struct Task<'a, T> {
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
    /// [`Error::Shape`] if `out` is not `[M, H]`.
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
            unsafe { simd::dispatch(self.isa(), Segments { task, units, segments }) }
        };
        let workers = self.workers(0.0, 3.0 * (m * h * size_of::<T>()) as f64);
        self.run(workers, &[Step { units: rows * segments, run: &run }]);
        Ok(())
    }

    /// The plan [`Cpu::activation`] follows.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the problem is not of the activation operation.
    pub fn plan_activation(&self, problem: Problem) -> Result<Plan> {
        if problem.op != Op::Activation {
            return Err(Error::Unsupported {
                what: problem.op.to_string(),
                why: "only the activation operation has no weights".into(),
            });
        }
        let stream = streams(problem.m, problem.intermediate, problem.dtype.size());
        let reason = if stream {
            "one pass over gate and up; the result exceeds the caches and is written past them"
        } else {
            "one pass over gate and up; the result fits the caches and stays there"
        };
        let workers = self.workers(0.0, problem.compulsory_bytes());
        let parameters = [("streaming_stores", usize::from(stream))];
        Ok(self.plan(problem, Path::Fused, workers, &parameters, reason))
    }

    /// The problem of applying `act` to `[m, intermediate]` inputs.
    pub fn activation_problem<T: Element>(
        act: &Activation,
        numerics: Numerics,
        inputs: &GateUpRef<'_, T>,
    ) -> Problem {
        Problem {
            op: Op::Activation,
            m: inputs.rows(),
            hidden: 0,
            intermediate: inputs.intermediate(),
            dtype: T::DTYPE,
            activation: *act,
            numerics,
            layout: WeightLayout {
                orientation: Orientation::OutIn,
                arrangement: inputs.arrangement(),
            },
            bias: false,
        }
    }
}

fn streams(m: usize, h: usize, element: usize) -> bool {
    3 * m * h * element >= STREAM_FROM_BYTES
}

struct Segments<'a, T> {
    task: Task<'a, T>,
    units: Range<usize>,
    segments: usize,
}

impl<T: Element> Kernel for Segments<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let task = self.task;
        task.activation.with_math::<T, _>(
            task.numerics,
            Running::<S, T> { segments: self, simd: std::marker::PhantomData },
        );
        if task.stream {
            S::fence();
        }
    }
}

struct Running<'a, S, T> {
    segments: Segments<'a, T>,
    simd: std::marker::PhantomData<S>,
}

impl<S: Simd, T: Element> WithGatedMath for Running<'_, S, T> {
    type Output = ();

    #[inline(always)]
    fn run<M: GatedMath>(self, math: M) {
        let Segments { task, units, segments } = self.segments;
        let [first, second] = task.inputs.tensors();
        let h = task.inputs.intermediate();
        for unit in units {
            let (row, start) = (unit / segments, unit % segments * SEGMENT);
            let count = SEGMENT.min(task.cols - start);
            // SAFETY: row and columns lie inside the operands; no other unit writes this part.
            unsafe {
                let out = task.out.get().add(row * task.out_stride + start);
                let a = first.as_slice().as_ptr().add(row * first.row_stride());
                let b = second.as_slice().as_ptr().add(row * second.row_stride());
                let (gate, up) = match task.inputs.arrangement() {
                    Arrangement::Separate => (a, b),
                    Arrangement::PackedGateFirst => (a, a.add(h)),
                    Arrangement::PackedUpFirst => (a.add(h), a),
                    Arrangement::Interleaved { group } => {
                        interleaved::<S, T, M>(math, a, group, start, out, count);
                        continue;
                    }
                };
                let (gate, up) = (gate.add(start), up.add(start));
                if task.stream {
                    streamed::<S, T, M>(math, gate, up, out, count);
                } else {
                    cached::<S, T, M>(math, gate, up, out, count);
                }
            }
        }
    }
}

/// Separates `[g gate][g up]…` into tiles and runs the plain loop on them.
#[inline(always)]
unsafe fn interleaved<S: Simd, T: Element, M: GatedMath>(
    math: M,
    row: *const T,
    group: usize,
    start: usize,
    out: *mut T,
    count: usize,
) {
    let (mut gate, mut up) = ([T::default(); TILE], [T::default(); TILE]);
    for done in (0..count).step_by(TILE) {
        let n = TILE.min(count - done);
        for (i, (g, u)) in gate[..n].iter_mut().zip(&mut up[..n]).enumerate() {
            let h = start + done + i;
            let at = if group == 1 { 2 * h } else { h / group * 2 * group + h % group };
            // SAFETY: the row holds 2H elements and h < H.
            unsafe { (*g, *u) = (*row.add(at), *row.add(at + group)) };
        }
        // SAFETY: the tiles hold n elements, and so does the rest of the output.
        unsafe { cached::<S, T, M>(math, gate.as_ptr(), up.as_ptr(), out.add(done), n) };
    }
}

/// Fewer elements than a vector, through buffers, with the same arithmetic.
#[inline(always)]
unsafe fn partial<S: Simd, T: Element, M: GatedMath>(
    math: M,
    gate: *const T,
    up: *const T,
    out: *mut T,
    count: usize,
) {
    let (mut g, mut u) = ([T::default(); 64], [T::default(); 64]);
    // SAFETY: count < LANES ≤ 64 elements are read and written.
    unsafe {
        std::ptr::copy_nonoverlapping(gate, g.as_mut_ptr(), count);
        std::ptr::copy_nonoverlapping(up, u.as_mut_ptr(), count);
        let h = math.apply(S::load::<T>(g.as_ptr()), S::load::<T>(u.as_ptr()));
        S::store::<T>(g.as_mut_ptr(), h);
        std::ptr::copy_nonoverlapping(g.as_ptr(), out, count);
    }
}

/// Stores through the caches, at any alignment.
#[inline(always)]
unsafe fn cached<S: Simd, T: Element, M: GatedMath>(
    math: M,
    gate: *const T,
    up: *const T,
    out: *mut T,
    count: usize,
) {
    // SAFETY: the caller's operands hold `count` elements, of which the pairs are the first.
    unsafe {
        let paired = pairs::<S, T, M, false>(math, gate, up, out, count);
        for i in (paired..count).step_by(S::LANES) {
            let (gate, up, out) = (gate.add(i), up.add(i), out.add(i));
            if i + S::LANES <= count {
                S::store::<T>(out, math.apply(S::load::<T>(gate), S::load::<T>(up)));
            } else {
                partial::<S, T, M>(math, gate, up, out, count - i);
            }
        }
    }
}

/// Stores past the caches what is aligned for it.
#[inline(always)]
unsafe fn streamed<S: Simd, T: Element, M: GatedMath>(
    math: M,
    gate: *const T,
    up: *const T,
    out: *mut T,
    count: usize,
) {
    let misaligned = out.align_offset(2 * S::LANES * size_of::<T>()).min(count);
    // SAFETY: head, pairs and tail partition `count` elements; from the head on `out` is aligned.
    unsafe {
        cached::<S, T, M>(math, gate, up, out, misaligned);
        let (gate, up, out) = (gate.add(misaligned), up.add(misaligned), out.add(misaligned));
        let count = count - misaligned;
        let paired = pairs::<S, T, M, true>(math, gate, up, out, count);
        cached::<S, T, M>(math, gate.add(paired), up.add(paired), out.add(paired), count - paired);
    }
}

/// As many pairs of vectors as `count` has; returns how many elements that is.
#[inline(always)]
unsafe fn pairs<S: Simd, T: Element, M: GatedMath, const STREAM: bool>(
    math: M,
    gate: *const T,
    up: *const T,
    out: *mut T,
    count: usize,
) -> usize {
    let pair = 2 * S::LANES;
    let whole = count / pair * pair;
    for i in (0..whole).step_by(pair) {
        // SAFETY: pairs end inside `count` elements. Prefetched addresses need not be valid.
        unsafe {
            let (gate, up) = (gate.add(i), up.add(i));
            for line in (0..pair * size_of::<T>()).step_by(64) {
                S::prefetch(gate.cast::<u8>().wrapping_add(AHEAD + line), Fetch::Once);
                S::prefetch(up.cast::<u8>().wrapping_add(AHEAD + line), Fetch::Once);
            }
            let (g, u) = (S::load_pair::<T>(gate), S::load_pair::<T>(up));
            let h = [math.apply(g[0], u[0]), math.apply(g[1], u[1])];
            S::store_pair::<T, STREAM>(out.add(i), h);
        }
    }
    whole
}
