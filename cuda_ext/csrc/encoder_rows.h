// Work on rows of an encoder's activations. encoder_rows.cpp is compiled once per instruction set, and each object
// offers the table of its set; encoder_cpu.cpp chooses among them when the process runs.
#pragma once

#include <cstdint>

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

struct DropoutAddNormWork {
  const void *x, *bias, *residual, *weight, *norm_bias;
  void *out, *summed, *mean, *rstd;
  int64_t width;
  double eps;
  DropoutWork dropout;
};

struct DropoutAddNormBackwardWork {
  const void *grad, *other_grad, *summed, *mean, *rstd, *weight;  // other_grad may be null
  void *grad_x, *grad_residual, *bias_sums, *weight_sums, *norm_bias_sums;
  int64_t width;
  DropoutWork dropout;
};

struct EmbedNormWork {
  const int64_t *ids, *types, *positions;
  const void *words, *position_table, *type_table, *weight, *bias;
  void *out, *mean, *rstd;
  int64_t width;
  double eps;
  DropoutWork dropout;
};

struct EmbedNormBackwardWork {
  const int64_t *ids, *types, *positions;
  const void *grad, *words, *position_table, *type_table, *mean, *rstd, *weight;
  void *grad_summed, *weight_sums, *bias_sums;  // grad_summed is wide
  int64_t width;
  DropoutWork dropout;
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
  void (*dropout_add_norm)(const DropoutAddNormWork&, int64_t begin, int64_t end);
  void (*dropout_add_norm_backward)(const DropoutAddNormBackwardWork&, int64_t begin, int64_t end);
  void (*embed_norm)(const EmbedNormWork&, int64_t begin, int64_t end);
  void (*embed_norm_backward)(const EmbedNormBackwardWork&, int64_t begin, int64_t end);
  void (*scatter)(const ScatterWork&, int64_t first, int64_t last);
  void (*scatter_exactly)(const ScatterWork&, int64_t first, int64_t last);
  void (*cross_entropy)(const CrossEntropyWork&, int64_t begin, int64_t end);
  void (*cross_entropy_backward)(const CrossEntropyWork&, int64_t begin, int64_t end);
};

#define STILLHOUSE_DECLARE_ROWS(isa) \
  namespace isa {                    \
  EncoderKernels encoder_kernels(Element element); \
  }

STILLHOUSE_DECLARE_ROWS(scalar)
STILLHOUSE_DECLARE_ROWS(avx2)
STILLHOUSE_DECLARE_ROWS(avx512)

#undef STILLHOUSE_DECLARE_ROWS

}  // namespace stillhouse::cpu
