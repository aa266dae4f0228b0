// Compiled once per instruction set with STILLHOUSE_ISA naming the set and the compiler's flags choosing it. A row
// is read into a buffer that stays in the first cache, so that statistics need no second pass over memory.

#include "encoder_rows.h"

#include <cmath>

#include "lanes.h"
#include "philox.h"
#include "row_storage.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

template <typename V>
STILLHOUSE_LANES V normal_cdf(V v) {
  using Scalar = typename LanesOf<V>::Scalar;
  return (erf(v * static_cast<Scalar>(M_SQRT1_2)) + 1) * static_cast<Scalar>(0.5);
}

// y = v Phi(v) with v = x + bias.
template <typename S>
void bias_gelu(const BiasGeluWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  const Number<S>* bias = row_of<Wide<S>>(work.bias, 0, work.width);
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.x, row, work.width);
    auto* out = row_of<S>(work.out, row, work.width);
    for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V v = part.template load<S>(x + c) + part.template load<Wide<S>>(bias + c);
      part.template store<S>(out + c, v * normal_cdf(v));
    });
  }
}

// dx = g (Phi(v) + v phi(v)), and its sum over rows for the bias.
template <typename S>
void bias_gelu_backward(const BiasGeluWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  using Scalar = Number<S>;
  const Scalar* bias = row_of<Wide<S>>(work.bias, 0, work.width);
  Scalar* sums = row_of<Wide<S>>(work.bias_sums, 0, work.width);
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.x, row, work.width);
    const auto* grad = row_of<S>(work.grad, row, work.width);
    auto* out = row_of<S>(work.out, row, work.width);
    for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V v = part.template load<S>(x + c) + part.template load<Wide<S>>(bias + c);
      const V density = exp(v * v * static_cast<Scalar>(-0.5)) * static_cast<Scalar>(M_2_SQRTPI * M_SQRT1_2 / 2);
      const V dx = part.template load<S>(grad + c) * (normal_cdf(v) + v * density);
      part.template store<S>(out + c, dx);
      part.template store<Wide<S>>(sums + c, part.template load<Wide<S>>(sums + c) + dx);
    });
  }
}

template <typename S>
struct RowBuffers {
  Buffer<Number<S>> values, more;
  Buffer<uint16_t> bits;

  explicit RowBuffers(int64_t width) : values(width), more(width), bits(width) {}
};

// Mean and 1 / sqrt(variance + eps) of a row in a buffer, in two passes.
template <typename S>
STILLHOUSE_LANES void statistics(const Number<S>* values, int64_t width, double eps, Number<S>* mean,
                                 Number<S>* rstd) {
  using V = typename S::V;
  V total{};
  for_columns<V>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    total += part.template load<Wide<S>>(values + c);
  });
  const Number<S> middle = sum_of(total) / static_cast<Number<S>>(width);
  V squares{};
  for_columns<V>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    const V centred = part.only(part.template load<Wide<S>>(values + c) - middle, V{});
    squares += centred * centred;
  });
  *mean = middle;
  *rstd = 1 / std::sqrt(sum_of(squares) / static_cast<Number<S>>(width) + static_cast<Number<S>>(eps));
}

// values = residual + dropout(x + bias), as it is stored.
template <typename S>
STILLHOUSE_LANES void dropout_add(const NormWork& work, int64_t row, const uint16_t* bits, Number<S>* values) {
  using V = typename S::V;
  const bool drops = work.dropout.below > 0;
  const auto* x = row_of<S>(work.x, row, work.width);
  const auto* residual = row_of<S>(work.residual, row, work.width);
  const Number<S>* bias = row_of<Wide<S>>(work.bias, 0, work.width);
  auto* summed = row_of<S>(work.summed, row, work.width);
  for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    V v = part.template load<S>(x + c) + part.template load<Wide<S>>(bias + c);
    if (drops) v *= kept<V>(work.dropout, bits + c);
    part.template store<S>(summed + c, v + part.template load<S>(residual + c));
    part.template store<Wide<S>>(values + c, part.template load<S>(summed + c));
  });
}

// values = word + type + position, in the order in which transformers adds them.
template <typename S>
STILLHOUSE_LANES void embed(const NormWork& work, int64_t row, Number<S>* values) {
  using V = typename S::V;
  const auto* word = row_of<S>(work.words, work.ids[row], work.width);
  const auto* type = row_of<S>(work.type_table, work.types[row], work.width);
  const auto* position = row_of<S>(work.position_table, work.positions[row], work.width);
  for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
    const V v = part.template load<S>(word + c) + part.template load<S>(type + c);
    part.template store<Wide<S>>(values + c, v + part.template load<S>(position + c));
  });
}

// out = LayerNorm(residual + dropout(x + bias)), or dropout(LayerNorm(word + type + position)).
template <typename S, bool kEmbeds>
void norm(const NormWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  const int64_t width = work.width;
  const bool drops = work.dropout.below > 0;
  const Number<S>* weight = row_of<Wide<S>>(work.weight, 0, width);
  const Number<S>* norm_bias = row_of<Wide<S>>(work.norm_bias, 0, width);
  RowBuffers<S> buffers(width);
  Number<S>* values = buffers.values.data();
  uint16_t* bits = buffers.bits.data();
  for (int64_t row = begin; row < end; ++row) {
    auto* out = row_of<S>(work.out, row, width);
    Number<S>* mean = row_of<Wide<S>>(work.mean, row, 1);
    Number<S>* rstd = row_of<Wide<S>>(work.rstd, row, 1);
    if (drops) draw_row(work.dropout, row, width, bits);
    if constexpr (kEmbeds) {
      embed<S>(work, row, values);
    } else {
      dropout_add<S>(work, row, bits, values);
    }
    statistics<S>(values, width, work.eps, mean, rstd);
    for_columns<V>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V n = (part.template load<Wide<S>>(values + c) - *mean) * *rstd;
      V y = n * part.template load<Wide<S>>(weight + c) + part.template load<Wide<S>>(norm_bias + c);
      if (kEmbeds && drops) y *= kept<V>(work.dropout, bits + c);
      part.template store<S>(out + c, y);
    });
  }
}

// With n = (summed - mean) rstd and h = g weight:  d summed = rstd (h - mean(h) - n mean(h n)).
template <typename S, bool kEmbeds>
void norm_backward(const NormWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  const int64_t width = work.width;
  const bool drops = work.dropout.below > 0;
  const Number<S>* weight = row_of<Wide<S>>(work.weight, 0, width);
  Number<S>* bias_sums = row_of<Wide<S>>(work.bias_sums, 0, width);
  Number<S>* weight_sums = row_of<Wide<S>>(work.weight_sums, 0, width);
  Number<S>* norm_bias_sums = row_of<Wide<S>>(work.norm_bias_sums, 0, width);
  RowBuffers<S> buffers(width);
  Number<S>*normed = buffers.values.data(), *weighted = buffers.more.data();
  uint16_t* bits = buffers.bits.data();
  for (int64_t row = begin; row < end; ++row) {
    const auto* grad = row_of<S>(work.grad, row, width);
    const auto* other = work.other_grad == nullptr ? nullptr : row_of<S>(work.other_grad, row, width);
    const auto* summed = row_of<S>(static_cast<const void*>(work.summed), row, width);
    const Number<S> mean = *row_of<Wide<S>>(work.mean, row, 1), rstd = *row_of<Wide<S>>(work.rstd, row, 1);
    if constexpr (kEmbeds) embed<S>(work, row, normed);
    if (drops) draw_row(work.dropout, row, width, bits);
    V total{}, product_total{};
    for_columns<V>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      V g = part.template load<S>(grad + c);
      V n;
      if constexpr (kEmbeds) {
        if (drops) g *= kept<V>(work.dropout, bits + c);
        n = (part.template load<Wide<S>>(normed + c) - mean) * rstd;
      } else {
        if (other != nullptr) g += part.template load<S>(other + c);
        n = (part.template load<S>(summed + c) - mean) * rstd;
      }
      const V h = g * part.template load<Wide<S>>(weight + c);  // 0 beyond the end of the row
      total += h;
      product_total += h * n;
      part.template store<Wide<S>>(weight_sums + c, part.template load<Wide<S>>(weight_sums + c) + g * n);
      part.template store<Wide<S>>(norm_bias_sums + c, part.template load<Wide<S>>(norm_bias_sums + c) + g);
      part.template store<Wide<S>>(normed + c, n);
      part.template store<Wide<S>>(weighted + c, h);
    });
    const Number<S> h_mean = sum_of(total) / static_cast<Number<S>>(width);
    const Number<S> hn_mean = sum_of(product_total) / static_cast<Number<S>>(width);
    for_columns<V>(width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V n = part.template load<Wide<S>>(normed + c), h = part.template load<Wide<S>>(weighted + c);
      V d = (h - h_mean - n * hn_mean) * rstd;
      if constexpr (kEmbeds) {
        part.template store<Wide<S>>(row_of<Wide<S>>(work.grad_summed, row, width) + c, d);
      } else {
        part.template store<S>(row_of<S>(work.grad_residual, row, width) + c, d);
        if (drops) d *= kept<V>(work.dropout, bits + c);
        part.template store<S>(row_of<S>(work.grad_x, row, width) + c, d);
        part.template store<Wide<S>>(bias_sums + c, part.template load<Wide<S>>(bias_sums + c) + d);
      }
    });
  }
}

template <typename S>
void scatter(const ScatterWork& work, int64_t first, int64_t last) {
  using W = Wide<S>;
  using V = typename S::V;
  for (int64_t row = 0; row < work.count; ++row) {
    const auto* from = row_of<W>(work.rows, row, work.width) + first;
    auto* to = row_of<W>(work.table, work.indices[row], work.width) + first;
    for_columns<V>(last - first, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      part.template store<W>(to + c, part.template load<W>(to + c) + part.template load<W>(from + c));
    });
  }
}

template <typename S>
void scatter_exactly(const ScatterWork& work, int64_t first, int64_t last) {
  for (int64_t row = 0; row < work.count; ++row) {
    const Number<S>* from = row_of<Wide<S>>(work.rows, row, work.width);
    double* to = row_of<Float64>(work.table, work.indices[row], work.width);
    for (int64_t c = first; c < last; ++c) to[c] += from[c];
  }
}

// loss = log(sum(exp(x))) - x[label], 0 where the label is to be ignored.
template <typename S>
void cross_entropy(const CrossEntropyWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.logits, row, work.width);
    V most = all<V>(-INFINITY);
    for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      const V v = part.only(part.template load<S>(x + c), all<V>(-INFINITY));
      most = larger(most, v);
    });
    const Number<S> top = largest_of(most);
    V total{};
    for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      total += part.only(exp(part.template load<S>(x + c) - top), V{});
    });
    const Number<S> lse = top + std::log(sum_of(total));
    const int64_t label = work.labels[row];
    *row_of<Wide<S>>(work.lse_out, row, 1) = lse;
    *row_of<Wide<S>>(work.losses, row, 1) =
        label == work.ignore_index ? 0 : lse - Part{1}.template load<S>(x + label)[0];
  }
}

// dx = g (softmax(x) - [column is the label]).
template <typename S>
void cross_entropy_backward(const CrossEntropyWork& work, int64_t begin, int64_t end) {
  using V = typename S::V;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = row_of<S>(work.logits, row, work.width);
    auto* out = row_of<S>(work.grad_logits, row, work.width);
    const int64_t label = work.labels[row];
    const Number<S> lse = *row_of<Wide<S>>(work.lse, row, 1);
    const Number<S> g = label == work.ignore_index ? 0 : *row_of<Wide<S>>(work.grad, row, 1);
    for_columns<V>(work.width, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      V share = exp(part.template load<S>(x + c) - lse);
      if (label >= c && label < c + LanesOf<V>::count) share[label - c] -= 1;
      part.template store<S>(out + c, share * g);
    });
  }
}

template <typename S>
EncoderKernels kernels_of() {
  return {bias_gelu<S>,
          bias_gelu_backward<S>,
          norm<S, false>,
          norm_backward<S, false>,
          norm<S, true>,
          norm_backward<S, true>,
          scatter<S>,
          scatter_exactly<S>,
          cross_entropy<S>,
          cross_entropy_backward<S>};
}

}  // namespace

EncoderKernels encoder_kernels(Element element) {
  return with_storage(element, [](auto s) -> EncoderKernels { return kernels_of<decltype(s)>(); });
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
