//! A second decoder, written element by element from the C definition of each block: slow, and
//! in float64 so that only the last step rounds.

#![allow(clippy::cast_possible_wrap, reason = "as the C definition casts")]

use half::f16;

pub const TYPES: [&str; 8] = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"];

pub fn block_bytes(dtype: &str) -> usize {
    match dtype {
        "Q4_0" => 2 + 16,
        "Q4_1" => 2 + 2 + 16,
        "Q5_0" => 2 + 4 + 16,
        "Q5_1" => 2 + 2 + 4 + 16,
        "Q8_0" => 2 + 32,
        "Q4_K" => 2 + 2 + 12 + 128,
        "Q5_K" => 2 + 2 + 12 + 32 + 128,
        "Q6_K" => 128 + 64 + 16 + 2,
        other => panic!("{other}"),
    }
}

pub fn block_elements(dtype: &str) -> usize {
    if dtype.ends_with('K') { 256 } else { 32 }
}

pub fn half_offsets(dtype: &str) -> &'static [usize] {
    match dtype {
        "Q4_0" | "Q5_0" | "Q8_0" => &[0],
        "Q6_K" => &[208],
        _ => &[0, 2],
    }
}

fn fp16(b: &[u8]) -> f64 {
    f16::from_bits(u16::from(b[0]) | u16::from(b[1]) << 8).to_f64()
}

pub fn decode(dtype: &str, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(block_bytes(dtype)).flat_map(|b| decode_block(dtype, b)).collect()
}

fn decode_block(dtype: &str, b: &[u8]) -> Vec<f64> {
    let mut y = vec![f64::NAN; block_elements(dtype)];
    match dtype {
        "Q4_0" => {
            for j in 0..16 {
                let q = b[2 + j];
                y[j] = f64::from(i32::from(q & 0x0f) - 8) * fp16(b);
                y[j + 16] = f64::from(i32::from(q >> 4) - 8) * fp16(b);
            }
        }
        "Q4_1" => {
            for j in 0..16 {
                let q = b[4 + j];
                y[j] = f64::from(q & 0x0f) * fp16(b) + fp16(&b[2..]);
                y[j + 16] = f64::from(q >> 4) * fp16(b) + fp16(&b[2..]);
            }
        }
        "Q5_0" | "Q5_1" => {
            let (at, m, bias) = if dtype == "Q5_0" { (2, 0.0, 16) } else { (4, fp16(&b[2..]), 0) };
            let qh = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
            for j in 0..16 {
                let q = b[at + 4 + j];
                let xh_0 = ((qh >> j) << 4) & 0x10;
                let xh_1 = (qh >> (j + 12)) & 0x10;
                let x0 = (u32::from(q & 0x0f) | xh_0) as i32 - bias;
                let x1 = (u32::from(q >> 4) | xh_1) as i32 - bias;
                y[j] = f64::from(x0) * fp16(b) + m;
                y[j + 16] = f64::from(x1) * fp16(b) + m;
            }
        }
        "Q8_0" => {
            for j in 0..32 {
                y[j] = f64::from(b[2 + j] as i8) * fp16(b);
            }
        }
        "Q4_K" | "Q5_K" => k45(dtype, b, &mut y),
        "Q6_K" => k6(b, &mut y),
        other => panic!("{other}"),
    }
    y
}

fn get_scale_min_k4(j: usize, q: &[u8]) -> (f64, f64) {
    let (d, m) = if j < 4 {
        (q[j] & 63, q[j + 4] & 63)
    } else {
        ((q[j + 4] & 0xf) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4))
    };
    (f64::from(d), f64::from(m))
}

fn k45(dtype: &str, b: &[u8], y: &mut [f64]) {
    let (d, min) = (fp16(b), fp16(&b[2..]));
    let scales = &b[4..16];
    let (qh, mut ql): (Option<&[u8]>, &[u8]) =
        if dtype == "Q5_K" { (Some(&b[16..48]), &b[48..]) } else { (None, &b[16..]) };
    let (mut u1, mut u2) = (1u8, 2u8);
    let mut is = 0;
    let mut out = 0;
    for _ in (0..256).step_by(64) {
        let (sc, m) = get_scale_min_k4(is, scales);
        let (d1, m1) = (d * sc, min * m);
        let (sc, m) = get_scale_min_k4(is + 1, scales);
        let (d2, m2) = (d * sc, min * m);
        for l in 0..32 {
            let high = qh.map_or(0, |h| if h[l] & u1 != 0 { 16 } else { 0 });
            y[out] = d1 * f64::from((ql[l] & 0xf) + high) - m1;
            out += 1;
        }
        for l in 0..32 {
            let high = qh.map_or(0, |h| if h[l] & u2 != 0 { 16 } else { 0 });
            y[out] = d2 * f64::from((ql[l] >> 4) + high) - m2;
            out += 1;
        }
        ql = &ql[32..];
        is += 2;
        u1 = u1.wrapping_shl(2);
        u2 = u2.wrapping_shl(2);
    }
}

fn k6(b: &[u8], y: &mut [f64]) {
    let d = fp16(&b[208..]);
    let (mut ql, mut qh, mut sc) = (&b[..128], &b[128..192], &b[192..208]);
    for n in (0..256).step_by(128) {
        for l in 0..32 {
            let is = l / 16;
            let q = |low: u8, shift: u32| {
                f64::from(i32::from(low | (((qh[l] >> shift) & 3) << 4)) - 32)
            };
            let s = |i: usize| d * f64::from(sc[is + i] as i8);
            y[n + l] = s(0) * q(ql[l] & 0xf, 0);
            y[n + l + 32] = s(2) * q(ql[l + 32] & 0xf, 2);
            y[n + l + 64] = s(4) * q(ql[l] >> 4, 4);
            y[n + l + 96] = s(6) * q(ql[l + 32] >> 4, 6);
        }
        ql = &ql[64..];
        qh = &qh[32..];
        sc = &sc[8..];
    }
}
