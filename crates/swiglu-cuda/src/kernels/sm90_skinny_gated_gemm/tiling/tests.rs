//! Tiles, splits and what is refused.

use super::*;

const EVEN: Config = Config { tile_m: 16, kind: Kind::EvenShare, split: 1, next: Next::Unknown };

fn shape(tokens: usize, features: usize, orientation: Orientation) -> Shape {
    Shape { tokens, features, orientation, multiprocessors: 132 }
}

#[test]
fn blocks_fit_a_multiprocessor() {
    for (config, orientation) in Config::ALL.iter().flat_map(|c| Orientation::ALL.map(|o| (c, o))) {
        for count in (0..60_000).step_by(97) {
            let tiling = config.tiling(shape(100, count, orientation));
            let all = (tiling.shared_bytes() + 1024) * tiling.blocks_per_sm;
            assert!(all <= SHARED_PER_SM && tiling.stages() >= 3, "{tiling:?}");
            for leaving in config.before_down() {
                let room = match leaving.next {
                    Next::SkinnyGemmBeside => 122 * 1024,
                    Next::RegisterGemmBeside => 208 * 1024,
                    _ => continue,
                };
                let tiling = leaving.tiling(shape(16, count, orientation));
                assert!(tiling.shared_bytes() <= room && tiling.stages() >= 2);
                assert_eq!(tiling.requested_bytes(), room, "{tiling:?}");
                assert!((1..tiling.stages()).contains(&tiling.under_way()), "{tiling:?}");
            }
            if let Multiplier::Wgmma { columns, .. } = tiling.form().multiplier {
                assert!(columns <= 256 && columns.is_multiple_of(16), "{tiling:?}");
            }
        }
    }
}

#[test]
fn every_multiprocessor_has_as_many_tiles() {
    let fitted = |count| EVEN.tiling(shape(1, count, Orientation::OutIn)).tile_h;
    assert_eq!([14336, 18944, 8192, 4864].map(fitted), [112, 144, 64, 40]);
    // Two tiles each, and what has less than eight features for each.
    assert_eq!([28672, 256, 0].map(fitted), [112, 8, 8]);
    let in_out = EVEN.tiling(shape(1, 14336, Orientation::InOut));
    assert_eq!(in_out.tile_h, 128);
}

/// Of one row of tiles or of two; more rows take the width of two.
#[test]
fn rows_of_tiles_share_the_multiprocessors() {
    let by_tokens = Config::by_tokens(2);
    let fitted = |m, count| by_tokens.tiling(shape(m, count, Orientation::OutIn)).tile_h;
    assert_eq!([77, 128, 129, 256, 257].map(|m| fitted(m, 4864)), [40, 40, 80, 80, 80]);
    // Beyond 128 multiples of 16; and two tiles each.
    assert_eq!([18_432, 18_944, 28_672].map(|h| fitted(64, h)), [144, 144, 112]);
    let in_out = by_tokens.tiling(shape(64, 20_000, Orientation::InOut));
    assert_eq!(in_out.tile_h, 128);
    // More tokens leave room for fewer features.
    let most =
        |groups| Config::by_tokens(groups).tiling(shape(1, 18_944, Orientation::OutIn)).tile_h;
    assert_eq!([1, 2, 3].map(most), [144, 144, 72]);
}

#[test]
fn tokens_are_shared_evenly() {
    let tile = |m, h| Config::EVEN_TOKENS.tiling(shape(m, h, Orientation::OutIn)).tile();
    assert_eq!([1, 136, 192].map(|m| tile(m, 14336)), [[16, 112], [144, 112], [192, 112]]);
    assert_eq!(
        [193, 260, 320, 385].map(|m| tile(m, 8192)),
        [[112, 128], [144, 128], [160, 128], [144, 96]]
    );
    let sums = |m| Config::EVEN_TOKENS.tiling(shape(m, 18_944, Orientation::OutIn)).tile_h;
    // Three warpgroups, and two.
    assert_eq!([128, 129].map(sums), [144, 72]);
    assert!(Config::EVEN_TOKENS.fits_rows(5) && !EVEN.fits_rows(2));
}

#[test]
fn names_tell_forms_apart() {
    let mut names: Vec<_> = Config::ALL.map(|config| config.to_string()).into();
    assert_eq!(names[..2], ["16x64 split 1", "16x64 split 2"]);
    assert_eq!(names[3], "16xfitted");
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Config::ALL.len());
}

#[test]
fn k_is_split_into_whole_steps() {
    let config = Config { kind: Kind::Instruction, split: 4, ..EVEN };
    assert!(!config.can_split(192) && config.can_split(193));
}
