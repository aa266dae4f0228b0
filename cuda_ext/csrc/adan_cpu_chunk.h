// Work on elements [begin, end) of one tensor of a launch. adan_cpu_chunk.cpp is compiled once per instruction set, and
// each object offers the two functions of its set; adan_cpu.cpp chooses among them when the process runs.
#pragma once

#include "adan_launch.h"
#include "instruction_sets.h"

namespace stillhouse::cpu {

struct ChunkKernels {
  void (*update)(const AdanLaunch&, const AdanTensor&, int64_t begin, int64_t end, const AdanScalars&);
  double (*squares)(const AdanLaunch&, const AdanTensor&, int64_t begin, int64_t end);  // of the gradients, added
};

STILLHOUSE_IN_EACH_SET(ChunkKernels chunk_kernels())

}  // namespace stillhouse::cpu
