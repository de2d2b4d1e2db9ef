//! Measures the rates of a device, which the cost model is then refined by ([`crate::Calibration`]).

use std::time::{Duration, Instant};

use swiglu_core::{Orientation, bf16};

use crate::ceilings::{self, Product};
use crate::device::cuda::Cuda;
use crate::device::error::{CudaError, Result};
use crate::device::graph::expect_no_capture;
use crate::device::library::Library;
use crate::device::loading;
use crate::device::memory::DeviceBuffer;
use crate::device::stream::{Event, Stream};
use crate::kernels::probe::{self, Probe};
use crate::plan::Planner;
use crate::plan::calibration::{Calibrated, Calibration, Reading};

/// Measurements, of which the median counts.
const SAMPLES: usize = 11;
/// Parts of L2 that are read: what is in the larger stays there, whichever half of the SMs asks.
const OF_L2: [usize; 2] = [16, 4];
/// Cycles that hold the stream up while the host enqueues what is timed behind them: milliseconds.
const HOLD_UP: usize = 6_000_000;
/// Kernels that start behind each other.
const LAUNCHES: usize = 128;
/// Of two runs that differ in nothing else, so that what is around them cancels.
const BARRIERS: [usize; 2] = [8, 72];
const CYCLES: [usize; 2] = [20_000, 220_000];
/// How long products run until the power that they draw has settled the clock, and before each look at it.
const HEAT: Duration = Duration::from_millis(600);
const REHEAT: Duration = Duration::from_millis(15);
/// Products between two looks at the host's clock.
const AT_ONCE: usize = 8;

impl Cuda {
    /// Measures the rates of this device on its default stream: with them plans are estimated that are
    /// made from now on, and layers that are. Layers that there are keep what they have. The result is kept where the options
    /// say that the device was opened with, so that later processes have it; the device should be idle meanwhile.
    ///
    /// A rate that cannot be measured, or that is outside of what is possible, is left as it is expected, and says so
    /// ([`Rate::refused`](crate::Rate::refused)).
    ///
    /// # Errors
    /// [`CudaError::Capture`] while this thread captures a graph, or the default stream is captured;
    /// [`CudaError::LibraryMissing`] without NVRTC; what the driver reports.
    pub fn calibrate(&self) -> Result<Calibrated> {
        self.recalibrate(|| measure(self))
    }
}

fn measure(cuda: &Cuda) -> Result<Calibration<Reading>> {
    let stream = cuda.stream();
    let (what, hint) = ("measuring the device", "measure before the capture");
    expect_no_capture(what, hint)?;
    stream.refuse_capture(what, hint)?;
    loading::expect_allowed(|| "what measures the device".into())?;
    stream.synchronize()?;
    Ok(Calibration {
        copy: unless_missing(ceilings::copy(cuda))?,
        clock: unless_missing(clock(&stream))?,
        l2: match cuda.facts().l2_bytes {
            0 => Reading::Missing("the driver does not tell the size of L2".into()),
            bytes => unless_missing(l2(&stream, bytes))?,
        },
        launch: Reading::new(launch(&stream)?),
        barrier: match Planner::of(cuda).limits().cooperative {
            true => unless_missing(barrier(&stream))?,
            false => Reading::Missing("the device has no cooperative launch".into()),
        },
    })
}

/// What lacks memory, or cuBLASLt, is not measured.
fn unless_missing(measured: Result<f64>) -> Result<Reading> {
    match measured {
        Ok(value) => Ok(Reading::new(value)),
        Err(CudaError::LibraryMissing { library: library @ Library::CublasLt, .. }) => {
            Ok(Reading::Missing(format!("{library} was not found")))
        }
        Err(
            why @ (CudaError::OutOfMemory { .. }
            | CudaError::SymbolMissing { library: Library::CublasLt, .. }),
        ) => Ok(Reading::Missing(why.to_string())),
        Err(why) => Err(why),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn enqueue(stream: &Stream, probe: Probe) -> Result<()> {
    // SAFETY: `l2` and `barrier` below, of which alone addresses are, have buffers of the extent that the probe says, which
    // are this stream's: they are freed behind what is enqueued here.
    unsafe { probe::enqueue(stream, probe) }
}

/// Median of the seconds between two marks of each sample. Waits for the last.
fn seconds(marks: &[[Event; 2]]) -> Result<f64> {
    let times = marks.iter().map(|[from, to]| Ok(f64::from(to.elapsed_ms(from)?) / 1e3));
    Ok(median(times.collect::<Result<_>>()?))
}

/// What two kernels of one form take, by the difference of their work: work per second.
fn rate_between(
    stream: &Stream,
    [few, many]: [usize; 2],
    mut before: impl FnMut() -> Result<()>,
    probe: impl Fn(usize) -> Probe,
) -> Result<f64> {
    let timed = |count| {
        let from = stream.record()?;
        enqueue(stream, probe(count))?;
        Ok::<_, CudaError>([from, stream.record()?])
    };
    timed(few)?;
    let (mut short, mut long) = (Vec::new(), Vec::new());
    for _ in 0..SAMPLES {
        before()?;
        // A kernel behind a mark starts later than one behind a kernel: both of them do.
        short.push(timed(few)?);
        long.push(timed(many)?);
    }
    Ok((many - few) as f64 / (seconds(&long)? - seconds(&short)?))
}

/// Cycles per second behind products of the size that a layer's have.
fn clock(stream: &Stream) -> Result<f64> {
    let sms = stream.cuda().facts().sm_count as usize;
    let side = (sms * 64).next_multiple_of(256).clamp(256, 4096);
    let mut product = Product::<bf16, bf16>::new(stream, [side; 3], false, Orientation::OutIn)?;
    let (begun, mut products) = (Instant::now(), 0);
    let mut before = stream.record()?;
    while begun.elapsed() < HEAT {
        for _ in 0..AT_ONCE {
            product.enqueue(stream)?;
        }
        // The device has the next ones meanwhile: it does not cool.
        std::mem::replace(&mut before, stream.record()?).synchronize()?;
        products += AT_ONCE;
    }
    stream.synchronize()?;
    let each = begun.elapsed() / products as u32;
    let again = (REHEAT.as_secs_f64() / each.as_secs_f64()).ceil().clamp(1.0, 256.0) as usize;
    let reheat = || (0..again).try_for_each(|_| product.enqueue(stream));
    rate_between(stream, CYCLES, reheat, Probe::Cycles)
}

/// Bytes per second of all SMs together.
fn l2(stream: &Stream, l2_bytes: usize) -> Result<f64> {
    let sizes = OF_L2.map(|part| probe::whole_reads(l2_bytes / part));
    let data = DeviceBuffer::<f32>::zeros(stream, sizes[1] / 4)?;
    let reads = |bytes| Probe::Reads { data: data.device_ptr(), bytes };
    // Brings the buffer to L2.
    enqueue(stream, reads(sizes[1]))?;
    let of_a_block = rate_between(stream, sizes, || Ok(()), reads)?;
    Ok(probe::readers(stream.cuda().facts().sm_count) as f64 * of_a_block)
}

/// Seconds from one kernel to the next.
fn launch(stream: &Stream) -> Result<f64> {
    let chain = || {
        enqueue(stream, Probe::Cycles(HOLD_UP))?;
        let from = stream.record()?;
        (0..LAUNCHES).try_for_each(|_| enqueue(stream, Probe::Nothing))?;
        let to = stream.record()?;
        // The next one finds the queue of the device empty.
        stream.synchronize()?;
        Ok([from, to])
    };
    let chains = (0..SAMPLES).map(|_| chain()).collect::<Result<Vec<_>>>()?;
    Ok(seconds(&chains)? / LAUNCHES as f64)
}

/// Seconds of a barrier.
fn barrier(stream: &Stream) -> Result<f64> {
    let word = DeviceBuffer::<f32>::zeros(stream, 1)?;
    let barriers = |count| Probe::Barriers { word: word.device_ptr(), count };
    Ok(1.0 / rate_between(stream, BARRIERS, || Ok(()), barriers)?)
}
