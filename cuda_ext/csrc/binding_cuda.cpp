// The CUDA kernels of the operators that adan_cpu.cpp and binary_cpu.cpp declare, and the device-resident tables.
//
// A table is written again only when its content changes: pointers, sizes, alignment, groups and chunk numbers
// are all compared, since a pointer alone can belong to another tensor by now. Inside a CUDA graph a table belongs
// to the graph, which writes it at each replay.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "adan_arguments.h"
#include "binary_arguments.h"

namespace {

using at::Tensor;
using stillhouse::AdanTensor;
using stillhouse::BinaryArguments;
using stillhouse::PreparedLaunch;
namespace cuda = stillhouse::cuda;

std::atomic<int64_t> cuda_launches{0}, cuda_tensors{0}, cuda_norms{0}, cuda_tables{0};
std::atomic<int64_t> linear_calls{0}, weight_linear_calls{0};

void check(const char* error, const char* what) { TORCH_CHECK(error == nullptr, what, " failed: ", error); }

void* stream_of(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

struct Resident {
  const AdanTensor* rows;  // on the device; null for a single tensor
  void *workspace, *stream;
};

// Tables and workspaces by device and stream. Work on one stream is ordered, so launches can share them.
class Residents {
 public:
  Resident get(const std::vector<AdanTensor>& rows, at::Device device) {
    void* const stream = stream_of(device);
    const bool capturing = c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::Active;
    const std::lock_guard<std::mutex> lock(mutex_);
    Memory& own = capturing ? captured_.emplace_back() : streams_[{device.index(), stream}];
    const auto bytes_on_device = at::TensorOptions().dtype(at::kByte).device(device);
    if (!own.workspace.defined()) {
      int64_t bytes = 0;
      check(cuda::workspace_bytes(&bytes), "adan: reading the device's size");
      own.workspace = at::zeros({bytes}, bytes_on_device);
    }
    void* workspace = own.workspace.mutable_data_ptr();
    if (rows.size() == 1) return {nullptr, workspace, stream};

    const int64_t count = static_cast<int64_t>(rows.size());
    const auto found = std::find_if(own.tables.begin(), own.tables.end(), [&](const Table& table) {
      return table.rows.size() == rows.size() &&
             std::memcmp(table.rows.data(), rows.data(), rows.size() * sizeof(AdanTensor)) == 0;
    });
    if (found != own.tables.end()) {
      own.tables.splice(own.tables.begin(), own.tables, found);
    } else {
      const Tensor on_device = at::empty({count * static_cast<int64_t>(sizeof(AdanTensor))}, bytes_on_device);
      check(cuda::store_rows(rows.data(), count, static_cast<AdanTensor*>(on_device.mutable_data_ptr()), stream),
            "adan: writing the table");
      cuda_tables += 1;
      own.tables.push_front({rows, on_device});
      if (own.tables.size() > kTablesPerStream) own.tables.pop_back();
    }
    return {static_cast<const AdanTensor*>(own.tables.front().on_device.const_data_ptr()), workspace, stream};
  }

 private:
  static constexpr size_t kTablesPerStream = 16;

  struct Table {
    std::vector<AdanTensor> rows;
    Tensor on_device;
  };
  struct Memory {
    Tensor workspace;
    std::list<Table> tables;  // most recently used first
  };

  std::mutex mutex_;
  std::map<std::pair<int, void*>, Memory> streams_;
  std::list<Memory> captured_;  // kept for the life of the process: the graphs that replay on them may live as long
};

Residents& residents = *new Residents();  // never destroyed: at exit the CUDA context may be gone before it

void adan(PreparedLaunch prepared) {
  TORCH_CHECK(prepared.groups.size() <= cuda::kMaxGroups, "adan: at most ", cuda::kMaxGroups,
              " parameter groups per launch");
  const c10::cuda::CUDAGuard guard(prepared.device);
  prepared.divide_into_chunks(cuda::chunk_elements());
  const Resident resident = residents.get(prepared.rows, prepared.device);
  check(cuda::update(prepared.launch, resident.rows, resident.workspace, resident.stream), "adan: the launch");
  cuda_launches += 1;
  cuda_tensors += prepared.launch.tensor_count;
}

Tensor grad_norm(PreparedLaunch prepared) {
  const c10::cuda::CUDAGuard guard(prepared.device);
  prepared.divide_into_chunks(stillhouse::kCudaChunk);
  const Resident resident = residents.get(prepared.rows, prepared.device);
  Tensor norm = at::empty({}, at::TensorOptions().dtype(at::kFloat).device(prepared.device));
  check(cuda::gradient_norm(prepared.launch, resident.rows, norm.mutable_data_ptr<float>(), resident.workspace,
                            resident.stream),
        "adan: the launch of the norm");
  cuda_norms += 1;
  return norm;
}

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
  check(cuda::binary_linear(p, stream_of(x.device())), "binary_linear: the launch");
  linear_calls += 1;
  return arguments.out;
}

Tensor binary_weight_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& bias, int64_t outputs) {
  const c10::cuda::CUDAGuard guard(x.device());
  const BinaryArguments arguments(x, weight, scale, bias, outputs);
  check(cuda::binary_weight_linear(arguments.product, stream_of(x.device())), "binary_weight_linear: the launch");
  weight_linear_calls += 1;
  return arguments.out;
}

// Since the process began: launches of adan_, tensors in them, launches of grad_norm, tables written.
std::vector<int64_t> cuda_counters() { return {cuda_launches, cuda_tensors, cuda_norms, cuda_tables}; }

// Since the process began: calls of binary_linear, calls of binary_weight_linear.
std::vector<int64_t> binary_cuda_counters() { return {linear_calls, weight_linear_calls}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) {
  m.def("cuda_counters() -> int[]", &cuda_counters);
  m.def("binary_cuda_counters() -> int[]", &binary_cuda_counters);
}

TORCH_LIBRARY_IMPL(stillhouse, CUDA, m) {
  m.impl("adan_", &stillhouse::adan_operator<adan>);
  m.impl("grad_norm", &stillhouse::grad_norm_operator<grad_norm>);
  m.impl("binary_linear", &binary_linear);
  m.impl("binary_weight_linear", &binary_weight_linear);
}
