#include "adan_cuda_kernel.cuh"

namespace stillhouse::cuda {

Launchable float16_kernel(Master master, bool bfloat16_moments) {
  if (master == Master::kFull) return choose_kernel<__half, Master::kFull>(bfloat16_moments);
  return choose_kernel<__half, Master::kNone>(bfloat16_moments);
}

}  // namespace stillhouse::cuda
