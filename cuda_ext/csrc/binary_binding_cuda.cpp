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

namespace {

using at::Tensor;
using stillhouse::BinaryArguments;
namespace cuda = stillhouse::cuda;

std::atomic<int64_t> linear_calls{0}, weight_linear_calls{0};

void* stream_of(const Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.device().index()).stream(); }

void check(const char* error, const char* name) { TORCH_CHECK(error == nullptr, name, ": the launch failed: ", error); }

Tensor binary_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& positives,
                     const Tensor& scale, const std::optional<Tensor>& bias, const Tensor& threshold,
                     int64_t outputs) {
  const c10::cuda::CUDAGuard guard(x.device());
  BinaryArguments arguments(x, weight, scale, bias, outputs);
  arguments.compare(threshold, positives);
  stillhouse::BinaryProduct& p = arguments.product;
  const auto integers = x.options().dtype(at::kInt);
  Tensor codes = at::empty({p.rows, p.words}, integers), unordered = at::zeros({p.rows}, integers);
  p.codes = codes.mutable_data_ptr();
  p.unordered = reinterpret_cast<uint32_t*>(unordered.mutable_data_ptr<int32_t>());
  check(cuda::binary_linear(p, stream_of(x)), "binary_linear");
  linear_calls += 1;
  return arguments.out;
}

Tensor binary_weight_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& bias, int64_t outputs) {
  const c10::cuda::CUDAGuard guard(x.device());
  const BinaryArguments arguments(x, weight, scale, bias, outputs);
  check(cuda::binary_weight_linear(arguments.product, stream_of(x)), "binary_weight_linear");
  weight_linear_calls += 1;
  return arguments.out;
}

// Since the process began: calls of binary_linear, calls of binary_weight_linear.
std::vector<int64_t> binary_cuda_counters() { return {linear_calls, weight_linear_calls}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) { m.def("binary_cuda_counters() -> int[]", &binary_cuda_counters); }

TORCH_LIBRARY_IMPL(stillhouse, CUDA, m) {
  m.impl("binary_linear", &binary_linear);
  m.impl("binary_weight_linear", &binary_weight_linear);
}
