//! Tensor cores of a warp and of a warpgroup, and TMA, against plain products.
mod common;

use common::*;
use half::bf16;

fn bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()
}

#[test]
fn mma_of_a_warp() {
    let Some(sim) = sim() else { return };
    // a [16, 16] and b [8, 16] (column-major B) by ldmatrix after cp.async.
    let source = "
struct P { const u16* a; const u16* b; float* d; };
KERNEL(32, 1, tile)(KERNEL_PARAMS(P) p) {
  const u32 shared = ptx::shared_address(ptx::dynamic_shared()), lane = threadIdx.x;
  for (int i = 0; i < 16; i += 16) {
    ptx::copy_async<16>(shared + lane * 16, p.a + lane * 8, true);
    if (lane < 16) ptx::copy_async<16>(shared + 512 + lane * 16, p.b + lane * 8, true);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncwarp();
  u32 a[4], b[4];
  ptx::load_matrix_x4(a, shared + lane % 16 * 32 + lane / 16 * 16);
  ptx::load_matrix_x4(b, shared + 512 + lane % 8 * 32 + lane / 8 % 2 * 16);
  float d[4] = {1, 1, 1, 1};
  ptx::mma_bf16(d, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) p.d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}";
    #[repr(C)]
    struct P {
        a: u64,
        b: u64,
        d: u64,
    }
    let (a, b) = (numbers(256, 1), numbers(128, 2));
    let d = upload(sim, &[0f32; 128]);
    let params = P { a: upload(sim, &bits(&a)), b: upload(sim, &bits(&b)), d };
    let tile = kernel(sim, source, &[], "tile", 768);
    assert_eq!(launch(sim, tile, 1, 32, 768, &params), 0);
    let want = product(16, 8, 16, |i, k| a[i * 16 + k], |k, j| b[j * 16 + k]);
    let want: Vec<_> = want.iter().map(|x| x + 1.0).collect();
    assert_eq!(download::<f32>(sim, d, 128), want);
}

#[test]
fn mma_of_a_warp_in_tf32() {
    let Some(sim) = sim() else { return };
    let source = "
struct P { const float* a; const float* b; float* d; };
KERNEL(32, 1, tile)(KERNEL_PARAMS(P) p) {
  const u32 i = threadIdx.x / 4, k = threadIdx.x % 4;
  const u32 a[4] = {ptx::tf32_bits(p.a[i * 8 + k]), ptx::tf32_bits(p.a[(i + 8) * 8 + k]),
                    ptx::tf32_bits(p.a[i * 8 + k + 4]), ptx::tf32_bits(p.a[(i + 8) * 8 + k + 4])};
  float d[4] = {};
  ptx::mma_tf32(d, a, ptx::as_bits(p.b[k * 8 + i]), ptx::as_bits(p.b[(k + 4) * 8 + i]));
  for (int e = 0; e < 4; ++e) p.d[(i + e / 2 * 8) * 8 + 2 * k + e % 2] = d[e];
}";
    #[repr(C)]
    struct P {
        a: u64,
        b: u64,
        d: u64,
    }
    let (a, b) = (numbers(128, 3), numbers(64, 4));
    let d = upload(sim, &[0f32; 128]);
    let tile = kernel(sim, source, &[], "tile", 0);
    assert_eq!(launch(sim, tile, 1, 32, 0, &P { a: upload(sim, &a), b: upload(sim, &b), d }), 0);
    let want = product(16, 8, 8, |i, k| a[i * 8 + k], |k, j| b[k * 8 + j]);
    assert_eq!(download::<f32>(sim, d, 128), want);
}

/// A ring of two stages, filled by TMA, multiplied by one warpgroup; the result leaves
/// through stmatrix and TMA. `TRANSPOSED` says whether b is [k, n] or [n, k].
const RING: &str = "
struct P { ptx::TensorMap a, b, d; int steps; };
constexpr u32 kA = 64 * 64 * 2, kB = COLUMNS * 64 * 2, kStage = kA + kB, kOut = 64 * COLUMNS * 2;
KERNEL(256, 1, ring)(KERNEL_PARAMS(P) p) {
  const u32 base = (ptx::shared_address(ptx::dynamic_shared()) + 1023) & ~1023u;
  const u32 out = base + 2 * kStage, full = out + kOut, empty = full + 16;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < 2; ++s) {
      ptx::barrier_init(full + 8 * s, 1);
      ptx::barrier_init(empty + 8 * s, 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    ptx::registers_release<40>();
    if (threadIdx.x == 128) {
      for (int i = 0; i < p.steps; ++i) {
        const u32 s = i % 2, stage = base + s * kStage, bar = full + 8 * s;
        ptx::barrier_wait(empty + 8 * s, i / 2 % 2 ^ 1);
        ptx::barrier_arrive_expect(bar, kStage);
        ptx::tensor_load(stage, &p.a, bar, i * 64, 0, ptx::policy_evict_normal());
        if (TRANSPOSED) {
          for (int n = 0; n < COLUMNS; n += 64) {
            ptx::tensor_load(stage + kA + n / 64 * 8192, &p.b, bar, n, i * 64);
          }
        } else {
          ptx::tensor_load(stage + kA, &p.b, bar, i * 64, 0);
        }
      }
    }
    return;
  }
  ptx::registers_request<232>();
  float d[COLUMNS / 2];
  for (int i = 0; i < p.steps; ++i) {
    const u32 s = i % 2, stage = base + s * kStage;
    ptx::barrier_wait(full + 8 * s, i / 2 % 2);
    const u64 a = ptx::swizzled_operand(stage, 0);
    const u64 b = ptx::swizzled_operand(stage + kA, TRANSPOSED ? 8192 : 0);
    ptx::wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      ptx::wgmma<COLUMNS, true, TRANSPOSED>(d, a + 2 * k, b + (TRANSPOSED ? 128 : 2) * k, (i | k) != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<WAIT>();
    if (i > 0 && threadIdx.x == 0) ptx::barrier_arrive(empty + 8 * (1 - s));
  }
  if (LAST_WAIT) ptx::wgmma_wait<0>();
  for (u32 j = 0; j < COLUMNS / 8; j += 2) {
    u32 r[4];
    for (u32 q = 0; q < 4; ++q) {
      const u32 i = 4 * (j + q / 2) + 2 * (q % 2);
      r[q] = ptx::pack_bf16(d[i], d[i + 1]);
    }
    const u32 chunk = j + lane / 16, row = warp * 16 + lane % 16;
    ptx::store_matrix_x4(out + chunk / 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16, r);
  }
  if (FENCE) ptx::fence_async_shared();
  ptx::named_barrier<1>(128);
  if (threadIdx.x == 0) {
    for (int n = 0; n < COLUMNS; n += 64) ptx::tensor_store(&p.d, out + n / 64 * 8192, n, 0);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
  if (!LAST_WAIT) ptx::wgmma_wait<0>();
}";

#[repr(C)]
struct RingParams {
    a: TensorMap,
    b: TensorMap,
    d: TensorMap,
    steps: u32,
}

const SWIZZLE_128: i32 = 3;
const SHARED: u32 = 200 * 1024;

/// What launches returned, what each computed, and what it should have.
struct Ran {
    codes: Vec<i32>,
    results: Vec<Vec<u16>>,
    want: Vec<u16>,
}

/// Launches of one tile's size, less 8 rows and columns.
fn run_ring(
    n: u32,
    transposed: bool,
    depth: u32,
    defines: &[&str],
    launches: usize,
) -> Option<Ran> {
    let sim = sim()?;
    // Fewer rows and columns than the tile: TMA clips, and fills with zeros.
    let (m, k, width) = (56, depth as usize, n as usize - 8);
    let (a, b) = (numbers(m * k, 5), numbers(k * width, 6));
    let b_at = |l: usize, j: usize| if transposed { b[l * width + j] } else { b[j * k + l] };
    let want = bits(&product(m, width, k, |i, l| a[i * k + l], b_at));
    let (a, b) = (upload(sim, &bits(&a)), upload(sim, &bits(&b)));
    let name = format!("COLUMNS={n}");
    let order = format!("TRANSPOSED={}", u8::from(transposed));
    let all: Vec<&str> =
        [&name[..], &order[..]].into_iter().chain(defines.iter().copied()).collect();
    let ring = kernel(sim, RING, &all, "ring", SHARED);
    let (mut codes, mut results) = (Vec::new(), Vec::new());
    for _ in 0..launches {
        let d = upload(sim, &vec![0u16; m * width]);
        let (rows, columns) = if transposed { (k, width) } else { (width, k) };
        let box_rows = if transposed { 64 } else { n };
        let params = RingParams {
            a: tensor_map(sim, a, m as u64, k as u64, 64, 64, SWIZZLE_128),
            b: tensor_map(sim, b, rows as u64, columns as u64, box_rows, 64, SWIZZLE_128),
            d: tensor_map(sim, d, m as u64, width as u64, 64, 64, SWIZZLE_128),
            steps: depth.div_ceil(64),
        };
        codes.push(launch(sim, ring, 1, 256, SHARED, &params));
        results.push(download(sim, d, m * width));
    }
    Some(Ran { codes, results, want })
}

const RIGHT: &[&str] = &["WAIT=1", "LAST_WAIT=1", "FENCE=1"];

#[test]
fn wgmma_of_both_layouts_through_a_ring() {
    for transposed in [false, true] {
        for (n, k) in [(64, 64), (128, 200), (256, 456)] {
            let Some(Ran { codes, results, want }) = run_ring(n, transposed, k, RIGHT, 8) else {
                return;
            };
            assert_eq!(codes, [0; 8]);
            assert!(results.iter().all(|r| *r == want), "N = {n}, k = {k}, {transposed}");
        }
    }
}

#[test]
fn accumulators_read_before_the_wait_are_not_numbers() {
    let defines = ["WAIT=1", "LAST_WAIT=0", "FENCE=1"];
    let Some(Ran { results, want, .. }) = run_ring(64, false, 64, &defines, 1) else { return };
    assert_ne!(results[0], want);
    assert!(results[0].iter().all(|&x| bf16::from_bits(x).is_nan()));
}

#[test]
fn a_tensor_store_of_unfenced_writes_is_reported() {
    let defines = ["WAIT=1", "LAST_WAIT=1", "FENCE=0"];
    let Some(Ran { codes, .. }) = run_ring(64, false, 64, &defines, 1) else { return };
    assert_eq!(codes, [719]);
}

#[test]
fn a_stage_given_back_too_soon_shows_in_some_schedule() {
    // Two groups may be under way, so the stage that is given back may still be read.
    let defines = ["WAIT=2", "LAST_WAIT=1", "FENCE=1"];
    let Some(Ran { codes, results, want }) = run_ring(64, false, 640, &defines, 32) else { return };
    // Wrong numbers, or a warp that misses two phases of its barrier and waits for ever.
    assert!(results.iter().any(|r| *r != want));
    assert!(codes.iter().all(|&code| code == 0 || code == 719));
}

/// One m64n64k16 of operands that ordinary stores put in place, in the layout of `SPAN` bytes of
/// swizzle (16: none) with B along K or along N.
const LAYOUTS: &str = "
struct P { const u16* a; const u16* b; float* d; };
// Along the contiguous extent: `inner`, in lines of SPAN bytes; across it: `outer`, 8 to a group.
INLINE u32 place(u32 base, u32 inner, u32 outer, u32 next_line, u32 next_group) {
  const u32 line = SPAN / 2, chunk = inner % line / 8;
  const u32 swap = SPAN == 128 ? outer % 8 : SPAN == 64 ? outer / 2 % 4 : SPAN == 32 ? outer / 4 % 2 : 0;
  return base + outer % 8 * SPAN + outer / 8 * next_group + inner / line * next_line +
         (chunk ^ swap) * 16 + inner % 8 * 2;
}
KERNEL(128, 1, layouts)(KERNEL_PARAMS(P) p) {
  const u32 a = ptx::shared_address(ptx::dynamic_shared()), b = a + 16384, t = threadIdx.x;
  constexpr u32 kLine = 4096, kGroup = 8 * SPAN;
  for (u32 e = t; e < 64 * 16; e += 128) {
    ptx::store_shared(place(a, e % 16, e / 16, kLine, kGroup), p.a[e]);
    if (TRANSPOSED) {
      ptx::store_shared(place(b, e % 64, e / 64, kLine / 4, SPAN == 16 ? kLine / 4 * 8 : kGroup), p.b[e]);
    } else {
      ptx::store_shared(place(b, e % 16, e / 16, kLine, kGroup), p.b[e]);
    }
  }
  ptx::fence_async_shared();
  __syncthreads();
  const u64 mode = u64(SPAN == 128 ? 1 : SPAN == 64 ? 2 : SPAN == 32 ? 3 : 0) << 62;
  const u64 da = a / 16 | u64(kLine / 16) << 16 | u64(kGroup / 16) << 32 | mode;
  u64 db = b / 16 | u64(kLine / 16) << 16 | u64(kGroup / 16) << 32 | mode;
  if (TRANSPOSED) {
    // Without a swizzle the stride offset leads along N, and the leading one along K.
    const u64 along_n = kLine / 4 / 16, along_k = (SPAN == 16 ? kLine / 4 * 8 : kGroup) / 16;
    db = b / 16 | (SPAN == 16 ? along_k : along_n) << 16 | (SPAN == 16 ? along_n : along_k) << 32 | mode;
  }
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma<64, true, TRANSPOSED>(d, da, db, false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  const u32 lane = t % 32, row = t / 32 * 16 + lane / 4;
  for (u32 i = 0; i < 32; ++i) {
    p.d[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
}";

#[test]
fn wgmma_of_every_canonical_layout() {
    let Some(sim) = sim() else { return };
    #[repr(C)]
    struct P {
        a: u64,
        b: u64,
        d: u64,
    }
    let (a, b) = (numbers(64 * 16, 7), numbers(64 * 16, 8));
    let (pa, pb) = (upload(sim, &bits(&a)), upload(sim, &bits(&b)));
    for span in [16, 32, 64, 128] {
        for transposed in [false, true] {
            let at = |k: usize, j: usize| if transposed { b[k * 64 + j] } else { b[j * 16 + k] };
            let want = product(64, 64, 16, |i, k| a[i * 16 + k], at);
            let defines = [format!("SPAN={span}"), format!("TRANSPOSED={}", u8::from(transposed))];
            let defines: Vec<&str> = defines.iter().map(String::as_str).collect();
            let layouts = kernel(sim, LAYOUTS, &defines, "layouts", 49152);
            let d = upload(sim, &[0f32; 64 * 64]);
            assert_eq!(launch(sim, layouts, 1, 128, 49152, &P { a: pa, b: pb, d }), 0);
            assert_eq!(download::<f32>(sim, d, 64 * 64), want, "{span} {transposed}");
        }
    }
}
