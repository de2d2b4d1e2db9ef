//! The two operations with weights, as types: what [`Layer`] and [`Weights`](crate::Weights) are
//! made of.

use swiglu_core::{Element, GatedLinearParams, MatrixMut, MatrixRef, MlpParams, Op, Path, Plan};

use crate::device::Device;
use crate::error::Result;
use crate::layer::{Kernel, Layer};
use crate::weights::HostWeights;

/// An operation with weights. Sealed: [`GatedLinearKind`] and [`MlpKind`].
pub trait Kind: sealed::Sealed + Sized + 'static {
    /// The operation.
    const OP: Op;

    /// Packs weights for a device.
    ///
    /// # Errors
    /// If a part of the layer is missing or does not fit.
    fn pack<T: Element>(device: &Device, host: &HostWeights<'_, T>) -> Result<Layer<Self>>;
}

/// x → h = act(x·Wg + bg, x·Wu + bu).
#[derive(Debug, Clone, Copy)]
pub enum GatedLinearKind {}

/// x → y = h·Wd + bd.
#[derive(Debug, Clone, Copy)]
pub enum MlpKind {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::GatedLinearKind {}
    impl Sealed for super::MlpKind {}
}

impl Kind for GatedLinearKind {
    const OP: Op = Op::GatedLinear;

    fn pack<T: Element>(device: &Device, host: &HostWeights<'_, T>) -> Result<Layer<Self>> {
        Layer::<Self>::from_params(device, &host.gated_linear())
    }
}

impl Kind for MlpKind {
    const OP: Op = Op::Mlp;

    fn pack<T: Element>(device: &Device, host: &HostWeights<'_, T>) -> Result<Layer<Self>> {
        Layer::<Self>::from_params(device, &host.mlp()?)
    }
}

impl Layer<GatedLinearKind> {
    /// Packs weights in memory for a device.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if a bias does not fit the weights.
    pub fn from_params<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
    ) -> Result<Self> {
        Self::with_path(device, params, Path::Fused)
    }

    /// As [`Self::from_params`], by a chosen path: [`Path::Unfused`] is the yardstick that passes
    /// gate and up through memory.
    ///
    /// # Errors
    /// As [`Self::from_params`].
    pub fn with_path<T: Element>(
        device: &Device,
        params: &GatedLinearParams<'_, T>,
        path: Path,
    ) -> Result<Self> {
        let Device::Cpu(cpu) = device;
        let kernel = swiglu_cpu::GatedLinear::with_path(cpu, params, path)?;
        Ok(Self::new(device, kernel))
    }
}

impl Layer<MlpKind> {
    /// Packs weights in memory for a device.
    ///
    /// # Errors
    /// [`swiglu_core::Error::Shape`] if the shapes disagree.
    pub fn from_params<T: Element>(device: &Device, params: &MlpParams<'_, T>) -> Result<Self> {
        Self::with_path(device, params, Path::Fused)
    }

    /// As [`Self::from_params`], by a chosen path: [`Path::Unfused`] is the yardstick that passes
    /// gate and up through memory.
    ///
    /// # Errors
    /// As [`Self::from_params`].
    pub fn with_path<T: Element>(
        device: &Device,
        params: &MlpParams<'_, T>,
        path: Path,
    ) -> Result<Self> {
        let Device::Cpu(cpu) = device;
        let kernel = swiglu_cpu::Mlp::with_path(cpu, params, path)?;
        Ok(Self::new(device, kernel))
    }
}

impl<T: Element> Kernel<T> for swiglu_cpu::GatedLinear<T> {
    fn plan(&self, m: usize) -> Plan {
        self.plan(m)
    }
    fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> swiglu_core::Result<()> {
        self.forward(x, out)
    }
}

impl<T: Element> Kernel<T> for swiglu_cpu::Mlp<T> {
    fn plan(&self, m: usize) -> Plan {
        self.plan(m)
    }
    fn forward(&self, x: MatrixRef<'_, T>, out: MatrixMut<'_, T>) -> swiglu_core::Result<()> {
        self.forward(x, out)
    }
}
