// The operators of Adan: schemas, CPU kernels, and the counters by which a test or a record can tell that a kernel ran.
// The CUDA kernels register themselves for the same schemas in binding_cuda.cpp.
//
// One parallel region goes over the flat list of chunks of all tensors. Threads take chunks from a shared counter: a
// neighbour that slows one core down does not make the other wait. Every sum is kept per chunk and added in the order
// of the chunks, so results do not depend on the threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "adan_arguments.h"
#include "adan_cpu_chunk.h"

namespace {

using at::Tensor;
using namespace stillhouse;

std::atomic<int64_t> calls{0}, tensors{0}, elements{0}, norms{0};

// The tensor that owns a chunk. Tensors without elements own none and are stepped over.
const AdanTensor& owner_of(const AdanLaunch& launch, int64_t chunk) {
  return *(std::upper_bound(launch.tensors, launch.tensors + launch.tensor_count, chunk,
                            [](int64_t wanted, const AdanTensor& tensor) { return wanted < tensor.first_chunk; }) -
           1);
}

// Calls `work(chunk, tensor, begin, end)` once for every chunk.
template <typename Work>
void for_each_chunk(const AdanLaunch& launch, const Work& work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), launch.chunk_count);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (;;) {
      const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= launch.chunk_count) return;
      const AdanTensor& tensor = owner_of(launch, chunk);
      const int64_t begin = (chunk - tensor.first_chunk) * kCpuChunk;
      work(chunk, tensor, begin, std::min(begin + kCpuChunk, tensor.numel));
    }
  });
}

void update(PreparedLaunch prepared) {
  prepared.divide_into_chunks(kCpuChunk);
  const AdanLaunch& launch = prepared.launch;
  calls += 1;
  tensors += launch.tensor_count;
  if (launch.found_inf != nullptr && *launch.found_inf != 0.0f) return;
  const cpu::ChunkKernels kernels = STILLHOUSE_CHOSEN(chunk_kernels)();
  const float factor = gradient_factor(launch.grad_scale, launch.grad_norm, launch.max_grad_norm);
  for_each_chunk(launch, [&](int64_t, const AdanTensor& tensor, int64_t begin, int64_t end) {
    const double step = static_cast<double>(*tensor.step) + 1.0;
    kernels.update(launch, tensor, begin, end, adan_scalars(launch.groups[tensor.group], step, factor));
    elements += end - begin;
  });
  for (const AdanTensor& tensor : prepared.rows) *tensor.step += 1.0f;
}

Tensor gradient_norm(PreparedLaunch prepared) {
  prepared.divide_into_chunks(kCpuChunk);
  const cpu::ChunkKernels kernels = STILLHOUSE_CHOSEN(chunk_kernels)();
  std::vector<double> partial(prepared.launch.chunk_count, 0.0);
  for_each_chunk(prepared.launch, [&](int64_t chunk, const AdanTensor& tensor, int64_t begin, int64_t end) {
    partial[chunk] = kernels.squares(prepared.launch, tensor, begin, end);
  });
  double total = 0.0;
  for (double squares : partial) total += squares;
  norms += 1;
  Tensor result = at::empty({}, at::TensorOptions().dtype(at::kFloat));
  *result.mutable_data_ptr<float>() = static_cast<float>(std::sqrt(total));
  return result;
}

// Since the process began: calls of adan_, tensors and elements that they updated, calls of grad_norm.
std::vector<int64_t> cpu_counters() { return {calls, tensors, elements, norms}; }

std::string cpu_capability() { return std::string(cpu::capability()); }

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
  m.impl("adan_", &adan_operator<update>);
  m.impl("grad_norm", &grad_norm_operator<gradient_norm>);
}
