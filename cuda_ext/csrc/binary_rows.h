// Work on rows of products with packed binary weights. binary_rows.cpp is compiled once per instruction set, and each
// object offers the table of its set; binary_cpu.cpp chooses among them when the process runs.
#pragma once

#include "binary_product.h"
#include "instruction_sets.h"

namespace stillhouse::cpu {

// Rows [begin, end) and panels [first, last) of a product.
struct BinaryTile {
  int64_t begin, end, first, last;
};

struct BinaryKernels {
  int64_t code_bytes;  // of a word of activations
  void (*signs)(const BinaryProduct&, int64_t begin, int64_t end);
  void (*xnor)(const BinaryProduct&, const BinaryTile&);
  void (*signed_sums)(const BinaryProduct&, const BinaryTile&);
};

STILLHOUSE_IN_EACH_SET(BinaryKernels binary_kernels())

}  // namespace stillhouse::cpu
