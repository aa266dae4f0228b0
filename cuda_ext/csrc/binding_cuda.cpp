// The CUDA kernels of the operators that binding.cpp declares, and the device-resident tables.
//
// A table is written again only when its content changes: pointers, sizes, alignment, groups and chunk numbers
// are all compared, since a pointer alone can belong to another tensor by now. Inside a CUDA graph a table belongs
// to the graph, which writes it at each replay.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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
#include "adan_cuda.h"

namespace {

using at::Tensor;
using stillhouse::AdanTensor;
namespace cuda = stillhouse::cuda;

std::atomic<int64_t> cuda_launches{0}, cuda_tensors{0}, cuda_norms{0}, cuda_tables{0};

void check(const char* error, const char* what) {
  TORCH_CHECK(error == nullptr, "adan: ", what, " failed: ", error);
}

Tensor device_bytes(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

Tensor cleared_workspace(at::Device device, void* stream) {
  int64_t bytes = 0;
  check(cuda::workspace_bytes(&bytes), "reading the device's size");
  Tensor workspace = device_bytes(bytes, device);
  check(cuda::clear(workspace.mutable_data_ptr(), bytes, stream), "clearing the workspace");
  return workspace;
}

Tensor stored_table(const std::vector<AdanTensor>& rows, at::Device device, void* stream) {
  Tensor table = device_bytes(static_cast<int64_t>(rows.size() * sizeof(AdanTensor)), device);
  check(cuda::store_rows(rows.data(), static_cast<int64_t>(rows.size()),
                         static_cast<AdanTensor*>(table.mutable_data_ptr()), stream),
        "writing the table");
  cuda_tables += 1;
  return table;
}

struct Resident {
  const AdanTensor* rows;  // on the device; null for a single tensor
  void* workspace;
};

// Tables and workspaces by device and stream. Work on one stream is ordered, so launches can share them.
class Residents {
 public:
  Resident get(const std::vector<AdanTensor>& rows, at::Device device, void* stream) {
    bool capturing = false;
    check(cuda::is_capturing(stream, &capturing), "asking for the capture state");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (capturing) return captured(rows, device, stream);

    OfStream& own = streams_[{device.index(), stream}];
    if (!own.workspace.defined()) own.workspace = cleared_workspace(device, stream);
    void* workspace = own.workspace.mutable_data_ptr();
    if (rows.size() == 1) return {nullptr, workspace};

    const auto found = std::find_if(own.tables.begin(), own.tables.end(), [&](const Table& table) {
      return table.rows.size() == rows.size() &&
             std::memcmp(table.rows.data(), rows.data(), rows.size() * sizeof(AdanTensor)) == 0;
    });
    if (found != own.tables.end()) {
      own.tables.splice(own.tables.begin(), own.tables, found);
    } else {
      own.tables.push_front({rows, stored_table(rows, device, stream)});
      if (own.tables.size() > kTablesPerStream) own.tables.pop_back();
    }
    return {static_cast<const AdanTensor*>(own.tables.front().on_device.const_data_ptr()), workspace};
  }

 private:
  static constexpr size_t kTablesPerStream = 16;

  struct Table {
    std::vector<AdanTensor> rows;
    Tensor on_device;
  };
  struct OfStream {
    Tensor workspace;
    std::list<Table> tables;  // most recently used first
  };

  // Kept for the life of the process: the graph that replays on these addresses may live as long.
  Resident captured(const std::vector<AdanTensor>& rows, at::Device device, void* stream) {
    captured_.push_back(cleared_workspace(device, stream));
    void* workspace = captured_.back().mutable_data_ptr();
    if (rows.size() == 1) return {nullptr, workspace};
    captured_.push_back(stored_table(rows, device, stream));
    return {static_cast<const AdanTensor*>(captured_.back().const_data_ptr()), workspace};
  }

  std::mutex mutex_;
  std::map<std::pair<int, void*>, OfStream> streams_;
  std::vector<Tensor> captured_;
};

// Never destroyed: at exit the CUDA context may be gone before it.
Residents& residents() {
  static Residents* const instance = new Residents();
  return *instance;
}

void adan_cuda(const stillhouse::AdanArguments& arguments) {
  TORCH_CHECK(static_cast<int64_t>(arguments.group_sizes.size()) <= cuda::kMaxGroups, "adan: at most ",
              cuda::kMaxGroups, " parameter groups per launch");
  const stillhouse::PreparedLaunch prepared = stillhouse::prepare_launch(arguments, cuda::chunk_elements());
  const at::Device device = arguments.params[0].device();
  const c10::cuda::CUDAGuard guard(device);
  void* const stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const Resident resident = residents().get(prepared.rows, device, stream);
  check(cuda::update(prepared.launch, resident.rows, resident.workspace, stream), "the launch");
  cuda_launches += 1;
  cuda_tensors += prepared.launch.tensor_count;
}

Tensor grad_norm_cuda(at::TensorList grads) {
  int64_t chunks = 0;
  const std::vector<AdanTensor> rows = stillhouse::gradient_rows(grads, stillhouse::kCudaChunk, &chunks);
  const at::Device device = grads[0].device();
  const c10::cuda::CUDAGuard guard(device);
  void* const stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const Resident resident = residents().get(rows, device, stream);
  Tensor norm = at::empty({}, grads[0].options().dtype(at::kFloat));
  check(cuda::gradient_norm(rows.data(), resident.rows, static_cast<int64_t>(rows.size()), chunks,
                            stillhouse::storage_of(grads[0]), norm.mutable_data_ptr<float>(), resident.workspace,
                            stream),
        "the launch of the norm");
  cuda_norms += 1;
  return norm;
}

// Since the process began: launches of adan_, tensors in them, launches of grad_norm, tables written.
std::vector<int64_t> cuda_counters() { return {cuda_launches, cuda_tensors, cuda_norms, cuda_tables}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) { m.def("cuda_counters() -> int[]", &cuda_counters); }

TORCH_LIBRARY_IMPL(stillhouse, CUDA, m) {
  m.impl("adan_", &stillhouse::adan_operator<adan_cuda>);
  m.impl("grad_norm", &grad_norm_cuda);
}
