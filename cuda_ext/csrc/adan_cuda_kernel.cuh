// The persistent multi-tensor kernel. No torch headers.
//
// A grid that fills the device works off the flat list of chunks. A block takes its next chunk from a counter, so a
// block that starts late, or shares its multiprocessor, does not hold up the others. A chunk's tensor is found in the
// table by binary search; what is the same for all elements of a tensor is computed once by one thread and shared.
// The block that finishes last counts the steps up, so that no other block can see a step that is already counted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include "adan_cuda.h"

namespace stillhouse::cuda {

// How a kernel of the step divides its work. `Width` elements are one access, of which a thread has `Ahead` under way
// before it uses the first; with `Stages`, it copies those of later turns to shared memory meanwhile (fp32 only).
template <int Threads, int Blocks, int Width, int Ahead, int Stages, int Chunk>
struct Shape {
  static constexpr int kThreads = Threads, kBlocks = Blocks, kWidth = Width, kAhead = Ahead, kStages = Stages;
  static constexpr int64_t kChunk = Chunk;
};
using Shipped = Shape<256, 4, 4, 1, 0, kCudaChunk>;

constexpr int kThreads = Shipped::kThreads;
constexpr int kBlocksPerMultiprocessor = Shipped::kBlocks;  // with 64 registers they fill the register file
constexpr int kWarps = kThreads / 32;
constexpr int kStripsPerBlock = 4;  // of the norm: a late block holds up at most a quarter of its share

// Zero before and after every launch.
struct Counters {
  unsigned int finished;  // blocks
  unsigned int taken;     // pieces of work, besides the one that each block begins with
};

struct AdanArgumentsOnDevice {
  const AdanTensor* table;  // null: `row` is the only tensor
  AdanTensor row;
  int64_t chunk_count;
  int tensor_count;
  const float *grad_scale, *found_inf, *grad_norm;
  double max_grad_norm;
  Counters* counters;
  AdanGroup groups[kMaxGroups];
};

// Neighbouring elements in fp32, from and to storage. Streaming hints: nothing of the state is read again
// before the next step, when it has long left the cache.
template <int kCount>
struct Elements {
  float x[kCount];
};
using Four = Elements<4>;

__device__ __forceinline__ Four load_four(const float* p) {
  const float4 f = __ldcs(reinterpret_cast<const float4*>(p));
  return {f.x, f.y, f.z, f.w};
}
__device__ __forceinline__ void store_four(float* p, const Four& f) {
  __stcs(reinterpret_cast<float4*>(p), make_float4(f.x[0], f.x[1], f.x[2], f.x[3]));
}
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, float* p) { *p = x; }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* p) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half* p) { *p = __float2half_rn(x); }

template <typename T>
union alignas(8) Packed {
  uint2 bits;
  T x[4];
  __device__ Packed() {}
};
template <typename T>
__device__ __forceinline__ Four load_four(const T* p) {
  Packed<T> packed;
  packed.bits = __ldcs(reinterpret_cast<const uint2*>(p));
  return {to_float(packed.x[0]), to_float(packed.x[1]), to_float(packed.x[2]), to_float(packed.x[3])};
}
template <typename T>
__device__ __forceinline__ void store_four(T* p, const Four& f) {
  Packed<T> packed;
#pragma unroll
  for (int k = 0; k < 4; ++k) from_float(f.x[k], &packed.x[k]);
  __stcs(reinterpret_cast<uint2*>(p), packed.bits);
}

template <int kWidth, typename T>
__device__ __forceinline__ Elements<kWidth> load_elements(const T* p) {
  if constexpr (kWidth == 4) return load_four(p);
  return {to_float(*p)};
}
template <int kWidth, typename T>
__device__ __forceinline__ void store_elements(T* p, const Elements<kWidth>& e) {
  if constexpr (kWidth == 4) {
    store_four(p, e);
  } else {
    from_float(e.x[0], p);
  }
}

// Type of the previous gradient: see previous_storage.
template <typename T>
struct PreviousOf {
  using Type = T;
};
template <>
struct PreviousOf<__half> {
  using Type = __nv_bfloat16;
};

// Parameters: in storage only, with an fp32 master, or split into bfloat16 and 16 remainder bits.
template <typename T, Master kMaster>
struct Parameter {
  T* stored;
  void* master;
  __device__ __forceinline__ float load(int64_t i) const {
    return kMaster == Master::kFull ? static_cast<const float*>(master)[i] : to_float(stored[i]);
  }
  __device__ __forceinline__ void store(int64_t i, float theta) const {
    if (kMaster == Master::kFull) static_cast<float*>(master)[i] = theta;
    from_float(theta, stored + i);
  }
  __device__ __forceinline__ Four load4(int64_t i) const {
    if constexpr (kMaster == Master::kFull) return load_four(static_cast<const float*>(master) + i);
    return load_four(stored + i);
  }
  __device__ __forceinline__ void store4(int64_t i, const Four& theta) const {
    if constexpr (kMaster == Master::kFull) store_four(static_cast<float*>(master) + i, theta);
    store_four(stored + i, theta);
  }
};

template <>
struct Parameter<__nv_bfloat16, Master::kSplit> {
  __nv_bfloat16* stored;
  void* master;
  static __device__ __forceinline__ float join(unsigned upper, unsigned remainder) {
    return __uint_as_float((upper << 16) + static_cast<unsigned>(static_cast<int>(static_cast<short>(remainder))));
  }
  static __device__ __forceinline__ void split(float theta, unsigned* upper, unsigned* remainder) {
    const unsigned bits = __float_as_uint(theta);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    *upper = (nan ? (bits >> 16) | 0x40u : (bits + 0x8000u) >> 16) & 0xffffu;
    *remainder = nan ? 0u : bits & 0xffffu;
  }
  __device__ __forceinline__ float load(int64_t i) const {
    return join(reinterpret_cast<const unsigned short*>(stored)[i], static_cast<const unsigned short*>(master)[i]);
  }
  __device__ __forceinline__ void store(int64_t i, float theta) const {
    unsigned upper, remainder;
    split(theta, &upper, &remainder);
    reinterpret_cast<unsigned short*>(stored)[i] = static_cast<unsigned short>(upper);
    static_cast<unsigned short*>(master)[i] = static_cast<unsigned short>(remainder);
  }
  __device__ __forceinline__ Four load4(int64_t i) const {
    const uint2 upper = __ldcs(reinterpret_cast<const uint2*>(reinterpret_cast<const unsigned short*>(stored) + i));
    const uint2 rest = __ldcs(reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(master) + i));
    return {join(upper.x & 0xffffu, rest.x & 0xffffu), join(upper.x >> 16, rest.x >> 16),
            join(upper.y & 0xffffu, rest.y & 0xffffu), join(upper.y >> 16, rest.y >> 16)};
  }
  __device__ __forceinline__ void store4(int64_t i, const Four& theta) const {
    unsigned upper[4], rest[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) split(theta.x[k], &upper[k], &rest[k]);
    __stcs(reinterpret_cast<uint2*>(reinterpret_cast<unsigned short*>(stored) + i),
           make_uint2(upper[0] | upper[1] << 16, upper[2] | upper[3] << 16));
    __stcs(reinterpret_cast<uint2*>(static_cast<unsigned short*>(master) + i),
           make_uint2(rest[0] | rest[1] << 16, rest[2] | rest[3] << 16));
  }
};

template <int kWidth, typename P>
__device__ __forceinline__ Elements<kWidth> load_parameters(const P& parameter, int64_t i) {
  if constexpr (kWidth == 4) return parameter.load4(i);
  return {parameter.load(i)};
}
template <int kWidth, typename P>
__device__ __forceinline__ void store_parameters(const P& parameter, int64_t i, const Elements<kWidth>& e) {
  if constexpr (kWidth == 4) {
    parameter.store4(i, e);
  } else {
    parameter.store(i, e.x[0]);
  }
}

// What the update of neighbouring elements reads.
template <typename T, typename Moment, Master kMaster, int kWidth>
struct Operands {
  using Previous = typename PreviousOf<T>::Type;
  Elements<kWidth> gradient, theta, m, v, n, previous;

  __device__ __forceinline__ void load(const AdanTensor& tensor, int64_t i, bool first) {
    gradient = load_elements<kWidth>(static_cast<const T*>(tensor.grad) + i);
    theta = load_parameters<kWidth>(Parameter<T, kMaster>{static_cast<T*>(tensor.param), tensor.master}, i);
    m = load_elements<kWidth>(static_cast<const Moment*>(tensor.m) + i);
    v = load_elements<kWidth>(static_cast<const Moment*>(tensor.v) + i);
    n = load_elements<kWidth>(static_cast<const float*>(tensor.n) + i);
    previous = {};
    if (!first) previous = load_elements<kWidth>(static_cast<const Previous*>(tensor.g_prev) + i);
  }
  __device__ __forceinline__ void update(const AdanScalars& s, bool first) {
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) {
      AdanElement e{theta.x[lane], m.x[lane], v.x[lane], n.x[lane], previous.x[lane]};
      adan_update(e, gradient.x[lane], s, first);
      theta.x[lane] = e.theta;
      m.x[lane] = e.m;
      v.x[lane] = e.v;
      n.x[lane] = e.n;
      previous.x[lane] = e.g_prev;
    }
  }
  __device__ __forceinline__ void store(const AdanTensor& tensor, int64_t i) const {
    store_parameters<kWidth>(Parameter<T, kMaster>{static_cast<T*>(tensor.param), tensor.master}, i, theta);
    store_elements<kWidth>(static_cast<Moment*>(tensor.m) + i, m);
    store_elements<kWidth>(static_cast<Moment*>(tensor.v) + i, v);
    store_elements<kWidth>(tensor.n + i, n);
    store_elements<kWidth>(static_cast<Previous*>(tensor.g_prev) + i, previous);
  }
};

// The row that owns `chunk`; the search starts at the row of the previous, smaller chunk.
__device__ __forceinline__ int owner_of(const AdanTensor* table, int count, int64_t chunk, int low) {
  int high = count;  // table[low].first_chunk <= chunk < table[high].first_chunk
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (table[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sum over the block; the result is valid in thread 0.
__device__ __forceinline__ double block_sum(double value, double* warp_sums) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0.0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kWarps; ++warp) total += warp_sums[warp];
  }
  __syncthreads();
  return total;
}

// The block's next piece of work. Its first piece is the one with the block's own number.
__device__ __forceinline__ int64_t take_next(Counters* counters) {
  __shared__ unsigned int next;
  __syncthreads();  // all threads are done with the previous piece and what is shared about it
  if (threadIdx.x == 0) next = gridDim.x + atomicAdd(&counters->taken, 1u);
  __syncthreads();
  return next;
}

// True in all threads of the block that finishes last. What the other blocks wrote before is then visible.
__device__ __forceinline__ bool finishes_last(Counters* counters) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&counters->finished, 1u) == gridDim.x - 1;
    if (last) *counters = Counters{};
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Makes the compiler read pointers and scalars from shared memory again where they are used: kept in registers
// across the loads they cost 27 of the 64, and the kernel spills.
__device__ __forceinline__ void reload_shared() { asm volatile("" ::: "memory"); }

// The vectors of a chunk in fp32. A thread copies those of its later turns to its own places in shared memory, and so
// waits for nothing but its own copies.
template <typename S>
__device__ __forceinline__ void update_staged(const AdanTensor& tensor, const AdanScalars& scalars, bool first,
                                              int64_t begin, int64_t end) {
  constexpr int kTurn = 4 * S::kThreads;
  __shared__ float4 staged[S::kStages][6][S::kThreads];
  const auto copy = [&](int64_t i, int stage) {
    if (i < end) {
      const void* const sources[] = {tensor.grad, tensor.param, tensor.m, tensor.v, tensor.n, tensor.g_prev};
#pragma unroll
      for (int k = 0; k < 6; ++k) {
        __pipeline_memcpy_async(&staged[stage][k][threadIdx.x], static_cast<const float*>(sources[k]) + i, 16);
      }
    }
    __pipeline_commit();
  };
  int64_t i = begin + 4 * threadIdx.x;
#pragma unroll
  for (int stage = 0; stage < S::kStages - 1; ++stage) copy(i + stage * kTurn, stage);
  for (int stage = 0; i < end; i += kTurn, stage = (stage + 1) % S::kStages) {
    copy(i + (S::kStages - 1) * kTurn, (stage + S::kStages - 1) % S::kStages);
    __pipeline_wait_prior(S::kStages - 1);
    const auto own = [&](int k) {
      const float4 f = staged[stage][k][threadIdx.x];
      return Four{f.x, f.y, f.z, f.w};
    };
    Operands<float, float, Master::kNone, 4> operands{own(0), own(1), own(2), own(3), own(4), own(5)};
    operands.update(scalars, first);
    operands.store(tensor, i);
  }
}

template <typename S, typename T, typename Moment, Master kMaster>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    adan_kernel(const __grid_constant__ AdanArgumentsOnDevice a) {
  using Previous = typename PreviousOf<T>::Type;
  if (a.found_inf != nullptr && *a.found_inf != 0.0f) return;

  __shared__ AdanTensor tensor;
  __shared__ AdanScalars shared_scalars;
  __shared__ float shared_step;  // the step and group that the shared scalars were computed for
  __shared__ int shared_group;
  if (threadIdx.x == 0) shared_group = -1;

  int row = -1;
  for (int64_t chunk = blockIdx.x; chunk < a.chunk_count; chunk = take_next(a.counters)) {
    const int owner = a.table == nullptr ? 0 : owner_of(a.table, a.tensor_count, chunk, row < 0 ? 0 : row);
    if (owner != row) {
      if (threadIdx.x == 0) {
        tensor = a.table == nullptr ? a.row : a.table[owner];
        if (tensor.group != shared_group || *tensor.step != shared_step) {
          shared_step = *tensor.step;
          shared_group = tensor.group;
          const float factor = gradient_factor(a.grad_scale, a.grad_norm, a.max_grad_norm);
          shared_scalars = adan_scalars(a.groups[shared_group], static_cast<double>(shared_step) + 1.0, factor);
        }
      }
      __syncthreads();
      row = owner;
    }
    const bool first = shared_step == 0.0f;
    const int64_t begin = (chunk - tensor.first_chunk) * S::kChunk;
    const int64_t end = min(begin + S::kChunk, tensor.numel);
    const int64_t vector_end = tensor.aligned ? end - end % S::kWidth : begin;
    constexpr int kTurn = S::kWidth * S::kThreads;

    if constexpr (S::kStages > 0) {
      update_staged<S>(tensor, shared_scalars, first, begin, vector_end);
    } else {
      for (int64_t i = begin + S::kWidth * threadIdx.x; i < vector_end; i += kTurn * S::kAhead) {
        reload_shared();
        Operands<T, Moment, kMaster, S::kWidth> operands[S::kAhead];
#pragma unroll
        for (int k = 0; k < S::kAhead; ++k) {
          if (k == 0 || i + k * kTurn < vector_end) operands[k].load(tensor, i + k * kTurn, first);
        }
        reload_shared();
        const AdanScalars s = shared_scalars;
#pragma unroll
        for (int k = 0; k < S::kAhead; ++k) operands[k].update(s, first);
        reload_shared();
#pragma unroll
        for (int k = 0; k < S::kAhead; ++k) {
          if (k == 0 || i + k * kTurn < vector_end) operands[k].store(tensor, i + k * kTurn);
        }
      }
    }
    for (int64_t i = vector_end + threadIdx.x; i < end; i += S::kThreads) {
      const Parameter<T, kMaster> parameter{static_cast<T*>(tensor.param), tensor.master};
      Moment *m = static_cast<Moment*>(tensor.m) + i, *v = static_cast<Moment*>(tensor.v) + i;
      Previous* g_prev = static_cast<Previous*>(tensor.g_prev) + i;
      AdanElement e{parameter.load(i), to_float(*m), to_float(*v), tensor.n[i], first ? 0.0f : to_float(*g_prev)};
      adan_update(e, to_float(static_cast<const T*>(tensor.grad)[i]), shared_scalars, first);
      parameter.store(i, e.theta);
      from_float(e.m, m);
      from_float(e.v, v);
      tensor.n[i] = e.n;
      from_float(e.g_prev, g_prev);
    }
  }

  if (!finishes_last(a.counters)) return;
  for (int i = threadIdx.x; i < a.tensor_count; i += S::kThreads) {
    const AdanTensor& done = a.table == nullptr ? a.row : a.table[i];
    *done.step += 1.0f;
  }
}

struct NormArgumentsOnDevice {
  const AdanTensor* table;
  AdanTensor row;
  int64_t chunk_count;
  int tensor_count;
  float* norm;
  double* partial;  // one per strip
  Counters* counters;
};

// Every `strips`-th chunk is a strip. Blocks take strips in any order, but a strip's sum and the order in which the
// strips are added depend on the grid alone, so the norm is the same in every run.

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    norm_kernel(const __grid_constant__ NormArgumentsOnDevice a) {
  __shared__ double warp_sums[kWarps];
  const int64_t strips = min(a.chunk_count, static_cast<int64_t>(kStripsPerBlock) * gridDim.x);
  for (int64_t strip = blockIdx.x; strip < strips; strip = take_next(a.counters)) {
    double total = 0.0;
    int row = 0;
    for (int64_t chunk = strip; chunk < a.chunk_count; chunk += strips) {
      if (a.table != nullptr) row = owner_of(a.table, a.tensor_count, chunk, row);
      const AdanTensor& tensor = a.table == nullptr ? a.row : a.table[row];
      const int64_t begin = (chunk - tensor.first_chunk) * kCudaChunk;
      const int count = static_cast<int>(min(kCudaChunk, tensor.numel - begin));
      const T* __restrict__ gradients = static_cast<const T*>(tensor.grad) + begin;
      const int vectors = tensor.aligned ? count / 4 : 0;
      float sum = 0.0f;
#pragma unroll 4
      for (int k = threadIdx.x; k < vectors; k += kThreads) {
        const Four gradient = load_four(gradients + 4 * k);
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) sum += gradient.x[lane] * gradient.x[lane];
      }
      for (int i = 4 * vectors + static_cast<int>(threadIdx.x); i < count; i += kThreads) {
        const float gradient = to_float(gradients[i]);
        sum += gradient * gradient;
      }
      total += static_cast<double>(sum);
    }
    total = block_sum(total, warp_sums);
    if (threadIdx.x == 0) a.partial[strip] = total;
  }
  if (!finishes_last(a.counters)) return;
  double sum = 0.0;
  for (int64_t strip = threadIdx.x; strip < strips; strip += kThreads) sum += a.partial[strip];
  sum = block_sum(sum, warp_sums);
  if (threadIdx.x == 0) *a.norm = static_cast<float>(sqrt(sum));
}

// Each storage format is instantiated in an object of its own, so that the compiler works on them in parallel.
using AdanKernel = void (*)(AdanArgumentsOnDevice);
using NormKernel = void (*)(NormArgumentsOnDevice);
struct Launchable {
  AdanKernel kernel;
  unsigned int threads;
  int blocks;  // per multiprocessor
};
Launchable float32_kernel(bool bfloat16_moments);
Launchable bfloat16_kernel(Master master, bool bfloat16_moments);
Launchable float16_kernel(Master master, bool bfloat16_moments);
NormKernel norm_kernel_for(Storage storage);

template <typename T, Master kMaster>
Launchable choose_kernel(bool bfloat16_moments) {
  return {bfloat16_moments ? adan_kernel<Shipped, T, __nv_bfloat16, kMaster> : adan_kernel<Shipped, T, float, kMaster>,
          Shipped::kThreads, Shipped::kBlocks};
}

}  // namespace stillhouse::cuda
