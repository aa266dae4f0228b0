// Work on one chunk of one tensor. adan_cpu_chunk.cpp is compiled once per instruction set, and each object
// offers the two functions of its set; adan_cpu.cpp chooses among them when the process runs.
#pragma once

#include <cstdint>

#include "adan_launch.h"

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

#define STILLHOUSE_DECLARE_CHUNK(isa)                \
  namespace isa {                                    \
  void update_chunk(const ChunkWork& work);          \
  double squares_of_chunk(const ChunkWork& work);    \
  }

STILLHOUSE_DECLARE_CHUNK(scalar)
STILLHOUSE_DECLARE_CHUNK(avx2)
STILLHOUSE_DECLARE_CHUNK(avx512)

#undef STILLHOUSE_DECLARE_CHUNK

}  // namespace stillhouse::cpu
