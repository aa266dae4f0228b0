// Work on an encoder's activations. encoder_rows.cpp and encoder_attention.cpp are compiled once per instruction set,
// and each object offers the table of its set; encoder_cpu.cpp chooses among them when the process runs.
#pragma once

#include <cstdint>

#include "instruction_sets.h"
#include "number_formats.h"

namespace stillhouse::cpu {

// `below` of 65536 elements are dropped; the others are scaled so that the mean stays.
struct DropoutWork {
  int32_t below;
  double scale;
  uint64_t seed, offset;
};

// Activations are (rows, width) of the storage. Parameters, statistics and sums are wide: double for double, float
// for the others. Sums over rows are added to, not set. Each kernel has what it reads and writes.
struct RowWork {
  const void *x, *bias, *residual, *weight, *norm_bias;
  const int64_t *ids, *types, *positions, *labels;
  const void *words, *position_table, *type_table;
  const void *grad, *other_grad;  // other_grad may be null
  void *out, *summed;             // out: of a backward kernel, the gradient of x
  void *mean, *rstd, *lse, *losses;
  void *grad_residual, *grad_summed;  // grad_summed, of the embeddings, is wide
  void* sums[3];  // for the weight and the bias of a norm, then for `bias`; of bias_gelu, for `bias` alone
  DropoutWork dropout;
  double eps;
  int64_t ignore_index, width;
};

// Adds columns [first, last) of every row to the row of a table that its index names, in the order of the rows.
struct ScatterWork {
  const int64_t* indices;
  const void* rows;  // wide
  void* table;       // wide; double for `scatter_exactly`
  int64_t count, width;
};

using RowKernel = void (*)(const RowWork&, int64_t begin, int64_t end);
using ScatterKernel = void (*)(const ScatterWork&, int64_t first, int64_t last);

struct EncoderKernels {
  RowKernel bias_gelu, bias_gelu_backward;
  RowKernel dropout_add_norm, dropout_add_norm_backward;
  RowKernel embed_norm, embed_norm_backward;
  RowKernel cross_entropy, cross_entropy_backward;
  ScatterKernel scatter, scatter_exactly;
};

// One head of the segment [first, last).
struct AttentionItem {
  int64_t first, last, head;
};

// Attention within the segments of a packed row. Statistics are wide and have each row's largest score and the sum of
// its exponentials relative to that.
struct AttentionWork {
  const void* given[3];  // queries, keys, values: rows of (heads, depth)
  int64_t strides[3];    // from one of their rows to the next, in elements
  void* out;             // (T, heads, depth)
  void* statistics;      // (T, heads, 2)
  const void* grad;      // (T, heads, depth), of `out`
  void* grads[3];        // (T, heads, depth), of `given`
  int64_t heads, depth, longest;
  double scale;
  DropoutWork dropout;
  const AttentionItem* items;
  int64_t count;
  int64_t* next;  // the first item that no thread has taken yet
};

// Each thread calls one of these once, and takes items until there are none.
struct AttentionKernels {
  void (*forward)(const AttentionWork&);
  void (*backward)(const AttentionWork&);
};

STILLHOUSE_IN_EACH_SET(EncoderKernels encoder_kernels(Storage storage))
STILLHOUSE_IN_EACH_SET(AttentionKernels attention_kernels(Storage storage))

}  // namespace stillhouse::cpu
