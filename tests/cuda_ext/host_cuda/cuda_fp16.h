// IEEE half of CUDA, for the host.
#pragma once

#include "number_formats.h"

struct __half {
  uint16_t bits;
};
inline float __half2float(__half x) { return stillhouse::half_to_float(x.bits); }
inline __half __float2half_rn(float x) { return {stillhouse::float_to_half(x)}; }
