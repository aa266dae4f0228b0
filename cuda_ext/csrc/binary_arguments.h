// What the operators on packed binary weights require of their arguments, on every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

namespace stillhouse {

// Shape of a product, checked before memory is touched.
struct BinaryShape {
  int64_t rows, inputs, outputs, words, panels;
  int64_t scale_step;
  bool bfloat16;

  BinaryShape(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
              const std::optional<at::Tensor>& bias, int64_t outputs)
      : outputs(outputs) {
    TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
                "x is ", x.scalar_type(), "; products with binary weights take float32 and bfloat16");
    TORCH_CHECK(x.dim() >= 1, "x has no dimension; its last one must be the inputs");
    inputs = x.size(-1);
    rows = 1;
    for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) rows *= x.size(dim);
    words = (inputs + 31) / 32;
    panels = (outputs + 15) / 16;
    // The sums' terms are counted in fp32, which has every integer up to 2^24.
    TORCH_CHECK(inputs < (int64_t{1} << 24), "x has ", inputs, " inputs; sums are exact below 2^24");
    TORCH_CHECK(outputs >= 0 && weight.scalar_type() == at::kInt && weight.dim() == 3 && weight.size(0) == panels &&
                    weight.size(1) == words && weight.size(2) == 16 && weight.is_contiguous(),
                "weight is ", weight.scalar_type(), " of shape ", weight.sizes(), "; ", outputs, " outputs of ", inputs,
                " inputs are a contiguous int32 of shape [", panels, ", ", words, ", 16]");
    TORCH_CHECK(weight.device() == x.device(), "weight is on ", weight.device(), ", but x is on ", x.device());
    require_vector(scale, "scale", at::kFloat, x);
    TORCH_CHECK(scale.numel() == 1 || scale.numel() == outputs, "scale has ", scale.numel(),
                " elements; it must have one, or one for each of ", outputs, " outputs");
    scale_step = scale.numel() == 1 ? 0 : 1;
    if (bias.has_value()) {
      require_vector(*bias, "bias", at::kFloat, x);
      TORCH_CHECK(bias->numel() == outputs, "bias has ", bias->numel(), " elements for ", outputs, " outputs");
    }
    bfloat16 = x.scalar_type() == at::kBFloat16;
  }

  int64_t require_threshold(const at::Tensor& threshold, const at::Tensor& x) const {
    require_vector(threshold, "threshold", at::kFloat, x);
    TORCH_CHECK(threshold.numel() == 1 || threshold.numel() == inputs, "threshold has ", threshold.numel(),
                " elements; it must have one, or one for each of ", inputs, " inputs");
    return threshold.numel() == 1 ? 0 : 1;
  }

  void require_positives(const std::optional<at::Tensor>& positives, const at::Tensor& x) const {
    if (!positives.has_value()) return;
    require_vector(*positives, "positives", at::kInt, x);
    TORCH_CHECK(positives->numel() == outputs, "positives has ", positives->numel(), " elements for ", outputs,
                " outputs");
  }

  at::Tensor result(const at::Tensor& x) const {
    at::DimVector sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = outputs;
    return at::empty(sizes, x.options());
  }

 private:
  static void require_vector(const at::Tensor& given, const char* name, at::ScalarType type, const at::Tensor& x) {
    TORCH_CHECK(given.scalar_type() == type && given.is_contiguous() && given.device() == x.device(), name, " is ",
                given.scalar_type(), " on ", given.device(), "; it must be a contiguous ", type, " on ", x.device());
  }
};

}  // namespace stillhouse
