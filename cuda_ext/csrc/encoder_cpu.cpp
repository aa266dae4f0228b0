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

#include "adan_launch.h"
#include "encoder_rows.h"
#include "operator_arguments.h"

namespace {

using at::Tensor;
using namespace stillhouse::cpu;

EncoderKernels kernels_for(at::ScalarType type) {
  const Element element = element_of(type);
#if defined(__x86_64__)
  const char* capability = stillhouse::cpu::capability();
  if (std::strcmp(capability, "avx512") == 0) return avx512::encoder_kernels(element);
  if (std::strcmp(capability, "avx2") == 0) return avx2::encoder_kernels(element);
#endif
  return scalar::encoder_kernels(element);
}

Tensor parameter(const Tensor& given, const Tensor& like, int64_t width, const char* name) {
  TORCH_CHECK(given.dim() == 1 && given.size(0) == width, name, " has shape ", given.sizes(), "; it must have (", width,
              ",)");
  return given.to(wide(like.scalar_type())).contiguous();
}

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
  Sums(int64_t rows, int64_t count, int64_t width, const Tensor& like)
      : partial_(at::zeros({std::max<int64_t>(1, chunks_of(rows)), count, width},
                           like.options().dtype(wide(like.scalar_type())))) {}

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

int64_t width_of(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) > 0, name, " has shape ", x.sizes(), "; its rows must have elements");
  return x.size(-1);
}

at::DimVector without_last(const Tensor& x) { return at::DimVector(x.sizes().begin(), x.sizes().end() - 1); }

Tensor bias_gelu(const Tensor& x_given, const Tensor& bias_given) {
  const Tensor x = x_given.contiguous();
  const int64_t width = width_of(x, "x"), rows = x.numel() / width;
  const Tensor bias = parameter(bias_given, x, width, "bias");
  Tensor out = at::empty_like(x);
  const EncoderKernels kernels = kernels_for(x.scalar_type());
  BiasGeluWork work{x.const_data_ptr(), nullptr, bias.const_data_ptr(), out.mutable_data_ptr(), nullptr, width};
  for_chunks(rows, [&](int64_t, int64_t begin, int64_t end) { kernels.bias_gelu(work, begin, end); });
  rows_forward += rows;
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad_given, const Tensor& x_given,
                                              const Tensor& bias_given) {
  const Tensor x = x_given.contiguous(), grad = grad_given.contiguous();
  require_same(grad, x, "grad");
  const int64_t width = width_of(x, "x"), rows = x.numel() / width;
  const Tensor bias = parameter(bias_given, x, width, "bias");
  Tensor out = at::empty_like(x);
  const EncoderKernels kernels = kernels_for(x.scalar_type());
  const Sums sums(rows, 1, width, x);
  const BiasGeluWork whole{x.const_data_ptr(), grad.const_data_ptr(), bias.const_data_ptr(), out.mutable_data_ptr(),
                           nullptr, width};
  for_chunks(rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    BiasGeluWork work = whole;
    work.bias_sums = sums.of(chunk, 0);
    kernels.bias_gelu_backward(work, begin, end);
  });
  rows_backward += rows;
  return {out, sums.total(0, bias_given.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm(const Tensor& x_given, const Tensor& bias_given,
                                                            const Tensor& residual_given, const Tensor& weight_given,
                                                            const Tensor& norm_bias_given, double eps, double rate,
                                                            const Tensor& seed, int64_t offset) {
  const Tensor x = x_given.contiguous(), residual = residual_given.contiguous();
  require_same(residual, x, "residual");
  const int64_t width = width_of(x, "x"), rows = x.numel() / width;
  const Tensor bias = parameter(bias_given, x, width, "bias"), weight = parameter(weight_given, x, width, "weight"),
               norm_bias = parameter(norm_bias_given, x, width, "norm_bias");
  Tensor out = at::empty_like(x), summed = at::empty_like(x);
  const auto wide_options = x.options().dtype(wide(x.scalar_type()));
  Tensor mean = at::empty(without_last(x), wide_options), rstd = at::empty(without_last(x), wide_options);
  const EncoderKernels kernels = kernels_for(x.scalar_type());
  const DropoutAddNormWork work{x.const_data_ptr(),
                                bias.const_data_ptr(),
                                residual.const_data_ptr(),
                                weight.const_data_ptr(),
                                norm_bias.const_data_ptr(),
                                out.mutable_data_ptr(),
                                summed.mutable_data_ptr(),
                                mean.mutable_data_ptr(),
                                rstd.mutable_data_ptr(),
                                width,
                                eps,
                                dropout_of(rate, seed, offset)};
  for_chunks(rows, [&](int64_t, int64_t begin, int64_t end) { kernels.dropout_add_norm(work, begin, end); });
  rows_forward += rows;
  return {out, summed, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_norm_backward(
    const Tensor& grad_given, const std::optional<Tensor>& other_given, const Tensor& summed, const Tensor& mean,
    const Tensor& rstd, const Tensor& weight_given, double rate, const Tensor& seed, int64_t offset) {
  const Tensor grad = grad_given.contiguous();
  const Tensor other = other_given.has_value() ? other_given->contiguous() : Tensor();
  require_same(grad, summed, "grad");
  if (other.defined()) require_same(other, summed, "other_grad");
  const int64_t width = width_of(summed, "summed"), rows = summed.numel() / width;
  const Tensor weight = parameter(weight_given, summed, width, "weight");
  Tensor grad_x = at::empty_like(summed), grad_residual = at::empty_like(summed);
  const EncoderKernels kernels = kernels_for(summed.scalar_type());
  const Sums sums(rows, 3, width, summed);
  const DropoutAddNormBackwardWork whole{grad.const_data_ptr(),
                                         other.defined() ? other.const_data_ptr() : nullptr,
                                         summed.const_data_ptr(),
                                         mean.const_data_ptr(),
                                         rstd.const_data_ptr(),
                                         weight.const_data_ptr(),
                                         grad_x.mutable_data_ptr(),
                                         grad_residual.mutable_data_ptr(),
                                         nullptr,
                                         nullptr,
                                         nullptr,
                                         width,
                                         dropout_of(rate, seed, offset)};
  for_chunks(rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    DropoutAddNormBackwardWork work = whole;
    work.bias_sums = sums.of(chunk, 0);
    work.weight_sums = sums.of(chunk, 1);
    work.norm_bias_sums = sums.of(chunk, 2);
    kernels.dropout_add_norm_backward(work, begin, end);
  });
  rows_backward += rows;
  const at::ScalarType type = weight_given.scalar_type();
  return {grad_x, grad_residual, sums.total(0, type), sums.total(1, type), sums.total(2, type)};
}

struct Embedded {
  Tensor ids, types, positions, words, position_table, type_table;
  int64_t width, rows;

  Embedded(const Tensor& ids_given, const Tensor& types_given, const Tensor& positions_given, const Tensor& words_given,
           const Tensor& positions_table_given, const Tensor& type_table_given)
      : words(words_given.contiguous()),
        position_table(positions_table_given.contiguous()),
        type_table(type_table_given.contiguous()),
        width(width_of(words, "words")),
        rows(ids_given.numel()) {
    for (const Tensor* table : {&words, &position_table, &type_table}) {
      TORCH_CHECK(table->dim() == 2 && table->size(1) == width && table->scalar_type() == words.scalar_type(),
                  "the embeddings' tables must have one width and dtype, but have ", words.sizes(), ", ",
                  position_table.sizes(), " and ", type_table.sizes());
    }
    ids = indices(ids_given, rows, words, "ids");
    types = indices(types_given, rows, type_table, "types");
    positions = indices(positions_given, rows, position_table, "positions");
  }
};

std::tuple<Tensor, Tensor, Tensor> embed_norm(const Tensor& ids, const Tensor& types, const Tensor& positions,
                                              const Tensor& words, const Tensor& position_table,
                                              const Tensor& type_table, const Tensor& weight_given,
                                              const Tensor& bias_given, double eps, double rate, const Tensor& seed,
                                              int64_t offset, at::IntArrayRef) {
  const Embedded e(ids, types, positions, words, position_table, type_table);
  const Tensor weight = parameter(weight_given, e.words, e.width, "weight"),
               bias = parameter(bias_given, e.words, e.width, "bias");
  at::DimVector shape(ids.sizes().begin(), ids.sizes().end());
  const auto wide_options = e.words.options().dtype(wide(e.words.scalar_type()));
  Tensor mean = at::empty(shape, wide_options), rstd = at::empty(shape, wide_options);
  shape.push_back(e.width);
  Tensor out = at::empty(shape, e.words.options());
  const EncoderKernels kernels = kernels_for(e.words.scalar_type());
  const EmbedNormWork work{e.ids.const_data_ptr<int64_t>(),
                           e.types.const_data_ptr<int64_t>(),
                           e.positions.const_data_ptr<int64_t>(),
                           e.words.const_data_ptr(),
                           e.position_table.const_data_ptr(),
                           e.type_table.const_data_ptr(),
                           weight.const_data_ptr(),
                           bias.const_data_ptr(),
                           out.mutable_data_ptr(),
                           mean.mutable_data_ptr(),
                           rstd.mutable_data_ptr(),
                           e.width,
                           eps,
                           dropout_of(rate, seed, offset)};
  for_chunks(e.rows, [&](int64_t, int64_t begin, int64_t end) { kernels.embed_norm(work, begin, end); });
  rows_forward += e.rows;
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
  TORCH_CHECK(grad.numel() == e.rows * e.width && grad.scalar_type() == e.words.scalar_type(), "grad is ",
              grad.scalar_type(), " of shape ", grad.sizes(), "; it must be the output's");
  const Tensor weight = parameter(weight_given, e.words, e.width, "weight");
  Tensor summed = at::empty({e.rows, e.width}, mean.options());
  const EncoderKernels kernels = kernels_for(e.words.scalar_type());
  const Sums sums(e.rows, 2, e.width, e.words);
  const EmbedNormBackwardWork whole{e.ids.const_data_ptr<int64_t>(),
                                    e.types.const_data_ptr<int64_t>(),
                                    e.positions.const_data_ptr<int64_t>(),
                                    grad.const_data_ptr(),
                                    e.words.const_data_ptr(),
                                    e.position_table.const_data_ptr(),
                                    e.type_table.const_data_ptr(),
                                    mean.const_data_ptr(),
                                    rstd.const_data_ptr(),
                                    weight.const_data_ptr(),
                                    summed.mutable_data_ptr(),
                                    nullptr,
                                    nullptr,
                                    e.width,
                                    dropout_of(rate, seed, offset)};
  for_chunks(e.rows, [&](int64_t chunk, int64_t begin, int64_t end) {
    EmbedNormBackwardWork work = whole;
    work.weight_sums = sums.of(chunk, 0);
    work.bias_sums = sums.of(chunk, 1);
    kernels.embed_norm_backward(work, begin, end);
  });
  rows_backward += e.rows;
  const at::ScalarType type = weight_given.scalar_type();
  return {table_gradient(kernels, e.ids, summed, e.words, padding[0]),
          table_gradient(kernels, e.positions, summed, e.position_table, padding[1]),
          table_gradient(kernels, e.types, summed, e.type_table, padding[2]), sums.total(0, type), sums.total(1, type)};
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

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits_given, const Tensor& labels_given,
                                         int64_t ignore_index) {
  const Tensor logits = logits_given.contiguous(), labels = labels_given.contiguous();
  require_labels(logits, labels, ignore_index);
  const int64_t rows = logits.size(0), width = width_of(logits, "logits");
  const auto wide_options = logits.options().dtype(wide(logits.scalar_type()));
  Tensor losses = at::empty({rows}, wide_options), lse = at::empty({rows}, wide_options);
  const EncoderKernels kernels = kernels_for(logits.scalar_type());
  const CrossEntropyWork work{logits.const_data_ptr(), nullptr, nullptr, labels.const_data_ptr<int64_t>(),
                              losses.mutable_data_ptr(), lse.mutable_data_ptr(), nullptr, width, ignore_index};
  for_chunks(rows, [&](int64_t, int64_t begin, int64_t end) { kernels.cross_entropy(work, begin, end); });
  rows_forward += rows;
  return {losses, lse};
}

Tensor cross_entropy_backward(const Tensor& grad_given, const Tensor& logits_given, const Tensor& labels_given,
                              const Tensor& lse, int64_t ignore_index) {
  const Tensor logits = logits_given.contiguous(), labels = labels_given.contiguous(), grad = grad_given.contiguous();
  require_labels(logits, labels, ignore_index);
  require_same(grad, lse, "grad");
  const int64_t rows = logits.size(0), width = width_of(logits, "logits");
  Tensor out = at::empty_like(logits);
  const EncoderKernels kernels = kernels_for(logits.scalar_type());
  const CrossEntropyWork work{logits.const_data_ptr(), grad.const_data_ptr(), lse.const_data_ptr(),
                              labels.const_data_ptr<int64_t>(), nullptr, nullptr, out.mutable_data_ptr(), width,
                              ignore_index};
  for_chunks(rows, [&](int64_t, int64_t begin, int64_t end) { kernels.cross_entropy_backward(work, begin, end); });
  rows_backward += rows;
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
