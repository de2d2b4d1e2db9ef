//! Nsight Compute: where it is, how it is asked, what it answers.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::class::{Class, EXPLAINED};
use crate::peer::wait;

/// Where a metric is kept.
type Kept = fn(&mut Counters) -> &mut Option<f64>;

/// The metrics that are asked for, by Nsight Compute's names.
const METRICS: [(&str, Kept); 9] = [
    ("gpu__time_duration.sum", |c| &mut c.us),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", |c| &mut c.dram_percent),
    ("dram__bytes_read.sum", |c| &mut c.dram_read_bytes),
    ("dram__bytes_write.sum", |c| &mut c.dram_written_bytes),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", |c| &mut c.tensor_percent),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed", |c| &mut c.sm_percent),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", |c| &mut c.occupancy_percent),
    ("lts__t_sector_hit_rate.pct", |c| &mut c.l2_hit_percent),
    ("launch__registers_per_thread", |c| &mut c.registers),
];

/// How long a profiled program may take: each kernel is replayed once per group of counters.
const LIMIT: Duration = Duration::from_secs(300);

/// Why there are no counters.
#[derive(Debug, Error)]
pub enum NcuError {
    /// There is no such program.
    #[error(
        "Nsight Compute is not installed: no `ncu` in PATH or in CUDA_PATH; times are our own count"
    )]
    Missing,
    /// The work runs on a processor, which it does not count.
    #[error("Nsight Compute counts on NVIDIA devices only; times are our own count")]
    NoDevice,
    /// Users may not read counters on this machine, which is the driver's default.
    #[error(
        "the driver keeps performance counters to administrators (ERR_NVGPUCTRPERM): run as root, or \
         load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )]
    NotPermitted,
    /// It could not be run, or not to its end.
    #[error("{}: {why}", program.display())]
    Failed {
        /// The program.
        program: PathBuf,
        /// What the system or the program said.
        why: String,
    },
    /// Its answer is not the documented table; what is wrong with it.
    #[error("{0}")]
    Table(String),
}

/// Counters of one launch; what the device does not count is absent.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Microseconds, with the profiler attached: longer than without.
    pub us: Option<f64>,
    /// Of the device memory's peak, in percent.
    pub dram_percent: Option<f64>,
    /// Bytes read from device memory.
    pub dram_read_bytes: Option<f64>,
    /// Bytes written to device memory.
    pub dram_written_bytes: Option<f64>,
    /// Cycles in which the tensor pipe worked, in percent.
    pub tensor_percent: Option<f64>,
    /// Of the multiprocessors' peak in any pipe, in percent.
    pub sm_percent: Option<f64>,
    /// Warps that were resident, in percent of the most.
    pub occupancy_percent: Option<f64>,
    /// Sectors found in the second-level cache, in percent.
    pub l2_hit_percent: Option<f64>,
    /// Registers of each thread.
    pub registers: Option<f64>,
}

/// A kernel and what was counted in its last launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelCounters {
    /// Its name.
    pub kernel: String,
    /// Launches that were seen.
    pub launches: usize,
    /// Counters of the last one: the first ones warm up.
    pub counters: Counters,
}

impl Counters {
    /// What the counters say the time consists of; none if they are absent.
    pub fn class(&self) -> Option<Class> {
        let compute = [self.tensor_percent, self.sm_percent].into_iter().flatten();
        let (memory, compute) = (self.dram_percent?, compute.reduce(f64::max)?);
        Some(match memory.max(compute) {
            most if most < 100.0 * EXPLAINED => Class::Latency,
            _ if memory >= compute => Class::Memory,
            _ => Class::Compute,
        })
    }
}

/// The profiler of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ncu {
    program: PathBuf,
}

impl Ncu {
    /// Looks in `PATH`, then under `CUDA_PATH`, then in the toolkit's usual place.
    ///
    /// # Errors
    /// [`NcuError::Missing`].
    pub fn find() -> Result<Self, NcuError> {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let cuda = std::env::var_os("CUDA_PATH").map(|root| PathBuf::from(root).join("bin"));
        let usual = [PathBuf::from("/usr/local/cuda/bin")];
        Self::find_in(std::env::split_paths(&paths).chain(cuda).chain(usual))
    }

    /// Looks in these directories.
    ///
    /// # Errors
    /// [`NcuError::Missing`].
    pub fn find_in(directories: impl IntoIterator<Item = PathBuf>) -> Result<Self, NcuError> {
        let name = format!("ncu{}", std::env::consts::EXE_SUFFIX);
        let mut candidates = directories.into_iter().map(|d| d.join(&name));
        let program = candidates.find(|p| p.is_file()).ok_or(NcuError::Missing)?;
        Ok(Self { program })
    }

    /// The arguments before the profiled program's own.
    pub fn arguments(log: &Path) -> Vec<OsString> {
        let metrics = METRICS.map(|(name, _)| name).join(",");
        let fixed = [
            "--csv",
            // One row per metric, whose layout does not depend on what was asked for.
            "--page",
            "details",
            // Plain bytes and nanoseconds, not what suits a reader.
            "--print-units",
            "base",
            // The clocks that the measured time had, not the base clock.
            "--clock-control",
            "none",
            "--target-processes",
            "all",
            "--metrics",
            &metrics,
            // The profiled program's own output must not mix with the table.
            "--log-file",
        ];
        fixed.iter().map(OsString::from).chain([log.as_os_str().to_owned()]).collect()
    }

    /// Runs a program under the profiler, with a file as its standard input.
    ///
    /// # Errors
    /// [`NcuError`].
    pub fn profile<A: AsRef<OsStr>>(
        &self,
        program: &Path,
        arguments: &[A],
        input: Option<&Path>,
    ) -> Result<Vec<KernelCounters>, NcuError> {
        let failed = |why: String| NcuError::Failed { program: self.program.clone(), why };
        let io = |error: io::Error| failed(error.to_string());
        let directory = tempfile::tempdir().map_err(io)?;
        let log = directory.path().join("ncu.csv");
        let stdin = match input {
            Some(path) => Stdio::from(fs::File::open(path).map_err(io)?),
            None => Stdio::null(),
        };
        let mut child = Command::new(&self.program)
            .args(Self::arguments(&log))
            .arg(program)
            .args(arguments)
            // Numbers with a decimal point in every country.
            .env("LC_ALL", "C")
            .stdin(stdin)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(io)?;
        let Some(status) = wait(&mut child, LIMIT).map_err(io)? else {
            // It may have ended meanwhile, which is as good.
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(format!("no end after {} s; it was stopped", LIMIT.as_secs())));
        };
        // Without a log there is still the status to report.
        let text = fs::read(&log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        if text.contains("ERR_NVGPUCTRPERM") {
            return Err(NcuError::NotPermitted);
        }
        if !status.success() {
            let mut last: Vec<&str> = text.lines().rev().take(5).collect();
            last.reverse();
            return Err(failed(format!("{status}: {}", last.join(" / "))));
        }
        parse_csv(&text)
    }
}

/// What a row is read for, of all its columns.
#[derive(Deserialize)]
struct Row {
    #[serde(rename = "ID")]
    id: String,
    #[serde(rename = "Kernel Name")]
    kernel: String,
    #[serde(rename = "Metric Name")]
    metric: String,
    #[serde(rename = "Metric Unit")]
    unit: String,
    #[serde(rename = "Metric Value")]
    value: String,
}

/// Reads the table of `ncu --csv --page details`: one row per launch and metric. Lines before the
/// header, and the profiler's own remarks (`==PROF== …`), are passed over.
///
/// # Errors
/// [`NcuError::Table`].
pub fn parse_csv(text: &str) -> Result<Vec<KernelCounters>, NcuError> {
    let ours = |line: &&str| !line.starts_with("==");
    let lines = text.lines().filter(ours).skip_while(|l| !l.starts_with("\"ID\","));
    let table: String = lines.flat_map(|line| [line, "\n"]).collect();
    if table.is_empty() {
        let why = "no table in the output of Nsight Compute: expected a line beginning with \"ID\"";
        return Err(NcuError::Table(why.into()));
    }
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(table.as_bytes());
    // By name and in order of the first launch; the launches of a kernel differ in their ID.
    let mut kernels: Vec<(String, BTreeMap<u64, Counters>)> = Vec::new();
    for (i, row) in reader.deserialize().enumerate() {
        let at = |reason: String| {
            NcuError::Table(format!("line {} of the table of Nsight Compute: {reason}", i + 2))
        };
        let row: Row = row.map_err(|e| at(e.to_string()))?;
        let launch =
            row.id.parse().map_err(|_| at(format!("the ID is `{}`, expected a number", row.id)))?;
        let known = kernels.iter().position(|(kernel, _)| *kernel == row.kernel);
        let known = known.unwrap_or_else(|| {
            kernels.push((row.kernel, BTreeMap::new()));
            kernels.len() - 1
        });
        let counters = kernels[known].1.entry(launch).or_default();
        if let Some((_, kept)) = METRICS.iter().find(|(name, _)| *name == row.metric) {
            *kept(counters) = number(&row.value, &row.unit).or(*kept(counters));
        }
    }
    if kernels.is_empty() {
        let why = "Nsight Compute saw no kernel: the program launched none on the device";
        return Err(NcuError::Table(why.into()));
    }
    let last = |(kernel, launches): (String, BTreeMap<u64, Counters>)| KernelCounters {
        kernel,
        launches: launches.len(),
        counters: launches.into_values().next_back().unwrap_or_default(),
    };
    Ok(kernels.into_iter().map(last).collect())
}

/// A value in bytes, microseconds or percent; none for `n/a`, which is what a device says that does
/// not count it.
fn number(text: &str, unit: &str) -> Option<f64> {
    let value: f64 = text.replace(',', "").parse().ok()?;
    let scale = match unit {
        "nsecond" | "ns" => 1e-3,
        "msecond" | "ms" | "Kbyte" => 1e3,
        "second" | "s" | "Mbyte" => 1e6,
        "Gbyte" => 1e9,
        _ => 1.0,
    };
    value.is_finite().then_some(value * scale)
}
