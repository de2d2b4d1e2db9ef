//! `swiglu info`: this program, this processor, what is available.

mod cuda;

use std::io::Write;

use serde::Serialize;
use swiglu::Isa;

use crate::terminal::{Terminal, Verdict};
use cuda::CudaInfo;

#[derive(Debug, Serialize)]
struct Info {
    version: &'static str,
    target: String,
    cpu: Option<String>,
    threads: usize,
    isa: Isa,
    isas: Vec<IsaInfo>,
    features: Vec<&'static str>,
    caches: Vec<Cache>,
    cuda: CudaInfo,
}

#[derive(Debug, Serialize)]
struct IsaInfo {
    name: Isa,
    available: bool,
}

/// A cache of the first processor.
#[derive(Debug, PartialEq, Serialize)]
struct Cache {
    level: u32,
    kind: String,
    size: String,
}

fn gather() -> Info {
    Info {
        version: env!("CARGO_PKG_VERSION"),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        cpu: std::fs::read_to_string("/proc/cpuinfo").ok().as_deref().and_then(cpu_model),
        threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        isa: Isa::detect(),
        isas: Isa::ALL
            .map(|name| IsaInfo { name, available: name.is_available() })
            .into_iter()
            .rev()
            .collect(),
        features: features(),
        caches: caches(),
        cuda: cuda::gather(),
    }
}

/// The model's name in the text of `/proc/cpuinfo`.
fn cpu_model(text: &str) -> Option<String> {
    let value = |line: &str| line.split_once(':').map(|(_, v)| v.trim().to_owned());
    text.lines().find(|l| l.starts_with("model name")).and_then(value)
}

/// The processor features that a kernel may use.
fn features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detected {
            ($($name:tt)*) => {
                [$(($name, is_x86_feature_detected!($name))),*]
            };
        }
        let all = detected!(
            "sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl"
            "avx512bf16" "avx512fp16" "avx512vnni"
        );
        all.into_iter().filter(|&(_, has)| has).map(|(name, _)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// The data caches, where the system tells.
fn caches() -> Vec<Cache> {
    let read = |index: usize, file: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}");
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    };
    (0..8)
        .filter_map(|i| {
            let (level, kind, size) = (read(i, "level")?, read(i, "type")?, read(i, "size")?);
            Some(Cache { level: level.parse().ok()?, kind, size })
        })
        .filter(|cache| cache.kind != "Instruction")
        .collect()
}

pub(crate) fn info(terminal: &mut Terminal) -> anyhow::Result<Verdict> {
    let info = gather();
    if terminal.json() {
        terminal.print_json(&info)?;
    } else {
        terminal.write_all(text(&info).as_bytes())?;
    }
    Ok(Verdict::Passed)
}

fn text(info: &Info) -> String {
    let isas: Vec<String> = info
        .isas
        .iter()
        .map(|i| match (i.name == info.isa, i.available) {
            (true, _) => format!("{} (used)", i.name),
            (_, true) => i.name.to_string(),
            (_, false) => format!("{} (not on this processor)", i.name),
        })
        .collect();
    let caches: Vec<String> =
        info.caches.iter().map(|c| format!("L{} {}", c.level, c.size)).collect();
    let or_unknown = |list: &str| if list.is_empty() { "unknown".into() } else { list.to_owned() };
    let lines = [
        ("swiglu", format!("{} ({})", info.version, info.target)),
        ("processor", or_unknown(info.cpu.as_deref().unwrap_or_default())),
        ("threads", info.threads.to_string()),
        ("caches", or_unknown(&caches.join(", "))),
        ("kernels", isas.join(", ")),
        ("features", or_unknown(&info.features.join(" "))),
    ];
    let lines: String = lines.iter().map(|(name, value)| format!("{name:<10} {value}\n")).collect();
    lines + &info.cuda.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_read_from_cpuinfo() {
        let text = "processor\t: 0\nmodel name\t: A: CPU\nmodel name\t: B\n";
        assert_eq!(cpu_model(text).as_deref(), Some("A: CPU"));
        assert_eq!(cpu_model("Hardware : x\n"), None);
    }
}
