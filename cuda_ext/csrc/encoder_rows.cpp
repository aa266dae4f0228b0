// Compiled once per instruction set with STILLHOUSE_ISA naming the set and the compiler's flags choosing it. A row
// is read into a buffer that stays in the first cache, so that statistics need no second pass over memory.

#include "encoder_kernels.h"

#include <cmath>

#include "lanes.h"
#include "philox.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

template <typename V>
STILLHOUSE_LANES V normal_cdf(V v) {
  return (erf(v * static_cast<ScalarOf<V>>(M_SQRT1_2)) + 1) * static_cast<ScalarOf<V>>(0.5);
}

// y = v Phi(v) with v = x + bias.
template <typename S>
void bias_gelu(const RowWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  const Number<S>* bias = row_of<Wide<S>>(work.bias, 0, work.width);
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.x, row, work.width);
    auto* out = row_of<S>(work.out, row, work.width);
    for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V v = part.load(x + c) + part.load(bias + c);
      part.store(out + c, v * normal_cdf(v));
    });
  }
}

// dx = g (Phi(v) + v phi(v)), and its sum over rows for the bias.
template <typename S>
void bias_gelu_backward(const RowWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  using Scalar = Number<S>;
  const Scalar* bias = row_of<Wide<S>>(work.bias, 0, work.width);
  Scalar* sums = row_of<Wide<S>>(work.sums[0], 0, work.width);
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.x, row, work.width);
    const auto* grad = row_of<S>(work.grad, row, work.width);
    auto* out = row_of<S>(work.out, row, work.width);
    for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V v = part.load(x + c) + part.load(bias + c);
      const V density = exp(v * v * static_cast<Scalar>(-0.5)) * static_cast<Scalar>(M_2_SQRTPI * M_SQRT1_2 / 2);
      const V dx = part.load(grad + c) * (normal_cdf(v) + v * density);
      part.store(out + c, dx);
      part.store(sums + c, part.load(sums + c) + dx);
    });
  }
}

// Mean and 1 / sqrt(variance + eps) of a row in a buffer, in two passes.
template <typename S>
STILLHOUSE_LANES void statistics(const Number<S>* values, int64_t width, double eps, Number<S>* mean,
                                 Number<S>* rstd) {
  using V = typename S::V;
  V total{};
  for_columns<S>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA { total += part.load(values + c); });
  const Number<S> middle = sum_of(total) / static_cast<Number<S>>(width);
  V squares{};
  for_columns<S>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    const V centred = part.only(part.load(values + c) - middle, V{});
    squares += centred * centred;
  });
  *mean = middle;
  *rstd = 1 / std::sqrt(sum_of(squares) / static_cast<Number<S>>(width) + static_cast<Number<S>>(eps));
}

// values = residual + dropout(x + bias), as it is stored.
template <typename S>
STILLHOUSE_LANES void dropout_add(const RowWork& work, int64_t row, const uint16_t* bits, Number<S>* values) {
  using V = typename S::V;
  const bool drops = work.dropout.below > 0;
  const auto* x = row_of<S>(work.x, row, work.width);
  const auto* residual = row_of<S>(work.residual, row, work.width);
  const Number<S>* bias = row_of<Wide<S>>(work.bias, 0, work.width);
  auto* summed = row_of<S>(work.summed, row, work.width);
  for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    V v = part.load(x + c) + part.load(bias + c);
    if (drops) v *= kept<V>(work.dropout, bits + c);
    part.store(summed + c, v + part.load(residual + c));
    part.store(values + c, part.load(summed + c));
  });
}

// values = word + type + position, in the order in which transformers adds them.
template <typename S>
STILLHOUSE_LANES void embed(const RowWork& work, int64_t row, Number<S>* values) {
  using V = typename S::V;
  const auto* word = row_of<S>(work.words, work.ids[row], work.width);
  const auto* type = row_of<S>(work.type_table, work.types[row], work.width);
  const auto* position = row_of<S>(work.position_table, work.positions[row], work.width);
  for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    const V v = part.load(word + c) + part.load(type + c);
    part.store(values + c, v + part.load(position + c));
  });
}

// out = LayerNorm(residual + dropout(x + bias)), or dropout(LayerNorm(word + type + position)).
template <typename S, bool kEmbeds>
void norm(const RowWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  const int64_t width = work.width;
  const bool drops = work.dropout.below > 0;
  const Number<S>* weight = row_of<Wide<S>>(work.weight, 0, width);
  const Number<S>* norm_bias = row_of<Wide<S>>(work.norm_bias, 0, width);
  Buffer<Number<S>> values_buffer(width);
  Buffer<uint16_t> bits_buffer(width);
  Number<S>* values = values_buffer.data();
  uint16_t* bits = bits_buffer.data();
  for (int64_t row = begin; row < end; ++row) {
    auto* out = row_of<S>(work.out, row, width);
    Number<S>* mean = row_of<Wide<S>>(work.mean, row, 1);
    Number<S>* rstd = row_of<Wide<S>>(work.rstd, row, 1);
    if (drops) draw_row(work.dropout, row, width, width, bits);
    if constexpr (kEmbeds) {
      embed<S>(work, row, values);
    } else {
      dropout_add<S>(work, row, bits, values);
    }
    statistics<S>(values, width, work.eps, mean, rstd);
    for_columns<S>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V n = (part.load(values + c) - *mean) * *rstd;
      V y = n * part.load(weight + c) + part.load(norm_bias + c);
      if (kEmbeds && drops) y *= kept<V>(work.dropout, bits + c);
      part.store(out + c, y);
    });
  }
}

// With n = (summed - mean) rstd and h = g weight:  d summed = rstd (h - mean(h) - n mean(h n)).
template <typename S, bool kEmbeds>
void norm_backward(const RowWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  const int64_t width = work.width;
  const bool drops = work.dropout.below > 0;
  const Number<S>* weight = row_of<Wide<S>>(work.weight, 0, width);
  Number<S>* bias_sums = row_of<Wide<S>>(work.sums[2], 0, width);
  Number<S>* weight_sums = row_of<Wide<S>>(work.sums[0], 0, width);
  Number<S>* norm_bias_sums = row_of<Wide<S>>(work.sums[1], 0, width);
  Buffer<Number<S>> normed_buffer(width), weighted_buffer(width);
  Buffer<uint16_t> bits_buffer(width);
  Number<S>*normed = normed_buffer.data(), *weighted = weighted_buffer.data();
  uint16_t* bits = bits_buffer.data();
  for (int64_t row = begin; row < end; ++row) {
    const auto* grad = row_of<S>(work.grad, row, width);
    const auto* other = work.other_grad == nullptr ? nullptr : row_of<S>(work.other_grad, row, width);
    const auto* summed = row_of<S>(work.summed, row, width);
    const Number<S> mean = *row_of<Wide<S>>(work.mean, row, 1), rstd = *row_of<Wide<S>>(work.rstd, row, 1);
    if constexpr (kEmbeds) embed<S>(work, row, normed);
    if (drops) draw_row(work.dropout, row, width, width, bits);
    V total{}, product_total{};
    for_columns<S>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      V g = part.load(grad + c);
      V n;
      if constexpr (kEmbeds) {
        if (drops) g *= kept<V>(work.dropout, bits + c);
        n = (part.load(normed + c) - mean) * rstd;
      } else {
        if (other != nullptr) g += part.load(other + c);
        n = (part.load(summed + c) - mean) * rstd;
      }
      const V h = g * part.load(weight + c);  // 0 beyond the end of the row
      total += h;
      product_total += h * n;
      part.store(weight_sums + c, part.load(weight_sums + c) + g * n);
      part.store(norm_bias_sums + c, part.load(norm_bias_sums + c) + g);
      part.store(normed + c, n);
      part.store(weighted + c, h);
    });
    const Number<S> h_mean = sum_of(total) / static_cast<Number<S>>(width);
    const Number<S> hn_mean = sum_of(product_total) / static_cast<Number<S>>(width);
    for_columns<S>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V n = part.load(normed + c), h = part.load(weighted + c);
      V d = (h - h_mean - n * hn_mean) * rstd;
      if constexpr (kEmbeds) {
        part.store(row_of<Wide<S>>(work.grad_summed, row, width) + c, d);
      } else {
        part.store(row_of<S>(work.grad_residual, row, width) + c, d);
        if (drops) d *= kept<V>(work.dropout, bits + c);
        part.store(row_of<S>(work.out, row, width) + c, d);
        part.store(bias_sums + c, part.load(bias_sums + c) + d);
      }
    });
  }
}

template <typename From, typename To>
void scatter(const ScatterWork& work, int64_t first, int64_t last) {
  for (int64_t row = 0; row < work.count; ++row) {
    const From* __restrict from = static_cast<const From*>(work.rows) + row * work.width;
    To* __restrict to = static_cast<To*>(work.table) + work.indices[row] * work.width;
    for (int64_t c = first; c < last; ++c) to[c] += from[c];
  }
}

// loss = log(sum(exp(x))) - x[label], 0 where the label is to be ignored.
template <typename S>
void cross_entropy(const RowWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.x, row, work.width);
    const V lowest = V{} - static_cast<Number<S>>(INFINITY);
    V most = lowest;
    for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V v = part.only(part.load(x + c), lowest);
      most = choose([](auto a, auto b) STILLHOUSE_LAMBDA { return a >= b; }, most, v, most, v);  // NaN where v is
    });
    const Number<S> top = largest_of(most);
    V total{};
    for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      total += part.only(exp(part.load(x + c) - top), V{});
    });
    const Number<S> lse = top + std::log(sum_of(total));
    const int64_t label = work.labels[row];
    *row_of<Wide<S>>(work.lse, row, 1) = lse;
    *row_of<Wide<S>>(work.losses, row, 1) = label == work.ignore_index ? 0 : lse - Part<S>{1}.load(x + label)[0];
  }
}

// dx = g (softmax(x) - [column is the label]).
template <typename S>
void cross_entropy_backward(const RowWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.x, row, work.width);
    auto* out = row_of<S>(work.out, row, work.width);
    const int64_t label = work.labels[row];
    const Number<S> lse = *row_of<Wide<S>>(work.lse, row, 1);
    const Number<S> g = label == work.ignore_index ? 0 : *row_of<Wide<S>>(work.grad, row, 1);
    for_columns<S>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      V share = exp(part.load(x + c) - lse);
      if (label >= c && label < c + kLanesOf<V>) share[label - c] -= 1;
      part.store(out + c, share * g);
    });
  }
}

}  // namespace

EncoderKernels encoder_kernels(Storage storage) {
  return with_storage(storage, []<typename S>(S) -> EncoderKernels {
    return {bias_gelu<S>,
            bias_gelu_backward<S>,
            norm<S, false>,
            norm_backward<S, false>,
            norm<S, true>,
            norm_backward<S, true>,
            cross_entropy<S>,
            cross_entropy_backward<S>,
            scatter<Number<S>, Number<S>>,
            scatter<Number<S>, double>};
  });
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
