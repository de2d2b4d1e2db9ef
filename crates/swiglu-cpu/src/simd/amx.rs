//! AMX: tiles of 16 rows of 64 bytes, and their products of bfloat16.
//!
//! Stable Rust has neither intrinsics for tiles nor values of them, so this module is assembly: each
//! function is one block, and no tile outlives it. What does outlive it is a thread's configuration,
//! which a [`Tiles`] holds: nothing else in a process of ours touches tiles, and the system saves
//! them with the thread's other registers.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows of a tile of inputs or sums.
pub(crate) const ROWS: usize = 16;
/// Input features of a tile of inputs: two in each of 16 columns of 32 bits.
pub(crate) const FEATURES: usize = 32;
/// Bytes of a tile.
pub(crate) const BYTES: usize = 1024;
/// Bytes of weights that one step takes: 16 pairs of input features of 32 output features.
pub(crate) const STEP_BYTES: usize = 2 * BYTES;

/// Whether the processor has tiles and products of bfloat16, and the system lets this process use
/// them, which it is asked once.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| in_hardware() && permitted())
}

/// Whether the processor has them.
#[cfg(target_arch = "x86_64")]
pub(super) fn in_hardware() -> bool {
    use super::cpuid;
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    if cpuid(0, 0).eax < 0x1D || cpuid(7, 0).edx & BF16_AND_TILES != BF16_AND_TILES {
        return false;
    }
    // The kernels are written for palette 1 as it is: eight tiles of 16 rows of 64 bytes.
    let palette = cpuid(0x1D, 1);
    let (tile_bytes, row_bytes) = (palette.eax >> 16, palette.ebx & 0xFFFF);
    let (tiles, rows) = (palette.ebx >> 16, palette.ecx & 0xFFFF);
    tile_bytes as usize == BYTES && row_bytes == 64 && tiles >= 8 && rows as usize == ROWS
}

#[cfg(not(target_arch = "x86_64"))]
fn in_hardware() -> bool {
    false
}

/// Linux gives the large state to processes that ask for it; threads started later have it too. It
/// refuses where it does not manage the state itself.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_STATE: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: the call takes two integers and touches no memory of ours.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_STATE,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Elsewhere nobody has tried.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn permitted() -> bool {
    false
}

/// What `ldtilecfg` reads.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// This thread's tiles, all configured at full size; they are released when it is dropped.
pub(crate) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// Configures the tiles of this thread.
    ///
    /// # Safety
    /// [`is_available`]; the thread has no other `Tiles`.
    pub(crate) unsafe fn configure() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let mut shape = Configuration {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                row_bytes: [0; 16],
                rows: [0; 16],
            };
            shape.row_bytes[..8].fill(64);
            shape.rows[..8].fill(ROWS as u8);
            // SAFETY: the processor has tiles of this shape.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &raw const shape, options(nostack, preserves_flags));
            }
        }
        Self(PhantomData)
    }

    /// Sums of products: two tiles of sums beside each other for each tile of rows.
    ///
    /// A step is 32 input features. `x` has for each step TWO or one tiles of inputs, 16 rows of 64
    /// bytes; `w` for each step 16 pairs of features of 32 output features, [`STEP_BYTES`]. `sums` are
    /// rows of 32. Products are exact; each tile product adds those of the even and of the odd features
    /// apart in `f32` and then both to the sum, each time to nearest even, subnormals flushed.
    ///
    /// LINES lines from `ahead` on are asked for in every step.
    ///
    /// # Safety
    /// `x` and `w` are valid for `steps` steps, `sums` for the rows of the tiles.
    #[inline]
    pub(crate) unsafe fn multiply<const TWO: bool, const LINES: usize>(&self, product: Product) {
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no tiles to multiply {product:p} with", product = product.x);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tiles are configured while `self` lives; the pointers are the caller's, and
        // prefetching takes any address.
        unsafe {
            let Product { x, w, steps, sums, resume, ahead } = product;
            if TWO {
                asm!(
                    "test {resume:l}, {resume:l}",
                    "jz 2f",
                    "tileloaddt1 tmm0, [{sums} + {step}]",
                    "tileloaddt1 tmm1, [{sums} + {step} + 64]",
                    "tileloaddt1 tmm2, [{sums} + {step} + 2048]",
                    "tileloaddt1 tmm3, [{sums} + {step} + 2112]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "3:",
                    "test {steps}, {steps}",
                    "jz 5f",
                    "4:",
                    "tileloaddt1 tmm4, [{x} + {row}]",
                    "tileloadd tmm6, [{w} + {step}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{w} + {step} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloaddt1 tmm5, [{x} + {row} + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    ".set swiglu_line, 0",
                    ".rept {lines}",
                    "prefetcht1 [{ahead} + swiglu_line]",
                    ".set swiglu_line, swiglu_line + 64",
                    ".endr",
                    "add {x}, 2048",
                    "add {w}, 2048",
                    "add {ahead}, 64 * {lines}",
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    "tilestored [{sums} + {step}], tmm0",
                    "tilestored [{sums} + {step} + 64], tmm1",
                    "tilestored [{sums} + {step} + 2048], tmm2",
                    "tilestored [{sums} + {step} + 2112], tmm3",
                    resume = in(reg) u64::from(resume),
                    x = inout(reg) x => _,
                    w = inout(reg) w => _,
                    steps = inout(reg) steps => _,
                    ahead = inout(reg) ahead => _,
                    sums = in(reg) sums,
                    row = in(reg) 64usize,
                    step = in(reg) 128usize,
                    lines = const LINES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            } else {
                asm!(
                    "test {resume:l}, {resume:l}",
                    "jz 2f",
                    "tileloaddt1 tmm0, [{sums} + {step}]",
                    "tileloaddt1 tmm1, [{sums} + {step} + 64]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "3:",
                    "test {steps}, {steps}",
                    "jz 5f",
                    "4:",
                    "tileloaddt1 tmm4, [{x} + {row}]",
                    "tileloadd tmm6, [{w} + {step}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{w} + {step} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    ".set swiglu_line, 0",
                    ".rept {lines}",
                    "prefetcht1 [{ahead} + swiglu_line]",
                    ".set swiglu_line, swiglu_line + 64",
                    ".endr",
                    "add {x}, 1024",
                    "add {w}, 2048",
                    "add {ahead}, 64 * {lines}",
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    "tilestored [{sums} + {step}], tmm0",
                    "tilestored [{sums} + {step} + 64], tmm1",
                    resume = in(reg) u64::from(resume),
                    x = inout(reg) x => _,
                    w = inout(reg) w => _,
                    steps = inout(reg) steps => _,
                    ahead = inout(reg) ahead => _,
                    sums = in(reg) sums,
                    row = in(reg) 64usize,
                    step = in(reg) 128usize,
                    lines = const LINES,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    }

    /// Four independent products of full tiles in registers, `times` times.
    pub(crate) fn multiply_registers(&self, times: usize) {
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no tiles to multiply {times} times");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tiles are configured while `self` lives; nothing else is touched.
        unsafe {
            asm!(
                "test {times}, {times}",
                "jz 3f",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {times}",
                "jnz 2b",
                "3:",
                times = inout(reg) times => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the processor has tiles, or there would be no `self`.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            asm!("tilerelease", options(nostack, nomem, preserves_flags));
        }
    }
}

/// What [`Tiles::multiply`] takes.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) x: *const u8,
    pub(crate) w: *const u8,
    pub(crate) steps: usize,
    pub(crate) sums: *mut f32,
    /// Whether products are added to what `sums` holds.
    pub(crate) resume: bool,
    /// What to bring to the second-level cache.
    pub(crate) ahead: *const u8,
}
