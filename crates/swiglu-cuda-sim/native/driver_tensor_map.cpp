// cuTensorMapEncodeTiled, with the conditions that its documentation lists.
#include <cstring>

#include "driver_abi.hpp"
#include "tensor_map.hpp"

namespace {

// Bytes of CU_TENSOR_MAP_DATA_TYPE_*; 0 for those that are not simulated (the tf32 types convert
// while loading).
unsigned element_bytes(int type) {
  constexpr unsigned char BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 0, 0, 0};
  return type >= 0 && type < static_cast<int>(sizeof BYTES) ? BYTES[type] : 0;
}

}  // namespace

SIM_API cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base,
                               const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                               const uint32_t* element_strides, int interleave, int swizzle,
                               int l2_promotion, int nan_fill) {
  using sim::TensorMap;
  if (map == nullptr || reinterpret_cast<uintptr_t>(map) % 64 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (rank < 1 || rank > TensorMap::MAX_RANK) return CUDA_ERROR_INVALID_VALUE;
  if (sizes == nullptr || box == nullptr || element_strides == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  if (rank > 1 && strides == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const unsigned bytes = element_bytes(type);
  if (bytes == 0)
    return type >= 0 && type <= 12 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  if (interleave != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (swizzle < 0 || swizzle > 3 || l2_promotion < 0 || l2_promotion > 3)
    return CUDA_ERROR_INVALID_VALUE;
  if (base == nullptr || reinterpret_cast<uintptr_t>(base) % 16 != 0)
    return CUDA_ERROR_INVALID_VALUE;

  TensorMap m{};
  m.magic = TensorMap::MAGIC;
  m.rank = static_cast<uint8_t>(rank);
  m.element_bytes = static_cast<uint8_t>(bytes);
  m.swizzle = static_cast<uint8_t>(swizzle);
  m.base = reinterpret_cast<uint64_t>(base);
  for (unsigned d = 0; d < rank; ++d) {
    if (sizes[d] == 0 || sizes[d] > (uint64_t{1} << 32)) return CUDA_ERROR_INVALID_VALUE;
    if (box[d] == 0 || box[d] > 256) return CUDA_ERROR_INVALID_VALUE;
    if (element_strides[d] == 0 || element_strides[d] > 8) return CUDA_ERROR_INVALID_VALUE;
    if (element_strides[d] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    m.last[d] = static_cast<uint32_t>(sizes[d] - 1);
    m.box[d] = static_cast<uint16_t>(box[d]);
    if (d == 0) continue;
    const uint64_t stride = strides[d - 1];
    if (stride % 16 != 0 || stride >= (uint64_t{1} << 40)) return CUDA_ERROR_INVALID_VALUE;
    m.stride[d - 1] = stride;
  }
  if (m.row_bytes() % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t span = sim::swizzle_span(m.swizzle);
  if (span != 0 && m.row_bytes() > span) return CUDA_ERROR_INVALID_VALUE;
  if (nan_fill != 0) return CUDA_ERROR_NOT_SUPPORTED;
  std::memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}
