// Work on rows of an encoder's activations. encoder_rows.cpp is compiled once per instruction set, and each object
// offers the table of its set; encoder_cpu.cpp chooses among them when the process runs.
#pragma once

#include <cstdint>

#include "instruction_sets.h"

namespace stillhouse::cpu {

enum class Element { kFloat32, kFloat64, kBFloat16, kFloat16 };

// `below` of 65536 elements are dropped; the others are scaled so that the mean stays.
struct DropoutWork {
  int32_t below;
  double scale;
  uint64_t seed, offset;
};

// Activations are (rows, width) of the element type. Parameters, statistics and sums are wide: double for
// double, float for the others. Sums over rows are added to, not set.

struct BiasGeluWork {
  const void *x, *grad, *bias;
  void *out, *bias_sums;  // out: y forward, the gradient of x backward
  int64_t width;
};

// Of `dropout_add_norm` or of `embed_norm`, forward or backward: each sets what it has.
struct NormWork {
  int64_t width;
  DropoutWork dropout;
  const void *weight, *norm_bias;
  double eps;
  void *mean, *rstd, *out;

  const void *x, *bias, *residual;
  void* summed;

  const int64_t *ids, *types, *positions;
  const void *words, *position_table, *type_table;

  const void *grad, *other_grad;  // other_grad may be null
  void *grad_x, *grad_residual, *grad_summed;  // grad_summed, of the embeddings, is wide
  void *bias_sums, *weight_sums, *norm_bias_sums;
};

// Adds columns [first, last) of every row to the row of a table that its index names, in the order of the rows.
struct ScatterWork {
  const int64_t* indices;
  const void* rows;  // wide
  void* table;       // wide; double for `scatter_exactly`
  int64_t count, width;
};

struct CrossEntropyWork {
  const void *logits, *grad, *lse;
  const int64_t* labels;
  void *losses, *lse_out, *grad_logits;
  int64_t width, ignore_index;
};

struct EncoderKernels {
  void (*bias_gelu)(const BiasGeluWork&, int64_t begin, int64_t end);
  void (*bias_gelu_backward)(const BiasGeluWork&, int64_t begin, int64_t end);
  void (*dropout_add_norm)(const NormWork&, int64_t begin, int64_t end);
  void (*dropout_add_norm_backward)(const NormWork&, int64_t begin, int64_t end);
  void (*embed_norm)(const NormWork&, int64_t begin, int64_t end);
  void (*embed_norm_backward)(const NormWork&, int64_t begin, int64_t end);
  void (*scatter)(const ScatterWork&, int64_t first, int64_t last);
  void (*scatter_exactly)(const ScatterWork&, int64_t first, int64_t last);
  void (*cross_entropy)(const CrossEntropyWork&, int64_t begin, int64_t end);
  void (*cross_entropy_backward)(const CrossEntropyWork&, int64_t begin, int64_t end);
};

STILLHOUSE_IN_EACH_SET(EncoderKernels encoder_kernels(Element element))

}  // namespace stillhouse::cpu
