//! A second decoder, written element by element from the C definition of each block: slow, and
//! in float64 so that only the last step rounds.

#![allow(clippy::cast_possible_wrap, reason = "as the C definition casts")]

use half::f16;

/// All types but those of codebooks.
pub const TYPES: [&str; 16] = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
];

pub fn block_bytes(dtype: &str) -> usize {
    match dtype {
        "Q4_0" => 2 + 16,
        "Q4_1" => 2 + 2 + 16,
        "Q5_0" => 2 + 4 + 16,
        "Q5_1" => 2 + 2 + 4 + 16,
        "Q8_0" => 2 + 32,
        "Q2_K" => 16 + 64 + 2 + 2,
        "Q3_K" => 32 + 64 + 12 + 2,
        "Q4_K" => 2 + 2 + 12 + 128,
        "Q5_K" => 2 + 2 + 12 + 32 + 128,
        "Q6_K" => 128 + 64 + 16 + 2,
        "IQ4_NL" => 2 + 16,
        "IQ4_XS" => 2 + 2 + 4 + 128,
        "TQ1_0" => 48 + 4 + 2,
        "TQ2_0" => 64 + 2,
        "MXFP4" => 1 + 16,
        "NVFP4" => 4 + 32,
        other => panic!("{other}"),
    }
}

pub fn block_elements(dtype: &str) -> usize {
    match dtype {
        "IQ4_XS" | "TQ1_0" | "TQ2_0" => 256,
        "NVFP4" => 64,
        _ if dtype.ends_with('K') => 256,
        _ => 32,
    }
}

pub fn half_offsets(dtype: &str) -> &'static [usize] {
    match dtype {
        "Q4_1" | "Q5_1" | "Q4_K" | "Q5_K" => &[0, 2],
        "Q2_K" => &[80, 82],
        "Q3_K" => &[108],
        "Q6_K" => &[208],
        "TQ1_0" => &[52],
        "TQ2_0" => &[64],
        "MXFP4" | "NVFP4" | "IQ1_M" => &[],
        _ => &[0],
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
        "Q2_K" => k2(b, &mut y),
        "Q3_K" => k3(b, &mut y),
        "Q4_K" | "Q5_K" => k45(dtype, b, &mut y),
        "Q6_K" => k6(b, &mut y),
        "IQ4_NL" => {
            for j in 0..16 {
                y[j] = fp16(b) * NON_LINEAR[usize::from(b[2 + j] & 15)];
                y[j + 16] = fp16(b) * NON_LINEAR[usize::from(b[2 + j] >> 4)];
            }
        }
        "IQ4_XS" => iq4_xs(b, &mut y),
        "TQ1_0" | "TQ2_0" => ternary(dtype, b, &mut y),
        "MXFP4" => {
            let d = 2f64.powi(i32::from(b[0]) - 128);
            for j in 0..16 {
                y[j] = d * e2m1_doubled(b[1 + j] & 15);
                y[j + 16] = d * e2m1_doubled(b[1 + j] >> 4);
            }
        }
        "NVFP4" => {
            for (j, y) in y.chunks_mut(16).enumerate() {
                for (l, &q) in b[4 + 8 * j..][..8].iter().enumerate() {
                    y[l] = ue4m3(b[j]) / 2.0 * e2m1_doubled(q & 15);
                    y[l + 8] = ue4m3(b[j]) / 2.0 * e2m1_doubled(q >> 4);
                }
            }
        }
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

fn k2(b: &[u8], y: &mut [f64]) {
    let (d, min) = (fp16(&b[80..]), fp16(&b[82..]));
    let (mut is, mut out) = (0, 0);
    for q in b[16..80].chunks(32) {
        for shift in [0, 2, 4, 6] {
            for q in q.chunks(16) {
                let sc = b[is];
                is += 1;
                for q in q {
                    y[out] = d * f64::from(sc & 15) * f64::from(q >> shift & 3)
                        - min * f64::from(sc >> 4);
                    out += 1;
                }
            }
        }
    }
}

fn k3(b: &[u8], y: &mut [f64]) {
    const KMASK1: u32 = 0x0303_0303;
    const KMASK2: u32 = 0x0f0f_0f0f;
    let aux = |i: usize| u32::from_le_bytes(b[96 + 4 * i..][..4].try_into().unwrap());
    let (low, middle, high) = (aux(0), aux(1), aux(2));
    let scales: Vec<u8> = [
        (low & KMASK2) | ((high & KMASK1) << 4),
        (middle & KMASK2) | (((high >> 2) & KMASK1) << 4),
        ((low >> 4) & KMASK2) | (((high >> 4) & KMASK1) << 4),
        ((middle >> 4) & KMASK2) | (((high >> 6) & KMASK1) << 4),
    ]
    .into_iter()
    .flat_map(u32::to_le_bytes)
    .collect();
    let (mut is, mut out, mut m) = (0, 0, 1u8);
    for q in b[32..96].chunks(32) {
        for shift in [0, 2, 4, 6] {
            for l in 0..32 {
                let dl = fp16(&b[108..]) * f64::from(i32::from(scales[is + l / 16]) - 32);
                let low = i32::from(q[l] >> shift & 3);
                y[out] = dl * f64::from(low - if b[l] & m != 0 { 0 } else { 4 });
                out += 1;
            }
            is += 2;
            m = m.wrapping_shl(1);
        }
    }
}

const NON_LINEAR: [f64; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

fn iq4_xs(b: &[u8], y: &mut [f64]) {
    let high = u16::from_le_bytes([b[2], b[3]]);
    for (ib, qs) in b[8..].chunks(16).enumerate() {
        let low = (b[4 + ib / 2] >> (4 * (ib % 2))) & 0xf;
        let ls = i32::from(low) | i32::from((high >> (2 * ib)) & 3) << 4;
        let dl = fp16(b) * f64::from(ls - 32);
        for (j, q) in qs.iter().enumerate() {
            y[32 * ib + j] = dl * NON_LINEAR[usize::from(q & 0xf)];
            y[32 * ib + j + 16] = dl * NON_LINEAR[usize::from(q >> 4)];
        }
    }
}

fn ternary(dtype: &str, b: &[u8], y: &mut [f64]) {
    let mut out = 0;
    let mut put = |d: f64, trit: u16| {
        y[out] = d * (f64::from(trit) - 1.0);
        out += 1;
    };
    if dtype == "TQ2_0" {
        for qs in b[..64].chunks(32) {
            for l in 0..4 {
                qs.iter().for_each(|q| put(fp16(&b[64..]), u16::from(q >> (2 * l) & 3)));
            }
        }
        return;
    }
    for (qs, digits) in [(&b[..32], 5), (&b[32..48], 5), (&b[48..52], 4)] {
        for n in 0..digits {
            for q in qs {
                let q = q.wrapping_mul(3u8.pow(n));
                put(fp16(&b[52..]), (u16::from(q) * 3) >> 8);
            }
        }
    }
}

fn e2m1_doubled(code: u8) -> f64 {
    let magnitude = match code & 7 {
        0 | 1 => f64::from(code & 1),
        e => f64::from(2 + (e & 1)) * 2f64.powi(i32::from(e >> 1) - 1),
    };
    if code < 8 || magnitude == 0.0 { magnitude } else { -magnitude }
}

fn ue4m3(code: u8) -> f64 {
    let (e, m) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    match (code, e) {
        (0x7f, _) => 0.0,
        (_, 0) => m / 512.0,
        _ => (1.0 + m / 8.0) * 2f64.powi(e - 7),
    }
}
