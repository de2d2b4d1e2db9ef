//! Where tiles become narrower, so that the last wave of them is no longer than it needs to be.

/// Widths of narrow tiles: whole panels of the full ones.
pub(super) const WIDTHS: [usize; 2] = [64, 32];
const TILE_M: usize = 128;
/// What an SM takes for its narrow tiles beyond their share of a full one, in full tiles: fitted on an
/// H200, where 80 columns instead of 96 of 256 x 4864 took 6 % longer.
const NARROW: f64 = 0.2;

/// How the features of a layer are cut: into tiles of the full width up to `full_columns`, and from there on
/// into tiles of `tail` columns, or, if that is 0, none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cut {
    pub(crate) full_columns: usize,
    pub(crate) tail: usize,
    /// How long the busiest SM takes, in tiles of the full width.
    pub(crate) waves: f64,
}

/// Cycles of a step of 64 k of a tile: 4096 operations a cycle, and 64 bytes from L2.
fn step_cycles(width: usize) -> usize {
    (4 * TILE_M * width * 64 / 4096).max((TILE_M + 2 * width) * 128 / 64)
}

impl Cut {
    /// So many tokens are not cut: 4 to 31 % slower on an H200.
    pub(crate) const NO_LESS: usize = 64;

    /// All tiles of the full width.
    pub(crate) fn none(rows: usize, features: usize, width: usize, multiprocessors: usize) -> Cut {
        let tiles = rows.saturating_mul(features.div_ceil(width));
        let waves = tiles.div_ceil(multiprocessors.max(1)) as f64;
        Cut { full_columns: features, tail: 0, waves }
    }

    /// The cut of so many rows of tiles by `features`, `width` of which are a full tile, with the least work for
    /// the busiest SM; of equal ones that with most full tiles. A few dozen operations.
    pub(crate) fn best(rows: usize, features: usize, width: usize, multiprocessors: usize) -> Cut {
        let mut best = Cut::none(rows, features, width, multiprocessors);
        let sms = multiprocessors.max(1);
        let tiles = rows.saturating_mul(features.div_ceil(width));
        for tail in WIDTHS.into_iter().filter(|&tail| tail < width) {
            // Full tiles in as many whole waves as there are, or one or two less.
            for fewer in 0..3 {
                let Some(whole) = (tiles / sms).checked_sub(fewer) else { break };
                let columns = (whole.saturating_mul(sms) / rows.max(1)).min(features / width);
                let rest = features - columns * width;
                if rest == 0 {
                    continue;
                }
                let counts = [columns * rows, rows.saturating_mul(rest.div_ceil(tail))];
                let waves = busiest(counts, [width, tail], sms) + NARROW;
                let full_columns = columns * width;
                let wider = best.tail > 0 && full_columns > best.full_columns;
                if waves < best.waves || (waves == best.waves && wider) {
                    best = Cut { full_columns, tail, waves };
                }
            }
        }
        best
    }
}

/// What the SM with the most work computes of `full` tiles and then `narrow` ones, which are dealt
/// out in turn, in full tiles.
fn busiest([full, narrow]: [usize; 2], [width, tail]: [usize; 2], sms: usize) -> f64 {
    let dealt = |tiles: usize, sm: usize| tiles / sms + usize::from(sm < tiles % sms);
    let work = |sm: usize| {
        let (wide, all) = (dealt(full, sm), dealt(full.saturating_add(narrow), sm));
        wide * step_cycles(width) + (all - wide) * step_cycles(tail)
    };
    // The first has the most tiles of all, and the first behind the last full tile the most narrow ones.
    work(0).max(work(full % sms)) as f64 / step_cycles(width) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What every SM gets, counted out.
    fn counted(rows: usize, features: usize, width: usize, sms: usize, cut: Cut) -> f64 {
        let full = rows * cut.full_columns.div_ceil(width);
        let rest = features.saturating_sub(cut.full_columns);
        let narrow = if cut.tail == 0 { 0 } else { rows * rest.div_ceil(cut.tail) };
        let mut work = vec![0; sms];
        for tile in 0..full + narrow {
            work[tile % sms] += step_cycles(if tile < full { width } else { cut.tail });
        }
        let most = work.into_iter().max().unwrap() as f64 / step_cycles(width) as f64;
        if narrow > 0 { most + NARROW } else { most }
    }

    #[test]
    fn cuts_cover_the_features_and_are_no_worse_than_none() {
        for sms in [1, 2, 78, 114, 132] {
            for rows in [1, 2, 3, 4, 8, 16, 33, 128] {
                for features in [1, 8, 95, 96, 97, 200, 3420, 4096, 4864, 8192, 13696, 14336] {
                    let none = Cut::none(rows, features, 96, sms);
                    let cut = Cut::best(rows, features, 96, sms);
                    let told = format!("{rows} rows of {features} on {sms}: {cut:?}");
                    assert!(cut.waves <= none.waves, "{told}");
                    assert_eq!(cut.waves, counted(rows, features, 96, sms, cut), "{told}");
                    match cut.tail {
                        0 => assert_eq!(cut.full_columns, features, "{told}"),
                        tail => {
                            assert!(tail < 96 && tail % 32 == 0, "{told}");
                            assert!(cut.full_columns < features, "{told}");
                            assert_eq!(cut.full_columns % 96, 0, "{told}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_last_wave_of_known_layers_is_short() {
        let cut = |rows, features| Cut::best(rows, features, 96, 132);
        // 512 x 14336: five waves before.
        let Cut { full_columns, tail, waves } = cut(4, 14336);
        assert_eq!((full_columns, tail), (132 * 96, 64));
        assert!(waves < 4.9);
        // 1024 x 4096: three waves before.
        assert_eq!((cut(8, 4096).full_columns, cut(8, 4096).tail), (33 * 96, 64));
        // Whole waves need no other tiles, nor does one that is nearly whole.
        assert_eq!([cut(132, 9600).tail, cut(2, 4864).tail], [0, 0]);
    }

    /// The sizes of `tiles_that_become_narrow` in `tests/conformance.rs`.
    #[test]
    fn the_conformance_suite_meets_every_cut() {
        for sms in [4, 132] {
            let (half, quarter) = (sms / 2, sms / 4);
            for odd in [0, 1] {
                let cut = |rows, features| {
                    let cut = Cut::best(rows, features - odd, 96, sms);
                    (cut.full_columns, cut.tail)
                };
                assert_eq!(cut(2, 160 * half - 8), (96 * half, 64));
                let eighth = (sms / 8).max(1);
                assert_eq!(cut(8, 96 * quarter + 32 * eighth), (96 * quarter, 32));
                assert_eq!(cut(1, 60), (0, 32));
            }
        }
    }
}
