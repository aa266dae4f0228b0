// The encoder's operators: schemas and CPU kernels. Rows are dealt out in chunks whose number depends on their count
// alone, and sums over rows are added chunk by chunk, so results do not depend on the threads. Nor do those of
// attention within the segments of a packed row, where an item is a segment's head.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "encoder_kernels.h"

namespace {

using at::Tensor;
using stillhouse::Storage;
using namespace stillhouse::cpu;

std::atomic<int64_t> rows_forward{0}, rows_backward{0};

Storage storage_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Storage::kFloat32;
    case at::kDouble: return Storage::kFloat64;
    case at::kBFloat16: return Storage::kBFloat16;
    case at::kHalf: return Storage::kFloat16;
    default: TORCH_CHECK(false, "the encoder's kernels take float32, float64, bfloat16 and float16, not ", type);
  }
}

at::ScalarType wide(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

void require_same(const Tensor& given, const Tensor& like, const char* name) {
  TORCH_CHECK(given.sizes() == like.sizes() && given.scalar_type() == like.scalar_type(), name, " is ",
              given.scalar_type(), " of shape ", given.sizes(), "; it must be ", like.scalar_type(), " of shape ",
              like.sizes());
}

DropoutWork dropout_of(double rate, const Tensor& seed, int64_t offset) {
  TORCH_CHECK(rate >= 0.0 && rate < 1.0, "rate is ", rate, "; it must be at least 0 and below 1");
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1 && seed.is_cpu(),
              "seed must be one int64 on the CPU");
  // At most one level less than all: what is kept is scaled by its share.
  const int32_t below = std::min<int32_t>(65535, static_cast<int32_t>(std::lround(rate * 65536.0)));
  return {below, 65536.0 / (65536.0 - below), static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()),
          static_cast<uint64_t>(offset)};
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
struct Sums {
  Tensor partial;  // (chunks, sums, width)

  void* of(int64_t chunk, int64_t which) const {
    return static_cast<char*>(partial.data_ptr()) +
           (chunk * partial.size(1) + which) * partial.size(2) * partial.element_size();
  }

  Tensor total(int64_t which, at::ScalarType type) const {
    const int64_t width = partial.size(2);
    const Tensor total = at::empty({width}, partial.options());
    std::memcpy(total.mutable_data_ptr(), of(0, which), width * partial.element_size());
    const auto add = [&](auto* to) {
      for (int64_t chunk = 1; chunk < partial.size(0); ++chunk) {
        const auto* from = static_cast<decltype(to)>(of(chunk, which));
        for (int64_t i = 0; i < width; ++i) to[i] += from[i];
      }
    };
    total.scalar_type() == at::kDouble ? add(total.mutable_data_ptr<double>()) : add(total.mutable_data_ptr<float>());
    return total.to(type);
  }
};

// Activations whose last dimension is a row, and what the kernels need besides them.
struct Rows {
  Tensor x;
  int64_t width, count;
  EncoderKernels kernels;

  Rows(const Tensor& given, const char* name) : x(given.contiguous()) {
    TORCH_CHECK(x.dim() >= 1 && x.size(-1) > 0, name, " has shape ", x.sizes(), "; its rows must have elements");
    width = x.size(-1);
    count = x.numel() / width;
    kernels = STILLHOUSE_CHOSEN(encoder_kernels)(storage_of(x.scalar_type()));
  }

  at::TensorOptions wide_options() const { return x.options().dtype(wide(x.scalar_type())); }

  // A wide number for each row.
  Tensor statistic() const { return at::empty(x.sizes().slice(0, x.dim() - 1), wide_options()); }

  Tensor parameter(const Tensor& given, const char* name) const {
    TORCH_CHECK(given.dim() == 1 && given.size(0) == width, name, " has shape ", given.sizes(), "; it must have (",
                width, ",)");
    return given.to(wide(x.scalar_type())).contiguous();
  }

  void forward(RowKernel kernel, RowWork work) const {
    work.width = width;
    for_chunks(count, [&](int64_t, int64_t begin, int64_t end) { kernel(work, begin, end); });
    rows_forward += count;
  }

  // Returns the first `sum_count` of the kernel's sums.
  Sums backward(RowKernel kernel, const RowWork& whole, int64_t sum_count) const {
    const Sums sums{at::zeros({std::max<int64_t>(1, chunks_of(count)), sum_count, width}, wide_options())};
    for_chunks(count, [&](int64_t chunk, int64_t begin, int64_t end) {
      RowWork work = whole;
      work.width = width;
      for (int64_t which = 0; which < sum_count; ++which) work.sums[which] = sums.of(chunk, which);
      kernel(work, begin, end);
    });
    rows_backward += count;
    return sums;
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

Tensor bias_gelu(const Tensor& x, const Tensor& bias_given) {
  const Rows rows(x, "x");
  const Tensor bias = rows.parameter(bias_given, "bias"), out = at::empty_like(rows.x);
  rows.forward(rows.kernels.bias_gelu,
               {.x = rows.x.const_data_ptr(), .bias = bias.const_data_ptr(), .out = out.mutable_data_ptr()});
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad_given, const Tensor& x, const Tensor& bias_given) {
  const Rows rows(x, "x");
  const Tensor grad = grad_given.contiguous(), bias = rows.parameter(bias_given, "bias"), out = at::empty_like(rows.x);
  require_same(grad, rows.x, "grad");
  const Sums sums = rows.backward(rows.kernels.bias_gelu_backward,
                                  {.x = rows.x.const_data_ptr(),
                                   .bias = bias.const_data_ptr(),
                                   .grad = grad.const_data_ptr(),
                                   .out = out.mutable_data_ptr()},
                                  1);
  return {out, sums.total(0, bias_given.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm(const Tensor& x, const Tensor& bias_given,
                                                            const Tensor& residual_given, const Tensor& weight_given,
                                                            const Tensor& norm_bias_given, double eps, double rate,
                                                            const Tensor& seed, int64_t offset) {
  const Rows rows(x, "x");
  const Tensor residual = residual_given.contiguous();
  require_same(residual, rows.x, "residual");
  const Tensor bias = rows.parameter(bias_given, "bias"), weight = rows.parameter(weight_given, "weight"),
               norm_bias = rows.parameter(norm_bias_given, "norm_bias");
  const Tensor out = at::empty_like(rows.x), summed = at::empty_like(rows.x), mean = rows.statistic(),
               rstd = rows.statistic();
  rows.forward(rows.kernels.dropout_add_norm, {.x = rows.x.const_data_ptr(),
                                               .bias = bias.const_data_ptr(),
                                               .residual = residual.const_data_ptr(),
                                               .weight = weight.const_data_ptr(),
                                               .norm_bias = norm_bias.const_data_ptr(),
                                               .out = out.mutable_data_ptr(),
                                               .summed = summed.mutable_data_ptr(),
                                               .mean = mean.mutable_data_ptr(),
                                               .rstd = rstd.mutable_data_ptr(),
                                               .dropout = dropout_of(rate, seed, offset),
                                               .eps = eps});
  return {out, summed, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_norm_backward(
    const Tensor& grad_given, const std::optional<Tensor>& other_given, const Tensor& summed, const Tensor& mean,
    const Tensor& rstd, const Tensor& weight_given, double rate, const Tensor& seed, int64_t offset) {
  const Rows rows(summed, "summed");
  const Tensor grad = grad_given.contiguous(), weight = rows.parameter(weight_given, "weight");
  require_same(grad, summed, "grad");
  const Tensor other = other_given.has_value() ? other_given->contiguous() : Tensor();
  if (other.defined()) require_same(other, summed, "other_grad");
  const Tensor grad_x = at::empty_like(summed), grad_residual = at::empty_like(summed);
  const Sums sums = rows.backward(rows.kernels.dropout_add_norm_backward,
                                  {.weight = weight.const_data_ptr(),
                                   .grad = grad.const_data_ptr(),
                                   .other_grad = other.defined() ? other.const_data_ptr() : nullptr,
                                   .out = grad_x.mutable_data_ptr(),
                                   .summed = rows.x.data_ptr(),
                                   .mean = mean.data_ptr(),
                                   .rstd = rstd.data_ptr(),
                                   .grad_residual = grad_residual.mutable_data_ptr(),
                                   .dropout = dropout_of(rate, seed, offset)},
                                  3);
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

  RowWork work(double rate, const Tensor& seed, int64_t offset) const {
    return {.ids = ids.const_data_ptr<int64_t>(),
            .types = types.const_data_ptr<int64_t>(),
            .positions = positions.const_data_ptr<int64_t>(),
            .words = rows.x.const_data_ptr(),
            .position_table = position_table.const_data_ptr(),
            .type_table = type_table.const_data_ptr(),
            .dropout = dropout_of(rate, seed, offset)};
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
  const Tensor mean = at::empty(shape, e.rows.wide_options()), rstd = at::empty(shape, e.rows.wide_options());
  shape.push_back(e.rows.width);
  const Tensor out = at::empty(shape, words.options());
  RowWork work = e.work(rate, seed, offset);
  work.weight = weight.const_data_ptr();
  work.norm_bias = bias.const_data_ptr();
  work.out = out.mutable_data_ptr();
  work.mean = mean.mutable_data_ptr();
  work.rstd = rstd.mutable_data_ptr();
  work.eps = eps;
  e.rows.forward(e.rows.kernels.embed_norm, work);
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
  const Tensor weight = e.rows.parameter(weight_given, "weight");
  const Tensor summed = at::empty({e.rows.count, e.rows.width}, mean.options());
  RowWork work = e.work(rate, seed, offset);
  work.weight = weight.const_data_ptr();
  work.grad = grad.const_data_ptr();
  work.mean = mean.data_ptr();
  work.rstd = rstd.data_ptr();
  work.grad_summed = summed.mutable_data_ptr();
  const EncoderKernels& kernels = e.rows.kernels;
  const Sums sums = e.rows.backward(kernels.embed_norm_backward, work, 2);
  const at::ScalarType type = weight_given.scalar_type();
  return {table_gradient(kernels, e.ids, summed, words, padding[0]),
          table_gradient(kernels, e.positions, summed, position_table, padding[1]),
          table_gradient(kernels, e.types, summed, type_table, padding[2]), sums.total(0, type), sums.total(1, type)};
}

void require_labels(const Tensor& logits, const Tensor& labels, int64_t ignore_index) {
  TORCH_CHECK(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) &&
                  labels.scalar_type() == at::kLong,
              "logits must be (N, C) and labels (N,) of int64, but are ", logits.sizes(), " and ", labels.sizes(),
              " of ", labels.scalar_type());
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
  const Tensor losses = rows.statistic(), lse = rows.statistic();
  rows.forward(rows.kernels.cross_entropy, {.x = rows.x.const_data_ptr(),
                                            .labels = labels.const_data_ptr<int64_t>(),
                                            .lse = lse.mutable_data_ptr(),
                                            .losses = losses.mutable_data_ptr(),
                                            .ignore_index = ignore_index});
  return {losses, lse};
}

Tensor cross_entropy_backward(const Tensor& grad_given, const Tensor& logits, const Tensor& labels_given,
                              const Tensor& lse, int64_t ignore_index) {
  const Tensor labels = labels_given.contiguous(), grad = grad_given.contiguous();
  require_labels(logits, labels, ignore_index);
  require_same(grad, lse, "grad");
  const Rows rows(logits, "logits");
  const Tensor out = at::empty_like(rows.x);
  rows.backward(rows.kernels.cross_entropy_backward,
                {.x = rows.x.const_data_ptr(),
                 .labels = labels.const_data_ptr<int64_t>(),
                 .grad = grad.const_data_ptr(),
                 .out = out.mutable_data_ptr(),
                 .lse = lse.data_ptr(),
                 .ignore_index = ignore_index},
                0);
  return out;
}

// What both directions of attention are given, and how they run. `work` points into the others.
struct Attention {
  AttentionWork work{};
  std::vector<Tensor> given;
  std::vector<AttentionItem> items;  // the heads of all segments, longest first, so that the threads end together
  AttentionKernels kernels;

  Attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& edges_given, double scale,
            double rate, const Tensor& seed, int64_t offset) {
    TORCH_CHECK(query.dim() == 3 && query.size(1) > 0 && query.size(2) > 0, "query has shape ", query.sizes(),
                "; it must be (T, heads, D)");
    TORCH_CHECK(scale > 0, "scale is ", scale, "; it must be above 0");
    require_same(key, query, "key");
    require_same(value, query, "value");
    for (const Tensor& tensor : {query, key, value}) {
      const bool in_place = tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2);
      given.push_back(in_place ? tensor : tensor.contiguous());
      work.strides[given.size() - 1] = given.back().stride(0);
      work.given[given.size() - 1] = given.back().const_data_ptr();
    }
    work.heads = query.size(1);
    work.depth = query.size(2);
    work.scale = scale;
    work.dropout = dropout_of(rate, seed, offset);
    TORCH_CHECK(edges_given.is_cpu() && edges_given.dim() == 1 && edges_given.numel() > 0 &&
                    edges_given.scalar_type() == at::kInt,
                "cu_seqlens must be (K + 1,) of int32 on the CPU, but is ", edges_given.scalar_type(), " of shape ",
                edges_given.sizes());
    const Tensor edges = edges_given.contiguous();
    const int32_t* edge = edges.const_data_ptr<int32_t>();
    const int64_t segments = edges.numel() - 1;
    TORCH_CHECK(edge[0] == 0 && edge[segments] == query.size(0), "cu_seqlens goes from ", edge[0], " to ",
                edge[segments], "; it must go from 0 to the ", query.size(0), " tokens");
    for (int64_t k = 0; k < segments; ++k) {
      TORCH_CHECK(edge[k] <= edge[k + 1], "cu_seqlens has ", edge[k + 1], " after ", edge[k], "; it must not decrease");
      work.longest = std::max<int64_t>(work.longest, edge[k + 1] - edge[k]);
      if (edge[k] == edge[k + 1]) continue;
      for (int64_t head = 0; head < work.heads; ++head) items.push_back({edge[k], edge[k + 1], head});
    }
    std::stable_sort(items.begin(), items.end(), [](const AttentionItem& a, const AttentionItem& b) {
      return a.last - a.first > b.last - b.first;
    });
    work.items = items.data();
    work.count = static_cast<int64_t>(items.size());
    kernels = STILLHOUSE_CHOSEN(attention_kernels)(storage_of(query.scalar_type()));
  }

  void run(void (*kernel)(const AttentionWork&)) {
    int64_t next = 0;
    work.next = &next;
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), work.count);
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { kernel(work); });
  }
};

std::tuple<Tensor, Tensor> segment_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& cu_seqlens, double scale, double rate, const Tensor& seed,
                                             int64_t offset) {
  Attention attention(query, key, value, cu_seqlens, scale, rate, seed, offset);
  const Tensor out = at::empty(query.sizes(), query.options());
  const Tensor statistics =
      at::empty({query.size(0), query.size(1), 2}, query.options().dtype(wide(query.scalar_type())));
  attention.work.out = out.mutable_data_ptr();
  attention.work.statistics = statistics.mutable_data_ptr();
  attention.run(attention.kernels.forward);
  rows_forward += query.size(0);
  return {out, statistics};
}

std::tuple<Tensor, Tensor, Tensor> segment_attention_backward(const Tensor& grad_given, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& out_given, const Tensor& statistics_given,
                                                              const Tensor& cu_seqlens, double scale, double rate,
                                                              const Tensor& seed, int64_t offset) {
  Attention attention(query, key, value, cu_seqlens, scale, rate, seed, offset);
  require_same(grad_given, query, "grad");
  const Tensor grad = grad_given.contiguous(), out = out_given.contiguous(), statistics = statistics_given.contiguous();
  Tensor grads[3];
  for (int which = 0; which < 3; ++which) {
    grads[which] = at::empty(query.sizes(), query.options());
    attention.work.grads[which] = grads[which].mutable_data_ptr();
  }
  attention.work.out = const_cast<void*>(out.const_data_ptr());
  attention.work.statistics = const_cast<void*>(statistics.const_data_ptr());
  attention.work.grad = grad.const_data_ptr();
  attention.run(attention.kernels.backward);
  rows_backward += query.size(0);
  return {grads[0], grads[1], grads[2]};
}

// Since the process began: rows that a forward and a backward kernel worked on.
std::vector<int64_t> encoder_counters() { return {rows_forward, rows_backward}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) {
  for (const char* schema :
       {"bias_gelu(Tensor x, Tensor bias) -> Tensor",
        "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)",
        "dropout_add_norm(Tensor x, Tensor bias, Tensor residual, Tensor weight, Tensor norm_bias, float eps, "
        "float rate, Tensor seed, int offset) -> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)",
        "dropout_add_norm_backward(Tensor grad, Tensor? other_grad, Tensor summed, Tensor mean, Tensor rstd, "
        "Tensor weight, float rate, Tensor seed, int offset) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "embed_norm(Tensor ids, Tensor types, Tensor positions, Tensor words, Tensor position_table, "
        "Tensor type_table, Tensor weight, Tensor bias, float eps, float rate, Tensor seed, int offset, "
        "int[] padding) -> (Tensor out, Tensor mean, Tensor rstd)",
        "embed_norm_backward(Tensor grad, Tensor ids, Tensor types, Tensor positions, Tensor words, "
        "Tensor position_table, Tensor type_table, Tensor mean, Tensor rstd, Tensor weight, float rate, Tensor seed, "
        "int offset, int[] padding) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "cross_entropy(Tensor logits, Tensor labels, int ignore_index) -> (Tensor losses, Tensor lse)",
        "cross_entropy_backward(Tensor grad, Tensor logits, Tensor labels, Tensor lse, int ignore_index) -> Tensor",
        "segment_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scale, float rate, "
        "Tensor seed, int offset) -> (Tensor out, Tensor statistics)",
        "segment_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor statistics, Tensor cu_seqlens, float scale, float rate, Tensor seed, int offset) -> "
        "(Tensor, Tensor, Tensor)"}) {
    m.def(schema, {at::Tag::pt2_compliant_tag});
  }
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
  m.impl("segment_attention", &segment_attention);
  m.impl("segment_attention_backward", &segment_attention_backward);
}
