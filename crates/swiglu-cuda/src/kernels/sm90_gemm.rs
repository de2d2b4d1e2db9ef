//! What launchers of the main loop in `device/sm90/gemm.cuh` share.

use super::gated_gemm::Extents;
use super::tensor_map::TensorMap;
use crate::device::cuda::Cuda;
use crate::device::launch::LaunchConfig;

pub(super) const TILE_M: usize = 128;
pub(super) const TILE_K: usize = 64;
/// Warpgroups that multiply; some forms have more.
pub(super) const CONSUMERS: usize = 2;
/// What a block can have on sm_90.
pub(super) const SHARED_LIMIT: usize = 232_448;

/// Bytes of a stage with weights of so many columns in all, and of its two barriers.
pub(super) fn stage_bytes(columns: usize) -> usize {
    (TILE_M + columns) * TILE_K * 2 + 16
}

/// Stages that fit beside so many bytes of the epilogue.
pub(super) fn stages_beside(epilogue: usize, columns: usize) -> usize {
    (SHARED_LIMIT - 1024 - epilogue) / stage_bytes(columns)
}

/// Shared memory of so many stages and an epilogue.
pub(super) fn shared_bytes(stages: usize, columns: usize, epilogue: usize) -> usize {
    1024 + stages * stage_bytes(columns) + epilogue
}

/// As in the device file, with `N` matrices of weights.
#[repr(C, align(64))]
pub(super) struct Operands<const N: usize> {
    pub(super) x: TensorMap,
    pub(super) last_x: TensorMap,
    pub(super) w: [TensorMap; N],
    pub(super) tail_w: [TensorMap; N],
    pub(super) full_columns: i32,
    pub(super) extents: Extents,
}

/// A launch of persistent blocks of so many consumers, a cluster for each so many SMs or for each tile.
pub(super) fn persistent(
    cuda: &Cuda,
    tiles: usize,
    cluster: usize,
    consumers: usize,
    shared: usize,
) -> LaunchConfig {
    let blocks = tiles.min(clusters(cuda, cluster)) * cluster;
    LaunchConfig {
        grid: [blocks as u32, 1, 1],
        block: 128 * (1 + consumers as u32),
        dynamic_shared: shared as u32,
        cluster: (cluster > 1).then_some(cluster as u32),
        // It waits before it reads or writes anything. Graphs can hold such launches since then.
        programmatic: cuda.facts().driver_version >= (12, 3),
        ..LaunchConfig::default()
    }
}

/// Clusters of so many blocks that run at a time.
pub(super) fn clusters(cuda: &Cuda, cluster: usize) -> usize {
    (cuda.facts().sm_count as usize / cluster).max(1)
}
