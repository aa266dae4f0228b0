// Products of rows of activations with packed binary weights, on the CPU and on CUDA.
//
// Weights lie in panels of 16 outputs: (panels, words, 16) uint32. Bit j of word w of an output is its weight of input
// 32 w + j, 1 for +1 and 0 for -1. Bits beyond the inputs or the outputs are 0.
#pragma once

#include <cstdint>

namespace stillhouse {

constexpr int kPanel = 16;
constexpr int kWordBits = 32;

// y = sum * scale + bias in two roundings, stored in the format of x.
struct BinaryProduct {
  const void* x;           // (rows, inputs), float or bfloat16
  const uint32_t* weight;  // (panels, words, 16)
  const float *scale, *bias;  // scale: one element with step 0, or one for each output; bias: may be null
  void* out;                  // (rows, outputs)
  int64_t rows, inputs, outputs, words, panels, scale_step;
  bool bfloat16;

  // Of products whose activations are bits.
  const int32_t* positives;  // weights +1 of each output where activations are {0, a}; null where they are {-a, a}
  const float* threshold;    // one element with step 0, or one for each input; a bit is x >= threshold
  int64_t threshold_step;
  void* codes;          // (rows, words) of the bits, in the form that the kernels read
  uint32_t* unordered;  // (rows,) other than 0 where a NaN was compared, which no bit stands for: the outputs are NaN
};

// Sums of {-1, 1} are inputs - 2 differing bits; of {0, 1} they are positives - differing, since
// |t ^ w| = |t| + |w| - 2 |t & w|.

namespace cuda {

// Every function returns null, or the text of the CUDA error.

// Two launches: the activations' bits, then XNOR and popcount. `unordered` is zeros before.
const char* binary_linear(const BinaryProduct& product, void* stream);

// One launch, with the CPU kernels' order of additions.
const char* binary_weight_linear(const BinaryProduct& product, void* stream);

}  // namespace cuda
}  // namespace stillhouse
