// bfloat16 of CUDA, for the host.
#pragma once

#include "number_formats.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return stillhouse::bfloat16_to_float(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {stillhouse::float_to_bfloat16(x)}; }
