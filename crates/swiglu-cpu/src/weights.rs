//! Packed weights of a linear map, dense or quantised, and how its kernels want their rows.

use std::ops::Range;

use swiglu_core::Element;

use crate::buffer::Buffer;
use crate::compiled;
use crate::cpu::Cpu;
use crate::gemm::{Blocks, panels_together};
use crate::isa::Isa;
use crate::order::Order;
use crate::panels::{Panels, SendPtr};
use crate::quant::{self, PackDigits, PackUnits, QuantizedPanels, RUN, Way, panels_fused};
use crate::rows::{PackBlocks, PackRows, Source, Steps};
use crate::simd;
use crate::tiles;

/// Packed weights.
#[derive(Debug)]
pub(crate) enum Weights<T> {
    Dense(Panels<T>),
    Quantized(QuantizedPanels),
}

/// Calls the same method of either.
macro_rules! of_either {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty)?) -> $out:ty;)*) => {
        $($(#[$doc])*
        pub(crate) fn $name(&self $(, $arg: $type)?) -> $out {
            match self {
                Weights::Dense(panels) => panels.$name($($arg)?),
                Weights::Quantized(panels) => panels.$name($($arg)?),
            }
        })*
    };
}

impl<T: Element> Weights<T> {
    of_either! {
        /// Panels.
        panels() -> usize;
        /// Input features.
        inputs() -> usize;
        /// All bytes of weights.
        bytes() -> usize;
        /// All bytes, those of biases among them.
        bytes_with_biases() -> usize;
        /// Floating-point operations of `m` rows.
        flops(m: usize) -> f64;
        /// `2 · LANES` biases per panel.
        bias() -> Option<*const f32>;
    }

    /// The memory of dense weights, which are gone then.
    pub(crate) fn take_memory(&mut self) -> Buffer {
        match self {
            Weights::Dense(panels) => panels.take_memory(),
            Weights::Quantized(_) => Buffer::empty(),
        }
    }

    /// How `m` rows are packed, and with that by which kernels they are multiplied.
    pub(crate) fn packing(&self, cpu: &Cpu, m: usize, order: Order) -> Packing {
        let panels = match self {
            Weights::Dense(panels) if tiles::take(cpu.isa(), T::DTYPE, m, order) => {
                return Packing::Tiles(tiles::Layout { m, inputs: panels.inputs() });
            }
            Weights::Dense(panels) => {
                // With vectors of 8 lanes also the fastest; with 16 that was not measured.
                let short = matches!(cpu.isa(), Isa::Portable | Isa::Avx2);
                let together = panels_together(m).filter(|_| order == Order::Common || short);
                return Packing::steps::<T>(cpu, m, Steps::Dense, panels.inputs(), together);
            }
            Weights::Quantized(panels) => panels,
        };
        let (block, inputs) = (panels.block(), panels.inputs());
        match Way::of(cpu.isa(), T::DTYPE, block, m, order) {
            Way::Digits => {
                let (offset, halves) = panels.offset_and_halves();
                Packing::Digits { m, inputs, offset, halves }
            }
            Way::Pairs => {
                let sums = block.minimum_span().map_or(0, |span| RUN / span);
                Packing::steps::<T>(cpu, m, Steps::Runs { sums }, inputs, None)
            }
            Way::Decoded => {
                let together = panels_fused(m).filter(|_| order == Order::Common);
                Packing::steps::<T>(cpu, m, Steps::Wide, inputs, together)
            }
        }
    }

    /// Bytes beside the sums that the kernels of all threads need for rows packed so.
    pub(crate) fn scratch_bytes(&self, cpu: &Cpu, packing: Packing) -> usize {
        match (self, packing) {
            (Weights::Quantized(_), Packing::Steps { .. }) => quant::scratch_bytes(cpu.threads()),
            _ => 0,
        }
    }
}

/// How rows are packed.
#[derive(Clone, Copy)]
pub(crate) enum Packing {
    /// Blocks of rows, each of `count` steps; how many panels of weights are summed side by side, if any.
    Steps { blocks: Blocks, steps: Steps, count: usize, together: Option<usize> },
    /// Fixed-point digits.
    Digits { m: usize, inputs: usize, offset: u32, halves: bool },
    /// Tiles of bfloat16.
    Tiles(tiles::Layout),
}

impl Packing {
    fn steps<T: Element>(
        cpu: &Cpu,
        m: usize,
        steps: Steps,
        inputs: usize,
        together: Option<usize>,
    ) -> Self {
        let blocks = Blocks::new(m, steps.tile_rows(cpu.isa(), T::DTYPE));
        Packing::Steps { blocks, steps, count: steps.count(T::DTYPE, inputs), together }
    }

    /// Bytes of the packed rows.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Packing::Steps { blocks, count, .. } => blocks.m * count * size_of::<u32>(),
            Packing::Digits { m, inputs, .. } => quant::row_bytes(m, inputs),
            Packing::Tiles(layout) => layout.bytes(),
        }
    }

    /// Accumulators that a worker needs.
    pub(crate) fn sums(self, cpu: &Cpu) -> usize {
        match self {
            Packing::Steps { blocks: Blocks { m, .. }, together, .. } => {
                together.unwrap_or(1) * m * 2 * simd::lanes(cpu.isa())
            }
            Packing::Digits { m, .. } => m * 2 * simd::lanes(cpu.isa()),
            Packing::Tiles(layout) => layout.sums(),
        }
    }

    /// Bytes of the accumulators of all workers.
    pub(crate) fn sums_bytes(self, cpu: &Cpu) -> usize {
        cpu.threads() * self.sums(cpu) * size_of::<f32>()
    }

    /// Whether rows must be packed even if they lie in memory as values of the steps' type.
    pub(crate) fn changes_rows(self) -> bool {
        !matches!(self, Packing::Steps { blocks: Blocks { m: 0 | 1, .. }, steps: Steps::Dense, .. })
    }

    /// Independent units of packing.
    pub(crate) fn units(self) -> usize {
        match self {
            Packing::Steps { blocks, .. } => blocks.count(),
            Packing::Digits { m, inputs, .. } => quant::units(m, inputs),
            Packing::Tiles(layout) => layout.blocks(),
        }
    }

    /// Packs the units of `range` from rows `first ..` of x.
    ///
    /// # Safety
    /// `isa` is available; `out` has [`Self::bytes`]; each unit is packed by one worker.
    pub(crate) unsafe fn pack<T: Element>(
        self,
        isa: Isa,
        (x, first): (Source<'_, T>, usize),
        out: SendPtr<u8>,
        range: Range<usize>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Packing::Steps { blocks, steps, .. } => {
                    let out = SendPtr(out.get().cast());
                    let rows = PackRows { x, first, blocks, steps, out };
                    compiled::pack_rows(isa, PackBlocks(rows, range));
                }
                Packing::Digits { offset, halves, .. } => {
                    let Source::Rows(x) = x else { unreachable!("gradients are of dense weights") };
                    let rows = PackDigits { x, first, offset, halves, out };
                    compiled::pack_digits(isa, PackUnits(rows, range));
                }
                Packing::Tiles(layout) => tiles::pack(layout, (x, first), out, range),
            }
        }
    }
}
