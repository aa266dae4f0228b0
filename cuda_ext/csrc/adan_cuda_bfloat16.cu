#include "adan_cuda_kernel.cuh"

namespace stillhouse::cuda {

Launchable bfloat16_kernel(Master master, bool bfloat16_moments) {
  switch (master) {
    case Master::kFull: return choose_kernel<__nv_bfloat16, Master::kFull>(bfloat16_moments);
    case Master::kSplit: return choose_kernel<__nv_bfloat16, Master::kSplit>(bfloat16_moments);
    default: return choose_kernel<__nv_bfloat16, Master::kNone>(bfloat16_moments);
  }
}

}  // namespace stillhouse::cuda
