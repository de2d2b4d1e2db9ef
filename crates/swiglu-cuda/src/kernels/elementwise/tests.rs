//! Calls and variants of the element-wise kernels.

use super::*;
use swiglu_core::{Activation, Numerics};

fn extent(rows: usize, cols: usize, dtype: DType) -> Extent {
    let act = Activation::SWIGLU;
    let code = GateCode::elementwise(&act, Numerics::default_for(dtype), dtype);
    Extent { rows, cols, code, formula: Formula::new(&act) }
}

fn cut(e: &Extent, stride: usize, misalignment: u64) -> Cut {
    let t = |data| Tensor::new(data, stride);
    let inputs =
        GateUp { gate: t(4096), up: t(8192 + misalignment), group: 0, stored: Stored::Elements };
    Cut::new(e, &[inputs], &[t(1 << 20)]).unwrap()
}

#[test]
fn the_widest_access_that_every_address_allows() {
    let e = extent(3, 100, DType::Bf16);
    assert_eq!(cut(&e, 104, 0).bytes, 16);
    assert_eq!(cut(&e, 108, 0).bytes, 8);
    assert_eq!(cut(&e, 106, 0).bytes, 4);
    assert_eq!(cut(&e, 105, 0).bytes, 2);
    assert_eq!(cut(&e, 104, 2).bytes, 2);
    assert_eq!(cut(&extent(3, 100, DType::F32), 101, 0).bytes, 4);
}

#[test]
fn sums_are_read_16_bytes_at_a_time_at_most() {
    let e = extent(3, 100, DType::Bf16);
    let [gate, up] = [4096, 4512].map(|data| Tensor::new(data, 208));
    let inputs = GateUp { gate, up, group: 0, stored: Stored::Sums };
    let cut = |out, stride| Cut::new(&e, &[inputs], &[Tensor::new(out, stride)]).unwrap();
    let widths = [(4096, 104), (4096, 102), (4100, 104), (4096, 101), (4098, 104)];
    assert_eq!(widths.map(|(out, stride)| cut(out, stride).bytes), [8, 4, 4, 2, 2]);
    let last = cut(4096, 104).parts(2).last().unwrap();
    assert_eq!((last.row, last.column), (2, 96));
    let within = cut(4096, 104).within(inputs, &last);
    assert_eq!(within.gate.data, 4096 + (2 * 208 + 96) * 4);
}

#[test]
fn dense_rows_are_one_row() {
    let c = cut(&extent(3, 101, DType::F16), 101, 0);
    assert_eq!((c.bytes, c.rows, c.cols), (16, 1, 303));
    let c = cut(&extent(3, 101, DType::F16), 104, 0);
    assert_eq!((c.bytes, c.rows, c.cols), (16, 3, 101));
}

#[test]
fn quotients_are_exact() {
    let divisors = (1..70).chain([255, 256, 257, 4097, 65_537, MOST as u32 - 1, MOST as u32]);
    for d in divisors.chain((0..31).map(|i| 1 << i)) {
        let [multiplier, shift] = reciprocal(d);
        let near = (0..40).flat_map(|i| {
            let k = (1u64 << 31) / u64::from(d) * i / 39;
            let at = k * u64::from(d);
            [at.saturating_sub(1), at, at + 1]
        });
        for n in near.chain([(1 << 31) - 1]).filter(|&n| n < 1 << 31) {
            let quotient = (n * u64::from(multiplier)) >> shift;
            assert_eq!(quotient, n / u64::from(d), "{n} / {d}");
        }
    }
}

/// Every element is in one part, and threads are there for every vector.
#[test]
fn parts_are_the_whole() {
    for (rows, cols, group) in
        [(1, 1, 0), (1, 4099, 0), (7, 40, 0), (70, 3, 0), (5, 48, 8), (1, 480, 16), (3, 6, 1)]
    {
        for (bytes, most) in [(16, 1 << 30), (16, 64), (16, 8), (2, 64), (4, 100)] {
            if group > 1 && group * 2 % bytes != 0 {
                continue;
            }
            let cut = Cut { bytes, size: 2, stored: 2, rows, cols, group };
            let mut seen = vec![0u8; (rows * cols) as usize];
            for Part { row, column, tiling: t } in cut.parts(most) {
                let most = most.max(group).max(bytes / 2);
                assert!(u64::from(t.cols.max(t.total)) <= most, "{cut:?}, {most}: {t:?}");
                let launch = cut.launch(&t, THREADS);
                let threads = u64::from(launch.grid[0] * launch.block);
                assert!(threads * BYTES_IN_FLIGHT / bytes >= u64::from(t.total));
                assert_eq!(t.total % t.vectors, 0);
                assert_eq!(column % group.max(bytes / 2), 0, "a vector or group is cut");
                for r in 0..u64::from(t.total / t.vectors) {
                    for c in 0..u64::from(t.cols) {
                        seen[((row + r) * cols + column + c) as usize] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{cut:?}, {most}: {seen:?}");
        }
    }
}

#[test]
fn a_part_begins_where_its_rows_and_groups_do() {
    let t = |data, stride| Tensor::new(data, stride);
    let pair = GateUp { gate: t(1000, 70), up: t(1016, 70), group: 8, stored: Stored::Elements };
    let cut = Cut { bytes: 16, size: 2, stored: 2, rows: 5, cols: 32, group: 8 };
    let last = cut.parts(2).last().unwrap();
    assert_eq!((last.row, last.column), (4, 24));
    let within = cut.within(pair, &last);
    assert_eq!(within.gate.data, 1000 + (4 * 70 + 48) * 2);
    assert_eq!(within.up.data, within.gate.data + 16);
}

#[test]
fn nothing_to_compute_is_no_launch() {
    let none = Tensor { data: 0, stride: 0 };
    let inputs = GateUp { gate: none, up: none, group: 0, stored: Stored::Elements };
    for [rows, cols] in [[0, 5], [5, 0]] {
        let cut = Cut::new(&extent(rows, cols, DType::F32), &[inputs], &[none]).unwrap();
        assert_eq!(cut.parts(MOST).count(), 0);
    }
}

#[test]
fn groups_that_are_too_large_are_refused() {
    let t = Tensor::new(0, 1 << 33);
    let inputs = GateUp { gate: t, up: t, group: 1 << 31, stored: Stored::Elements };
    let error = Cut::new(&extent(1, 1 << 32, DType::F32), &[inputs], &[t]).unwrap_err();
    assert!(error.to_string().contains("2147483648"), "{error}");
}
