#include "adan_cuda_kernel.cuh"

namespace stillhouse::cuda {

int64_t chunk_elements() { return Shipped::kChunk; }

Launchable float32_kernel(bool bfloat16_moments) {
  return choose_kernel<float, Master::kNone>(bfloat16_moments);
}

}  // namespace stillhouse::cuda
