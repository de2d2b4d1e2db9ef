// Element types: how values of T are stored, read into float registers and rounded back.
//
// ELEMENT: 0 = f32, 1 = f16 (IEEE binary16), 2 = bf16 (bfloat16).
#pragma once
#include "lib/ptx.cuh"

constexpr bool kIsF32 = ELEMENT == 0;
constexpr bool kIsF16 = ELEMENT == 1;
constexpr bool kIsBf16 = ELEMENT == 2;
static_assert(kIsF32 || kIsF16 || kIsBf16, "ELEMENT is 0, 1 or 2");

constexpr int kElementBytes = kIsF32 ? 4 : 2;

// Storage of one element. Arithmetic happens in float only.
template <int BYTES>
struct Storage;
template <>
struct Storage<4> {
  typedef u32 Type;
};
template <>
struct Storage<2> {
  typedef u16 Type;
};
typedef Storage<kElementBytes>::Type Element;

INLINE float element_to_float(Element x) {
  if constexpr (kIsF32) return ptx::as_float(x);
  if constexpr (kIsF16) return ptx::float_from_f16(x);
  return ptx::float_from_bf16(x);
}

// Two 16-bit elements in a word, `low` first in memory.
INLINE u32 pack_elements(float low, float high) {
  return kIsF16 ? ptx::pack_f16(low, high) : ptx::pack_bf16(low, high);
}

INLINE Element float_to_element(float x) {
  if constexpr (kIsF32) {
    return ptx::as_bits(x);
  } else {
    return (Element)pack_elements(x, 0.0f);
  }
}

// Rounded to T and back: what storing and loading would do.
INLINE float round_to_element(float x) {
  if constexpr (kIsF32) return x;
  return element_to_float((Element)float_to_element(x));
}

// BYTES of adjacent elements as floats.
template <int BYTES>
struct Values {
  static constexpr int kCount = BYTES / kElementBytes;
  float value[kCount];
};

template <int BYTES>
INLINE Values<BYTES> unpack(ptx::Raw<BYTES> raw) {
  Values<BYTES> v;
  if constexpr (BYTES == 2) {
    v.value[0] = element_to_float(raw.half);
  } else if constexpr (kIsF32) {
#pragma unroll
    for (int i = 0; i < v.kCount; ++i) v.value[i] = ptx::as_float(raw.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < v.kCount; ++i) {
      v.value[i] = element_to_float((Element)(raw.word[i / 2] >> (16 * (i % 2))));
    }
  }
  return v;
}

template <int BYTES>
INLINE ptx::Raw<BYTES> pack(const Values<BYTES>& v) {
  ptx::Raw<BYTES> raw;
  if constexpr (BYTES == 2) {
    raw.half = float_to_element(v.value[0]);
  } else if constexpr (kIsF32) {
#pragma unroll
    for (int i = 0; i < v.kCount; ++i) raw.word[i] = ptx::as_bits(v.value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < v.kCount; i += 2) {
      raw.word[i / 2] = pack_elements(v.value[i], v.value[i + 1]);
    }
  }
  return raw;
}
