//! What a profile of this peer can say, and the devices that it names.

use anyhow::{Context, Result, anyhow, bail};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use swiglu::{CpuOptions, Device, Isa, Path, SavePolicy};
use swiglu_cuda::{CudaOptions, DecodeDesign};
use swiglu_lab::peer::protocol::ProfileRef;
use swiglu_lab::{CaseOp, DeviceKind};

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// Which path; by default the one that is planned.
    #[serde(deserialize_with = "path")]
    pub(super) path: Option<Path>,
    /// CUDA, feed-forward blocks of few tokens: one way of computing them; by default as planned.
    #[serde(deserialize_with = "design")]
    pub(super) design: Option<Option<DecodeDesign>>,
    /// CUDA, layers of elements: one candidate of the plan.
    pub(super) candidate: Option<Which>,
    /// One order of sums for every number of tokens. A profile's `numerics` say by what it is judged, and no more.
    pub(super) batch_invariant: bool,
    /// Decode quantised weights to the element type, once.
    pub(super) decode: bool,
    /// Training steps: what is kept of gate and up between the passes.
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
    isa: Option<Isa>,
    /// The peer `read`: prefetch, as our kernels do; else leave it to the processor.
    pub(super) asks: bool,
}

fn path<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Path>, D::Error> {
    one_of(&[("planned", None), ("fused", Some(Path::Fused)), ("unfused", Some(Path::Unfused))], d)
}

/// A design of decoding kernels; `steps`, the gated linear layer and then cuBLASLt, is none.
fn design<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Option<DecodeDesign>>, D::Error> {
    let all = [
        ("one-launch", Some(DecodeDesign::OneLaunch)),
        ("two-launches", Some(DecodeDesign::TwoLaunches)),
        ("bulk-one-launch", Some(DecodeDesign::BulkOneLaunch)),
        ("bulk-one-launch-wide", Some(DecodeDesign::BulkOneLaunchWide)),
        ("steps", None),
        ("sequential", Some(DecodeDesign::Sequential)),
    ];
    one_of(&all, d).map(Some)
}

fn one_of<'de, D: Deserializer<'de>, T: Copy>(all: &[(&str, T)], d: D) -> Result<T, D::Error> {
    let given = String::deserialize(d)?;
    all.iter().find(|(name, _)| *name == given).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| format!("`{name}`")).collect();
        let expected = names.join(", ");
        D::Error::custom(format!("unknown variant `{given}`, expected one of {expected}"))
    })
}

impl Options {
    /// Reads what a definition says, of a profile that reads alone or of one that computes.
    pub(super) fn read(profile: &ProfileRef, reads: bool) -> Result<Self> {
        let what = || format!("the options of profile `{}`", profile.id);
        let given: Self =
            serde_json::from_value(Value::Object(profile.options.clone())).with_context(what)?;
        let Self { asks, threads, isa, .. } = given;
        let alone = given.path.is_none() && given.design.is_none() && !given.decode;
        let wrong = match reads {
            _ if given.candidate.is_some() && !alone => {
                "candidate is one way; expected no path, design or decode beside it"
            }
            true if given != (Self { asks, threads, isa, ..Self::default() }) => {
                "the peer `read` has asks, threads and isa, and no others"
            }
            false if asks => "asks is an option of the peer `read`",
            _ => return Ok(given),
        };
        Err(anyhow!(wrong)).with_context(what)
    }

    /// Refuses options of a training step beside another operation.
    pub(super) fn expect_op(&self, op: CaseOp) -> Result<()> {
        let trains = op == CaseOp::MlpTrain;
        if trains && self.design.is_some() {
            bail!("design is an option of mlp, given {op}");
        }
        if !trains && (self.keep.is_some() || self.products) {
            bail!("keep and products are options of mlp-train, given {op}");
        }
        Ok(())
    }

    fn expect_device(&self, device: DeviceKind) -> Result<()> {
        let Self { graph, tf32, plain_allocations, portable_kernels, products, .. } = *self;
        let switches = [graph, tf32, plain_allocations, portable_kernels, products];
        let of_cuda = switches.contains(&true) || self.design.is_some() || self.candidate.is_some();
        let of_cpu = self.threads.is_some() || self.isa.is_some();
        match device {
            DeviceKind::Cpu if of_cuda => bail!(
                "graph, tf32, plain_allocations, portable_kernels, products, candidate and design are options of CUDA devices"
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
    pub(super) fn open(&mut self, kind: DeviceKind, options: &Options) -> Result<Device> {
        options.expect_device(kind)?;
        // Others are of a case.
        let of = |o: &Options| (o.tf32, o.plain_allocations, o.portable_kernels, o.threads, o.isa);
        let same = |(k, o, _): &&(DeviceKind, Options, Device)| (*k, of(o)) == (kind, of(options));
        if let Some((_, _, device)) = self.0.iter().find(same) {
            return Ok(device.clone());
        }
        let (tf32, plain_allocations, portable_kernels, threads, isa) = of(options);
        let device = match kind {
            DeviceKind::Cpu => {
                Device::cpu_with(CpuOptions::default().with_isa(isa).with_threads(threads))?
            }
            DeviceKind::Cuda => Device::cuda_with(
                &CudaOptions::default()
                    .with_tf32(tf32)
                    .with_plain_allocations(plain_allocations)
                    .with_portable_kernels(portable_kernels),
            )?,
        };
        self.0.push((kind, options.clone(), device.clone()));
        Ok(device)
    }

    pub(super) fn first(&self) -> Option<&Device> {
        self.0.first().map(|(_, _, device)| device)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Which {
    Planned,
    /// Gate and up as elements in memory.
    Unfused,
    /// Of those near the plan that are neither, by expected time, from 1 on.
    Near(usize),
}

impl<'de> Deserialize<'de> for Which {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let given = Value::deserialize(d)?;
        match (given.as_str(), given.as_u64()) {
            (Some("planned"), _) => Ok(Which::Planned),
            (Some("unfused"), _) => Ok(Which::Unfused),
            (_, Some(at @ 1..)) => Ok(Which::Near(at as usize)),
            _ => Err(D::Error::custom(format!(
                "candidate = {given}, expected `planned`, `unfused` or a number from 1 on"
            ))),
        }
    }
}
