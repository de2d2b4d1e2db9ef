//! Where layers run.

use std::fmt;
use std::str::FromStr;

use swiglu_core::{DType, Error as CoreError, Op, Path, Plan, Problem, QuantizedType};
use swiglu_cpu::{Cpu, CpuOptions};
#[cfg(feature = "cuda")]
use swiglu_cuda::{Cuda, CudaOptions};

use crate::error::{Error, Result};
use crate::explain::Explanation;

/// A device that layers are packed for and run on. Cheap to clone; clones share its threads or its
/// streams and kernels.
///
/// It is also parsed from a name: `best`, `cpu`, `cuda` (the first CUDA device) or `cuda:1`.
///
/// Two are equal where one is a clone of the other, which is cheap to ask: layers and memory of equal devices go together.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// The processor, with an instruction set and a number of threads.
    Cpu(Cpu),
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

impl Device {
    /// The best device of this machine that works: the first CUDA device that there are kernels and libraries for, else
    /// [`Device::cpu`]. [`Device::probe`] says why another was not taken.
    ///
    /// # Errors
    /// As [`Device::cpu`].
    pub fn best() -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = cuda_devices().find_map(|(_, cuda)| cuda.ok()) {
            return Ok(Device::Cuda(cuda));
        }
        Self::cpu()
    }

    /// Every device of this machine, the best first, opened, or with what speaks against it.
    pub fn probe() -> Vec<(String, Result<Self>)> {
        let mut all = Vec::new();
        #[cfg(feature = "cuda")]
        all.extend(cuda_devices().map(|(name, cuda)| (name, cuda.map(Device::Cuda))));
        all.push(("cpu".to_owned(), Self::cpu()));
        all
    }

    /// The CPU with its widest instruction set and one thread per processor.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Unavailable`] if threads cannot be started.
    pub fn cpu() -> Result<Self> {
        Self::cpu_with(CpuOptions::default())
    }

    /// The CPU with a forced instruction set, a number of threads, or threads that it shares.
    ///
    /// # Errors
    /// [`swiglu_core::Error::OutOfRange`] for zero threads or too many; [`swiglu_core::Error::Unavailable`]
    /// for an instruction set this machine lacks or threads that cannot be started.
    pub fn cpu_with(options: CpuOptions) -> Result<Self> {
        Ok(Device::Cpu(Cpu::new(&options)?))
    }

    /// A CUDA device by its number, from 0.
    ///
    /// # Errors
    /// [`CudaError`](crate::cuda::CudaError) without a driver, without that device, or for one that is too old.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Ok(Device::Cuda(Cuda::new(ordinal)?))
    }

    /// A CUDA device with options.
    ///
    /// # Errors
    /// As [`Device::cuda`].
    #[cfg(feature = "cuda")]
    pub fn cuda_with(options: &CudaOptions) -> Result<Self> {
        Ok(Device::Cuda(Cuda::with_options(options)?))
    }

    /// How a problem will be computed here, from the numbers alone: a layer packed for the same path
    /// says the same. [`None`] is the device's own choice, as [`Mlp::from_params`](crate::Mlp) makes
    /// it: on the CPU always the fused path, on a GPU the one that is expected to be faster.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`] for what no layer computes here: [`Problem::expect_computed`], and on a CUDA device row steps
    /// of a block.
    pub fn plan(
        &self,
        problem: Problem,
        path: impl Into<Option<Path>>,
    ) -> std::result::Result<Plan, CoreError> {
        let path = path.into();
        match self {
            Device::Cpu(cpu) => cpu.plan(problem, path.unwrap_or(Path::Fused)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.plan(problem, path),
        }
    }

    /// The plan, what it was chosen from, and what the problem costs at least.
    ///
    /// # Errors
    /// As [`Device::plan`].
    pub fn explain(
        &self,
        problem: Problem,
        path: impl Into<Option<Path>>,
    ) -> std::result::Result<Explanation, CoreError> {
        let path = path.into();
        Ok(Explanation::new(self, self.plan(problem, path)?, path))
    }

    /// Refuses quantised weights that the device has no kernels for in this operation and with inputs
    /// and outputs of `dtype`: they are decoded.
    ///
    /// # Errors
    /// [`CoreError::Unsupported`], which says what there are kernels for.
    pub fn expect_quantized(
        &self,
        op: Op,
        dtype: DType,
        kind: QuantizedType,
    ) -> std::result::Result<(), CoreError> {
        match self {
            Device::Cpu(_) => swiglu_cpu::expect_quantized(op, dtype, kind),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => swiglu_cuda::expect_quantized(op, dtype, kind),
        }
    }

    /// Up to this many tokens a call reads quantised weights once, as they are: the fast way where they come
    /// from memory (decoded ones that stay in a CPU's cache can be faster before, by 15 % for 8 tokens of a
    /// small layer). More tokens make it decode them again or, on a CUDA device, read them several times:
    /// decoded weights ([`crate::Weights::decoded`]) are then at least as fast.
    pub fn quantized_tokens(&self, dtype: DType, kind: QuantizedType) -> usize {
        match (self, kind.block()) {
            (Device::Cpu(cpu), Some(block)) => cpu.quantized_rows(dtype, block),
            (Device::Cpu(_), None) => 0,
            #[cfg(feature = "cuda")]
            (Device::Cuda(_), _) => swiglu_cuda::quantized_tokens(),
        }
    }

    /// The kind of device: `cpu` or `cuda`.
    pub fn name(&self) -> &'static str {
        match self {
            Device::Cpu(_) => "cpu",
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => "cuda",
        }
    }

    /// Threads of the host that take part in one call.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.threads(),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 1,
        }
    }

    /// Frees the working memory of the host that no call uses at the moment, and returns its bytes. A CPU keeps a block for
    /// each of the calls that there were at the same time, not larger than the largest of them took
    /// ([`Layer::workspace_bytes`](crate::Layer::workspace_bytes)), and as many for what was kept between the passes of training
    /// ([`Saved`](crate::Saved)); a CUDA device keeps
    /// there what dropped matrices of page-locked memory had, and gives back device memory that no stream has.
    pub fn trim(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.trim(),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.trim(),
        }
    }
}

/// CUDA devices by name, each opened when it is asked for; one without a number where the driver cannot be used.
#[cfg(feature = "cuda")]
fn cuda_devices() -> impl Iterator<Item = (String, Result<Cuda>)> {
    let (count, none) = match Cuda::device_count() {
        Ok(count) => (count, None),
        Err(why) => (0, Some(("cuda".to_owned(), Err(why.into())))),
    };
    let open = |ordinal| -> Result<Cuda> {
        let cuda = Cuda::new(ordinal)?;
        cuda.expect_libraries()?;
        Ok(cuda)
    };
    (0..count).map(move |ordinal| (format!("cuda:{ordinal}"), open(ordinal))).chain(none)
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "best" => Self::best(),
            "cpu" => Self::cpu(),
            _ => match cuda_ordinal(name) {
                #[cfg(feature = "cuda")]
                Some(ordinal) => Self::cuda(ordinal),
                #[cfg(not(feature = "cuda"))]
                Some(_) => Err(CoreError::Unavailable {
                    what: format!("device {name}"),
                    why: "this build is without the feature `cuda`".into(),
                }
                .into()),
                None => Err(unknown(name).into()),
            },
        }
    }
}

/// The number in `cuda` (0) or `cuda:N`.
fn cuda_ordinal(name: &str) -> Option<usize> {
    match name.strip_prefix("cuda")? {
        "" => Some(0),
        number => number.strip_prefix(':')?.parse().ok(),
    }
}

fn unknown(name: &str) -> CoreError {
    CoreError::UnknownName {
        what: "device",
        given: name.to_owned(),
        choices: "best, cpu, cuda, cuda:N".into(),
    }
}

impl fmt::Display for Device {
    /// The kind and what it was given: `cpu (avx512-bf16, 2 threads)`, `cuda:0 (NVIDIA H200,
    /// sm_90a)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(cpu) => {
                let plural = if cpu.threads() == 1 { "" } else { "s" };
                write!(f, "cpu ({}, {} thread{plural})", cpu.isa(), cpu.threads())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let tf32 = if cuda.tf32() { ", TF32" } else { "" };
                write!(f, "cuda:{} ({}, {}{tf32})", cuda.ordinal(), cuda.facts().name, cuda.arch())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swiglu_cpu::Isa;

    #[test]
    fn devices_name_what_they_were_given() {
        let options = CpuOptions::default().with_isa(Isa::Portable).with_threads(1);
        let device = Device::cpu_with(options).unwrap();
        assert_eq!(device.name(), "cpu");
        assert_eq!(device.to_string(), "cpu (portable, 1 thread)");
    }

    #[test]
    fn clones_are_equal_and_devices_made_alike_are_not() {
        let options = CpuOptions::default().with_threads(1);
        let [one, other] = [(); 2].map(|()| Device::cpu_with(options.clone()).unwrap());
        assert!(one == one.clone() && one != other);
    }

    #[test]
    fn zero_threads_are_refused() {
        let options = CpuOptions::default().with_threads(0);
        let error = Device::cpu_with(options).unwrap_err().to_string();
        assert!(error.contains("threads = 0") && error.contains("expected 1 to"), "{error}");
    }

    #[test]
    fn names_are_parsed_and_others_refused() {
        assert_eq!(Device::from_str("cpu").unwrap().name(), "cpu");
        assert_eq!(["cuda", "cuda:3"].map(cuda_ordinal), [Some(0), Some(3)]);
        for name in ["tpu", "cuda:", "cuda:-1", "cuda0", "CPU"] {
            let error = Device::from_str(name).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("cuda:N"), "{error}");
        }
    }
}
