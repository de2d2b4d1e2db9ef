//! `swiglu info`: this program, this processor, CUDA devices and libraries: what is here, or why not.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};
use swiglu::Isa;
use swiglu_cuda::jit::{self, cache::CacheOptions, cache::KernelCache};
use swiglu_cuda::library::{self, Library};
use swiglu_cuda::tuning::TuningOptions;
use swiglu_cuda::{Calibrated, Calibration, Cuda, CudaError, Rate, cublaslt_version};
use swiglu_lab::DeviceKind;
use swiglu_lab::record::Machine;

use crate::table::number;
use crate::terminal::{Terminal, Verdict, shown};

#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// Measure the rates of each CUDA device, for plans to follow: bandwidth, clock under load, L2, a
    /// launch and a barrier of the grid, beside what is expected. They are kept where `tune` keeps measurements
    #[arg(long)]
    probe: bool,
}

pub(crate) fn info(args: &InfoArgs, terminal: &mut Terminal) -> Result<Verdict> {
    let mut lines = Vec::new();
    let mut document = processor(&mut lines)?;
    document["cuda"] = cuda(args.probe, &mut lines);
    terminal.print(&document, |_, terminal| {
        for (name, value) in lines {
            let value = if value.is_empty() { "unknown" } else { &value };
            writeln!(terminal, "{name:<10} {value}")?;
        }
        Ok(())
    })
}

/// What is said of something, under its name.
type Lines = Vec<(&'static str, String)>;

fn processor(lines: &mut Lines) -> Result<Value> {
    let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    let (version, isa, features) = (env!("CARGO_PKG_VERSION"), Isa::detect(), features());
    let Machine { cpu, threads, .. } = Machine::detect(DeviceKind::Cpu, None)?;
    let isas: Vec<Isa> = Isa::ALL.into_iter().rev().collect();
    let caches = caches();
    let kernel = |name: &Isa| match (*name == isa, name.is_available()) {
        (true, _) => format!("{name} (used)"),
        (_, true) => name.to_string(),
        (_, false) => format!("{name} (not on this processor)"),
    };
    let cache = |[level, _, size]: &[String; 3]| format!("L{level} {size}");
    lines.extend([
        ("swiglu", format!("{version} ({target})")),
        ("processor", cpu.clone()),
        ("threads", threads.to_string()),
        ("caches", caches.iter().map(cache).collect::<Vec<_>>().join(", ")),
        ("kernels", isas.iter().map(kernel).collect::<Vec<_>>().join(", ")),
        ("features", features.join(" ")),
    ]);
    let kernel = |name: &Isa| json!({ "name": name, "available": name.is_available() });
    let cache = |[level, kind, size]: &[String; 3]| json!({ "level": level.parse::<u32>().ok(), "kind": kind, "size": size });
    Ok(json!({
        "version": version, "target": target, "cpu": cpu, "threads": threads, "isa": isa,
        "isas": isas.iter().map(kernel).collect::<Vec<_>>(),
        "features": features, "caches": caches.iter().map(cache).collect::<Vec<_>>(),
    }))
}

/// The processor features that a kernel may use.
fn features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detected {
            ($($name:tt)*) => {
                [$(is_x86_feature_detected!($name).then_some($name)),*]
            };
        }
        let all = detected!(
            "sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl"
            "avx512bf16" "avx512fp16" "avx512vnni"
        );
        all.into_iter().flatten().collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// Level, kind and size of the first processor's data caches, where the system tells.
fn caches() -> Vec<[String; 3]> {
    let read = |index: usize, file: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}");
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    };
    let cache = |i| Some([read(i, "level")?, read(i, "type")?, read(i, "size")?]);
    (0..8).filter_map(cache).filter(|[_, kind, _]| kind != "Instruction").collect()
}

fn cuda(probe: bool, lines: &mut Lines) -> Value {
    let mut said = Vec::new();
    let (devices, none) = match Cuda::device_count() {
        Ok(0) => (Vec::new(), Some(CudaError::NoDevice.to_string())),
        Ok(count) => ((0..count).map(|at| device(at, probe, &mut said)).collect(), None),
        Err(error) => (Vec::new(), Some(brief(&error))),
    };
    let lacking = if probe { "no device to probe" } else { "no device" };
    said.extend(none.iter().map(|why| format!("{lacking}: {why}")));
    let libraries = [
        // The driver's version is that of a device.
        library(Library::Driver, || Ok(None)),
        library(Library::Nvrtc, || jit::version().map(|(a, b)| Some(format!("{a}.{b}")))),
        library(Library::CublasLt, || {
            cublaslt_version().map(|(a, b, c)| Some(format!("{a}.{b}.{c}")))
        }),
    ];
    // What the line about devices has said already is not said again.
    let news = |(line, _): &&(String, Value)| none.as_deref() != Some(line);
    said.extend(libraries.iter().filter(news).map(|(line, _)| line.clone()));
    let cache = KernelCache::new(&CacheOptions::default());
    let [read_only, kept] = cache.directories();
    let dir = |what: &str, dir: Option<&Path>| dir.map(|d| format!("{what} {}", d.display()));
    said.extend(dir("kernels read from", read_only));
    said.extend(dir("kernels kept in", kept));
    let measurements = TuningOptions::default().directory();
    said.extend(dir("measurements kept in", measurements.as_deref()));
    let heads = std::iter::once("CUDA").chain(std::iter::repeat(""));
    lines.extend(heads.zip(said));
    json!({
        "devices": devices, "none": none, "libraries": libraries.map(|(_, document)| document),
        "read_only_cache": read_only.map(shown), "cache": kept.map(shown), "tuning": measurements.map(shown),
    })
}

fn device(ordinal: usize, probe: bool, said: &mut Vec<String>) -> Value {
    let cuda = match Cuda::new(ordinal) {
        Ok(cuda) => cuda,
        Err(error) => {
            said.push(format!("cuda:{ordinal} cannot be used: {error}"));
            return json!({ "ordinal": ordinal, "why": error.to_string() });
        }
    };
    let (f, arch) = (cuda.facts(), cuda.arch());
    let (major, minor) = f.driver_version;
    let (l2, memory) = (f.l2_bytes >> 20, f.memory_bytes as f64 / f64::from(1 << 30));
    said.push(format!(
        "cuda:{ordinal} {}, {arch}, {} SMs, L2 {l2} MiB, {memory:.1} GiB, driver for CUDA {major}.{minor}",
        f.name, f.sm_count
    ));
    let mut document = json!(f);
    document["arch"] = json!(arch);
    if probe {
        document["probe"] = probed(&cuda, said);
    }
    document["rates"] = json!(cuda.calibration());
    document
}

/// Measures a device, and says what it can do beside what is expected. What came of it, as a part of a document.
pub(crate) fn probed(cuda: &Cuda, said: &mut Vec<String>) -> Value {
    match cuda.calibrate() {
        Ok(Calibrated { rates, kept, .. }) => {
            said.extend(rate_lines(&rates));
            said.push(match &kept {
                Ok(path) => format!("rates kept in {}", path.display()),
                Err(why) => why.to_string(),
            });
            json!({ "kept": kept.as_ref().ok().map(shown), "why": kept.err().map(|e| e.to_string()) })
        }
        Err(error) => {
            said.push(format!("its rates were not measured: {error}"));
            json!({ "kept": null, "why": error.to_string() })
        }
    }
}

/// A line of each rate, in units that people read.
fn rate_lines(rates: &Calibration) -> impl Iterator<Item = String> {
    let units = [(1e-9, "GB/s"), (1e-6, "MHz"), (1e-9, "GB/s"), (1e6, "µs"), (1e6, "µs")];
    rates.each().into_iter().zip(units).map(|((name, rate), (scale, unit))| {
        let Rate { prior, measured, refused, .. } = rate;
        let value = |value: f64| number(value * scale);
        let (prior, why) = (value(*prior), refused.as_deref().unwrap_or("not measured"));
        match measured {
            Some(measured) => format!("{name} {} {unit}, expected {prior}", value(*measured)),
            None => format!("{name} expected {prior} {unit}: {why}"),
        }
    })
}

/// A library's line, and its part of the document.
fn library(
    library: Library,
    version: impl FnOnce() -> Result<Option<String>, CudaError>,
) -> (String, Value) {
    let (mut path, mut found) = (None, None);
    let version = library::load(library).and_then(|loaded| {
        (path, found) = (Some(loaded.path.clone()), Some(loaded.how));
        version()
    });
    let missing = version.as_ref().err().map(brief);
    let version = version.ok().flatten();
    let name = version.as_ref().map_or_else(|| library.to_string(), |v| format!("{library} {v}"));
    let line = match (&missing, &path) {
        (Some(why), _) => why.clone(),
        (None, Some(path)) => format!("{name}: {}", path.display()),
        (None, None) => name,
    };
    let path = path.map(shown);
    let document = json!({
        "library": library, "path": path, "found": found, "version": version, "missing": missing,
    });
    (line, document)
}

/// One plain line: where a library was looked for is told by whoever needs it.
fn brief(error: &CudaError) -> String {
    match error {
        CudaError::LibraryMissing { library, .. } => format!("{library} was not found"),
        other => other.to_string(),
    }
}
