// From the operators' tensor lists to an AdanLaunch, with every check that must precede the first write.
// Included by the two bindings only: the files with torch headers are kept to those two.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "adan_launch.h"

namespace stillhouse {

// The arguments of stillhouse::adan_, in the order of its schema.
struct AdanArguments {
  at::TensorList params, grads, exp_avgs, exp_avg_diffs, exp_avg_sqs, g_prevs, masters, steps;
  at::IntArrayRef group_sizes;
  at::ArrayRef<double> hyper_parameters;  // per group: lr, beta1, beta2, beta3, eps, weight_decay
  at::IntArrayRef group_flags;            // per group: 1 no_prox, 2 maximize
  at::TensorList lr_tensors;              // none, or one per group
  const std::optional<at::Tensor>& grad_scale;
  const std::optional<at::Tensor>& found_inf;
  const std::optional<at::Tensor>& grad_norm;
  double max_grad_norm;
};

// The operator itself, of a function of its arguments.
template <void (*kUpdate)(const AdanArguments&)>
void adan_operator(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_diffs,
                   at::TensorList exp_avg_sqs, at::TensorList g_prevs, at::TensorList masters, at::TensorList steps,
                   at::IntArrayRef group_sizes, at::ArrayRef<double> hyper_parameters, at::IntArrayRef group_flags,
                   at::TensorList lr_tensors, const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& grad_norm,
                   double max_grad_norm) {
  kUpdate({params, grads, exp_avgs, exp_avg_diffs, exp_avg_sqs, g_prevs, masters, steps, group_sizes, hyper_parameters,
           group_flags, lr_tensors, grad_scale, found_inf, grad_norm, max_grad_norm});
}

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

inline const float* scalar_of(const std::optional<at::Tensor>& tensor, const char* name, at::Device device) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->numel() == 1 && tensor->device() == device, "adan: ",
              name, " must be one float32 on ", device);
  return tensor->const_data_ptr<float>();
}

// `alignment` of a pointer into elements of `size` bytes, for accesses of four elements at once.
inline bool allows_vectors(const void* pointer, int64_t size) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(4 * size) == 0;
}

// Rows and groups own the memory that `launch` points into.
struct PreparedLaunch {
  std::vector<AdanTensor> rows;
  std::vector<AdanGroup> groups;
  AdanLaunch launch;
};

inline PreparedLaunch prepare_launch(const AdanArguments& a, int64_t chunk) {
  const int64_t count = static_cast<int64_t>(a.params.size());
  const int64_t group_count = static_cast<int64_t>(a.group_sizes.size());
  const auto of_length = [count](at::TensorList list, const char* name) {
    TORCH_CHECK(static_cast<int64_t>(list.size()) == count, "adan: ", name, " has ", list.size(), " tensors for ",
                count, " parameters");
  };
  of_length(a.grads, "grads");
  of_length(a.exp_avgs, "exp_avgs");
  of_length(a.exp_avg_diffs, "exp_avg_diffs");
  of_length(a.exp_avg_sqs, "exp_avg_sqs");
  of_length(a.g_prevs, "g_prevs");
  of_length(a.steps, "steps");
  TORCH_CHECK(count > 0, "adan: no parameters");
  TORCH_CHECK(static_cast<int64_t>(a.hyper_parameters.size()) == 6 * group_count &&
                  static_cast<int64_t>(a.group_flags.size()) == group_count,
              "adan: six hyper-parameters and one flag word per group are needed");
  TORCH_CHECK(a.lr_tensors.empty() || static_cast<int64_t>(a.lr_tensors.size()) == group_count,
              "adan: lr_tensors must be empty or have one tensor per group");

  const at::Device device = a.params[0].device();
  const at::ScalarType dtype = a.params[0].scalar_type();
  const at::ScalarType previous = dtype == at::kHalf ? at::kBFloat16 : dtype;  // see previous_storage
  const at::ScalarType moments = a.exp_avgs[0].scalar_type();
  TORCH_CHECK(moments == at::kFloat || moments == at::kBFloat16, "adan: moments must be float32 or bfloat16");

  PreparedLaunch prepared;
  AdanLaunch& launch = prepared.launch;
  launch.storage = storage_of(a.params[0]);
  launch.bfloat16_moments = moments == at::kBFloat16;
  launch.master = Master::kNone;
  at::ScalarType master_dtype = at::kFloat;
  if (!a.masters.empty()) {
    of_length(a.masters, "masters");
    master_dtype = a.masters[0].scalar_type();
    launch.master = master_dtype == at::kShort ? Master::kSplit : Master::kFull;
    TORCH_CHECK(master_dtype == at::kFloat || (master_dtype == at::kShort && dtype == at::kBFloat16),
                "adan: masters must be float32, or int16 remainders of bfloat16 parameters");
    TORCH_CHECK(dtype != at::kFloat, "adan: float32 parameters are their own masters");
  }

  prepared.groups.reserve(group_count);
  for (int64_t g = 0; g < group_count; ++g) {
    const double* h = a.hyper_parameters.data() + 6 * g;
    AdanGroup group{h[0], h[1], h[2], h[3], h[4], h[5], std::log(h[1]), std::log(h[2]), std::log(h[3]), nullptr,
                    static_cast<int32_t>(a.group_flags[g] & 1), static_cast<int32_t>((a.group_flags[g] >> 1) & 1)};
    if (!a.lr_tensors.empty()) group.lr_tensor = scalar_of(a.lr_tensors[g], "a learning rate tensor", device);
    prepared.groups.push_back(group);
  }

  prepared.rows.reserve(count);
  int64_t chunks = 0, index = 0;
  for (int64_t g = 0; g < group_count; ++g) {
    for (int64_t in_group = 0; in_group < a.group_sizes[g]; ++in_group, ++index) {
      TORCH_CHECK(index < count, "adan: group_sizes name more tensors than there are");
      const at::Tensor& param = a.params[index];
      TORCH_CHECK(param.is_non_overlapping_and_dense(), "adan: parameter ", index,
                  " has gaps or overlaps in memory; make it contiguous");
      const auto like_param = [&](const at::Tensor& tensor, at::ScalarType wanted, const char* name) {
        TORCH_CHECK(tensor.device() == device && tensor.scalar_type() == wanted && same_layout(tensor, param),
                    "adan: ", name, " of parameter ", index, " must have its shape and strides, dtype ", wanted,
                    " and device ", device);
      };
      like_param(param, dtype, "the value");
      like_param(a.grads[index], dtype, "the gradient");
      like_param(a.exp_avgs[index], moments, "exp_avg");
      like_param(a.exp_avg_diffs[index], moments, "exp_avg_diff");
      like_param(a.exp_avg_sqs[index], at::kFloat, "exp_avg_sq");
      like_param(a.g_prevs[index], previous, "g_prev");
      if (launch.master != Master::kNone) like_param(a.masters[index], master_dtype, "the master");
      const at::Tensor& step = a.steps[index];
      TORCH_CHECK(step.scalar_type() == at::kFloat && step.numel() == 1 && step.device() == device,
                  "adan: the step of parameter ", index, " must be one float32 on ", device);

      AdanTensor row{};
      row.param = param.mutable_data_ptr();
      row.grad = a.grads[index].const_data_ptr();
      row.m = a.exp_avgs[index].mutable_data_ptr();
      row.v = a.exp_avg_diffs[index].mutable_data_ptr();
      row.n = a.exp_avg_sqs[index].mutable_data_ptr<float>();
      row.g_prev = a.g_prevs[index].mutable_data_ptr();
      row.master = launch.master != Master::kNone ? a.masters[index].mutable_data_ptr() : nullptr;
      row.step = step.mutable_data_ptr<float>();
      row.numel = param.numel();
      row.first_chunk = chunks;
      row.group = static_cast<int32_t>(g);
      const int64_t item = param.element_size(), moment = a.exp_avgs[index].element_size();
      row.aligned = allows_vectors(row.param, item) && allows_vectors(row.grad, item) &&
                    allows_vectors(row.g_prev, item) && allows_vectors(row.m, moment) &&
                    allows_vectors(row.v, moment) && allows_vectors(row.n, sizeof(float)) &&
                    (row.master == nullptr || allows_vectors(row.master, a.masters[index].element_size()));
      chunks += chunks_of(row.numel, chunk);
      prepared.rows.push_back(row);
    }
  }
  TORCH_CHECK(index == count, "adan: group_sizes name ", index, " tensors and there are ", count);

  launch.tensors = prepared.rows.data();
  launch.tensor_count = count;
  launch.chunk_count = chunks;
  launch.groups = prepared.groups.data();
  launch.group_count = static_cast<int32_t>(group_count);
  launch.grad_scale = scalar_of(a.grad_scale, "grad_scale", device);
  launch.found_inf = scalar_of(a.found_inf, "found_inf", device);
  launch.grad_norm = scalar_of(a.grad_norm, "grad_norm", device);
  launch.max_grad_norm = a.max_grad_norm;
  return prepared;
}

// Rows for the norm: of an AdanTensor only `grad`, `numel`, `first_chunk` and `aligned` are set.
inline std::vector<AdanTensor> gradient_rows(at::TensorList grads, int64_t chunk, int64_t* chunks) {
  TORCH_CHECK(!grads.empty(), "grad_norm: no gradients");
  std::vector<AdanTensor> rows;
  rows.reserve(grads.size());
  *chunks = 0;
  for (const at::Tensor& grad : grads) {
    TORCH_CHECK(grad.device() == grads[0].device() && grad.scalar_type() == grads[0].scalar_type() &&
                    grad.is_non_overlapping_and_dense(),
                "grad_norm: gradients must be dense in memory, of one dtype and on one device");
    AdanTensor row{};
    row.grad = grad.const_data_ptr();
    row.numel = grad.numel();
    row.first_chunk = *chunks;
    row.aligned = allows_vectors(row.grad, grad.element_size());
    *chunks += chunks_of(row.numel, chunk);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace stillhouse
