// The operators of attention within the segments of a packed row: schemas and CPU kernels. An item is a segment's
// head, so results do not depend on the threads; the longest come first, so that the threads end together.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "encoder_attention.h"
#include "operator_arguments.h"

namespace {

using at::Tensor;
using namespace stillhouse::cpu;

// The heads of all segments, longest first.
class Items {
 public:
  Items(const Tensor& query, const Tensor& edges_given) : heads_(query.size(1)), depth_(query.size(2)) {
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
      longest_ = std::max<int64_t>(longest_, edge[k + 1] - edge[k]);
      if (edge[k] == edge[k + 1]) continue;
      for (int64_t head = 0; head < heads_; ++head) items_.push_back({edge[k], edge[k + 1], head});
    }
    std::stable_sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
      return a.last - a.first > b.last - b.first;
    });
  }

  void work(AttentionWork work, void (*kernel)(const AttentionWork&)) const {
    int64_t next = 0;
    work.heads = heads_;
    work.depth = depth_;
    work.longest = longest_;
    work.items = items_.data();
    work.count = static_cast<int64_t>(items_.size());
    work.next = &next;
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), work.count);
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { kernel(work); });
  }

 private:
  const int64_t heads_, depth_;
  int64_t longest_ = 0;
  std::vector<AttentionItem> items_;
};

// Queries, keys and values as the kernels read them: in place where only the tokens are strided.
class Given {
 public:
  Given(const Tensor& query, const Tensor& key, const Tensor& value, double scale) {
    TORCH_CHECK(query.dim() == 3 && query.size(1) > 0 && query.size(2) > 0, "query has shape ", query.sizes(),
                "; it must be (T, heads, D)");
    TORCH_CHECK(scale > 0, "scale is ", scale, "; it must be above 0");
    require_same(key, query, "key");
    require_same(value, query, "value");
    for (const Tensor& tensor : {query, key, value}) {
      const bool in_place = tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2);
      tensors_.push_back(in_place ? tensor : tensor.contiguous());
    }
  }

  void put_into(AttentionWork& work) const {
    for (int which = 0; which < 3; ++which) {
      work.given[which] = tensors_[which].const_data_ptr();
      work.strides[which] = tensors_[which].stride(0);
    }
  }

 private:
  std::vector<Tensor> tensors_;
};

std::tuple<Tensor, Tensor> segment_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& cu_seqlens, double scale, double rate, const Tensor& seed,
                                             int64_t offset) {
  const Given given(query, key, value, scale);
  const int64_t tokens = query.size(0), heads = query.size(1);
  Tensor out = at::empty(query.sizes(), query.options());
  Tensor statistics = at::empty({tokens, heads, 2}, query.options().dtype(wide(query.scalar_type())));
  AttentionWork work{};
  given.put_into(work);
  work.out = out.mutable_data_ptr();
  work.statistics = statistics.mutable_data_ptr();
  work.scale = scale;
  work.dropout = dropout_of(rate, seed, offset);
  Items(query, cu_seqlens).work(work, STILLHOUSE_CHOSEN(attention_kernels)(element_of(query.scalar_type())).forward);
  rows_forward += tokens;
  return {out, statistics};
}

std::tuple<Tensor, Tensor, Tensor> segment_attention_backward(const Tensor& grad_given, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& out_given, const Tensor& statistics_given,
                                                              const Tensor& cu_seqlens, double scale, double rate,
                                                              const Tensor& seed, int64_t offset) {
  const Given given(query, key, value, scale);
  require_same(grad_given, query, "grad");
  const Tensor grad = grad_given.contiguous(), out = out_given.contiguous(), statistics = statistics_given.contiguous();
  Tensor grads[3];
  AttentionWork work{};
  given.put_into(work);
  for (int which = 0; which < 3; ++which) {
    grads[which] = at::empty(query.sizes(), query.options());
    work.grads[which] = grads[which].mutable_data_ptr();
  }
  work.out = const_cast<void*>(out.const_data_ptr());
  work.statistics = const_cast<void*>(statistics.const_data_ptr());
  work.grad = grad.const_data_ptr();
  work.scale = scale;
  work.dropout = dropout_of(rate, seed, offset);
  Items(query, cu_seqlens).work(work, STILLHOUSE_CHOSEN(attention_kernels)(element_of(query.scalar_type())).backward);
  rows_backward += query.size(0);
  return {grads[0], grads[1], grads[2]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "segment_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scale, float rate, "
      "Tensor seed, int offset) -> (Tensor out, Tensor statistics)",
      tags);
  m.def(
      "segment_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor statistics, "
      "Tensor cu_seqlens, float scale, float rate, Tensor seed, int offset) -> (Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(stillhouse, CPU, m) {
  m.impl("segment_attention", &segment_attention);
  m.impl("segment_attention_backward", &segment_attention_backward);
}
