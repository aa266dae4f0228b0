// What the encoder's CPU operators make of their arguments, and the rows that they count.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "encoder_rows.h"

namespace stillhouse::cpu {

inline std::atomic<int64_t> rows_forward{0}, rows_backward{0};

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Element::kFloat32;
    case at::kDouble:
      return Element::kFloat64;
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kHalf:
      return Element::kFloat16;
    default:
      TORCH_CHECK(false, "the encoder's kernels take float32, float64, bfloat16 and float16, not ", type);
  }
}

inline at::ScalarType wide(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

inline void require_same(const at::Tensor& given, const at::Tensor& like, const char* name) {
  TORCH_CHECK(given.sizes() == like.sizes() && given.scalar_type() == like.scalar_type(), name, " is ",
              given.scalar_type(), " of shape ", given.sizes(), "; it must be ", like.scalar_type(), " of shape ",
              like.sizes());
}

inline DropoutWork dropout_of(double rate, const at::Tensor& seed, int64_t offset) {
  TORCH_CHECK(rate >= 0.0 && rate < 1.0, "rate is ", rate, "; it must be at least 0 and below 1");
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1 && seed.is_cpu(),
              "seed must be one int64 on the CPU");
  // At most one level less than all: what is kept is scaled by its share.
  const int32_t below = std::min<int32_t>(65535, static_cast<int32_t>(std::lround(rate * 65536.0)));
  return {below, 65536.0 / (65536.0 - below),
          static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()), static_cast<uint64_t>(offset)};
}

}  // namespace stillhouse::cpu
