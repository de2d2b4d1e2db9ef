// wgmma.mma_async in flight. Each warp of a warpgroup computes its own 16 rows of the tile.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device_abi.hpp"

namespace sim {

constexpr int WGMMA_K = 16;

struct WgmmaOp {
  WgmmaArgs args;
  bool done;
};

// The accumulators of one tile while operations on them are under way; the lanes' registers hold
// NaN meanwhile.
struct WgmmaTile {
  float* lanes[32];
  int n;
  unsigned in_flight;
  std::vector<float> values;  // [16][n]
};

struct WgmmaGroup {
  std::vector<std::pair<WgmmaOp, std::shared_ptr<WgmmaTile>>> ops;
};

struct WgmmaState {
  bool fenced = false;
  WgmmaGroup open;
  std::vector<WgmmaGroup> committed;  // and not waited for
  uint64_t retired = 0;               // groups that were waited for
  uint64_t issued() const { return retired + committed.size(); }
  std::vector<std::shared_ptr<WgmmaTile>> tiles;
};

}  // namespace sim
