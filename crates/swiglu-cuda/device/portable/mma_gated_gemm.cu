// h = act(x·Wg + bg, x·Wu + bu) on every GPU from sm_80: the main loop of mma_gemm.cuh over gate and up, whose sums of an
// output meet in one thread, and the activation behind it.
//
// Compile-time: what mma_gemm.cuh, gated_gemm.cuh and gate.cuh name.
#include "lib/gated_gemm.cuh"
#include "portable/mma_gemm.cuh"

static_assert(kOperands == 2, "gate and up");

struct MmaGatedGemmParams {
  Operands operands;
  EpilogueParams epilogue;
};

struct Gated {
  static INLINE void begin() {}
  static INLINE void take(const MmaGatedGemmParams& p, Part part, Place place, const OutputPair& gate,
                          const OutputPair& up) {
    const Extents& e = p.operands.extents;
    const int row = part.row + place.row, column = part.column + place.column;
    store_pair(activate_pair(gate.value[0], gate.value[1], up.value[0], up.value[1], p.epilogue, e,
                             row, column),
               p.epilogue, e, row, column);
  }
  static INLINE void finish(const MmaGatedGemmParams&, Part, int) {}
};

KERNEL(kThreads, 1, mma_gated_gemm)(KERNEL_PARAMS(MmaGatedGemmParams) p) { gemm<Gated>(p); }
