//! The CUDA backend as the conformance suite sees it.

mod on_device;
mod rings;

use swiglu_core::conformance::{Backend, Case};
use swiglu_core::quant::{QuantizedMlpParams, QuantizedType};
use swiglu_core::{
    Activation, Arrangement, DType, Element, GateUpRef, GatedLinearParams, GradientsMut, Matrix,
    MatrixMut, MatrixRef, MlpParams, Numerics, Op, Path, Problem, Result, Rounding, RowScale,
    SavePolicy, StridedRef,
};

use crate::device::cuda::Cuda;
use crate::device::error::Result as CudaResult;
use crate::device::memory::DeviceMatrixMut;
use crate::kernels::decode_mlp::Design;
use crate::kernels::elementwise::Stored;
use crate::kernels::gated_gemm::Kernel;
use crate::layers::activation::DeviceGateUp;
use crate::plan::{Algorithm, Planner};
use crate::{
    DeviceGradientsMut, DeviceKeptMut, GatedLinear, Layer, Mlp, quantized_tokens, quantized_types,
};

use self::on_device::{Gradient, OnDevice, Streams, lead, place};

/// Which way a [`CudaBackend`] takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Planned,
    /// The unfused path, which keeps elements.
    Unfused,
    /// Always by this algorithm.
    By(Algorithm),
}

/// A device on one way: as planned, unfused with elements or sums in memory, or always with the same
/// kernel. Layers are packed for every case, as a user would.
#[derive(Debug, Clone)]
pub struct CudaBackend {
    cuda: Cuda,
    way: Way,
    streams: Streams,
}

impl CudaBackend {
    /// What a user gets.
    pub fn planned(cuda: &Cuda) -> Self {
        Self { cuda: cuda.clone(), way: Way::Planned, streams: Streams::default() }
    }

    /// Every way of this device: as planned, the two unfused ones, each fused kernel, and one of those before
    /// each kernel that follows it in blocks of few tokens.
    pub fn all(cuda: &Cuda) -> Vec<Self> {
        let kernels = Kernel::all().filter(|kernel| {
            DType::ALL.into_iter().any(|dtype| {
                let case = Case::new(Op::GatedLinear, [1, 1, 1], dtype);
                kernel.check_problem(cuda.arch(), &problem(&case), cuda.tf32()).is_ok()
            })
        });
        // The narrowest before each kernel: that computes every number of tokens of these.
        let pairs = Algorithm::all(Op::Mlp).filter(Algorithm::is_pair);
        let streams = Streams::default();
        let by = [Algorithm::unfused(Stored::Sums)]
            .into_iter()
            .chain(pairs.take(3))
            .chain(kernels.map(Algorithm::gated))
            .chain(Design::every().map(Algorithm::Decode));
        [Way::Planned, Way::Unfused]
            .into_iter()
            .chain(by.map(Way::By))
            .map(|way| Self { cuda: cuda.clone(), way, streams: streams.clone() })
            .collect()
    }

    /// Whether this way computes the case: a kernel has its element types, the unfused path has no
    /// [`Rounding::Fused`] of 16-bit types, where f32 sums have nothing else, and the activation operation has one
    /// way.
    pub fn computes(&self, case: &Case) -> bool {
        if case.quantized.is_some() {
            // More tokens go in passes.
            let pass = problem(case).with_m(case.m.min(quantized_tokens()));
            return match self.way {
                Way::Planned => case.op == Op::Mlp && case.dtype != DType::F32,
                Way::Unfused => false,
                Way::By(algorithm) => {
                    algorithm.design().is_some()
                        && algorithm.check(Planner::of(&self.cuda), &pass).is_ok()
                }
            };
        }
        match (self.way, case.op) {
            (Way::Planned, _) => true,
            (_, Op::Activation) => false,
            (Way::Unfused, _) => {
                let rounds = case.dtype == DType::F32 || case.numerics.rounding != Rounding::Fused;
                rounds && case.hidden > 0
            }
            (Way::By(algorithm), op) => {
                let stride = (case.hidden + case.padding) * case.dtype.size();
                // A kernel for h is tried alone.
                let algorithm =
                    if algorithm.stored().is_some() { algorithm.of(op) } else { algorithm };
                algorithm.check(Planner::of(&self.cuda), &problem(case)).is_ok()
                    && (!self.aligned_x() || case.m <= 1 || stride.is_multiple_of(16))
            }
        }
    }

    /// Whether the kernel that is insisted on takes no other x than an aligned one.
    fn aligned_x(&self) -> bool {
        matches!(self.way, Way::By(algorithm) if algorithm.kernel_of_h().is_some_and(Kernel::needs_tma))
    }
}

impl Backend for CudaBackend {
    /// `cuda:0 planned`, `cuda:0 sm90_gated_gemm 128x64`.
    fn name(&self) -> String {
        let way = match self.way {
            Way::Planned => "planned".to_owned(),
            Way::Unfused => Path::Unfused.to_string(),
            Way::By(algorithm) => algorithm.to_string(),
        };
        let tf32 = if self.cuda.tf32() { " tf32" } else { "" };
        format!("cuda:{} {way}{tf32}", self.cuda.ordinal())
    }

    fn factor_roundoff(&self, dtype: DType) -> f64 {
        // 10 stored bits of the mantissa; truncation, where the hardware does it, is twice that.
        if dtype == DType::F32 && self.cuda.tf32() { 2.0f64.powi(-10) } else { 0.0 }
    }

    fn activation<T: Element>(
        &self,
        act: &Activation,
        numerics: Numerics,
        inputs: GateUpRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let stream = self.streams.take(&self.cuda)?;
        let [first, second] = inputs.tensors();
        let (first, second) = (OnDevice::new(&stream, first)?, OnDevice::new(&stream, second)?);
        let on_device = match inputs.arrangement() {
            Arrangement::Separate => DeviceGateUp::separate(first.view()?, second.view()?)?,
            packed => DeviceGateUp::packed(first.view()?, packed)?,
        };
        let mut h = OnDevice::new(&stream, out.as_ref())?;
        self.cuda.activation(&stream, act, numerics, on_device, h.view_mut()?)?;
        Ok(h.copy_to(&mut out)?)
    }

    fn gated_linear<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let layer = match self.way {
            Way::Planned => GatedLinear::new(&self.cuda, params),
            Way::Unfused => GatedLinear::with_path(&self.cuda, params, Path::Unfused),
            Way::By(algorithm) => GatedLinear::with_algorithm(&self.cuda, params, algorithm),
        }?;
        let stream = self.streams.take(&self.cuda)?;
        let x = OnDevice::at(&stream, x, if self.aligned_x() { 0 } else { lead(&x) })?;
        let mut h = OnDevice::new(&stream, out.as_ref())?;
        layer.forward(&stream, x.view()?, h.view_mut()?)?;
        Ok(h.copy_to(&mut out)?)
    }

    fn quantized_types(&self) -> &[QuantizedType] {
        match self.way {
            Way::By(algorithm) if algorithm.design().is_none() => &[],
            Way::Planned | Way::By(_) => quantized_types(),
            Way::Unfused => &[],
        }
    }

    fn quantized_mlp<T: Element>(
        &self,
        params: &QuantizedMlpParams<'_>,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let design = match self.way {
            Way::By(algorithm) => algorithm.design(),
            Way::Planned | Way::Unfused => None,
        };
        let layer = match design {
            Some(design) => Mlp::<T>::from_quantized_by(&self.cuda, params, design),
            None => Mlp::from_quantized(&self.cuda, params),
        }?;
        let stream = self.streams.take(&self.cuda)?;
        let (x, mut y) = (OnDevice::new(&stream, x)?, OnDevice::new(&stream, out.as_ref())?);
        layer.forward(&stream, x.view()?, y.view_mut()?)?;
        Ok(y.copy_to(&mut out)?)
    }

    fn mlp<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        x: MatrixRef<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<()> {
        let layer = match self.way {
            Way::Unfused => Mlp::with_path(&self.cuda, params, Path::Unfused),
            Way::By(algorithm) if algorithm.design().is_some() => {
                Mlp::with_design(&self.cuda, params, algorithm.design())
            }
            Way::Planned | Way::By(_) => Mlp::new(&self.cuda, params),
        }?;
        let stream = self.streams.take(&self.cuda)?;
        let x = OnDevice::at(&stream, x, if self.aligned_x() { 0 } else { lead(&x) })?;
        let mut y = OnDevice::new(&stream, out.as_ref())?;
        match self.way {
            Way::By(algorithm) if algorithm.design().is_none() => {
                let algorithm = algorithm.of(Op::Mlp);
                let all = self.cuda.candidates(&params.problem(x.rows), None);
                // Of its own problem there is every algorithm.
                let by = all.iter().filter(|candidate| candidate.algorithm == Some(algorithm));
                for candidate in by {
                    layer.forward_by(&stream, candidate, x.view()?, y.view_mut()?)?;
                }
            }
            _ => layer.forward(&stream, x.view()?, y.view_mut()?)?,
        }
        Ok(y.copy_to(&mut out)?)
    }

    fn trains(&self) -> bool {
        matches!(self.way, Way::Planned | Way::Unfused)
    }

    fn gated_linear_backward<T: Element>(
        &self,
        params: &GatedLinearParams<'_, T>,
        policy: SavePolicy,
        x: MatrixRef<'_, T>,
        dh: StridedRef<'_, T>,
        into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let layer = match self.way {
            Way::Unfused => GatedLinear::with_path(&self.cuda, params, Path::Unfused),
            Way::Planned | Way::By(_) => GatedLinear::new(&self.cuda, params),
        }?;
        Ok(self.backward(&layer, policy, x, dh, into)?)
    }

    fn mlp_backward<T: Element>(
        &self,
        params: &MlpParams<'_, T>,
        policy: SavePolicy,
        x: MatrixRef<'_, T>,
        dy: StridedRef<'_, T>,
        into: GradientsMut<'_, T>,
    ) -> Result<()> {
        let layer = match self.way {
            Way::Unfused => Mlp::with_path(&self.cuda, params, Path::Unfused),
            Way::Planned | Way::By(_) => Mlp::new(&self.cuda, params),
        }?;
        Ok(self.backward(&layer, policy, x, dy, into)?)
    }
}

impl CudaBackend {
    /// Both passes; gate and up lie in one matrix, as every third of what callers have. What is computed again outside of the
    /// backward pass, [`SavePolicy::Recompute`], is computed before it.
    fn backward<K, T: Element>(
        &self,
        layer: &Layer<K, T>,
        policy: SavePolicy,
        x: MatrixRef<'_, T>,
        dy: StridedRef<'_, T>,
        mut into: GradientsMut<'_, T>,
    ) -> CudaResult<()> {
        let stream = self.streams.take(&self.cuda)?;
        let (m, h) = (x.rows(), layer.intermediate());
        // Layers take rows that do not overlap.
        let rows = dy.to_rows()?;
        let rows = rows.view()?;
        let values = (0..m).flat_map(|row| rows.row(row).iter().copied());
        let dy = Matrix::from_values(values, m, rows.cols())?;
        let out = Matrix::<T>::zeros(m, layer.out_features())?;
        let padded = if m % 3 == 0 { h } else { h.next_multiple_of(8) };
        let kept = Matrix::<T>::from_values(
            (0..m * 2 * padded).map(|_| T::from_f32(f32::NAN)),
            m,
            2 * padded,
        )?;
        let (x, dy) = (OnDevice::new(&stream, x)?, OnDevice::at(&stream, dy.view(), 0)?);
        let mut y = OnDevice::new(&stream, out.view())?;
        let kept = OnDevice::at(&stream, kept.view(), 0)?;
        let half = |first: usize| {
            let at = kept.address() + (first * size_of::<T>()) as u64;
            // SAFETY: the columns lie in the buffer, which outlives the view, and no other view is of them.
            unsafe { DeviceMatrixMut::<T>::from_raw(&self.cuda, at, m, h, 2 * padded) }
        };
        let keeps = || -> CudaResult<DeviceKeptMut<'_, T>> {
            Ok(match policy {
                SavePolicy::SaveGate => half(0)?.into(),
                _ => [half(0)?, half(padded)?].into(),
            })
        };
        if policy == SavePolicy::Recompute {
            layer.forward(&stream, x.view()?, y.view_mut()?)?;
            layer.pre_activations(&stream, x.view()?, keeps()?, None)?;
        } else {
            layer.forward_saving(&stream, x.view()?, y.view_mut()?, keeps()?)?;
        }

        let mut dx = into.dx.as_ref().map(|to| OnDevice::new(&stream, to.as_ref())).transpose()?;
        let mut weights = [&into.gate, &into.up, &into.down]
            .map(|to| to.as_ref().map(|to| Gradient::new(&stream, to)).transpose());
        let [gate, up, down] = &mut weights;
        let bias = |to: &Option<&mut [f32]>| {
            let to = to.as_ref().map(|to| MatrixRef::new(to, 1, to.len())).transpose()?;
            to.map(|to| OnDevice::at(&stream, to, 0)).transpose()
        };
        let mut biases = [
            bias(&into.gate_bias)?,
            bias(&into.up_bias)?,
            bias(&into.down_bias)?,
            bias(&into.row_scale_grad)?,
        ];
        let [gate_bias, up_bias, down_bias, of_factors] = &mut biases;
        let factors: Vec<f32> = (0..m).map(|row| into.row_scale.of_row(row)).collect();
        let factors = (into.row_scale != RowScale::None)
            .then(|| OnDevice::at(&stream, MatrixRef::new(&factors, 1, factors.len())?, 0))
            .transpose()?;
        let there = DeviceGradientsMut {
            dx: dx.as_mut().map(OnDevice::view_mut).transpose()?,
            gate: place(gate)?,
            up: place(up)?,
            down: place(down)?,
            gate_bias: gate_bias.as_mut().map(OnDevice::view_mut).transpose()?,
            up_bias: up_bias.as_mut().map(OnDevice::view_mut).transpose()?,
            down_bias: down_bias.as_mut().map(OnDevice::view_mut).transpose()?,
            row_scale: factors.as_ref().map(OnDevice::view).transpose()?,
            row_scale_grad: of_factors.as_mut().map(OnDevice::view_mut).transpose()?,
            ..DeviceGradientsMut::default().with_accumulate(into.accumulate)
        };
        layer.backward(&stream, x.view()?, dy.view()?, keeps()?, there, None)?;
        if let (Some(from), Some(to)) = (dx, &mut into.dx) {
            from.copy_to(to)?;
        }
        let places = [&mut into.gate, &mut into.up, &mut into.down];
        for (from, to) in weights.into_iter().zip(places) {
            if let (Some(from), Some(to)) = (from?, to) {
                from.copy_to(to)?;
            }
        }
        let places =
            [&mut into.gate_bias, &mut into.up_bias, &mut into.down_bias, &mut into.row_scale_grad];
        for (from, to) in biases.into_iter().zip(places) {
            if let (Some(from), Some(to)) = (from, to) {
                to.copy_from_slice(&from.buffer.to_host()?);
            }
        }
        Ok(())
    }
}

/// The problem that a case poses.
fn problem(case: &Case) -> Problem {
    Problem::new(case.op, case.m, case.hidden, case.intermediate, case.dtype, case.activation)
        .with_numerics(case.numerics)
        .with_layout(case.layout)
        .with_bias(case.bias)
        .with_quantized(case.quantized)
}
