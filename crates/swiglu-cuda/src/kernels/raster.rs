//! The order of tiles: how many row tiles share a column of weight tiles, see `device/lib/gated_gemm.cuh`.

/// Of L2, what the rows of x of a group may fill beside weights that pass through.
const CACHE_FOR_ROWS: f64 = 0.5;
/// The most row tiles of a group.
const TALLEST: usize = 32;

/// Row tiles per group of the raster. The blocks that run together read the fewest rows of x and columns of the
/// weights, counted in elements of k, where a group is about as tall as the blocks reach wide. A taller one fetches the
/// weights from memory less often, for as long as its rows of x, `row_bytes` for each row tile, stay in `cache` bytes:
/// on an H200 groups of 24 or 32 take 0.99 of the time of 15 at the limit of power for 16384×2048×4096, which fetches
/// x and the weights 4.9 times in groups of 15.
pub(super) fn rows(
    [tile_m, tile_h]: [usize; 2],
    tiles: usize,
    sm_count: usize,
    row_bytes: usize,
    cache: usize,
) -> usize {
    let read = |group: usize| group * tile_m + sm_count.div_ceil(group) * 2 * tile_h;
    let fewest = (1..=tiles.clamp(1, TALLEST)).min_by_key(|&group| read(group)).unwrap_or(1);
    let stay = (cache as f64 * CACHE_FOR_ROWS) as usize / row_bytes.max(1);
    let groups = tiles.div_ceil(stay.clamp(1, TALLEST)).max(1);
    fewest.max(tiles.div_ceil(groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_about_as_tall_as_wide() {
        let raster = |tile, tiles, k: usize| rows(tile, tiles, 132, 256 * k, 50 << 20);
        assert_eq!(raster([128, 128], 32, 14336), 15);
        assert_eq!(raster([128, 128], 1, 4096), 1);
        assert_eq!(raster([128, 64], 0, 4096), 1);
        // In groups of the same size, as tall as x may be to stay in the cache.
        assert_eq!([2048, 4096, 16384].map(|k| raster([128, 128], 128, k)), [32, 22, 15]);
        assert_eq!(rows([128, 128], 128, 132, 1 << 20, 0), 15);
    }
}
