// Work on one chunk of one tensor. adan_cpu_chunk.cpp is compiled once per instruction set, and each object
// offers the two functions of its set; adan_cpu.cpp chooses among them when the process runs.
#pragma once

#include <cstdint>

#include "adan_launch.h"
#include "instruction_sets.h"

namespace stillhouse::cpu {

struct ChunkWork {
  const AdanTensor* tensor;
  int64_t begin, end;  // elements [begin, end) of the tensor
  AdanScalars scalars;
  Storage storage;
  Master master;
  bool bfloat16_moments;
  bool first;  // no previous gradient yet
};

struct ChunkKernels {
  void (*update)(const ChunkWork&);
  double (*squares)(const ChunkWork&);  // of the gradients, added
};

STILLHOUSE_IN_EACH_SET(ChunkKernels chunk_kernels())

}  // namespace stillhouse::cpu
