// Launches: grids, the table, errors. The kernels themselves are in adan_cuda_kernel.cuh.

#include <algorithm>
#include <cstring>

#include "adan_cuda_kernel.cuh"

namespace stillhouse::cuda {
namespace {

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// kernel<<<blocks, threads, 0, stream>>>(arguments...), in C++: tests/cuda_ext/host_cuda runs this file on a CPU.
template <typename... Parameters>
const char* run(void (*kernel)(Parameters...), unsigned int blocks, unsigned int threads, void* stream,
                const Parameters&... arguments) {
  void* pointers[] = {const_cast<Parameters*>(&arguments)...};
  return text_of(
      cudaLaunchKernel(kernel, dim3{blocks}, dim3{threads}, pointers, 0, static_cast<cudaStream_t>(stream)));
}

const char* multiprocessors(int* count) {
  int device = 0;
  if (const char* error = text_of(cudaGetDevice(&device))) return error;
  return text_of(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
}

// The counters have a line of their own before the partial sums.
constexpr int64_t kCounterBytes = 64;

Counters* counters_in(void* workspace) { return static_cast<Counters*>(workspace); }
double* partial_in(void* workspace) {
  return reinterpret_cast<double*>(static_cast<unsigned char*>(workspace) + kCounterBytes);
}

// Kernel arguments may take 4 KiB before CUDA 12.1 and 32,764 bytes from then on.
#if CUDART_VERSION >= 12010
constexpr int kRowsPerStore = 32000 / sizeof(AdanTensor);
#else
constexpr int kRowsPerStore = 3800 / sizeof(AdanTensor);
#endif

struct RowsInArguments {
  AdanTensor rows[kRowsPerStore];
};

__global__ void store_rows_kernel(const __grid_constant__ RowsInArguments piece, int count, AdanTensor* device_rows) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) device_rows[i] = piece.rows[i];
}

// Blocks that fill the current device, or fewer when there are fewer chunks.
const char* grid_for(int64_t chunk_count, int per_multiprocessor, unsigned int* blocks) {
  int count = 0;
  if (const char* error = multiprocessors(&count)) return error;
  const int64_t full = static_cast<int64_t>(count) * per_multiprocessor;
  *blocks = static_cast<unsigned int>(std::max<int64_t>(1, std::min(full, chunk_count)));
  return nullptr;
}

}  // namespace

const char* workspace_bytes(int64_t* bytes) {
  int count = 0;
  if (const char* error = multiprocessors(&count)) return error;
  *bytes = kCounterBytes + static_cast<int64_t>(count) * kBlocksPerMultiprocessor * kStripsPerBlock * sizeof(double);
  return nullptr;
}

const char* clear(void* workspace, int64_t bytes, void* stream) {
  return text_of(cudaMemsetAsync(workspace, 0, bytes, static_cast<cudaStream_t>(stream)));
}

const char* is_capturing(void* stream, bool* capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const char* error = text_of(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  *capturing = status == cudaStreamCaptureStatusActive;
  return error;
}

const char* store_rows(const AdanTensor* rows, int64_t count, AdanTensor* device_rows, void* stream) {
  RowsInArguments piece;
  for (int64_t begin = 0; begin < count; begin += kRowsPerStore) {
    const int of_piece = static_cast<int>(std::min<int64_t>(kRowsPerStore, count - begin));
    std::memcpy(piece.rows, rows + begin, of_piece * sizeof(AdanTensor));
    if (const char* error = run(store_rows_kernel, 1, kThreads, stream, piece, of_piece, device_rows + begin)) return error;
  }
  return nullptr;
}

const char* update(const AdanLaunch& launch, const AdanTensor* device_rows, void* workspace, void* stream) {
  AdanArgumentsOnDevice a{};
  a.table = device_rows;
  a.row = launch.tensors[0];
  a.tensor_count = static_cast<int>(launch.tensor_count);
  a.chunk_count = launch.chunk_count;
  a.grad_scale = launch.grad_scale;
  a.found_inf = launch.found_inf;
  a.grad_norm = launch.grad_norm;
  a.max_grad_norm = launch.max_grad_norm;
  a.counters = counters_in(workspace);
  std::copy(launch.groups, launch.groups + launch.group_count, a.groups);

  Launchable chosen{};
  switch (launch.storage) {
    case Storage::kFloat32: chosen = float32_kernel(launch.bfloat16_moments); break;
    case Storage::kBFloat16: chosen = bfloat16_kernel(launch.master, launch.bfloat16_moments); break;
    case Storage::kFloat16: chosen = float16_kernel(launch.master, launch.bfloat16_moments); break;
  }
  unsigned int blocks = 0;
  if (const char* error = grid_for(launch.chunk_count, chosen.blocks, &blocks)) return error;
  return run(chosen.kernel, blocks, chosen.threads, stream, a);
}

NormKernel norm_kernel_for(Storage storage) {
  switch (storage) {
    case Storage::kBFloat16: return norm_kernel<__nv_bfloat16>;
    case Storage::kFloat16: return norm_kernel<__half>;
    default: return norm_kernel<float>;
  }
}

const char* gradient_norm(const AdanTensor* rows, const AdanTensor* device_rows, int64_t tensor_count,
                          int64_t chunk_count, Storage storage, float* norm, void* workspace, void* stream) {
  NormArgumentsOnDevice a{};
  a.table = device_rows;
  a.row = rows[0];
  a.tensor_count = static_cast<int>(tensor_count);
  a.chunk_count = chunk_count;
  a.norm = norm;
  a.partial = partial_in(workspace);
  a.counters = counters_in(workspace);
  unsigned int blocks = 0;
  if (const char* error = grid_for(chunk_count, kBlocksPerMultiprocessor, &blocks)) return error;
  return run(norm_kernel_for(storage), blocks, kThreads, stream, a);
}

}  // namespace stillhouse::cuda
