//! What this machine can do at most, measured with the same vectors, threads and buffers as the
//! kernels: the floors that results are stated against.
//!
//! Rates are medians over repetitions. Memory bandwidth on a shared host moves between states, so
//! [`bandwidth`] is cheap and meant to be called beside each memory-bound item.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use swiglu_core::random::normal_matrix;
use swiglu_core::{Activation, Element, F32Lanes, GateUpRef, Matrix, Numerics, Result};

use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::isa::Isa;
use crate::panels::SendPtr;
use crate::simd::amx::{self, Tiles};
use crate::simd::{self, Kernel, Simd};
use crate::team::Step;

/// Bytes of one array: far beyond any cache here.
const ARRAY_BYTES: usize = 128 << 20;
/// Bytes of a unit of work.
const UNIT_BYTES: usize = 1 << 20;
/// The same where the arrays may be small.
const CACHED_UNIT_BYTES: usize = 16 << 10;
/// How far ahead loads are prefetched.
const AHEAD: usize = 4 << 10;

/// What is moved between memory and processors, of arrays far beyond the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// One array is read.
    Read,
    /// One is read and another written past the caches.
    Copy,
    /// Two are read and a third is written past the caches: the traffic of the activation.
    Triad,
}

/// Compute rates of a [`Cpu`] with its threads and instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Compute {
    /// Multiply-adds of `f32` vectors, FLOP/s.
    pub fma_f32: f64,
    /// Dot products of bfloat16 pairs, or of tiles of them, FLOP/s; none where the hardware has no such
    /// instruction.
    pub dot_bf16: Option<f64>,
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// What a repetition lasts at least: long beside waking threads and reading the clock, and short enough for
/// instruction sets that take a hundred times as long as others.
const REPETITION: Duration = Duration::from_millis(5);

/// The median over `repetitions` of `amount` per second, each of as many passes over `step` as
/// [`REPETITION`] asks for.
fn rate(cpu: &Cpu, workers: usize, repetitions: usize, amount: f64, step: &Step<'_>) -> f64 {
    let seconds = |passes: usize| {
        let start = Instant::now();
        for _ in 0..passes {
            cpu.run(workers, &[Step { units: step.units, run: step.run }]);
        }
        start.elapsed().as_secs_f64()
    };
    // The first pass meets cold caches and sleeping threads.
    let once = seconds(1).min(seconds(1)).max(1e-9);
    let passes = (REPETITION.as_secs_f64() / once).ceil() as usize;
    median((0..repetitions).map(|_| passes as f64 * amount / seconds(passes)).collect())
}

/// Measures compute rates; about a tenth of a second each.
pub fn compute(cpu: &Cpu) -> Compute {
    let dot_bf16 = match cpu.isa() {
        Isa::AmxBf16 => Some(tiles(cpu)),
        Isa::Avx512Bf16 => Some(vectors(cpu, true)),
        _ => None,
    };
    Compute { fma_f32: vectors(cpu, false), dot_bf16 }
}

/// FLOP/s of independent multiply-adds in registers.
fn vectors(cpu: &Cpu, pairs: bool) -> f64 {
    const ITERATIONS: usize = 20_000;
    let units = 16 * cpu.threads();
    let run = |range: Range<usize>, _: usize| {
        for _ in range {
            // SAFETY: the instruction set was checked when the device was made.
            unsafe { simd::dispatch(cpu.isa(), Registers { pairs, iterations: ITERATIONS }) }
        }
    };
    let per_lane = if pairs { 4.0 } else { 2.0 };
    let accumulators = 2 * simd::tile_rows(cpu.isa());
    let flops = per_lane * (simd::lanes(cpu.isa()) * accumulators * ITERATIONS * units) as f64;
    rate(cpu, cpu.threads(), 15, flops, &Step { units, run: &run })
}

/// FLOP/s of independent products of tiles in registers.
fn tiles(cpu: &Cpu) -> f64 {
    const ITERATIONS: usize = 20_000;
    let units = 16 * cpu.threads();
    let run = |range: Range<usize>, _: usize| {
        // SAFETY: the instruction set was checked when the device was made; this is a unit of its own.
        let tiles = unsafe { Tiles::configure() };
        range.for_each(|_| tiles.multiply_registers(ITERATIONS));
    };
    let per_product = 2 * amx::ROWS * amx::ROWS * amx::FEATURES;
    let flops = (4 * per_product * ITERATIONS * units) as f64;
    rate(cpu, cpu.threads(), 15, flops, &Step { units, run: &run })
}

/// As many independent accumulators as the matrix kernel's largest tile.
struct Registers {
    pairs: bool,
    iterations: usize,
}

impl Kernel for Registers {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        macro_rules! with {
            ($($rows:literal),*) => {
                match S::ROWS {
                    $($rows => registers::<S, { 2 * $rows }>(self.pairs, self.iterations),)*
                    rows => unreachable!("no façade has tiles of {rows} rows"),
                }
            };
        }
        with!(4, 6, 12)
    }
}

#[inline(always)]
fn registers<S: Simd, const N: usize>(pairs: bool, iterations: usize) {
    // The product has the accumulator in it, or it could be hoisted out of the loop.
    let (factor, term) = (S::V::splat(0.5), S::V::splat(1.0));
    let mut acc = [S::V::splat(1.0); N];
    for _ in 0..iterations {
        for a in &mut acc {
            *a = if pairs {
                S::accumulate_pairs(*a, factor, term)
            } else {
                S::accumulate(term, *a, factor)
            };
        }
    }
    let mut sums = [0.0f32; 64];
    for a in acc {
        // SAFETY: 64 values are at least one vector.
        unsafe { S::store_f32(sums.as_mut_ptr(), a) };
        std::hint::black_box(&sums);
    }
}

/// Measures memory bandwidth in bytes per second, reads and writes counted once each; about a tenth of a second.
///
/// # Errors
/// [`swiglu_core::Error::OutOfMemory`] if there is no memory for the arrays, 128 MiB each.
pub fn bandwidth(cpu: &Cpu, traffic: Traffic) -> Result<f64> {
    let (inputs, writes) = match traffic {
        Traffic::Read => (1, false),
        Traffic::Copy => (1, true),
        Traffic::Triad => (2, true),
    };
    let arrays = inputs + usize::from(writes);
    let mut memory =
        (0..arrays).map(|_| Buffer::zeroed(ARRAY_BYTES)).collect::<Result<Vec<_>>>()?;
    let pointers: Vec<_> =
        memory.iter_mut().map(|a| SendPtr(a.as_mut_ptr().cast::<f32>())).collect();
    let units = ARRAY_BYTES / UNIT_BYTES;
    // Pages that were never written all map to one zero page.
    for &array in &pointers {
        let touch = |range: Range<usize>, _: usize| {
            for unit in range {
                // SAFETY: units are disjoint parts of the array.
                unsafe {
                    let at = array.get().cast::<u8>().add(unit * UNIT_BYTES);
                    std::ptr::write_bytes(at, 1, UNIT_BYTES);
                }
            }
        };
        cpu.run(cpu.threads(), &[Step { units, run: &touch }]);
    }
    let measure = |asks: bool| {
        let run = |range: Range<usize>, _: usize| {
            let [a, b, out] = [0, inputs - 1, arrays - 1].map(|i| pointers[i].get());
            let stores = writes.then_some(Stores::Streamed);
            let stream = Stream { a, b, out, range, unit: UNIT_BYTES, inputs, stores, asks };
            // SAFETY: the instruction set was checked when the device was made; units are disjoint
            // parts of the arrays, and where nothing is written no other array is touched.
            unsafe { simd::dispatch(cpu.isa(), stream) }
        };
        rate(cpu, cpu.threads(), 5, (arrays * ARRAY_BYTES) as f64, &Step { units, run: &run })
    };
    // What kernels do was found to be the faster way on some processors; on others it may not be.
    Ok(measure(true).max(measure(false)))
}

/// Bytes per second that are read, or read twice and written once, where the arrays together have
/// `bytes` and are used again and again: what the caches that they fit in deliver. As many threads
/// take part as in a call that moves as much.
///
/// # Errors
/// As [`bandwidth`].
pub fn cached(cpu: &Cpu, bytes: usize, writes: bool) -> Result<f64> {
    let inputs = if writes { 2 } else { 1 };
    let arrays = inputs + usize::from(writes);
    let units = (bytes / arrays).div_ceil(CACHED_UNIT_BYTES).max(1);
    let total = arrays * units * CACHED_UNIT_BYTES;
    let mut memory = Buffer::zeroed(total)?;
    // Pages that were never written all map to one zero page. Every value becomes a tiny normal one.
    // SAFETY: the buffer has `total` bytes.
    unsafe { std::ptr::write_bytes(memory.as_mut_ptr(), 1, total) };
    let first = SendPtr(memory.as_mut_ptr().cast::<f32>());
    let workers = cpu.workers(0.0, bytes as f64);
    let run = |range: Range<usize>, _: usize| {
        let array = units * CACHED_UNIT_BYTES / size_of::<f32>();
        let first = first.get();
        let (b, out) = (first.wrapping_add(array), first.wrapping_add((arrays - 1) * array));
        let stores = writes.then_some(Stores::Kept);
        let (a, unit, asks) = (first, CACHED_UNIT_BYTES, true);
        let stream = Stream { a, b, out, range, unit, inputs, stores, asks };
        // SAFETY: the instruction set was checked when the device was made; units are disjoint parts
        // of the arrays, and where nothing is written no other array is touched.
        unsafe { simd::dispatch(cpu.isa(), stream) }
    };
    Ok(rate(cpu, workers, 7, total as f64, &Step { units, run: &run }))
}

/// Memory that is read, and nothing else done with it: the least that a call takes whose weights are as many bytes.
/// A pass is a call like any other, by the same threads, so the two can take turns on a machine whose bandwidth
/// changes from one second to the next.
#[derive(Debug)]
pub struct Reading {
    cpu: Cpu,
    memory: Buffer,
    units: usize,
}

impl Reading {
    /// As much memory as `bytes`, rounded up to a few pages.
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfMemory`] if there is no memory for it.
    pub fn new(cpu: &Cpu, bytes: usize) -> Result<Self> {
        let units = bytes.div_ceil(CACHED_UNIT_BYTES).max(1);
        let mut memory = Buffer::zeroed(units.saturating_mul(CACHED_UNIT_BYTES))?;
        // Pages that were never written all map to one zero page. Every value becomes a tiny normal one.
        // SAFETY: the buffer has as many bytes as it says.
        unsafe { std::ptr::write_bytes(memory.as_mut_ptr(), 1, memory.bytes()) };
        Ok(Self { cpu: cpu.clone(), memory, units })
    }

    /// Bytes that a pass reads.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Reads everything once, with as many threads as a call that moves as much; with `asks` as kernels read, who may
    /// ask the processor for what comes later, else without.
    pub fn pass(&self, asks: bool) {
        let first = SendPtr(self.memory.as_ptr().cast_mut().cast::<f32>());
        let run = |range: Range<usize>, _: usize| {
            let (a, unit) = (first.get(), CACHED_UNIT_BYTES);
            let stream = Stream { a, b: a, out: a, range, unit, inputs: 1, stores: None, asks };
            // SAFETY: the instruction set was checked when the device was made; units are inside the buffer, and
            // nothing is written.
            unsafe { simd::dispatch(self.cpu.isa(), stream) }
        };
        let workers = self.cpu.workers(0.0, self.bytes() as f64);
        self.cpu.run(workers, &[Step { units: self.units, run: &run }]);
    }
}

/// Results per second of an activation whose data are in a near cache of each thread: what its
/// arithmetic allows.
///
/// # Errors
/// As [`bandwidth`].
pub fn activation<T: Element>(cpu: &Cpu, act: &Activation, numerics: Numerics) -> Result<f64> {
    // Together 96 KiB: small enough for a second-level cache, which is no limit, and large enough
    // that what a call costs besides is none.
    const CALLS: usize = 8;
    let cols = (32 << 10) / size_of::<T>();
    let [gate, up] = [1, 2].map(|stream| normal_matrix::<T>(stream, 1, cols, 2.0));
    let (gate, up) = (gate?, up?);
    let inputs = GateUpRef::separate(gate.view(), up.view())?;
    let mut outputs = (0..cpu.threads())
        .map(|_| Ok(Mutex::new(Matrix::<T>::zeros(1, cols)?)))
        .collect::<Result<Vec<_>>>()?;
    // What would fail in the calls that are timed fails here.
    for out in &mut outputs {
        let out = out.get_mut().unwrap_or_else(PoisonError::into_inner);
        cpu.activation(act, numerics, inputs, out.view_mut())?;
    }
    let units = 16 * cpu.threads();
    let run = |range: Range<usize>, worker: usize| {
        // So little work stays with its thread, and no lock is waited for: each worker has its own.
        let mut out = outputs[worker].lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..CALLS * range.len() {
            let done = cpu.activation(act, numerics, inputs, out.view_mut());
            std::hint::black_box((&done, out.view()));
        }
    };
    let amount = (cols * CALLS * units) as f64;
    Ok(rate(cpu, cpu.threads(), 15, amount, &Step { units, run: &run }))
}

/// How results of a pass are written.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stores {
    /// Past the caches.
    Streamed,
    /// Into them.
    Kept,
}

/// One pass over units of one or two arrays, summing or writing to a third.
struct Stream {
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    range: Range<usize>,
    /// Bytes of a unit.
    unit: usize,
    inputs: usize,
    stores: Option<Stores>,
    /// Whether loads are prefetched, the way that kernels do.
    asks: bool,
}

impl Kernel for Stream {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const UNROLL: usize = 8;
        let per_unit = self.unit / size_of::<f32>();
        let (start, end) = (self.range.start * per_unit, self.range.end * per_unit);
        let mut sums = [S::V::splat(0.0); UNROLL];
        // SAFETY: start and end are inside the arrays and multiples of every vector.
        unsafe {
            for i in (start..end).step_by(UNROLL * S::LANES) {
                if self.asks {
                    let (ahead, lines) = (i * size_of::<f32>() + AHEAD, UNROLL * S::LANES / 16);
                    S::prefetch_lines(self.a.cast::<u8>().wrapping_add(ahead), lines);
                    if self.inputs > 1 {
                        S::prefetch_lines(self.b.cast::<u8>().wrapping_add(ahead), lines);
                    }
                }
                for (j, sum) in sums.iter_mut().enumerate() {
                    let at = i + j * S::LANES;
                    let mut v = S::load_f32(self.a.add(at));
                    if self.inputs > 1 {
                        v = v.add(S::load_f32(self.b.add(at)));
                    }
                    match self.stores {
                        Some(Stores::Streamed) => S::stream_f32(self.out.add(at), v),
                        Some(Stores::Kept) => S::store_f32(self.out.add(at), v),
                        None => *sum = sum.add(v),
                    }
                }
            }
            let mut kept = [0.0f32; 64];
            for sum in sums {
                S::store_f32(kept.as_mut_ptr(), sum);
                std::hint::black_box(&kept);
            }
        }
        if self.stores == Some(Stores::Streamed) {
            S::fence();
        }
    }
}
