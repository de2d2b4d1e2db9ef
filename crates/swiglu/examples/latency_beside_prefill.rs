//! Measures how long a call of one token takes while another thread computes prompts, and what that costs the prompts.
//!
//! One thread calls a block of 896/4864 in f32 with one token every 20 ms; another one, where it runs, calls a second block
//! of that size on the same device with 4096 tokens again and again. Times are those from call to return. With `--json` the
//! figures are printed as JSON, with `--calls N` there are more calls than 500.

// An example talks to people.
#![allow(clippy::print_stdout)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use swiglu::{
    Activation, CallOptions, Device, GateUpWeights, GatedLinearParams, Matrix, MatrixRef, Mlp,
    MlpParams, Orientation, Result,
};

const HIDDEN: usize = 896;
const INTERMEDIATE: usize = 4864;
const PROMPT: usize = 4096;
const LEAST_CALLS: usize = 500;
const EVERY: Duration = Duration::from_millis(20);

fn block(device: &Device) -> Result<Mlp> {
    // Some numbers around zero: their values do not matter to the time.
    let number = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 7) % 2048) as f32 / 1e5 - 0.01;
    let weights: Vec<f32> = (0..HIDDEN * INTERMEDIATE).map(number).collect();
    let gate = MatrixRef::new(&weights, INTERMEDIATE, HIDDEN)?;
    let gate_up = GateUpWeights::separate(gate, gate, Orientation::OutIn)?;
    let gated = GatedLinearParams::new(gate_up, Activation::SWIGLU);
    let down = MatrixRef::new(&weights, HIDDEN, INTERMEDIATE)?;
    let params = MlpParams::new(gated, down, Orientation::OutIn);
    Mlp::from_params(device, &params)
}

fn inputs(tokens: usize) -> Result<Matrix<f32>> {
    Ok(Matrix::from_vec(vec![0.5; tokens * HIDDEN], tokens, HIDDEN)?)
}

/// Times of calls, sorted.
struct Latency(Vec<Duration>);

impl Latency {
    /// Makes a call of one token every 20 ms, or at once where the one before ended later.
    fn measure(mlp: &Mlp, calls: usize, options: &CallOptions) -> Result<Self> {
        let (x, mut y) = (inputs(1)?, Matrix::<f32>::zeros(1, HIDDEN)?);
        mlp.forward_opts(&x, &mut y, options)?;
        let mut times = Vec::with_capacity(calls);
        let mut next = Instant::now();
        for _ in 0..calls {
            next = (next + EVERY).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            let start = Instant::now();
            mlp.forward_opts(&x, &mut y, options)?;
            times.push(start.elapsed());
        }
        times.sort();
        Ok(Self(times))
    }

    /// The time in µs that so many per cent of the calls do not exceed.
    fn percentile(&self, percent: usize) -> f64 {
        let at = (self.0.len() * percent).div_ceil(100).saturating_sub(1);
        self.0.get(at).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({ "p50": self.percentile(50), "p99": self.percentile(99) })
    }
}

/// Tokens per second of calls with a prompt, until `stop` or one call at least.
fn prefill(mlp: &Mlp, stop: &AtomicBool) -> Result<f64> {
    let (x, mut y) = (inputs(PROMPT)?, Matrix::<f32>::zeros(PROMPT, HIDDEN)?);
    mlp.forward_into(&x, &mut y)?;
    let (mut tokens, start) = (0, Instant::now());
    while tokens == 0 || !stop.load(Ordering::Relaxed) {
        mlp.forward_into(&x, &mut y)?;
        tokens += PROMPT;
    }
    Ok(tokens as f64 / start.elapsed().as_secs_f64())
}

/// What `f` gives while another thread computes prompts, and how fast that is.
fn beside_prefill<R>(mlp: &Mlp, f: impl FnOnce() -> Result<R>) -> Result<(R, f64)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let prompts = scope.spawn(|| prefill(mlp, &stop));
        // Its first call, which makes the working memory, is not measured.
        std::thread::sleep(Duration::from_millis(500));
        let result = f();
        stop.store(true, Ordering::Relaxed);
        let speed = match prompts.join() {
            Ok(speed) => speed?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        Ok((result?, speed))
    })
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let (mut json, mut calls) = (false, LEAST_CALLS);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = true,
            "--calls" => {
                let count = arguments.next().ok_or("--calls takes a number")?;
                calls = count.parse::<usize>()?.max(LEAST_CALLS);
            }
            other => return Err(format!("{other}: there are --json and --calls N").into()),
        }
    }
    let device = Device::cpu()?;
    let (decoding, prompts) = (block(&device)?, block(&device)?);
    let shared = CallOptions::default();
    let one = shared.with_max_threads(1);

    let alone = Latency::measure(&decoding, calls, &shared)?;
    let alone_one_thread = Latency::measure(&decoding, calls, &one)?;
    let while_measured = EVERY * calls.try_into()?;
    let ((), speed_alone) = beside_prefill(&prompts, || {
        std::thread::sleep(while_measured);
        Ok(())
    })?;
    let (beside, speed_beside) =
        beside_prefill(&prompts, || Latency::measure(&decoding, calls, &shared))?;

    if json {
        let figures = serde_json::json!({
            "alone_us": alone.json(),
            "alone_one_thread_us": alone_one_thread.json(),
            "beside_us": beside.json(),
            "prefill_tokens_per_s": { "alone": speed_alone, "beside": speed_beside },
        });
        println!("{figures}");
        return Ok(());
    }
    println!("One token, {HIDDEN}/{INTERMEDIATE} in f32, every 20 ms, {calls} calls, {device}\n");
    println!("{:24}{:>10}{:>10}{:>10}   of one thread alone", "", "p50 µs", "p99 µs", "max µs");
    let rows = [
        ("alone", &alone),
        ("alone, one thread", &alone_one_thread),
        ("beside a prefill", &beside),
    ];
    for (name, times) in rows {
        let [p50, p99, most] = [50, 99, 100].map(|percent| times.percentile(percent));
        let [of_p50, of_p99] =
            [50, 99].map(|p| times.percentile(p) / alone_one_thread.percentile(p));
        println!("{name:24}{p50:>10.0}{p99:>10.0}{most:>10.0}   p50 {of_p50:.2}, p99 {of_p99:.2}");
    }
    println!(
        "\nPrefill of {PROMPT} tokens, tokens/s: alone {speed_alone:.0}, beside {speed_beside:.0}"
    );
    println!("({:.2} of alone)", speed_beside / speed_alone);
    Ok(())
}
