// The CUDA kernels of Adan and the scalar CPU kernel in one library without torch, for ctypes.
#include "adan_cuda.cu"
#include "adan_cuda_bfloat16.cu"
#include "adan_cuda_float16.cu"
#include "adan_cuda_variants.cu"

#define STILLHOUSE_ISA scalar
#include "adan_cpu_chunk.cpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace stillhouse;

// For the test, which mirrors the structures.
EXPORTED void structure_bytes(int64_t* bytes) {
  bytes[0] = sizeof(AdanTensor);
  bytes[1] = sizeof(AdanGroup);
  bytes[2] = sizeof(AdanLaunch);
}

EXPORTED int64_t chunk_elements() { return cuda::chunk_elements(); }

EXPORTED void set_device(int multiprocessors, host_cuda::Order order, uint32_t seed) {
  host_cuda::device.multiprocessors = multiprocessors;
  host_cuda::device.order = order;
  host_cuda::device.random.seed(seed);
}

EXPORTED int64_t workspace_bytes() {
  int64_t bytes = 0;
  cuda::workspace_bytes(&bytes);
  return bytes;
}

EXPORTED const char* store_rows(const AdanTensor* rows, int64_t count, AdanTensor* device_rows) {
  return cuda::store_rows(rows, count, device_rows, nullptr);
}

EXPORTED const char* cuda_update(const AdanLaunch* launch, const AdanTensor* device_rows, void* workspace) {
  return cuda::update(*launch, device_rows, workspace, nullptr);
}

EXPORTED const char* cuda_norm(const AdanLaunch* launch, const AdanTensor* device_rows, float* norm, void* workspace) {
  return cuda::gradient_norm(*launch, device_rows, norm, workspace, nullptr);
}

EXPORTED void cpu_update(const AdanLaunch* launch) {
  if (launch->found_inf != nullptr && *launch->found_inf != 0.0f) return;
  const float factor = gradient_factor(launch->grad_scale, launch->grad_norm, launch->max_grad_norm);
  for (int64_t i = 0; i < launch->tensor_count; ++i) {
    const AdanTensor& tensor = launch->tensors[i];
    const double step = *tensor.step + 1.0;
    cpu::scalar::chunk_kernels().update(*launch, tensor, 0, tensor.numel,
                                        adan_scalars(launch->groups[tensor.group], step, factor));
    *tensor.step += 1.0f;
  }
}
