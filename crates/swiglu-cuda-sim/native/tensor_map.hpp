// The simulated form of a CUtensorMap: what cuTensorMapEncodeTiled was told, in its 128 bytes.
#pragma once

#include <cstdint>

namespace sim {

struct alignas(64) TensorMap {
  static constexpr uint32_t MAGIC = 0x70616d54;  // "Tmap"
  static constexpr uint32_t MAX_RANK = 5;

  uint32_t magic;
  uint8_t rank, element_bytes, swizzle;
  uint64_t base;
  uint32_t last[MAX_RANK];  // size of each dimension less one, innermost first
  uint16_t box[MAX_RANK];
  uint64_t stride[MAX_RANK - 1];  // bytes, of dimensions 1 and up

  uint64_t size(uint32_t dimension) const { return uint64_t{last[dimension]} + 1; }
  uint32_t row_bytes() const { return uint32_t{box[0]} * element_bytes; }
  uint32_t box_bytes() const {
    uint32_t bytes = element_bytes;
    for (uint32_t d = 0; d < rank; ++d) bytes *= box[d];
    return bytes;
  }
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap has 128 bytes");

// Swizzling exchanges 16-byte chunks within 128-byte lines, depending on the line: bits 4 and up
// of the address are XORed with bits 7 and up (PTX ISA 5.5.8, swizzling modes). `span` is the
// number of bytes of the swizzle: 128, 64, 32, or 0 for none.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
  const uint32_t chunks = span <= 16 ? 0 : span / 16 - 1;
  return address ^ ((address >> 3) & (chunks << 4));
}

// Bytes of CU_TENSOR_MAP_SWIZZLE_NONE, _32B, _64B, _128B.
inline uint32_t swizzle_span(uint8_t mode) { return mode == 0 ? 0 : 16u << mode; }

}  // namespace sim
