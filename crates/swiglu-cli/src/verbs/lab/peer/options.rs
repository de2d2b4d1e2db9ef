//! What a profile of this peer can say, and the devices that it names.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;
use swiglu::cuda::{CudaOptions, DecodeDesign};
use swiglu::{CpuOptions, Device, Isa, Path};
use swiglu_lab::DeviceKind;
use swiglu_lab::peer::protocol::ProfileRef;

/// The options of a profile.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Options {
    /// Which path; by default the one that is planned.
    pub(super) path: PathChoice,
    /// CUDA, feed-forward blocks of few tokens: one way of computing them; by default the one that
    /// is planned.
    pub(super) design: Option<DesignChoice>,
    /// Decode quantised weights to the element type, once.
    pub(super) decode: bool,
    /// CUDA: replay a captured graph.
    pub(super) graph: bool,
    /// CUDA: round the factors of f32 products to TF32.
    tf32: bool,
    /// CUDA: memory from plain allocations instead of the stream-ordered pool.
    plain_allocations: bool,
    /// CUDA: leave out the kernels of one architecture.
    portable_kernels: bool,
    /// CPU: threads of one call [default: all].
    threads: Option<usize>,
    /// CPU: an instruction set [default: the best].
    isa: Option<IsaName>,
    /// The peer `read`: ask the processor for what comes later, as our kernels do; else leave it to the
    /// processor.
    pub(super) asks: bool,
}

/// Fused, unfused, or whichever a call's plan takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PathChoice {
    #[default]
    Planned,
    Fused,
    Unfused,
}

impl PathChoice {
    pub(super) fn path(self) -> Option<Path> {
        match self {
            PathChoice::Planned => None,
            PathChoice::Fused => Some(Path::Fused),
            PathChoice::Unfused => Some(Path::Unfused),
        }
    }
}

/// How few tokens go through a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DesignChoice {
    OneLaunch,
    TwoLaunches,
    /// The same by the copy engine of sm_90.
    BulkOneLaunch,
    BulkOneLaunchWide,
    /// The gated linear layer, then cuBLASLt.
    Steps,
    /// One thread block: the warning.
    Sequential,
}

impl DesignChoice {
    pub(super) fn design(self) -> Option<DecodeDesign> {
        match self {
            DesignChoice::OneLaunch => Some(DecodeDesign::OneLaunch),
            DesignChoice::TwoLaunches => Some(DecodeDesign::TwoLaunches),
            DesignChoice::BulkOneLaunch => Some(DecodeDesign::BulkOneLaunch),
            DesignChoice::BulkOneLaunchWide => Some(DecodeDesign::BulkOneLaunchWide),
            DesignChoice::Steps => None,
            DesignChoice::Sequential => Some(DecodeDesign::Sequential),
        }
    }
}

/// An instruction set by its name.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "String")]
struct IsaName(Isa);

impl TryFrom<String> for IsaName {
    type Error = <Isa as FromStr>::Err;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        name.parse().map(IsaName)
    }
}

impl Options {
    /// Reads what a definition says, of a profile that reads alone or of one that computes.
    pub(super) fn read(profile: &ProfileRef, reads: bool) -> anyhow::Result<Self> {
        let what = || format!("the options of profile `{}`", profile.id);
        let given: Self =
            serde_json::from_value(Value::Object(profile.options.clone())).with_context(what)?;
        let of_reading =
            Self { asks: given.asks, threads: given.threads, isa: given.isa, ..Self::default() };
        match reads {
            true if given != of_reading => {
                Err(anyhow!("the peer `read` has asks, threads and isa, and no others"))
            }
            false if given.asks => Err(anyhow!("asks is an option of the peer `read`")),
            _ => Ok(given),
        }
        .with_context(what)
    }

    fn expect_device(&self, device: DeviceKind) -> anyhow::Result<()> {
        let of_cuda = self.graph
            || self.tf32
            || self.plain_allocations
            || self.portable_kernels
            || self.design.is_some();
        let of_cpu = self.threads.is_some() || self.isa.is_some();
        match device {
            DeviceKind::Cpu if of_cuda => {
                bail!(
                    "graph, tf32, plain_allocations, portable_kernels and design are options of \
                     CUDA devices"
                )
            }
            DeviceKind::Cuda if of_cpu => bail!("threads and isa are options of the CPU"),
            _ => Ok(()),
        }
    }
}

/// The devices that were opened: threads and kernels are kept from case to case.
#[derive(Default)]
pub(super) struct Devices(Vec<(Key, Device)>);

#[derive(PartialEq)]
struct Key {
    kind: DeviceKind,
    tf32: bool,
    plain_allocations: bool,
    portable_kernels: bool,
    threads: Option<usize>,
    isa: Option<IsaName>,
}

impl Devices {
    pub(super) fn open(&mut self, kind: DeviceKind, options: &Options) -> anyhow::Result<Device> {
        options.expect_device(kind)?;
        let Options { tf32, plain_allocations, portable_kernels, threads, isa, .. } = *options;
        let key = Key { kind, tf32, plain_allocations, portable_kernels, threads, isa };
        if let Some((_, device)) = self.0.iter().find(|(k, _)| *k == key) {
            return Ok(device.clone());
        }
        let device = match kind {
            DeviceKind::Cpu => Device::cpu_with(CpuOptions { isa: isa.map(|i| i.0), threads })?,
            DeviceKind::Cuda => {
                let options = CudaOptions {
                    tf32,
                    plain_allocations,
                    portable_kernels,
                    ..CudaOptions::default()
                };
                Device::cuda_with(&options)?
            }
        };
        self.0.push((key, device.clone()));
        Ok(device)
    }

    /// The device of the run.
    pub(super) fn first(&self) -> Option<&Device> {
        self.0.first().map(|(_, device)| device)
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(_, device)| device.to_string())).finish()
    }
}
