//! The machine that is measured, and how fast it runs at this moment.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::case::DeviceKind;
use crate::error::{LabError, Result};
use crate::files::entries;
use crate::record::Machine;

impl Machine {
    /// The facts of this machine. Records lie in a directory of `name`; by default one made of the
    /// accelerator's name (`nvidia-h200`) or of the processor's family and the number of its
    /// threads (`amd-zen5-2c`).
    ///
    /// # Errors
    /// [`LabError::Name`] if `name` cannot be a directory's.
    pub fn detect(device: DeviceKind, name: Option<&str>) -> Result<Self> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (gpu, driver) = match device {
            DeviceKind::Cpu => (None, None),
            DeviceKind::Cuda => accelerator(Path::new("/proc/driver/nvidia")),
        };
        let default = match &gpu {
            Some(gpu) => slug(gpu),
            None => format!("{}-{threads}c", family(&cpuinfo)),
        };
        let name = name.unwrap_or(&default);
        LabError::expect_name("machine", name)?;
        Ok(Self {
            name: name.to_owned(),
            device,
            cpu: field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH).to_owned(),
            threads,
            memory_bytes: memory(),
            os: os(),
            gpu,
            driver,
        })
    }
}

/// The first value of a key in the text of `/proc/cpuinfo`.
fn field<'a>(cpuinfo: &'a str, key: &str) -> Option<&'a str> {
    let pair = |line: &'a str| line.split_once(':').map(|(k, v)| (k.trim(), v.trim()));
    cpuinfo.lines().filter_map(pair).find(|(k, _)| *k == key).map(|(_, v)| v)
}

/// Vendor and generation, where it is known which models are of which.
fn family(cpuinfo: &str) -> String {
    let number = |key| field(cpuinfo, key).and_then(|v| v.parse::<u32>().ok());
    let vendor = field(cpuinfo, "vendor_id");
    match (vendor, number("cpu family"), number("model")) {
        (Some("AuthenticAMD"), Some(family), Some(model)) => match (family, model) {
            (0x17, ..0x30) => "amd-zen".into(),
            (0x17, _) => "amd-zen2".into(),
            (0x19, 0x10..0x20 | 0x60..0x80 | 0xa0..0xb0) => "amd-zen4".into(),
            (0x19, _) => "amd-zen3".into(),
            (0x1a, _) => "amd-zen5".into(),
            _ => format!("amd-{family:x}-{model:x}"),
        },
        (Some("GenuineIntel"), Some(family), Some(model)) => format!("intel-{family:x}-{model:x}"),
        _ => std::env::consts::ARCH.replace('_', "-"),
    }
}

/// Name and driver version of the first accelerator, as its driver tells.
fn accelerator(driver: &Path) -> (Option<String>, Option<String>) {
    let gpus = entries(&driver.join("gpus")).unwrap_or_default();
    let first = gpus.first().map(|gpu| gpu.join("information"));
    let information = first.and_then(|file| fs::read_to_string(file).ok());
    let name = information.as_deref().and_then(|text| field(text, "Model")).map(str::to_owned);
    let version = fs::read_to_string(driver.join("version")).unwrap_or_default();
    let number =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let version = version.lines().next().unwrap_or_default().split_whitespace().find(number);
    (name, version.map(str::to_owned))
}

fn slug(name: &str) -> String {
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|p| !p.is_empty());
    parts.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

fn memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = field(&text, "MemTotal").and_then(|v| v.split_whitespace().next()?.parse().ok());
    kib.map_or(0, |kib: u64| kib * 1024)
}

fn os() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{} {}", std::env::consts::OS, release.trim()).trim_end().to_owned()
}

/// As many dependent steps as there are words behind the semicolon.
macro_rules! chain_of {
    ($x:ident, $factor:ident; $($step:literal)*) => {
        $(let _ = $step; $x = ($x ^ $factor).wrapping_mul($factor);)*
    };
}

/// Effective clock of one core in MHz, if a multiplication takes three cycles and an exclusive or
/// takes one, as on every current x86-64 and most other processors: the best of some short chains
/// of dependent operations, so that an interruption does not count. They take a few milliseconds together, in which
/// a clock can rise, and no more where nothing is optimised, which gives a fraction of the clock.
pub(crate) fn cpu_mhz() -> f64 {
    const LENGTH: u32 = 100_000;
    const LATENCY: f64 = 4.0;
    let chain = || {
        let start = Instant::now();
        let mut x = black_box(0x9E37_79B9_7F4A_7C15u64);
        // Products alone would be joined; an exclusive or between them prevents it.
        let factor = black_box(0xBF58_476D_1CE4_E5B9u64);
        let mut left = LENGTH;
        while left > 0 {
            // So many that the loop itself hides behind the chain, also where nothing is optimised.
            chain_of!(x, factor; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19);
            left -= 20;
        }
        black_box(x);
        f64::from(LENGTH) * LATENCY / start.elapsed().as_secs_f64() / 1e6
    };
    let begun = Instant::now();
    let mut best = chain();
    while begun.elapsed() < Duration::from_millis(5) {
        best = best.max(chain());
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_stable() {
        let zen5 =
            "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n";
        assert_eq!(family(zen5), "amd-zen5");
        assert_eq!(field(zen5, "model name"), Some("AMD EPYC"));
        let intel = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\n";
        assert_eq!(family(intel), "intel-6-8f");
        assert_eq!(slug("NVIDIA H200 (MIG)"), "nvidia-h200-mig");
        let machine = Machine::detect(DeviceKind::Cpu, None).unwrap();
        assert!(crate::place::is_name(&machine.name), "{}", machine.name);
        assert_eq!(Machine::detect(DeviceKind::Cpu, Some("here")).unwrap().name, "here");
        for bad in ["", "../x", "A b", ".hidden"] {
            assert!(Machine::detect(DeviceKind::Cpu, Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_driver_tells_what_the_accelerator_is() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = dir.path().join("gpus/0000:01:00.0");
        fs::create_dir_all(&gpu).unwrap();
        fs::write(gpu.join("information"), "Model: \t\t NVIDIA H200\nIRQ: 3\n").unwrap();
        let version =
            "NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15  Release\nGCC 12.2.0\n";
        fs::write(dir.path().join("version"), version).unwrap();
        let found = accelerator(dir.path());
        assert_eq!(found, (Some("NVIDIA H200".into()), Some("570.86.15".into())));
        assert_eq!(accelerator(&dir.path().join("none")), (None, None));
    }
}
