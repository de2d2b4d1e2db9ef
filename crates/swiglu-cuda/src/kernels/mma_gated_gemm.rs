//! Launches `device/portable/mma_gated_gemm.cu`.

use swiglu_core::{DType, Orientation};

use super::NamedVariant;
use super::elementwise::Tensor;
use super::gate::GateCode;
use super::gated_gemm::{Call, Epilogue, Layout};
use super::mma_gemm::{Config, Operands, bits, widest};
use super::weights::Bias;
use crate::device::cuda::Cuda;
use crate::device::error::Result;
use crate::device::jit::{KernelFile, Variant, kernel_file};
use crate::device::launch::{Function, launch as enqueue};
use crate::device::stream::Stream;

pub(super) static FILE: KernelFile = kernel_file!("portable", "mma_gated_gemm.cu");

#[repr(C)]
struct Params {
    operands: Operands<2>,
    epilogue: Epilogue,
}

fn variant(config: Config, code: GateCode, layout: Layout, copy_bytes: usize) -> Variant {
    let [a, b, c, d, e] = code.defines();
    let [f, g, h] = layout.defines();
    let [i, j, k, l, m, n, o, p, q] = config.defines(2, copy_bytes);
    Variant::new(&FILE, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q])
}

fn function(
    cuda: &Cuda,
    config: Config,
    code: GateCode,
    layout: Layout,
    copy_bytes: usize,
) -> Result<Function> {
    let variant = variant(config, code, layout, copy_bytes);
    cuda.function(&variant, "mma_gated_gemm", config.shared_bytes())
}

/// The widest copy that every address and row stride is a multiple of.
fn copy_bytes(call: &Call<'_>) -> usize {
    let (w, dtype) = (&call.weights, call.code.dtype());
    let weights = [w.gate, w.up].map(|at| bits(Tensor::new(at, w.row_stride), 2, dtype));
    widest([bits(call.x, call.m, dtype)].into_iter().chain(weights))
}

/// That of a call with rows of x and of packed weights one behind the other.
fn copy_bytes_of(m: usize, hidden: usize, dtype: DType) -> usize {
    widest([bits(Tensor::new(0, hidden), m, dtype)])
}

/// What a call with `m` tokens and packed weights launches.
pub(super) fn needed(
    config: Config,
    code: GateCode,
    layout: Layout,
    [m, hidden]: [usize; 2],
) -> NamedVariant {
    named(config, code, layout, copy_bytes_of(m, hidden, code.dtype()))
}

fn named(config: Config, code: GateCode, layout: Layout, copy: usize) -> NamedVariant {
    let [m, h] = config.tile();
    let name = format!("{} {layout} {m}x{h} copy{copy}", code.name());
    NamedVariant { name, variant: variant(config, code, layout, copy) }
}

/// The function that a call launches.
pub(super) fn prepare(cuda: &Cuda, config: Config, call: &Call<'_>) -> Result<Function> {
    function(cuda, config, call.code, call.layout(), copy_bytes(call))
}

/// # Safety
/// As [`super::gated_gemm::Kernel::launch`].
pub(super) unsafe fn launch(stream: &Stream, config: Config, call: &Call<'_>) -> Result<()> {
    let (cuda, w) = (stream.cuda(), &call.weights);
    let function = prepare(cuda, config, call)?;
    let extents = call.extents(cuda, config.tile(), cuda.facts().sm_count);
    let params = Params {
        operands: Operands::new(call.x, [w.gate, w.up], w.row_stride, extents),
        epilogue: call.epilogue(),
    };
    let launch = config.launch(call.tiles(config.tile()));
    // SAFETY: the parameters are those of the kernel; the caller vouches for the memory.
    unsafe { enqueue(stream, &function, &launch, &params) }
}

/// Every activation and mode in the large tile, every layout, tile and copy with the default ones.
pub(super) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all = Vec::new();
    let mut push = |config: Config, code: GateCode, layout: Layout, copy| {
        all.push(named(config, code, layout, copy));
    };
    let out_in = Layout { orientation: Orientation::OutIn, bias: Bias::Floats, saves: false };
    for code in GateCode::all(dtype) {
        push(Config::LARGE, code, out_in, 16);
    }
    let default = super::default_code(dtype);
    for config in Config::ALL {
        for orientation in Orientation::ALL {
            for copy in [16, 8, 4, 2].into_iter().filter(|&c| c >= dtype.size()) {
                let bias = if copy == 16 { Bias::Floats } else { Bias::None };
                push(config, default, Layout { orientation, bias, ..out_in }, copy);
            }
        }
        push(config, default, Layout { bias: Bias::Elements, ..out_in }, 16);
        push(config, default, Layout { saves: true, ..out_in }, 16);
    }
    all
}
