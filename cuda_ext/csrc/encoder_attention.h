// Attention within the segments of a packed row. encoder_attention.cpp is compiled once per instruction set, like
// encoder_rows.cpp, and attention_cpu.cpp chooses among the objects when the process runs.
#pragma once

#include <cstdint>

#include "encoder_rows.h"

namespace stillhouse::cpu {

// One head of the segment [first, last).
struct AttentionItem {
  int64_t first, last, head;
};

// Activations are of the element type; statistics are wide and have each row's largest score and the sum of its
// exponentials relative to that.
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

STILLHOUSE_IN_EACH_SET(AttentionKernels attention_kernels(Element element))

}  // namespace stillhouse::cpu
