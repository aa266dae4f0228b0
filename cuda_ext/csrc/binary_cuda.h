// Doors of the CUDA kernels for products with packed binary weights. Every function returns null, or the text of the
// CUDA error. Layout of weights and meaning of fields are those of binary_rows.h.
#pragma once

#include <cstdint>

namespace stillhouse::cuda {

struct BinaryProduct {
  const void* x;             // (rows, inputs), float or bfloat16
  const uint32_t* weight;    // (panels, words, 16)
  const int32_t* positives;  // null: activations are {-1, 1}
  const float *scale, *bias, *threshold;
  uint32_t* codes;      // (rows, words), written by `binary_linear`
  uint32_t* unordered;  // (rows,) zeros; other than 0 afterwards where a NaN was compared: the row's outputs are NaN
  void* out;            // (rows, outputs), in the format of x
  int64_t rows, inputs, outputs, words;
  int64_t scale_step, threshold_step;
  bool bfloat16;
};

// Two launches: the activations' bits, then XNOR and popcount.
const char* binary_linear(const BinaryProduct& product, void* stream);

// One launch, with the CPU kernels' order of additions.
const char* binary_weight_linear(const BinaryProduct& product, void* stream);

}  // namespace stillhouse::cuda
