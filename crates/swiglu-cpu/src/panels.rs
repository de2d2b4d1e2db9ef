//! Weights as the kernels read them: one sequential stream.
//!
//! Output features are taken in panels of two vectors. A gated panel holds one vector of gate and
//! one of the matching up features, a plain panel two vectors of output features. Within a panel
//! the input features follow each other; a step is one of them, or two for bfloat16, whose dot
//! product takes pairs. So a step is `2 · LANES` weights (or pairs), and a panel is read front to
//! back while its accumulators stay in registers.

use std::marker::PhantomData;

use swiglu_core::{DType, Element, GateUpWeights, Half, MatrixRef, Orientation, Result};

use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::simd;
use crate::team::Step;
use crate::tiles;

/// Input features per step.
pub(crate) const fn features_per_step(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 => 2,
        _ => 1,
    }
}

/// Where the weights of a panel come from: tensor and feature of each of its output lanes.
type Lane<'a, T> = Option<(MatrixRef<'a, T>, usize)>;

/// Packed weights and biases.
#[derive(Debug)]
pub(crate) struct Panels<T> {
    data: Buffer,
    bias: Option<Buffer>,
    panels: usize,
    inputs: usize,
    lanes: usize,
    /// Steps of a panel in memory: those of its inputs, and zeros where tiles need them.
    padded_steps: usize,
    element: PhantomData<T>,
}

impl<T: Element> Panels<T> {
    /// Gate and up features side by side: panel p holds features `p·LANES ..` of both.
    pub(crate) fn gated(
        cpu: &Cpu,
        weights: &GateUpWeights<'_, T>,
        biases: [Option<&[f32]>; 2],
    ) -> Result<Self> {
        let lanes = simd::lanes(cpu.isa());
        let features = weights.intermediate();
        let source = |panel: usize, lane: usize| {
            let half = if lane < lanes { Half::Gate } else { Half::Up };
            let h = panel * lanes + lane % lanes;
            (h < features).then(|| weights.locate(half, h))
        };
        let bias = biases.iter().any(Option::is_some).then_some(|panel: usize, lane: usize| {
            let h = panel * lanes + lane % lanes;
            biases[lane / lanes].and_then(|b| b.get(h)).copied().unwrap_or(0.0)
        });
        Self::pack(
            cpu,
            features.div_ceil(lanes),
            weights.hidden(),
            weights.layout().orientation,
            &source,
            bias,
        )
    }

    /// Panel p holds output features `2·p·LANES ..`.
    pub(crate) fn linear<'a>(
        cpu: &Cpu,
        outputs: usize,
        inputs: usize,
        orientation: Orientation,
        locate: &(dyn Fn(usize) -> (MatrixRef<'a, T>, usize) + Sync),
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        let width = 2 * simd::lanes(cpu.isa());
        let source = |panel: usize, lane: usize| {
            let o = panel * width + lane;
            (o < outputs).then(|| locate(o))
        };
        let bias = bias.map(|b| {
            move |panel: usize, lane: usize| b.get(panel * width + lane).copied().unwrap_or(0.0)
        });
        Self::pack(cpu, outputs.div_ceil(width), inputs, orientation, &source, bias)
    }

    fn pack<'a>(
        cpu: &Cpu,
        panels: usize,
        inputs: usize,
        orientation: Orientation,
        source: &(dyn Fn(usize, usize) -> Lane<'a, T> + Sync),
        bias: Option<impl Fn(usize, usize) -> f32>,
    ) -> Result<Self> {
        let lanes = simd::lanes(cpu.isa());
        let mut this = Self {
            data: Buffer::zeroed(0)?,
            bias: None,
            panels,
            inputs,
            lanes,
            padded_steps: tiles::padded_steps(
                cpu.isa(),
                T::DTYPE,
                inputs.div_ceil(features_per_step(T::DTYPE)),
            ),
            element: PhantomData,
        };
        this.data = Buffer::zeroed(panels * this.panel_bytes())?;
        this.bias = bias.map(|bias| pack_bias(panels, 2 * lanes, bias)).transpose()?;
        let data = SendPtr(this.data.as_mut_ptr());
        let panel_bytes = this.panel_bytes();
        let pack = |range: std::ops::Range<usize>, _: usize| {
            for panel in range {
                // SAFETY: panels are disjoint parts of `data`, each packed by one worker.
                let panel_data = unsafe {
                    std::slice::from_raw_parts_mut(
                        data.get().add(panel * panel_bytes).cast::<T>(),
                        panel_bytes / size_of::<T>(),
                    )
                };
                pack_panel(panel_data, 2 * lanes, inputs, orientation, |l| source(panel, l));
            }
        };
        cpu.run(cpu.threads(), &[Step { units: panels, run: &pack }]);
        Ok(this)
    }

    /// Panels.
    pub(crate) fn panels(&self) -> usize {
        self.panels
    }
    /// Input features.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }
    /// Steps of a panel.
    pub(crate) fn steps(&self) -> usize {
        self.inputs.div_ceil(features_per_step(T::DTYPE))
    }
    /// Bytes of a step: `2 · LANES` weights or pairs.
    pub(crate) fn step_bytes(&self) -> usize {
        2 * self.lanes * features_per_step(T::DTYPE) * size_of::<T>()
    }
    /// Bytes of a panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.padded_steps * self.step_bytes()
    }
    /// Floating-point operations of `m` rows.
    pub(crate) fn flops(&self, m: usize) -> f64 {
        let outputs = self.panels * 2 * self.lanes;
        2.0 * m as f64 * outputs as f64 * self.inputs as f64
    }
    /// All bytes of weights.
    pub(crate) fn bytes(&self) -> usize {
        self.data.bytes()
    }
    /// All bytes, those of biases among them.
    pub(crate) fn bytes_with_biases(&self) -> usize {
        self.data.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }
    pub(crate) fn data(&self) -> *const u8 {
        self.data.as_ptr()
    }
    /// `2 · LANES` biases per panel.
    pub(crate) fn bias(&self) -> Option<*const f32> {
        self.bias.as_ref().map(|b| b.as_ptr().cast())
    }
}

/// The biases of all panels; `bias` gives that of a panel's lane.
pub(crate) fn pack_bias(
    panels: usize,
    width: usize,
    bias: impl Fn(usize, usize) -> f32,
) -> Result<Buffer> {
    let mut buffer = Buffer::zeroed(panels * width * size_of::<f32>())?;
    for i in 0..panels * width {
        // SAFETY: `i` is below the number of `f32` the buffer was made for.
        unsafe { *buffer.as_mut_ptr().cast::<f32>().add(i) = bias(i / width, i % width) };
    }
    Ok(buffer)
}

/// Writes `[step][lane][feature of step]`; lanes without a source and the missing half of a last
/// pair stay zero.
fn pack_panel<'a, T: Element>(
    out: &mut [T],
    lanes: usize,
    inputs: usize,
    orientation: Orientation,
    source: impl Fn(usize) -> Lane<'a, T>,
) {
    let per_step = features_per_step(T::DTYPE);
    let at = |k: usize, lane: usize| (k / per_step * lanes + lane) * per_step + k % per_step;
    for lane in 0..lanes {
        let Some((tensor, feature)) = source(lane) else { continue };
        match orientation {
            Orientation::OutIn => {
                for (k, &w) in tensor.row(feature).iter().enumerate() {
                    out[at(k, lane)] = w;
                }
            }
            Orientation::InOut => {
                for k in 0..inputs {
                    out[at(k, lane)] = tensor.row(k)[feature];
                }
            }
        }
    }
}

/// A pointer handed to workers that write disjoint parts behind it.
#[derive(Clone, Copy)]
pub(crate) struct SendPtr<T>(pub(crate) *mut T);
// SAFETY: whoever dereferences it argues disjointness at that place.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPtr<T> {}
impl<T> SendPtr<T> {
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}
