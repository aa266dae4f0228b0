// What one call of the Adan kernels is given, and the doors of those for CUDA. No torch headers here.
#pragma once

#include <cstdint>

#include "number_formats.h"

namespace stillhouse {

// Where the fp32 value of a 16-bit parameter lives: nowhere, in a tensor of its own, or in the parameter's
// 16 bits together with 16 remainder bits (bfloat16 only).
enum class Master : int32_t { kNone = 0, kFull = 1, kSplit = 2 };

// One parameter and its state. All pointers have `numel` elements in the same memory order.
struct AdanTensor {
  void *param, *grad;
  void *m, *v;   // fp32, or bfloat16 when the launch says so
  void* n;       // fp32
  void* g_prev;  // in previous_storage
  void* master;  // float for Master::kFull, int16_t for Master::kSplit
  float* step;   // finished steps of this parameter; the kernel adds one
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

// The norm reads `grad`, `numel`, `first_chunk` and `aligned` of the tensors, their number and the storage.
struct AdanLaunch {
  const AdanTensor* tensors;
  int64_t tensor_count;
  int64_t chunk_count;
  const AdanGroup* groups;
  int32_t group_count;
  Storage storage;  // of parameters, gradients and previous gradients
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

namespace cuda {

// Every function returns null, or the text of the CUDA error.

constexpr int kMaxGroups = 16;  // per launch; the groups travel as kernel arguments

// Bytes that a launch on the current device needs beside the table: two counters and sums of squares. The
// counters must be zero before the first launch, and every launch leaves them zero.
const char* workspace_bytes(int64_t* bytes);

// Writes rows to device memory by kernel arguments: no pinned buffer has to outlive the copy, no
// synchronisation, and a CUDA graph replays the values it captured.
const char* store_rows(const AdanTensor* rows, int64_t count, AdanTensor* device_rows, void* stream);

// Elements of a chunk, by which the chunks of `update`'s launch are numbered.
int64_t chunk_elements();

// `launch.tensors` are host rows; `device_rows` are the same rows on the device, or null for a single tensor, whose row
// travels as a kernel argument.

// One launch for all tensors.
const char* update(const AdanLaunch& launch, const AdanTensor* device_rows, void* workspace, void* stream);

// One launch: the norm of all `grad` fields, the same in every run on the same device.
const char* gradient_norm(const AdanLaunch& launch, const AdanTensor* device_rows, float* norm, void* workspace,
                          void* stream);

}  // namespace cuda
}  // namespace stillhouse
