// bfloat16 and IEEE half as bit patterns, for the CPU kernels. No branches, so that loops over these
// functions become vector code; rounding is to nearest even, NaN stays NaN, half overflows to infinity.
#pragma once

#include <cstdint>
#include <cstring>

#include "adan_update.h"

namespace stillhouse {

// Number format in which tensors are stored. Those of Adan are never in fp64.
enum class Storage : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

STILLHOUSE_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

STILLHOUSE_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

STILLHOUSE_INLINE float bfloat16_to_float(uint16_t stored) { return float_of(static_cast<uint32_t>(stored) << 16); }

STILLHOUSE_INLINE uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

STILLHOUSE_INLINE float half_to_float(uint16_t stored) {
  const uint32_t sign = static_cast<uint32_t>(stored & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(stored & 0x7fffu) << 13;
  // Multiplying by 2^112 moves the exponent bias from 15 to 127, subnormal halves included.
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t result = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : finite;
  return float_of(result | sign);
}

STILLHOUSE_INLINE uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the addition of 0.5 makes the adder round at the last bit of a subnormal half.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= 0x47800000u ? special : finite) | sign);
}

// An fp32 value as a bfloat16 (rounded, ties away from zero) and a signed 16-bit remainder of the bit pattern:
// bits = (upper << 16) + remainder, exactly.
STILLHOUSE_INLINE float join_split(uint16_t upper, int16_t remainder) {
  return float_of((static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

STILLHOUSE_INLINE uint16_t split_upper(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x8000u) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? ((bits >> 16) | 0x40u) : rounded);
}

STILLHOUSE_INLINE int16_t split_remainder(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<int16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0 : static_cast<uint16_t>(bits));
}

}  // namespace stillhouse
