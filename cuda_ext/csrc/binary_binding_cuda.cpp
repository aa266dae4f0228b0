// The CUDA kernels of the operators on packed binary weights, which binary_cpu.cpp declares.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <atomic>
#include <vector>

#include "binary_arguments.h"
#include "binary_cuda.h"

namespace {

using at::Tensor;
using stillhouse::BinaryShape;
namespace cuda = stillhouse::cuda;

std::atomic<int64_t> linear_calls{0}, weight_linear_calls{0};

cuda::BinaryProduct product_of(const BinaryShape& shape, const Tensor& x, const Tensor& weight, const Tensor& scale,
                               const std::optional<Tensor>& bias, Tensor& out) {
  cuda::BinaryProduct product{};
  product.x = x.const_data_ptr();
  product.weight = reinterpret_cast<const uint32_t*>(weight.const_data_ptr<int32_t>());
  product.scale = scale.const_data_ptr<float>();
  product.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  product.out = out.mutable_data_ptr();
  product.rows = shape.rows;
  product.inputs = shape.inputs;
  product.outputs = shape.outputs;
  product.words = shape.words;
  product.scale_step = shape.scale_step;
  product.bfloat16 = shape.bfloat16;
  return product;
}

void* stream_of(const Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.device().index()).stream(); }

void check(const char* error, const char* name) { TORCH_CHECK(error == nullptr, name, ": the launch failed: ", error); }

Tensor binary_linear(const Tensor& given, const Tensor& weight, const std::optional<Tensor>& positives,
                     const Tensor& scale, const std::optional<Tensor>& bias, const Tensor& threshold,
                     int64_t outputs) {
  const BinaryShape shape(given, weight, scale, bias, outputs);
  const int64_t threshold_step = shape.require_threshold(threshold, given);
  shape.require_positives(positives, given);
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor x = given.contiguous();
  const auto integers = x.options().dtype(at::kInt);
  Tensor out = shape.result(x), codes = at::empty({shape.rows, shape.words}, integers),
         unordered = at::zeros({shape.rows}, integers);
  cuda::BinaryProduct product = product_of(shape, x, weight, scale, bias, out);
  product.positives = positives.has_value() ? positives->const_data_ptr<int32_t>() : nullptr;
  product.threshold = threshold.const_data_ptr<float>();
  product.threshold_step = threshold_step;
  product.codes = reinterpret_cast<uint32_t*>(codes.mutable_data_ptr<int32_t>());
  product.unordered = reinterpret_cast<uint32_t*>(unordered.mutable_data_ptr<int32_t>());
  check(cuda::binary_linear(product, stream_of(x)), "binary_linear");
  linear_calls += 1;
  return out;
}

Tensor binary_weight_linear(const Tensor& given, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& bias, int64_t outputs) {
  const BinaryShape shape(given, weight, scale, bias, outputs);
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor x = given.contiguous();
  Tensor out = shape.result(x);
  check(cuda::binary_weight_linear(product_of(shape, x, weight, scale, bias, out), stream_of(x)),
        "binary_weight_linear");
  weight_linear_calls += 1;
  return out;
}

// Since the process began: calls of binary_linear, calls of binary_weight_linear.
std::vector<int64_t> binary_cuda_counters() { return {linear_calls, weight_linear_calls}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) { m.def("binary_cuda_counters() -> int[]", &binary_cuda_counters); }

TORCH_LIBRARY_IMPL(stillhouse, CUDA, m) {
  m.impl("binary_linear", &binary_linear);
  m.impl("binary_weight_linear", &binary_weight_linear);
}
