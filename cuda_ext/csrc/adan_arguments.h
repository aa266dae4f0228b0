// From the operators' tensor lists to an AdanLaunch, with every check that must precede the first write.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "adan_launch.h"

namespace stillhouse {

// Rows and groups own the memory that `launch` points into.
struct PreparedLaunch {
  at::Device device;
  std::vector<AdanTensor> rows;
  std::vector<AdanGroup> groups;
  AdanLaunch launch{};

  // Lists the rows, with their chunks numbered one tensor after the other.
  void divide_into_chunks(int64_t elements) {
    for (AdanTensor& row : rows) {
      row.first_chunk = launch.chunk_count;
      launch.chunk_count += (row.numel + elements - 1) / elements;
    }
    launch.tensors = rows.data();
    launch.tensor_count = static_cast<int64_t>(rows.size());
  }
};

inline Storage storage_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Storage::kFloat32;
    case at::kBFloat16: return Storage::kBFloat16;
    case at::kHalf: return Storage::kFloat16;
    default: TORCH_CHECK(false, "adan: dtype ", tensor.scalar_type(), " is not float32, bfloat16 or float16");
  }
}

// Same shape and, where a dimension has more than one element, same strides.
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

template <typename... Name>
const float* scalar_of(const std::optional<at::Tensor>& tensor, at::Device device, const Name&... name) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->numel() == 1 && tensor->device() == device, "adan: ",
              name..., " must be one float32 on ", device);
  return tensor->const_data_ptr<float>();
}

// Whether a pointer into elements of `size` bytes allows accesses of four elements at once.
inline bool allows_vectors(const void* pointer, int64_t size) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(4 * size) == 0;
}

// The operator adan_ of a function that takes the step. For each group there are six hyper-parameters (lr, beta1,
// beta2, beta3, eps, weight_decay) and flags (1 no_prox, 2 maximize); `lr_tensors` are none, or one for each group.
template <void (*kUpdate)(PreparedLaunch)>
void adan_operator(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_diffs,
                   at::TensorList exp_avg_sqs, at::TensorList g_prevs, at::TensorList masters, at::TensorList steps,
                   at::IntArrayRef group_sizes, at::ArrayRef<double> hyper_parameters, at::IntArrayRef group_flags,
                   at::TensorList lr_tensors, const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& grad_norm,
                   double max_grad_norm) {
  const size_t count = params.size(), group_count = group_sizes.size();
  TORCH_CHECK(count > 0, "adan: no parameters");
  const auto dtype_of = [](at::TensorList list) { return list.empty() ? at::kFloat : list[0].scalar_type(); };
  const at::ScalarType dtype = dtype_of(params), moments = dtype_of(exp_avgs), master = dtype_of(masters);
  const at::ScalarType previous = dtype == at::kHalf ? at::kBFloat16 : dtype;  // see previous_storage
  struct Field {
    const char *list, *name;
    at::TensorList tensors;
    at::ScalarType dtype;
    void* AdanTensor::*pointer;
  };
  const Field fields[] = {{"params", "the value", params, dtype, &AdanTensor::param},
                          {"grads", "the gradient", grads, dtype, &AdanTensor::grad},
                          {"exp_avgs", "exp_avg", exp_avgs, moments, &AdanTensor::m},
                          {"exp_avg_diffs", "exp_avg_diff", exp_avg_diffs, moments, &AdanTensor::v},
                          {"exp_avg_sqs", "exp_avg_sq", exp_avg_sqs, at::kFloat, &AdanTensor::n},
                          {"g_prevs", "g_prev", g_prevs, previous, &AdanTensor::g_prev},
                          {"masters", "the master", masters, master, &AdanTensor::master}};
  const auto check_length = [count](at::TensorList list, const char* name) {
    TORCH_CHECK(list.size() == count, "adan: ", name, " has ", list.size(), " tensors for ", count, " parameters");
  };
  for (const Field& field : fields) {
    if (field.pointer != &AdanTensor::master || !masters.empty()) check_length(field.tensors, field.list);
  }
  check_length(steps, "steps");
  TORCH_CHECK(hyper_parameters.size() == 6 * group_count && group_flags.size() == group_count,
              "adan: six hyper-parameters and one flag word per group are needed");
  TORCH_CHECK(lr_tensors.empty() || lr_tensors.size() == group_count,
              "adan: lr_tensors must be empty or have one tensor per group");
  TORCH_CHECK(moments == at::kFloat || moments == at::kBFloat16, "adan: moments must be float32 or bfloat16");

  const at::Device device = params[0].device();
  PreparedLaunch prepared{device};
  AdanLaunch& launch = prepared.launch;
  launch.storage = storage_of(params[0]);
  launch.bfloat16_moments = moments == at::kBFloat16;
  if (!masters.empty()) {
    launch.master = master == at::kShort ? Master::kSplit : Master::kFull;
    TORCH_CHECK(master == at::kFloat || (master == at::kShort && dtype == at::kBFloat16),
                "adan: masters must be float32, or int16 remainders of bfloat16 parameters");
    TORCH_CHECK(dtype != at::kFloat, "adan: float32 parameters are their own masters");
  }

  prepared.groups.reserve(group_count);
  prepared.rows.reserve(count);
  for (size_t g = 0; g < group_count; ++g) {
    const double* h = hyper_parameters.data() + 6 * g;
    AdanGroup group{h[0], h[1], h[2], h[3], h[4], h[5], std::log(h[1]), std::log(h[2]), std::log(h[3]), nullptr,
                    static_cast<int32_t>(group_flags[g] & 1), static_cast<int32_t>((group_flags[g] >> 1) & 1)};
    if (!lr_tensors.empty()) group.lr_tensor = scalar_of(lr_tensors[g], device, "a learning rate tensor");
    prepared.groups.push_back(group);

    for (int64_t in_group = 0; in_group < group_sizes[g]; ++in_group) {
      const size_t index = prepared.rows.size();
      TORCH_CHECK(index < count, "adan: group_sizes name more tensors than there are");
      const at::Tensor& param = params[index];
      TORCH_CHECK(param.is_non_overlapping_and_dense(), "adan: parameter ", index,
                  " has gaps or overlaps in memory; make it contiguous");
      AdanTensor row{};
      row.aligned = 1;
      for (const Field& field : fields) {
        if (field.tensors.empty()) continue;
        const at::Tensor& tensor = field.tensors[index];
        TORCH_CHECK(tensor.device() == device && tensor.scalar_type() == field.dtype && same_layout(tensor, param),
                    "adan: ", field.name, " of parameter ", index, " must have its shape and strides, dtype ",
                    field.dtype, " and device ", device);
        const bool written = field.pointer != &AdanTensor::grad;
        row.*field.pointer = written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
        row.aligned &= allows_vectors(row.*field.pointer, tensor.element_size());
      }
      scalar_of(steps[index], device, "the step of parameter ", index);
      row.step = steps[index].mutable_data_ptr<float>();
      row.numel = param.numel();
      row.group = static_cast<int32_t>(g);
      prepared.rows.push_back(row);
    }
  }
  TORCH_CHECK(prepared.rows.size() == count, "adan: group_sizes name ", prepared.rows.size(), " tensors and there are ",
              count);

  launch.groups = prepared.groups.data();
  launch.group_count = static_cast<int32_t>(group_count);
  launch.grad_scale = scalar_of(grad_scale, device, "grad_scale");
  launch.found_inf = scalar_of(found_inf, device, "found_inf");
  launch.grad_norm = scalar_of(grad_norm, device, "grad_norm");
  launch.max_grad_norm = max_grad_norm;
  kUpdate(std::move(prepared));
}

// The operator grad_norm of a function that computes it.
template <at::Tensor (*kNorm)(PreparedLaunch)>
at::Tensor grad_norm_operator(at::TensorList grads) {
  TORCH_CHECK(!grads.empty(), "grad_norm: no gradients");
  PreparedLaunch prepared{grads[0].device()};
  prepared.launch.storage = storage_of(grads[0]);
  prepared.rows.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    TORCH_CHECK(grad.device() == grads[0].device() && grad.scalar_type() == grads[0].scalar_type() &&
                    grad.is_non_overlapping_and_dense(),
                "grad_norm: gradients must be dense in memory, of one dtype and on one device");
    AdanTensor row{};
    row.grad = const_cast<void*>(grad.const_data_ptr());
    row.numel = grad.numel();
    row.aligned = allows_vectors(row.grad, grad.element_size());
    prepared.rows.push_back(row);
  }
  return kNorm(std::move(prepared));
}

}  // namespace stillhouse
