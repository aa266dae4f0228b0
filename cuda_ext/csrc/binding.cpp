// The operators' schemas, their CPU kernels, and the counters by which a test or a record can tell that a kernel
// ran. The CUDA kernels register themselves for the same schemas in binding_cuda.cpp.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <vector>

#include "adan_arguments.h"
#include "instruction_sets.h"

namespace {

using at::Tensor;

std::atomic<int64_t> cpu_calls{0}, cpu_tensors{0}, cpu_elements{0}, cpu_norms{0};

void adan_cpu(const stillhouse::AdanArguments& arguments) {
  const stillhouse::PreparedLaunch prepared = stillhouse::prepare_launch(arguments, stillhouse::kCpuChunk);
  cpu_elements += stillhouse::cpu::update(prepared.launch, at::get_num_threads());
  cpu_calls += 1;
  cpu_tensors += prepared.launch.tensor_count;
}

Tensor grad_norm_cpu(at::TensorList grads) {
  int64_t chunks = 0;
  const std::vector<stillhouse::AdanTensor> rows = stillhouse::gradient_rows(grads, stillhouse::kCpuChunk, &chunks);
  const double norm = stillhouse::cpu::gradient_norm(rows.data(), static_cast<int64_t>(rows.size()), chunks,
                                                     stillhouse::storage_of(grads[0]), at::get_num_threads());
  cpu_norms += 1;
  Tensor result = at::empty({}, grads[0].options().dtype(at::kFloat));
  *result.mutable_data_ptr<float>() = static_cast<float>(norm);
  return result;
}

// Since the process began: calls of adan_, tensors and elements that they updated, calls of grad_norm.
std::vector<int64_t> cpu_counters() { return {cpu_calls, cpu_tensors, cpu_elements, cpu_norms}; }

std::string cpu_capability() { return std::string(stillhouse::cpu::capability()); }

}  // namespace

TORCH_LIBRARY(stillhouse, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "adan_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_diffs, "
      "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] g_prevs, Tensor(f!)[] masters, Tensor(g!)[] steps, "
      "int[] group_sizes, float[] hyper_parameters, int[] group_flags, Tensor[] lr_tensors, Tensor? grad_scale, "
      "Tensor? found_inf, Tensor? grad_norm, float max_grad_norm) -> ()",
      tags);
  m.def("grad_norm(Tensor[] grads) -> Tensor", tags);
  m.def("cpu_counters() -> int[]", &cpu_counters);
  m.def("cpu_capability() -> str", &cpu_capability);
}

TORCH_LIBRARY_IMPL(stillhouse, CPU, m) {
  m.impl("adan_", &stillhouse::adan_operator<adan_cpu>);
  m.impl("grad_norm", &grad_norm_cpu);
}
