//! Nsight Compute: where it is, how it is asked, what it answers.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::counters::{Counters, KernelCounters};

/// The metrics that are asked for, by Nsight Compute's names.
pub const METRICS: [&str; 9] = [
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "lts__t_sector_hit_rate.pct",
    "launch__registers_per_thread",
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
    /// It could not be started or read.
    #[error("{program}: {error}", program = program.display())]
    Io {
        /// The program.
        program: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// It took longer than its limit and was ended.
    #[error("{program}: no end after {seconds} s; it was stopped", program = program.display())]
    Slow {
        /// The program.
        program: PathBuf,
        /// The limit.
        seconds: u64,
    },
    /// Users may not read counters on this machine, which is the driver's default.
    #[error(
        "the driver keeps performance counters to administrators (ERR_NVGPUCTRPERM): run as root, or \
         load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )]
    NotPermitted,
    /// It ended with an error.
    #[error("{program}: {status}: {text}", program = program.display())]
    Failed {
        /// The program.
        program: PathBuf,
        /// Its exit status.
        status: String,
        /// The last of what it said.
        text: String,
    },
    /// Its answer is not what is documented.
    #[error(transparent)]
    Csv(#[from] CsvError),
}

/// An answer that is not the documented table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CsvError {
    /// No header line.
    #[error("no table in the output of Nsight Compute: expected a line beginning with \"ID\"")]
    NoTable,
    /// A column is not there.
    #[error("the table of Nsight Compute has no column `{column}`, only {given}")]
    NoColumn {
        /// What was looked for.
        column: &'static str,
        /// What there is.
        given: String,
    },
    /// A line has no such shape.
    #[error("line {line} of the table of Nsight Compute: {reason}")]
    Line {
        /// The line, the header being the first.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A table without kernels.
    #[error("Nsight Compute saw no kernel: the program launched none on the device")]
    Empty,
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

    /// Its path.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The arguments before the profiled program's own.
    pub fn arguments(log: &Path) -> Vec<OsString> {
        let metrics = METRICS.join(",");
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
        let failed = |error| NcuError::Io { program: self.program.clone(), error };
        let directory = tempfile::tempdir().map_err(failed)?;
        let log = directory.path().join("ncu.csv");
        let stdin = match input {
            Some(path) => Stdio::from(std::fs::File::open(path).map_err(failed)?),
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
            .map_err(failed)?;
        let start = Instant::now();
        let status = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break status,
                None if start.elapsed() > LIMIT => {
                    // It may have ended meanwhile, which is as good.
                    let _ = child.kill();
                    let _ = child.wait();
                    let (program, seconds) = (self.program.clone(), LIMIT.as_secs());
                    return Err(NcuError::Slow { program, seconds });
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let mut text = String::new();
        // Without a log there is still the status to report.
        if let Ok(mut file) = std::fs::File::open(&log) {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map_err(failed)?;
            text = String::from_utf8_lossy(&bytes).into_owned();
        }
        if text.contains("ERR_NVGPUCTRPERM") {
            return Err(NcuError::NotPermitted);
        }
        if !status.success() {
            let program = self.program.clone();
            let last = text.lines().rev().take(5).collect::<Vec<_>>();
            let text = last.into_iter().rev().collect::<Vec<_>>().join(" / ");
            return Err(NcuError::Failed { program, status: status.to_string(), text });
        }
        Ok(parse_csv(&text)?)
    }
}

/// Reads the table of `ncu --csv --page details`: one row per launch and metric. Lines before the
/// header, and the profiler's own remarks (`==PROF== …`), are passed over.
///
/// # Errors
/// [`CsvError`].
pub fn parse_csv(text: &str) -> Result<Vec<KernelCounters>, CsvError> {
    let ours = |line: &&str| !line.starts_with("==");
    let lines = text.lines().filter(ours).skip_while(|l| !l.starts_with("\"ID\","));
    let table: String = lines.flat_map(|line| [line, "\n"]).collect();
    if table.is_empty() {
        return Err(CsvError::NoTable);
    }
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(table.as_bytes());
    let header = reader.headers().map_err(|e| of_line(1, &e))?.clone();
    let column = |name: &'static str| {
        let given = || header.iter().collect::<Vec<_>>().join(", ");
        let found = header.iter().position(|h| h == name);
        found.ok_or_else(|| CsvError::NoColumn { column: name, given: given() })
    };
    let (id, kernel) = (column("ID")?, column("Kernel Name")?);
    let (metric, unit, value) =
        (column("Metric Name")?, column("Metric Unit")?, column("Metric Value")?);
    // By name and in order of the first launch; the launches of a kernel differ in their ID.
    let mut kernels: Vec<(String, BTreeMap<u64, Counters>)> = Vec::new();
    for (i, row) in reader.records().enumerate() {
        let line = i as u64 + 2;
        let row = row.map_err(|e| of_line(line, &e))?;
        let cell = |at: usize| {
            row.get(at).ok_or_else(|| CsvError::Line {
                line,
                reason: format!("{} columns, expected more than {at}", row.len()),
            })
        };
        let launch = cell(id)?;
        let launch = launch.parse().map_err(|_| CsvError::Line {
            line,
            reason: format!("the ID is `{launch}`, expected a number"),
        })?;
        let name = cell(kernel)?;
        let at = kernels.iter().position(|(k, _)| k == name).unwrap_or_else(|| {
            kernels.push((name.to_owned(), BTreeMap::new()));
            kernels.len() - 1
        });
        let counters = kernels[at].1.entry(launch).or_default();
        if let Some(number) = number(cell(value)?, cell(unit)?) {
            counters.set(cell(metric)?, number);
        }
    }
    if kernels.is_empty() {
        return Err(CsvError::Empty);
    }
    let last = |(kernel, launches): (String, BTreeMap<u64, Counters>)| KernelCounters {
        kernel,
        launches: launches.len(),
        counters: launches.into_values().next_back().unwrap_or_default(),
    };
    Ok(kernels.into_iter().map(last).collect())
}

fn of_line(line: u64, error: &csv::Error) -> CsvError {
    CsvError::Line { line, reason: error.to_string() }
}

/// A value in bytes, nanoseconds or percent; none for `n/a`, which is what a device says that does
/// not count it.
fn number(text: &str, unit: &str) -> Option<f64> {
    let value: f64 = text.replace(',', "").parse().ok()?;
    let scale = match unit {
        "Kbyte" | "usecond" | "us" => 1e3,
        "Mbyte" | "msecond" | "ms" => 1e6,
        "Gbyte" | "second" | "s" => 1e9,
        _ => 1.0,
    };
    value.is_finite().then_some(value * scale)
}

impl Counters {
    fn set(&mut self, metric: &str, value: f64) {
        let fields = [
            // Nanoseconds.
            (&mut self.us, 1e-3),
            (&mut self.dram_percent, 1.0),
            (&mut self.dram_read_bytes, 1.0),
            (&mut self.dram_written_bytes, 1.0),
            (&mut self.tensor_percent, 1.0),
            (&mut self.sm_percent, 1.0),
            (&mut self.occupancy_percent, 1.0),
            (&mut self.l2_hit_percent, 1.0),
            (&mut self.registers, 1.0),
        ];
        for (name, (field, scale)) in METRICS.iter().zip(fields) {
            if *name == metric {
                *field = Some(value * scale);
            }
        }
    }
}
