// Products of rows of activations with packed binary weights. binary_rows.cpp is compiled once per instruction set,
// and each object offers the table of its set; binary_cpu.cpp chooses among them when the process runs.
//
// Weights lie in panels of 16 outputs: (panels, words, 16) uint32. Bit j of word w of an output is its weight of input
// 32 w + j, 1 for +1 and 0 for -1. Bits beyond the inputs or the outputs are 0.
#pragma once

#include <cstdint>

namespace stillhouse::cpu {

constexpr int64_t kPanel = 16;
constexpr int64_t kWordBits = 32;

// Rows [begin, end) and panels [first, last) of a product.
struct BinaryTile {
  int64_t begin, end, first, last;
};

// y = sum * scale + bias in two roundings, stored as float or bfloat16.
struct BinaryOutput {
  const float *scale, *bias;  // scale: one element with step 0, or one for each output; bias: may be null
  int64_t scale_step;
  void* out;
  int64_t outputs;
  bool bfloat16;
};

// Activations (rows, inputs), float or bfloat16.
struct BinaryInput {
  const void* x;
  int64_t inputs, words;
  bool bfloat16;
};

struct SignWork {
  BinaryInput input;
  const float* threshold;  // one element with step 0, or one for each input; a bit is x >= threshold
  int64_t threshold_step;
  uint8_t* codes;      // (rows, words, code bytes)
  uint8_t* unordered;  // (rows,) 1 where a NaN was compared, which no bit stands for: the row's outputs are NaN
};

struct XnorWork {
  const uint8_t* codes;
  const uint32_t* weight;
  const int32_t* positives;  // weights +1 of each output where activations are {0, a}; null where they are {-a, a}
  int64_t inputs, words;
  BinaryOutput output;
};

struct SignedSumWork {
  BinaryInput input;
  const uint32_t* weight;
  BinaryOutput output;
};

struct BinaryKernels {
  int64_t code_bytes;  // of a word of activations, in the form that `xnor` reads
  void (*signs)(const SignWork&, int64_t begin, int64_t end);
  void (*xnor)(const XnorWork&, const BinaryTile&);
  void (*signed_sums)(const SignedSumWork&, const BinaryTile&);
};

#define STILLHOUSE_DECLARE_BINARY(isa) \
  namespace isa {                      \
  BinaryKernels binary_kernels();      \
  }

STILLHOUSE_DECLARE_BINARY(scalar)
STILLHOUSE_DECLARE_BINARY(avx2)
STILLHOUSE_DECLARE_BINARY(avx512)
STILLHOUSE_DECLARE_BINARY(neon)

#undef STILLHOUSE_DECLARE_BINARY

}  // namespace stillhouse::cpu
