#include "adan_cuda_kernel.cuh"

namespace stillhouse::cuda {

AdanKernel float32_kernel(bool bfloat16_moments) {
  return choose_kernel<float, Master::kNone>(bfloat16_moments);
}

}  // namespace stillhouse::cuda
