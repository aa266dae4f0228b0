// What the operators on packed binary weights require of their arguments, on every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <optional>

#include "binary_product.h"

namespace stillhouse {

// A product whose arguments are checked before memory is touched, and the tensors that it points into.
struct BinaryArguments {
  at::Tensor x, out;
  BinaryProduct product{};

  BinaryArguments(const at::Tensor& given, const at::Tensor& weight, const at::Tensor& scale,
                  const std::optional<at::Tensor>& bias, int64_t outputs) {
    TORCH_CHECK(given.scalar_type() == at::kFloat || given.scalar_type() == at::kBFloat16,
                "x is ", given.scalar_type(), "; products with binary weights take float32 and bfloat16");
    TORCH_CHECK(given.dim() >= 1, "x has no dimension; its last one must be the inputs");
    const int64_t inputs = given.size(-1), words = (inputs + kWordBits - 1) / kWordBits,
                  panels = (outputs + kPanel - 1) / kPanel;
    // The sums' terms are counted in fp32, which has every integer up to 2^24.
    TORCH_CHECK(inputs < (int64_t{1} << 24), "x has ", inputs, " inputs; sums are exact below 2^24");
    TORCH_CHECK(outputs >= 0 && weight.scalar_type() == at::kInt && weight.dim() == 3 && weight.size(0) == panels &&
                    weight.size(1) == words && weight.size(2) == kPanel && weight.is_contiguous(),
                "weight is ", weight.scalar_type(), " of shape ", weight.sizes(), "; ", outputs, " outputs of ", inputs,
                " inputs are a contiguous int32 of shape [", panels, ", ", words, ", 16]");
    TORCH_CHECK(weight.device() == given.device(), "weight is on ", weight.device(), ", but x is on ", given.device());
    x = given.contiguous();
    const float* scales = vector<float>(scale, "scale", at::kFloat);
    TORCH_CHECK(scale.numel() == 1 || scale.numel() == outputs, "scale has ", scale.numel(),
                " elements; it must have one, or one for each of ", outputs, " outputs");
    at::DimVector sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = outputs;
    out = at::empty(sizes, x.options());
    product.x = x.const_data_ptr();
    product.weight = reinterpret_cast<const uint32_t*>(weight.const_data_ptr<int32_t>());
    product.scale = scales;
    product.bias = bias.has_value() ? for_each_output<float>(*bias, "bias", at::kFloat) : nullptr;
    product.out = out.mutable_data_ptr();
    product.rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
    product.inputs = inputs;
    product.outputs = outputs;
    product.words = words;
    product.panels = panels;
    product.scale_step = scale.numel() == 1 ? 0 : 1;
    product.bfloat16 = x.scalar_type() == at::kBFloat16;
  }

  // Makes the activations bits.
  void compare(const at::Tensor& threshold, const std::optional<at::Tensor>& positives) {
    product.threshold = vector<float>(threshold, "threshold", at::kFloat);
    TORCH_CHECK(threshold.numel() == 1 || threshold.numel() == product.inputs, "threshold has ", threshold.numel(),
                " elements; it must have one, or one for each of ", product.inputs, " inputs");
    product.threshold_step = threshold.numel() == 1 ? 0 : 1;
    if (positives.has_value()) product.positives = for_each_output<int32_t>(*positives, "positives", at::kInt);
  }

 private:
  template <typename T>
  const T* vector(const at::Tensor& given, const char* name, at::ScalarType type) const {
    TORCH_CHECK(given.scalar_type() == type && given.is_contiguous() && given.device() == x.device(), name, " is ",
                given.scalar_type(), " on ", given.device(), "; it must be a contiguous ", type, " on ", x.device());
    return given.const_data_ptr<T>();
  }

  template <typename T>
  const T* for_each_output(const at::Tensor& given, const char* name, at::ScalarType type) const {
    const T* values = vector<T>(given, name, type);
    TORCH_CHECK(given.numel() == out.size(-1), name, " has ", given.numel(), " elements for ", out.size(-1),
                " outputs");
    return values;
  }
};

}  // namespace stillhouse
