//! Weights as the kernels read them: one sequential stream.
//!
//! Output features are taken in panels of two vectors. A gated panel holds one vector of gate and
//! one of the matching up features, a plain panel two vectors of output features. Within a panel
//! the input features follow each other; a step is one of them, or two for bfloat16, whose dot
//! product takes pairs. So a step is `2 · LANES` weights (or pairs), and a panel is read front to
//! back while its accumulators stay in registers.

use std::marker::PhantomData;
use std::ops::Range;

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

/// Some inputs of a linear map: those whose weights lie in the same tensors.
pub(crate) struct Part<'l, 'a, T> {
    pub(crate) inputs: usize,
    pub(crate) orientation: Orientation,
    /// The tensor and the index of an output feature.
    pub(crate) locate: &'l (dyn Fn(usize) -> (MatrixRef<'a, T>, usize) + Sync + 'l),
}

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
        memory: Buffer,
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
        let inputs = weights.hidden();
        let orientation = weights.layout().orientation;
        let pack = |out: &mut [T], panel: usize| {
            pack_panel(out, 2 * lanes, 0..inputs, orientation, |l| source(panel, l));
        };
        Self::pack(cpu, memory, features.div_ceil(lanes), inputs, &pack, bias)
    }

    /// Panel p holds output features `2·p·LANES ..`. The inputs come in parts.
    pub(crate) fn linear(
        cpu: &Cpu,
        memory: Buffer,
        outputs: usize,
        parts: &[Part<'_, '_, T>],
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        let width = 2 * simd::lanes(cpu.isa());
        let pack = |out: &mut [T], panel: usize| {
            let mut first = 0;
            for part in parts {
                let source = |lane: usize| {
                    let o = panel * width + lane;
                    (o < outputs).then(|| (part.locate)(o))
                };
                pack_panel(out, width, first..first + part.inputs, part.orientation, source);
                first += part.inputs;
            }
        };
        let bias = bias.map(|b| {
            move |panel: usize, lane: usize| b.get(panel * width + lane).copied().unwrap_or(0.0)
        });
        let inputs = parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.inputs));
        Self::pack(cpu, memory, outputs.div_ceil(width), inputs, &pack, bias)
    }

    /// Panels in this memory if it has the size; `pack` writes the weights of one.
    fn pack(
        cpu: &Cpu,
        memory: Buffer,
        panels: usize,
        inputs: usize,
        pack: &(dyn Fn(&mut [T], usize) + Sync),
        bias: Option<impl Fn(usize, usize) -> f32>,
    ) -> Result<Self> {
        let lanes = simd::lanes(cpu.isa());
        let mut this = Self {
            data: Buffer::empty(),
            bias: None,
            panels,
            inputs,
            lanes,
            padded_steps: Self::padded_steps(cpu, inputs),
            element: PhantomData,
        };
        this.data = memory.or_zeroed(this.bytes())?;
        this.bias = bias.map(|bias| pack_bias(panels, 2 * lanes, bias)).transpose()?;
        let data = SendPtr(this.data.as_mut_ptr());
        let panel_bytes = this.panel_bytes();
        // Where the last pair is half a one, and behind the last step.
        let rest = inputs / features_per_step(T::DTYPE) * this.step_bytes() / size_of::<T>();
        let run = |range: Range<usize>, _: usize| {
            for panel in range {
                // SAFETY: panels are disjoint parts of `data`, each packed by one worker.
                let panel_data = unsafe {
                    std::slice::from_raw_parts_mut(
                        data.get().add(panel * panel_bytes).cast::<T>(),
                        panel_bytes / size_of::<T>(),
                    )
                };
                panel_data[rest..].fill(T::default());
                pack(panel_data, panel);
            }
        };
        // Without inputs any number of panels is nothing.
        let units = if panel_bytes == 0 { 0 } else { panels };
        cpu.run(cpu.threads(), &[Step { units, run: &run }]);
        Ok(this)
    }

    /// Steps of a panel in memory.
    fn padded_steps(cpu: &Cpu, inputs: usize) -> usize {
        let steps = inputs.div_ceil(features_per_step(T::DTYPE));
        tiles::padded_steps(cpu.isa(), T::DTYPE, steps)
    }

    /// Bytes of [`Self::linear`] panels.
    pub(crate) fn linear_bytes(cpu: &Cpu, outputs: usize, inputs: usize) -> usize {
        let width = 2 * simd::lanes(cpu.isa());
        let step_bytes = width * features_per_step(T::DTYPE) * size_of::<T>();
        let panel = Self::padded_steps(cpu, inputs).saturating_mul(step_bytes);
        outputs.div_ceil(width).saturating_mul(panel)
    }

    /// The memory of the weights, which are gone then.
    pub(crate) fn take_memory(&mut self) -> Buffer {
        self.panels = 0;
        std::mem::replace(&mut self.data, Buffer::empty())
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
    /// Bytes of a panel. More than there are addresses for are refused as memory.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.padded_steps.saturating_mul(self.step_bytes())
    }
    /// Floating-point operations of `m` rows.
    pub(crate) fn flops(&self, m: usize) -> f64 {
        let outputs = self.panels * 2 * self.lanes;
        2.0 * m as f64 * outputs as f64 * self.inputs as f64
    }
    /// All bytes of weights.
    pub(crate) fn bytes(&self) -> usize {
        self.panels.saturating_mul(self.panel_bytes())
    }
    /// All bytes, those of biases among them.
    pub(crate) fn bytes_with_biases(&self) -> usize {
        self.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
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
    // There is a bias for each feature: the number of these is one.
    let mut buffer = Buffer::zeroed(panels * width * size_of::<f32>())?;
    for i in 0..panels * width {
        // SAFETY: `i` is below the number of `f32` the buffer was made for.
        unsafe { *buffer.as_mut_ptr().cast::<f32>().add(i) = bias(i / width, i % width) };
    }
    Ok(buffer)
}

/// Inputs that are packed at a time: their part of a panel stays in the first-level cache while lane after lane is written.
const PACKED_TOGETHER: usize = 256;

/// Writes `[step][lane][feature of step]` of some inputs; lanes without a source become zeros.
fn pack_panel<'a, T: Element>(
    out: &mut [T],
    lanes: usize,
    inputs: Range<usize>,
    orientation: Orientation,
    source: impl Fn(usize) -> Lane<'a, T>,
) {
    let per_step = features_per_step(T::DTYPE);
    let at = |k: usize, lane: usize| (k / per_step * lanes + lane) * per_step + k % per_step;
    for start in inputs.clone().step_by(PACKED_TOGETHER) {
        let block = start..(start + PACKED_TOGETHER).min(inputs.end);
        let mut lane = 0;
        while lane < lanes {
            let Some((tensor, feature)) = source(lane) else {
                block.clone().for_each(|k| out[at(k, lane)] = T::default());
                lane += 1;
                continue;
            };
            match orientation {
                Orientation::OutIn => {
                    let row = &tensor.row(feature)[block.start - inputs.start..];
                    // Inputs of the same place in their steps are as far apart as steps are.
                    for place in 0..per_step.min(block.len()) {
                        let to = out[at(block.start + place, lane)..].iter_mut();
                        let from = row[..block.len()].iter().skip(place).step_by(per_step);
                        let to = to.step_by(lanes * per_step);
                        to.zip(from).for_each(|(to, &w)| *to = w);
                    }
                    lane += 1;
                }
                Orientation::InOut => {
                    let run = adjacent(lanes, lane, &source);
                    for k in block.clone() {
                        let from = &tensor.row(k - inputs.start)[feature..feature + run];
                        let to = &mut out[at(k, lane)..];
                        match per_step {
                            1 => to[..run].copy_from_slice(from),
                            _ => {
                                let to = to.iter_mut().step_by(per_step);
                                to.zip(from).for_each(|(to, &w)| *to = w);
                            }
                        }
                    }
                    lane += run;
                }
            }
        }
    }
}

/// How many lanes from this one on are neighbours in the same tensor.
fn adjacent<'a, T: Element>(
    lanes: usize,
    lane: usize,
    source: impl Fn(usize) -> Lane<'a, T>,
) -> usize {
    let place = |lane| source(lane).map(|(tensor, feature)| (tensor.as_slice().as_ptr(), feature));
    let Some((tensor, feature)) = place(lane) else { return 1 };
    let follows = |&other: &usize| place(other) == Some((tensor, feature + other - lane));
    1 + (lane + 1..lanes).take_while(follows).count()
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
