// Compiled once per instruction set with STILLHOUSE_ISA naming the set and the compiler's flags choosing it. A few
// queries at a time meet all keys of their segment, so their scores stay in the second cache and a row's softmax
// needs one pass for its maximum and one for all else. The backward pass computes the scores again.

#include "encoder_kernels.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "philox.h"
#include "products.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

constexpr int64_t kBlock = 48;  // queries that are worked on together, a multiple of a tile's rows
constexpr int64_t kPadding = 16;

enum Given { kQueries, kKeys, kValues };

int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

// The buffers of one thread, and what it does with one item.
template <typename S>
class Head {
 public:
  using T = Number<S>;
  using V = typename S::V;
  using R = typename Register<T>::Type;
  using Stored = typename S::Stored;

  Head(const AttentionWork& work, bool backward) : work_(work), backward_(backward) {}

  // O = (keep softmax(scale Q K^T)) V / (1 - rate).
  void forward(const AttentionItem& item) {
    const int64_t length = item.last - item.first, columns = padded(length), pitch = this->pitch(length);
    const int64_t out_stride = work_.heads * work_.depth;
    read(item, kKeys, 0, length, keys_.data());
    transpose<T>(keys_.data(), columns, width_, turned_keys_.data());
    read(item, kValues, 0, length, values_.data());
    for (int64_t first = 0; first < length; first += kBlock) {
      const int64_t count = std::min(kBlock, length - first);
      read(item, kQueries, first, count, queries_.data());
      score(queries_.data(), turned_keys_.data(), count, columns, pitch, scores_.data());
      T* statistics = statistics_of(item, first);
      for (int64_t i = 0; i < count; ++i) {
        T* row = scores_.data() + i * pitch;
        for (int64_t j = length; j < columns; ++j) row[j] = -INFINITY;
        draw(item, first + i, length);
        exponentials(row, columns, statistics + 2 * work_.heads * i);
      }
      multiply<T>({count, width_, length, scores_.data(), pitch, 1, values_.data(), kTile<T>, width_,
                   mixed_.data(), width_, false});
      Stored* out = static_cast<Stored*>(work_.out) + place(item, first);
      for (int64_t i = 0; i < count; ++i) {
        write(mixed_.data() + i * width_, 1 / statistics[2 * work_.heads * i + 1], 1, out + i * out_stride, 0);
      }
    }
  }

  // With P the softmax, M what is kept, s the scale of what is kept, and dO the gradient of O:
  // dV = (s M P)^T dO;  dS = P (s M (dO V^T) - rowsum(dO O));  dQ = scale dS K;  dK = scale dS^T Q.
  void backward(const AttentionItem& item) {
    const int64_t length = item.last - item.first, columns = padded(length), pitch = this->pitch(length);
    const int64_t out_stride = work_.heads * work_.depth;
    read(item, kKeys, 0, length, keys_.data());
    transpose<T>(keys_.data(), columns, width_, turned_keys_.data());
    read(item, kValues, 0, length, values_.data());
    transpose<T>(values_.data(), columns, width_, turned_values_.data());
    for (int64_t first = 0; first < length; first += kBlock) {
      const int64_t count = std::min(kBlock, length - first);
      read(item, kQueries, first, count, queries_.data());
      read(static_cast<const Stored*>(work_.grad) + place(item, first), out_stride, count, grads_.data());
      score(queries_.data(), turned_keys_.data(), count, columns, pitch, scores_.data());
      score(grads_.data(), turned_values_.data(), count, columns, pitch, d_scores_.data());
      const Stored* out = static_cast<const Stored*>(work_.out) + place(item, first);
      const T* statistics = statistics_of(item, first);
      for (int64_t i = 0; i < count; ++i) {
        draw(item, first + i, length);
        differentiate(scores_.data() + i * pitch, d_scores_.data() + i * pitch, columns,
                      statistics + 2 * work_.heads * i, dot(out + i * out_stride, grads_.data() + i * width_));
      }
      const bool adds = first > 0;
      multiply<T>({length, width_, count, scores_.data(), 1, pitch, grads_.data(), kTile<T>, width_,
                   d_values_.data(), width_, adds});
      multiply<T>({length, width_, count, d_scores_.data(), 1, pitch, queries_.data(), kTile<T>, width_,
                   d_keys_.data(), width_, adds});
      multiply<T>({count, width_, length, d_scores_.data(), pitch, 1, keys_.data(), kTile<T>, width_,
                   mixed_.data(), width_, false});
      write(mixed_.data(), work_.scale, count, grad_of(item, kQueries, first), out_stride);
    }
    write(d_keys_.data(), work_.scale, length, grad_of(item, kKeys, 0), out_stride);
    write(d_values_.data(), 1, length, grad_of(item, kValues, 0), out_stride);
  }

 private:
  // Of a row of scores in memory, so that rows do not all meet in the same lines of the cache.
  static int64_t pitch(int64_t length) { return padded(length) + kPadding; }
  int64_t panels() const {
    constexpr int64_t panel = kTile<T>;
    return (padded(work_.longest) + panel - 1) / panel * panel * width_;
  }
  int64_t place(const AttentionItem& item, int64_t query) const {
    return ((item.first + query) * work_.heads + item.head) * work_.depth;
  }
  Stored* grad_of(const AttentionItem& item, Given which, int64_t row) const {
    return static_cast<Stored*>(work_.grads[which]) + place(item, row);
  }
  T* statistics_of(const AttentionItem& item, int64_t query) const {
    return static_cast<T*>(work_.statistics) + ((item.first + query) * work_.heads + item.head) * 2;
  }

  // (rows, depth) to (padded(rows), width_), with zeros where there is nothing to read.
  void read(const AttentionItem& item, Given which, int64_t row, int64_t rows, T* to) const {
    const int64_t stride = work_.strides[which];
    read(static_cast<const Stored*>(work_.given[which]) + (item.first + row) * stride + item.head * work_.depth, stride,
         rows, to);
  }

  void read(const Stored* from, int64_t stride, int64_t rows, T* to) const {
    for (int64_t row = 0; row < rows; ++row, from += stride, to += width_) {
      for_columns<S>(work_.depth, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
        Wide<S>::store(to + c, part.load(from + c));
      });
    }
    memset(to, 0, (padded(rows) - rows) * width_ * sizeof(T));
  }

  void write(const T* from, T factor, int64_t rows, Stored* to, int64_t stride) const {
    for (int64_t row = 0; row < rows; ++row, from += width_, to += stride) {
      for_columns<S>(work_.depth, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
        part.store(to + c, Wide<S>::load(from + c) * factor);
      });
    }
  }

  T dot(const Stored* a, const T* b) const {
    V total{};
    for_columns<S>(work_.depth, [&](int64_t c, auto part) STILLHOUSE_LAMBDA {
      total += part.load(a + c) * Wide<S>::load(b + c);
    });
    return sum_of(total);
  }

  void score(const T* rows, const T* turned, int64_t count, int64_t columns, int64_t pitch, T* to) const {
    multiply<T>({count, columns, work_.depth, rows, width_, 1, turned, kTile<T> * width_, kTile<T>,
                 to, pitch, false});
  }

  // Bits of a query's row, element j of which is key j.
  void draw(const AttentionItem& item, int64_t query, int64_t length) {
    if (work_.dropout.below == 0) return;
    draw_row(work_.dropout, (item.first + query) * work_.heads + item.head, work_.longest, length, bits_.data());
  }

  // Scores to what is kept of exp(scale (score - largest)), and the row's statistics.
  void exponentials(T* row, int64_t columns, T* statistics) {
    R most = R{} - INFINITY;
    for (int64_t j = 0; j < columns; j += Register<T>::count) {
      const R score = loaded<R>(row + j);
      most = most >= score ? most : score;
    }
    const T scale = work_.scale, largest = largest_of(most);
    const bool drops = work_.dropout.below > 0;
    R total{};
    for (int64_t j = 0; j < columns; j += Register<T>::count) {
      R share = exp_of((loaded<R>(row + j) - largest) * scale);
      total += share;
      if (drops) share *= kept_of<T>(work_.dropout, bits_.data() + j);
      memcpy(row + j, &share, sizeof(share));
    }
    statistics[0] = largest;
    statistics[1] = sum_of(total);
  }

  // Scores to s M P and dO V^T to dS.
  void differentiate(T* row, T* d_row, int64_t columns, const T* statistics, T delta) {
    const T scale = work_.scale, largest = statistics[0], norm = 1 / statistics[1];
    const bool drops = work_.dropout.below > 0;
    for (int64_t j = 0; j < columns; j += Register<T>::count) {
      const R share = exp_of((loaded<R>(row + j) - largest) * scale) * norm;
      R d_share = loaded<R>(d_row + j), kept_share = share;
      if (drops) {
        const R keep = kept_of<T>(work_.dropout, bits_.data() + j);
        d_share *= keep;
        kept_share *= keep;
      }
      d_share = share * (d_share - delta);
      memcpy(row + j, &kept_share, sizeof(kept_share));
      memcpy(d_row + j, &d_share, sizeof(d_share));
    }
  }

  const AttentionWork work_;
  const bool backward_;
  const int64_t width_ = padded(work_.depth), rows_ = padded(work_.longest) * width_;
  const int64_t block_ = kBlock * width_, block_scores_ = kBlock * pitch(work_.longest);
  Buffer<T> keys_{rows_}, values_{rows_}, turned_keys_{panels()}, queries_{block_}, mixed_{block_};
  Buffer<T> scores_{block_scores_};
  Buffer<uint16_t> bits_{work_.longest};
  // Of the backward pass alone.
  Buffer<T> turned_values_{backward_ * panels()}, grads_{backward_ * block_}, d_keys_{backward_ * rows_};
  Buffer<T> d_values_{backward_ * rows_}, d_scores_{backward_ * block_scores_};
};

template <typename S, bool kBackward>
void attend(const AttentionWork& work) {
  Head<S> head(work, kBackward);
  for (;;) {
    const int64_t number = __atomic_fetch_add(work.next, 1, __ATOMIC_RELAXED);
    if (number >= work.count) return;
    if constexpr (kBackward) {
      head.backward(work.items[number]);
    } else {
      head.forward(work.items[number]);
    }
  }
}

}  // namespace

AttentionKernels attention_kernels(Storage storage) {
  return with_storage(storage, []<typename S>(S) -> AttentionKernels { return {attend<S, false>, attend<S, true>}; });
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
