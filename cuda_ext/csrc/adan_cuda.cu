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

// What `blocks` of each of the current device's multiprocessors make.
const char* full_grid(int blocks, int64_t* full) {
  int device = 0, count = 0;
  if (const char* error = text_of(cudaGetDevice(&device))) return error;
  const char* error = text_of(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  *full = static_cast<int64_t>(count) * blocks;
  return error;
}

// The counters have a line of their own before the partial sums.
constexpr int64_t kCounterBytes = 64;

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

LaunchOnDevice on_device(const AdanLaunch& launch, const AdanTensor* device_rows, void* workspace) {
  LaunchOnDevice on_device{launch, launch.tensors[0], static_cast<Counters*>(workspace)};
  on_device.launch.tensors = device_rows;
  return on_device;
}

// Runs a kernel in blocks that fill the current device, or in fewer when there are fewer chunks.
template <typename Arguments>
const char* run_over_chunks(void (*kernel)(Arguments), int blocks, unsigned int threads, const Arguments& arguments,
                            void* stream) {
  int64_t full = 0;
  if (const char* error = full_grid(blocks, &full)) return error;
  const int64_t wanted = std::max<int64_t>(1, std::min(full, arguments.launch.chunk_count));
  return run(kernel, static_cast<unsigned int>(wanted), threads, stream, arguments);
}

}  // namespace

const char* workspace_bytes(int64_t* bytes) {
  int64_t full = 0;
  const char* error = full_grid(kBlocksPerMultiprocessor, &full);
  *bytes = kCounterBytes + full * kStripsPerBlock * static_cast<int64_t>(sizeof(double));
  return error;
}

const char* store_rows(const AdanTensor* rows, int64_t count, AdanTensor* device_rows, void* stream) {
  RowsInArguments piece;
  for (int64_t begin = 0; begin < count; begin += kRowsPerStore) {
    const int of_piece = static_cast<int>(std::min<int64_t>(kRowsPerStore, count - begin));
    std::memcpy(piece.rows, rows + begin, of_piece * sizeof(AdanTensor));
    const char* error = run(store_rows_kernel, 1, kThreads, stream, piece, of_piece, device_rows + begin);
    if (error != nullptr) return error;
  }
  return nullptr;
}

const char* update(const AdanLaunch& launch, const AdanTensor* device_rows, void* workspace, void* stream) {
  StepOnDevice arguments{on_device(launch, device_rows, workspace), {}};
  std::copy(launch.groups, launch.groups + launch.group_count, arguments.groups);
  Launchable chosen{};
  switch (launch.storage) {
    case Storage::kBFloat16: chosen = bfloat16_kernel(launch.master, launch.bfloat16_moments); break;
    case Storage::kFloat16: chosen = float16_kernel(launch.master, launch.bfloat16_moments); break;
    default: chosen = float32_kernel(launch.bfloat16_moments);
  }
  return run_over_chunks(chosen.kernel, chosen.blocks, chosen.threads, arguments, stream);
}

const char* gradient_norm(const AdanLaunch& launch, const AdanTensor* device_rows, float* norm, void* workspace,
                          void* stream) {
  void* const partial = static_cast<unsigned char*>(workspace) + kCounterBytes;
  const NormOnDevice arguments{on_device(launch, device_rows, workspace), norm, static_cast<double*>(partial)};
  const auto kernel = launch.storage == Storage::kBFloat16  ? norm_kernel<__nv_bfloat16>
                      : launch.storage == Storage::kFloat16 ? norm_kernel<__half>
                                                            : norm_kernel<float>;
  return run_over_chunks(kernel, kBlocksPerMultiprocessor, kThreads, arguments, stream);
}

}  // namespace stillhouse::cuda
