//! What a profile of this peer can say, and the devices that it names.

use std::fmt::Display;
use std::str::FromStr;

use anyhow::{Context, anyhow, bail};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use swiglu::{CpuOptions, Device, Isa, Path, SavePolicy};
use swiglu_cuda::{CudaOptions, DecodeDesign};
use swiglu_lab::peer::protocol::ProfileRef;
use swiglu_lab::{CaseOp, DeviceKind};

/// The options of a profile.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// Which path; by default the one that is planned.
    #[serde(deserialize_with = "planned")]
    pub(super) path: Option<Path>,
    /// CUDA, feed-forward blocks of few tokens: one way of computing them; by default the one that
    /// is planned.
    pub(super) design: Option<DesignChoice>,
    /// One order of sums for every number of tokens. A profile's `numerics` say by what it is judged, and no more.
    pub(super) batch_invariant: bool,
    /// Decode quantised weights to the element type, once.
    pub(super) decode: bool,
    /// Training steps: what is kept of gate and up between the passes.
    #[serde(deserialize_with = "by_name")]
    pub(super) keep: Option<SavePolicy>,
    /// CUDA, training steps: the six products by themselves, as cuBLASLt computes them.
    pub(super) products: bool,
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
    #[serde(deserialize_with = "by_name")]
    isa: Option<Isa>,
    /// The peer `read`: ask the processor for what comes later, as our kernels do; else leave it to the
    /// processor.
    pub(super) asks: bool,
}

fn by_name<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    d: D,
) -> Result<Option<T>, D::Error> {
    Ok(Some(String::deserialize(d)?.parse().map_err(D::Error::custom)?))
}

/// A path, or `planned`: whichever a call's plan takes.
fn planned<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Path>, D::Error> {
    match String::deserialize(d)?.as_str() {
        "planned" => Ok(None),
        "fused" => Ok(Some(Path::Fused)),
        "unfused" => Ok(Some(Path::Unfused)),
        other => Err(D::Error::unknown_variant(other, &["planned", "fused", "unfused"])),
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
        Some(match self {
            DesignChoice::OneLaunch => DecodeDesign::OneLaunch,
            DesignChoice::TwoLaunches => DecodeDesign::TwoLaunches,
            DesignChoice::BulkOneLaunch => DecodeDesign::BulkOneLaunch,
            DesignChoice::BulkOneLaunchWide => DecodeDesign::BulkOneLaunchWide,
            DesignChoice::Steps => return None,
            DesignChoice::Sequential => DecodeDesign::Sequential,
        })
    }
}

impl Options {
    /// Reads what a definition says, of a profile that reads alone or of one that computes.
    pub(super) fn read(profile: &ProfileRef, reads: bool) -> anyhow::Result<Self> {
        let what = || format!("the options of profile `{}`", profile.id);
        let given: Self =
            serde_json::from_value(Value::Object(profile.options.clone())).with_context(what)?;
        let Self { asks, threads, isa, .. } = given;
        match reads {
            true if given != (Self { asks, threads, isa, ..Self::default() }) => {
                Err(anyhow!("the peer `read` has asks, threads and isa, and no others"))
            }
            false if asks => Err(anyhow!("asks is an option of the peer `read`")),
            _ => Ok(given),
        }
        .with_context(what)
    }

    /// What of them is the device's.
    fn of_device(&self) -> Self {
        let Self { tf32, plain_allocations, portable_kernels, threads, isa, .. } = *self;
        let others = Self::default();
        Self { tf32, plain_allocations, portable_kernels, threads, isa, ..others }
    }

    /// Refuses options of a training step beside another operation.
    pub(super) fn expect_op(&self, op: CaseOp) -> anyhow::Result<()> {
        match op {
            CaseOp::MlpTrain if self.design.is_some() => {
                bail!("design is an option of mlp, given {op}")
            }
            CaseOp::MlpTrain => Ok(()),
            _ if self.keep.is_some() || self.products => {
                bail!("keep and products are options of mlp-train, given {op}")
            }
            _ => Ok(()),
        }
    }

    fn expect_device(&self, device: DeviceKind) -> anyhow::Result<()> {
        let Self { graph, tf32, plain_allocations, portable_kernels, products, .. } = *self;
        let switches = [graph, tf32, plain_allocations, portable_kernels, products];
        let of_cuda = switches.contains(&true) || self.design.is_some();
        let of_cpu = self.threads.is_some() || self.isa.is_some();
        match device {
            DeviceKind::Cpu if of_cuda => bail!(
                "graph, tf32, plain_allocations, portable_kernels, products and design are options of CUDA devices"
            ),
            DeviceKind::Cuda if of_cpu => bail!("threads and isa are options of the CPU"),
            _ => Ok(()),
        }
    }
}

/// The devices that were opened: threads and kernels are kept from case to case.
#[derive(Debug, Default)]
pub(super) struct Devices(Vec<(DeviceKind, Options, Device)>);

impl Devices {
    pub(super) fn open(&mut self, kind: DeviceKind, options: &Options) -> anyhow::Result<Device> {
        options.expect_device(kind)?;
        let options = options.of_device();
        let same = |(k, o, _): &&(DeviceKind, Options, Device)| (*k, o) == (kind, &options);
        if let Some((_, _, device)) = self.0.iter().find(same) {
            return Ok(device.clone());
        }
        let Options { tf32, plain_allocations, portable_kernels, threads, isa, .. } = options;
        let device = match kind {
            DeviceKind::Cpu => {
                Device::cpu_with(CpuOptions::default().with_isa(isa).with_threads(threads))?
            }
            DeviceKind::Cuda => {
                let others = CudaOptions::default();
                let options = others
                    .with_tf32(tf32)
                    .with_plain_allocations(plain_allocations)
                    .with_portable_kernels(portable_kernels);
                Device::cuda_with(&options)?
            }
        };
        self.0.push((kind, options, device.clone()));
        Ok(device)
    }

    /// The device of the run.
    pub(super) fn first(&self) -> Option<&Device> {
        self.0.first().map(|(_, _, device)| device)
    }
}
