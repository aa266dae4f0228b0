// The encoder's elementwise operators: schemas and CPU kernels. Rows are dealt out in chunks whose number depends
// on their count alone, and sums over rows are added chunk by chunk, so results do not depend on the threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "encoder_rows.h"
#include "operator_arguments.h"

namespace {

using at::Tensor;
using namespace stillhouse::cpu;

// Activations whose last dimension is a row, and what the kernels need besides them.
struct Rows {
  Tensor x;
  int64_t width, count;
  EncoderKernels kernels;

  Rows(const Tensor& given, const char* name) : x(given.contiguous()) {
    TORCH_CHECK(x.dim() >= 1 && x.size(-1) > 0, name, " has shape ", x.sizes(), "; its rows must have elements");
    width = x.size(-1);
    count = x.numel() / width;
    kernels = STILLHOUSE_CHOSEN(encoder_kernels)(element_of(x.scalar_type()));
  }

  at::TensorOptions wide_options() const { return x.options().dtype(wide(x.scalar_type())); }

  // A wide number for each row.
  Tensor statistic() const { return at::empty(x.sizes().slice(0, x.dim() - 1), wide_options()); }

  Tensor parameter(const Tensor& given, const char* name) const {
    TORCH_CHECK(given.dim() == 1 && given.size(0) == width, name, " has shape ", given.sizes(), "; it must have (",
                width, ",)");
    return given.to(wide(x.scalar_type())).contiguous();
  }
};

Tensor indices(const Tensor& given, int64_t rows, const Tensor& table, const char* name) {
  TORCH_CHECK(given.scalar_type() == at::kLong, name, " is ", given.scalar_type(), "; it must be int64");
  TORCH_CHECK(given.numel() == rows, name, " has ", given.numel(), " elements for ", rows, " rows");
  Tensor whole = given.contiguous();
  const int64_t* values = whole.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < table.size(0), name, " has ", values[i],
                      ", but its table has rows 0 to ", table.size(0) - 1);
  }
  return whole;
}

// 64 to 127 chunks of many rows; of few rows, chunks of 16.
int64_t chunk_rows(int64_t rows) { return std::max<int64_t>(16, rows / 64); }

int64_t chunks_of(int64_t rows) { return (rows + chunk_rows(rows) - 1) / chunk_rows(rows); }

// Calls `work(chunk, begin, end)` for each chunk of rows.
template <typename Work>
void for_chunks(int64_t rows, const Work& work) {
  const int64_t size = chunk_rows(rows);
  at::parallel_for(0, chunks_of(rows), 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      work(chunk, chunk * size, std::min(rows, (chunk + 1) * size));
    }
  });
}

// Sums over rows, one set for each chunk.
class Sums {
 public:
  Sums(const Rows& rows, int64_t count)
      : partial_(at::zeros({std::max<int64_t>(1, chunks_of(rows.count)), count, rows.width}, rows.wide_options())) {}

  void* of(int64_t chunk, int64_t which) const {
    return static_cast<char*>(partial_.data_ptr()) +
           (chunk * partial_.size(1) + which) * partial_.size(2) * partial_.element_size();
  }

  Tensor total(int64_t which, at::ScalarType type) const {
    if (partial_.scalar_type() == at::kDouble) return total_of<double>(which).to(type);
    return total_of<float>(which).to(type);
  }

 private:
  template <typename T>
  Tensor total_of(int64_t which) const {
    const int64_t width = partial_.size(2);
    Tensor total = at::empty({width}, partial_.options());
    T* to = total.mutable_data_ptr<T>();
    std::memcpy(to, of(0, which), width * sizeof(T));
    for (int64_t chunk = 1; chunk < partial_.size(0); ++chunk) {
      const T* from = static_cast<const T*>(of(chunk, which));
      for (int64_t i = 0; i < width; ++i) to[i] += from[i];
    }
    return total;
  }

  Tensor partial_;
};

using NormKernel = void (*)(const NormWork&, int64_t begin, int64_t end);

// Runs the forward kernel of a norm, for which `work` has the rest.
void normalize(const Rows& rows, NormKernel kernel, NormWork work, const Tensor& weight, const Tensor& norm_bias,
               double eps, Tensor& mean, Tensor& rstd, Tensor& out) {
  work.weight = weight.const_data_ptr();
  work.norm_bias = norm_bias.const_data_ptr();
  work.eps = eps;
  work.mean = mean.mutable_data_ptr();
  work.rstd = rstd.mutable_data_ptr();
  work.out = out.mutable_data_ptr();
  for_chunks(rows.count, [&](int64_t, int64_t begin, int64_t end) { kernel(work, begin, end); });
  rows_forward += rows.count;
}

// Runs the backward kernel of a norm; returns the sums for its weight and bias and, of three, for what x was added to.
Sums gradients(const Rows& rows, NormKernel kernel, const NormWork& whole, int64_t count, const Tensor& grad,
               const Tensor& weight_given, const Tensor& mean, const Tensor& rstd) {
  const Tensor weight = rows.parameter(weight_given, "weight");
  Sums sums(rows, count);
  for_chunks(rows.count, [&](int64_t chunk, int64_t begin, int64_t end) {
    NormWork work = whole;
    work.grad = grad.const_data_ptr();
    work.weight = weight.const_data_ptr();
    work.mean = mean.data_ptr();
    work.rstd = rstd.data_ptr();
    work.weight_sums = sums.of(chunk, 0);
    work.norm_bias_sums = sums.of(chunk, 1);
    if (count == 3) work.bias_sums = sums.of(chunk, 2);
    kernel(work, begin, end);
  });
  rows_backward += rows.count;
  return sums;
}

Tensor bias_gelu(const Tensor& x_given, const Tensor& bias_given) {
  const Rows rows(x_given, "x");
  const Tensor bias = rows.parameter(bias_given, "bias");
  Tensor out = at::empty_like(rows.x);
  const BiasGeluWork work{
      .x = rows.x.const_data_ptr(), .bias = bias.const_data_ptr(), .out = out.mutable_data_ptr(), .width = rows.width};
  for_chunks(rows.count, [&](int64_t, int64_t begin, int64_t end) { rows.kernels.bias_gelu(work, begin, end); });
  rows_forward += rows.count;
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad_given, const Tensor& x_given,
                                              const Tensor& bias_given) {
  const Rows rows(x_given, "x");
  const Tensor grad = grad_given.contiguous(), bias = rows.parameter(bias_given, "bias");
  require_same(grad, rows.x, "grad");
  Tensor out = at::empty_like(rows.x);
  const Sums sums(rows, 1);
  for_chunks(rows.count, [&](int64_t chunk, int64_t begin, int64_t end) {
    rows.kernels.bias_gelu_backward({.x = rows.x.const_data_ptr(),
                                     .grad = grad.const_data_ptr(),
                                     .bias = bias.const_data_ptr(),
                                     .out = out.mutable_data_ptr(),
                                     .bias_sums = sums.of(chunk, 0),
                                     .width = rows.width},
                                    begin, end);
  });
  rows_backward += rows.count;
  return {out, sums.total(0, bias_given.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm(const Tensor& x_given, const Tensor& bias_given,
                                                            const Tensor& residual_given, const Tensor& weight_given,
                                                            const Tensor& norm_bias_given, double eps, double rate,
                                                            const Tensor& seed, int64_t offset) {
  const Rows rows(x_given, "x");
  const Tensor residual = residual_given.contiguous();
  require_same(residual, rows.x, "residual");
  const Tensor bias = rows.parameter(bias_given, "bias"), weight = rows.parameter(weight_given, "weight"),
               norm_bias = rows.parameter(norm_bias_given, "norm_bias");
  Tensor out = at::empty_like(rows.x), summed = at::empty_like(rows.x);
  Tensor mean = rows.statistic(), rstd = rows.statistic();
  NormWork work{.width = rows.width, .dropout = dropout_of(rate, seed, offset)};
  work.x = rows.x.const_data_ptr();
  work.bias = bias.const_data_ptr();
  work.residual = residual.const_data_ptr();
  work.summed = summed.mutable_data_ptr();
  normalize(rows, rows.kernels.dropout_add_norm, work, weight, norm_bias, eps, mean, rstd, out);
  return {out, summed, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_norm_backward(
    const Tensor& grad_given, const std::optional<Tensor>& other_given, const Tensor& summed, const Tensor& mean,
    const Tensor& rstd, const Tensor& weight_given, double rate, const Tensor& seed, int64_t offset) {
  const Rows rows(summed, "summed");
  const Tensor grad = grad_given.contiguous();
  require_same(grad, summed, "grad");
  const Tensor other = other_given.has_value() ? other_given->contiguous() : Tensor();
  if (other.defined()) require_same(other, summed, "other_grad");
  Tensor grad_x = at::empty_like(summed), grad_residual = at::empty_like(summed);
  NormWork work{.width = rows.width, .dropout = dropout_of(rate, seed, offset)};
  work.summed = rows.x.data_ptr();
  work.other_grad = other.defined() ? other.const_data_ptr() : nullptr;
  work.grad_x = grad_x.mutable_data_ptr();
  work.grad_residual = grad_residual.mutable_data_ptr();
  const Sums sums =
      gradients(rows, rows.kernels.dropout_add_norm_backward, work, 3, grad, weight_given, mean, rstd);
  const at::ScalarType type = weight_given.scalar_type();
  return {grad_x, grad_residual, sums.total(2, type), sums.total(0, type), sums.total(1, type)};
}

// Rows that are looked up in three tables.
struct Embedded {
  Rows rows;
  Tensor ids, types, positions, position_table, type_table;

  Embedded(const Tensor& ids_given, const Tensor& types_given, const Tensor& positions_given, const Tensor& words,
           const Tensor& positions_table_given, const Tensor& type_table_given)
      : rows(words, "words"),
        position_table(positions_table_given.contiguous()),
        type_table(type_table_given.contiguous()) {
    rows.count = ids_given.numel();
    for (const Tensor* table : {&rows.x, &position_table, &type_table}) {
      TORCH_CHECK(table->dim() == 2 && table->size(1) == rows.width && table->scalar_type() == words.scalar_type(),
                  "the embeddings' tables must have one width and dtype, but have ", words.sizes(), ", ",
                  position_table.sizes(), " and ", type_table.sizes());
    }
    ids = indices(ids_given, rows.count, words, "ids");
    types = indices(types_given, rows.count, type_table, "types");
    positions = indices(positions_given, rows.count, position_table, "positions");
  }

  NormWork work(double rate, const Tensor& seed, int64_t offset) const {
    NormWork work{.width = rows.width, .dropout = dropout_of(rate, seed, offset)};
    work.ids = ids.const_data_ptr<int64_t>();
    work.types = types.const_data_ptr<int64_t>();
    work.positions = positions.const_data_ptr<int64_t>();
    work.words = rows.x.const_data_ptr();
    work.position_table = position_table.const_data_ptr();
    work.type_table = type_table.const_data_ptr();
    return work;
  }
};

std::tuple<Tensor, Tensor, Tensor> embed_norm(const Tensor& ids, const Tensor& types, const Tensor& positions,
                                              const Tensor& words, const Tensor& position_table,
                                              const Tensor& type_table, const Tensor& weight_given,
                                              const Tensor& bias_given, double eps, double rate, const Tensor& seed,
                                              int64_t offset, at::IntArrayRef) {
  const Embedded e(ids, types, positions, words, position_table, type_table);
  const Tensor weight = e.rows.parameter(weight_given, "weight"), bias = e.rows.parameter(bias_given, "bias");
  at::DimVector shape(ids.sizes().begin(), ids.sizes().end());
  Tensor mean = at::empty(shape, e.rows.wide_options()), rstd = at::empty(shape, e.rows.wide_options());
  shape.push_back(e.rows.width);
  Tensor out = at::empty(shape, words.options());
  normalize(e.rows, e.rows.kernels.embed_norm, e.work(rate, seed, offset), weight, bias, eps, mean, rstd, out);
  return {out, mean, rstd};
}

// Gradient of a table: threads share its columns, so that equal indices meet in one thread and in order. The few rows
// of a small table are sums of many, which nearly cancel: those are kept in double. The row `padding` has no gradient;
// -1 = all have.
Tensor table_gradient(const EncoderKernels& kernels, const Tensor& indices, const Tensor& rows, const Tensor& table,
                      int64_t padding) {
  const int64_t width = table.size(1);
  const bool exactly = table.size(0) <= indices.numel();
  Tensor gradient = at::zeros(table.sizes(), exactly ? rows.options().dtype(at::kDouble) : rows.options());
  const ScatterWork work{indices.const_data_ptr<int64_t>(), rows.const_data_ptr(), gradient.mutable_data_ptr(),
                         indices.numel(), width};
  const int64_t block = 64, blocks = (width + block - 1) / block;
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    (exactly ? kernels.scatter_exactly : kernels.scatter)(work, first * block, std::min(width, last * block));
  });
  if (padding >= 0) gradient.select(0, padding).zero_();
  return gradient.to(table.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> embed_norm_backward(
    const Tensor& grad_given, const Tensor& ids, const Tensor& types, const Tensor& positions, const Tensor& words,
    const Tensor& position_table, const Tensor& type_table, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight_given, double rate, const Tensor& seed, int64_t offset, at::IntArrayRef padding) {
  TORCH_CHECK(padding.size() == 3, "padding has ", padding.size(), " elements; there are 3 tables");
  const Embedded e(ids, types, positions, words, position_table, type_table);
  const Tensor grad = grad_given.contiguous();
  TORCH_CHECK(grad.numel() == e.rows.count * e.rows.width && grad.scalar_type() == words.scalar_type(), "grad is ",
              grad.scalar_type(), " of shape ", grad.sizes(), "; it must be the output's");
  Tensor summed = at::empty({e.rows.count, e.rows.width}, mean.options());
  NormWork work = e.work(rate, seed, offset);
  work.grad_summed = summed.mutable_data_ptr();
  const EncoderKernels& kernels = e.rows.kernels;
  const Sums sums = gradients(e.rows, kernels.embed_norm_backward, work, 2, grad, weight_given, mean, rstd);
  const at::ScalarType type = weight_given.scalar_type();
  return {table_gradient(kernels, e.ids, summed, words, padding[0]),
          table_gradient(kernels, e.positions, summed, position_table, padding[1]),
          table_gradient(kernels, e.types, summed, type_table, padding[2]), sums.total(0, type), sums.total(1, type)};
}

void require_labels(const Tensor& logits, const Tensor& labels, int64_t ignore_index) {
  TORCH_CHECK(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
                  labels.scalar_type() == at::kLong,
              "logits must be (N, C) and labels (N,) of int64, but are ", logits.sizes(), " and ", labels.sizes(), " of ",
              labels.scalar_type());
  const int64_t* values = labels.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < labels.size(0); ++i) {
    TORCH_CHECK_INDEX(values[i] == ignore_index || (values[i] >= 0 && values[i] < logits.size(1)), "labels has ",
                      values[i], ", but there are classes 0 to ", logits.size(1) - 1);
  }
}

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& labels_given, int64_t ignore_index) {
  const Tensor labels = labels_given.contiguous();
  require_labels(logits, labels, ignore_index);
  const Rows rows(logits, "logits");
  Tensor losses = rows.statistic(), lse = rows.statistic();
  const CrossEntropyWork work{.logits = rows.x.const_data_ptr(),
                              .labels = labels.const_data_ptr<int64_t>(),
                              .losses = losses.mutable_data_ptr(),
                              .lse_out = lse.mutable_data_ptr(),
                              .width = rows.width,
                              .ignore_index = ignore_index};
  for_chunks(rows.count, [&](int64_t, int64_t begin, int64_t end) { rows.kernels.cross_entropy(work, begin, end); });
  rows_forward += rows.count;
  return {losses, lse};
}

Tensor cross_entropy_backward(const Tensor& grad_given, const Tensor& logits, const Tensor& labels_given,
                              const Tensor& lse, int64_t ignore_index) {
  const Tensor labels = labels_given.contiguous(), grad = grad_given.contiguous();
  require_labels(logits, labels, ignore_index);
  require_same(grad, lse, "grad");
  const Rows rows(logits, "logits");
  Tensor out = at::empty_like(rows.x);
  const CrossEntropyWork work{.logits = rows.x.const_data_ptr(),
                              .grad = grad.const_data_ptr(),
                              .lse = lse.const_data_ptr(),
                              .labels = labels.const_data_ptr<int64_t>(),
                              .grad_logits = out.mutable_data_ptr(),
                              .width = rows.width,
                              .ignore_index = ignore_index};
  for_chunks(rows.count,
             [&](int64_t, int64_t begin, int64_t end) { rows.kernels.cross_entropy_backward(work, begin, end); });
  rows_backward += rows.count;
  return out;
}

// Since the process began: rows that a forward and a backward kernel worked on.
std::vector<int64_t> encoder_counters() { return {rows_forward, rows_backward}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("bias_gelu(Tensor x, Tensor bias) -> Tensor", tags);
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)", tags);
  m.def(
      "dropout_add_norm(Tensor x, Tensor bias, Tensor residual, Tensor weight, Tensor norm_bias, float eps, float rate, "
      "Tensor seed, int offset) -> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)",
      tags);
  m.def(
      "dropout_add_norm_backward(Tensor grad, Tensor? other_grad, Tensor summed, Tensor mean, Tensor rstd, "
      "Tensor weight, float rate, Tensor seed, int offset) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "embed_norm(Tensor ids, Tensor types, Tensor positions, Tensor words, Tensor position_table, Tensor type_table, "
      "Tensor weight, Tensor bias, float eps, float rate, Tensor seed, int offset, int[] padding) -> "
      "(Tensor out, Tensor mean, Tensor rstd)",
      tags);
  m.def(
      "embed_norm_backward(Tensor grad, Tensor ids, Tensor types, Tensor positions, Tensor words, "
      "Tensor position_table, Tensor type_table, Tensor mean, Tensor rstd, Tensor weight, float rate, Tensor seed, "
      "int offset, int[] padding) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def("cross_entropy(Tensor logits, Tensor labels, int ignore_index) -> (Tensor losses, Tensor lse)", tags);
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor labels, Tensor lse, int ignore_index) -> Tensor", tags);
  m.def("encoder_counters() -> int[]", &encoder_counters);
}

TORCH_LIBRARY_IMPL(stillhouse, CPU, m) {
  m.impl("bias_gelu", &bias_gelu);
  m.impl("bias_gelu_backward", &bias_gelu_backward);
  m.impl("dropout_add_norm", &dropout_add_norm);
  m.impl("dropout_add_norm_backward", &dropout_add_norm_backward);
  m.impl("embed_norm", &embed_norm);
  m.impl("embed_norm_backward", &embed_norm_backward);
  m.impl("cross_entropy", &cross_entropy);
  m.impl("cross_entropy_backward", &cross_entropy_backward);
}
