// What one call of the Adan kernels is given, and the kernels' doors. No torch headers here.
#pragma once

#include <cstdint>

#include "adan_update.h"

namespace stillhouse {

// Number format in which parameters, gradients and previous gradients are stored.
enum class Storage : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Where the fp32 value of a 16-bit parameter lives: nowhere, in a tensor of its own, or in the parameter's
// 16 bits together with 16 remainder bits (bfloat16 only).
enum class Master : int32_t { kNone = 0, kFull = 1, kSplit = 2 };

// One parameter and its state. All pointers have `numel` elements in the same memory order.
struct AdanTensor {
  void* param;
  const void* grad;
  void* m;        // fp32, or bfloat16 when the launch says so
  void* v;        // like m
  float* n;
  void* g_prev;   // in previous_storage
  void* master;   // float for Master::kFull, int16_t for Master::kSplit
  float* step;    // finished steps of this parameter; the kernel adds one
  int64_t numel;
  int64_t first_chunk;  // index of its first chunk in the flat list of chunks of the launch
  int32_t group;
  int32_t aligned;      // every pointer allows vector accesses of four elements
};

// How the previous gradient is stored. It carries no loss scale, so that fp16, which ends at 6e-8, would lose it:
// bfloat16 has the range of fp32 in as many bytes.
constexpr Storage previous_storage(Storage gradients) {
  return gradients == Storage::kFloat16 ? Storage::kBFloat16 : gradients;
}

struct AdanLaunch {
  const AdanTensor* tensors;
  int64_t tensor_count;
  int64_t chunk_count;
  const AdanGroup* groups;
  int32_t group_count;
  Storage storage;
  Master master;
  bool bfloat16_moments;
  const float* grad_scale;   // null: 1
  const float* found_inf;    // null or 0: the step is taken; otherwise nothing at all is written
  const float* grad_norm;    // null: no clipping
  double max_grad_norm;
};

// Elements per chunk. Chunks never straddle tensors, so results do not depend on who takes which chunk.
constexpr int64_t kCpuChunk = 32768;
constexpr int64_t kCudaChunk = 8192;

inline int64_t chunks_of(int64_t numel, int64_t chunk) { return (numel + chunk - 1) / chunk; }

namespace cpu {

// The step over all tensors in one parallel region of `threads` threads. Returns elements updated.
int64_t update(const AdanLaunch& launch, int threads);

// sqrt(sum of squares) over all `grad` fields; the same for every number of threads.
double gradient_norm(const AdanTensor* tensors, int64_t tensor_count, int64_t chunk_count, Storage storage,
                     int threads);

}  // namespace cpu
}  // namespace stillhouse
