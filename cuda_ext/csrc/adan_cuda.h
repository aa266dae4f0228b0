// Doors of the CUDA kernels for the binding. Every function returns null, or the text of the CUDA error.
#pragma once

#include <cstdint>

#include "adan_launch.h"

namespace stillhouse::cuda {

// Bytes that a launch on the current device needs beside the table: two counters and sums of squares. The
// counters must be zero before the first launch, and every launch leaves them zero.
const char* workspace_bytes(int64_t* bytes);

const char* clear(void* workspace, int64_t bytes, void* stream);

// Writes rows to device memory by kernel arguments: no pinned buffer has to outlive the copy, no
// synchronisation, and a CUDA graph replays the values it captured.
const char* store_rows(const AdanTensor* rows, int64_t count, AdanTensor* device_rows, void* stream);

const char* is_capturing(void* stream, bool* capturing);

// Elements of a chunk, by which the chunks of `update`'s launch are numbered.
int64_t chunk_elements();

// One launch for all tensors. `launch.tensors` are host rows; `device_rows` are the same rows on the device,
// or null for a single tensor, whose row travels as a kernel argument.
const char* update(const AdanLaunch& launch, const AdanTensor* device_rows, void* workspace, void* stream);

// One launch: the norm of all `grad` fields, the same in every run on the same device.
const char* gradient_norm(const AdanTensor* rows, const AdanTensor* device_rows, int64_t tensor_count,
                          int64_t chunk_count, Storage storage, float* norm, void* workspace, void* stream);

constexpr int kMaxGroups = 16;  // per launch; the groups travel as kernel arguments

}  // namespace stillhouse::cuda
