// 16-bit and tf32 operands as floats. Their products are exact in float (at most 22 significant
// bits), so whether a multiplication and an addition are fused makes no difference.
#pragma once

#include <bit>
#include <cstdint>

#include "device_abi.hpp"

namespace sim {

// Both branches are computed, so that loops over elements can be vectorised.
inline float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t special = 0x7f800000u | (magnitude & 0x007fffffu);
  return std::bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}
inline float from_bf16(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }
inline float from_16(Element element, uint16_t h) {
  return element == Element::BF16 ? from_bf16(h) : from_f16(h);
}
// Tensor cores do not read the low 13 bits of a tf32 operand.
inline float from_tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

}  // namespace sim
