// The fp32 kernel in several shapes, of which one is chosen at run time: for `benchmarks.optimizer --variants`, in the
// place of adan_cuda_float32.cu. The library that trains has the first one only.
#include "adan_cuda_kernel.cuh"

namespace stillhouse::cuda {
namespace {

struct Variant {
  Launchable launch;
  int64_t chunk;
};

template <typename S>
constexpr Variant variant() {
  return {{adan_kernel<S, float, float, Master::kNone>, S::kThreads, S::kBlocks}, S::kChunk};
}

// The names are in benchmarks/adan_variants.py.
constexpr Variant variants[] = {
    variant<Shipped>(),
    variant<Shape<1024, 1, 4, 1, 0, 65536>>(),  // A of the study: vector accesses
    variant<Shape<1024, 1, 1, 1, 0, 65536>>(),  // B: more threads
    variant<Shape<512, 2, 1, 4, 0, 65536>>(),   // C: several elements of a thread, unrolled; the chunk of Apex
    variant<Shape<256, 4, 4, 1, 0, 2048>>(),    // the shipped one with other chunks
    variant<Shape<256, 4, 4, 1, 0, 32768>>(),
    variant<Shape<256, 4, 4, 1, 0, 65536>>(),
    variant<Shape<256, 2, 4, 2, 0, 8192>>(),  // with more accesses under way
    variant<Shape<256, 1, 4, 4, 0, 8192>>(),
    variant<Shape<128, 4, 4, 1, 3, 8192>>(),  // prefetching through shared memory
};
constexpr int kVariants = sizeof(variants) / sizeof(variants[0]);
int chosen = 0;

}  // namespace

// bfloat16 moments have no variants.
Launchable float32_kernel(bool bfloat16_moments) {
  return bfloat16_moments ? choose_kernel<float, Master::kNone>(true) : variants[chosen].launch;
}

int64_t chunk_elements() { return variants[chosen].chunk; }

}  // namespace stillhouse::cuda

// False: there is no such variant. Until the next call, only parameters and moments in fp32 may be updated, unless
// it is the first.
extern "C" __attribute__((visibility("default"))) bool stillhouse_adan_variant(int number) {
  const bool exists = number >= 0 && number < stillhouse::cuda::kVariants;
  if (exists) stillhouse::cuda::chosen = number;
  return exists;
}
