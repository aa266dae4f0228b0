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

#include "adan_launch.h"

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

// A launch as a kernel's argument. `launch.tensors` is on the device; null: `row` is the only tensor.
struct LaunchOnDevice {
  AdanLaunch launch;
  AdanTensor row;
  Counters* counters;

  __device__ __forceinline__ const AdanTensor& tensor(int index) const {
    return launch.tensors == nullptr ? row : launch.tensors[index];
  }

  // The row that owns `chunk`; the search starts at the row of the previous, smaller chunk.
  __device__ __forceinline__ int owner_of(int64_t chunk, int low) const {
    if (launch.tensors == nullptr) return 0;
    int high = static_cast<int>(launch.tensor_count);  // [low].first_chunk <= chunk < [high].first_chunk
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (launch.tensors[middle].first_chunk <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

struct StepOnDevice : LaunchOnDevice {
  AdanGroup groups[kMaxGroups];
};

struct NormOnDevice : LaunchOnDevice {
  float* norm;
  double* partial;  // one per strip
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, float* p) { *p = x; }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* p) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half* p) { *p = __float2half_rn(x); }

// Neighbouring elements, one or four, as they are stored and in fp32.
template <typename T, int kCount>
struct Stored {
  T x[kCount];
};
template <int kCount>
using Elements = Stored<float, kCount>;

// One access. Streaming hints: nothing of the state is read again before the next step, when it has long left the cache.
template <int kCount, typename T>
__device__ __forceinline__ Stored<T, kCount> load(const T* p) {
  Stored<T, kCount> stored;
  if constexpr (kCount == 1) {
    stored.x[0] = *p;
  } else if constexpr (sizeof(T) == 4) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(p));
    memcpy(&stored, &four, sizeof(stored));
  } else {
    const uint2 four = __ldcs(reinterpret_cast<const uint2*>(p));
    memcpy(&stored, &four, sizeof(stored));
  }
  return stored;
}
template <typename T, int kCount>
__device__ __forceinline__ void store(T* p, const Stored<T, kCount>& stored) {
  if constexpr (kCount == 1) {
    *p = stored.x[0];
  } else if constexpr (sizeof(T) == 4) {
    float4 four;
    memcpy(&four, &stored, sizeof(four));
    __stcs(reinterpret_cast<float4*>(p), four);
  } else {
    uint2 four;
    memcpy(&four, &stored, sizeof(four));
    __stcs(reinterpret_cast<uint2*>(p), four);
  }
}

template <int kCount, typename T>
__device__ __forceinline__ Elements<kCount> load_elements(const T* p) {
  const Stored<T, kCount> stored = load<kCount>(p);
  Elements<kCount> elements;
#pragma unroll
  for (int k = 0; k < kCount; ++k) elements.x[k] = to_float(stored.x[k]);
  return elements;
}
template <typename T, int kCount>
__device__ __forceinline__ void store_elements(T* p, const Elements<kCount>& elements) {
  Stored<T, kCount> stored;
#pragma unroll
  for (int k = 0; k < kCount; ++k) from_float(elements.x[k], &stored.x[k]);
  store(p, stored);
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
template <typename T, Master kMaster, int kCount>
__device__ __forceinline__ Elements<kCount> load_parameters(const AdanTensor& tensor, int64_t i) {
  if constexpr (kMaster == Master::kFull) {
    return load_elements<kCount>(static_cast<const float*>(tensor.master) + i);
  } else if constexpr (kMaster == Master::kSplit) {
    const auto upper = load<kCount>(static_cast<const uint16_t*>(tensor.param) + i);
    const auto remainder = load<kCount>(static_cast<const int16_t*>(tensor.master) + i);
    Elements<kCount> theta;
#pragma unroll
    for (int k = 0; k < kCount; ++k) theta.x[k] = join_split(upper.x[k], remainder.x[k]);
    return theta;
  } else {
    return load_elements<kCount>(static_cast<const T*>(tensor.param) + i);
  }
}
template <typename T, Master kMaster, int kCount>
__device__ __forceinline__ void store_parameters(const AdanTensor& tensor, int64_t i, const Elements<kCount>& theta) {
  if constexpr (kMaster == Master::kSplit) {
    Stored<uint16_t, kCount> upper;
    Stored<int16_t, kCount> remainder;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      upper.x[k] = split_upper(theta.x[k]);
      remainder.x[k] = split_remainder(theta.x[k]);
    }
    store(static_cast<uint16_t*>(tensor.param) + i, upper);
    store(static_cast<int16_t*>(tensor.master) + i, remainder);
  } else {
    if constexpr (kMaster == Master::kFull) store_elements(static_cast<float*>(tensor.master) + i, theta);
    store_elements(static_cast<T*>(tensor.param) + i, theta);
  }
}

// What the update of neighbouring elements reads.
template <typename T, typename Moment, Master kMaster, int kWidth>
struct Operands {
  using Previous = typename PreviousOf<T>::Type;
  Elements<kWidth> gradient, theta, m, v, n, previous;

  __device__ __forceinline__ void load(const AdanTensor& tensor, int64_t i, bool first) {
    gradient = load_elements<kWidth>(static_cast<const T*>(tensor.grad) + i);
    theta = load_parameters<T, kMaster, kWidth>(tensor, i);
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
    store_parameters<T, kMaster>(tensor, i, theta);
    store_elements(static_cast<Moment*>(tensor.m) + i, m);
    store_elements(static_cast<Moment*>(tensor.v) + i, v);
    store_elements(static_cast<float*>(tensor.n) + i, n);
    store_elements(static_cast<Previous*>(tensor.g_prev) + i, previous);
  }
};

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
      return Elements<4>{f.x, f.y, f.z, f.w};
    };
    Operands<float, float, Master::kNone, 4> operands{own(0), own(1), own(2), own(3), own(4), own(5)};
    operands.update(scalars, first);
    operands.store(tensor, i);
  }
}

template <typename S, typename T, typename Moment, Master kMaster>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    adan_kernel(const __grid_constant__ StepOnDevice a) {
  const AdanLaunch& launch = a.launch;
  if (launch.found_inf != nullptr && *launch.found_inf != 0.0f) return;

  __shared__ AdanTensor tensor;
  __shared__ AdanScalars shared_scalars;
  __shared__ float shared_step;  // the step and group that the shared scalars were computed for
  __shared__ int shared_group;
  if (threadIdx.x == 0) shared_group = -1;

  int row = -1;
  for (int64_t chunk = blockIdx.x; chunk < launch.chunk_count; chunk = take_next(a.counters)) {
    const int owner = a.owner_of(chunk, row < 0 ? 0 : row);
    if (owner != row) {
      if (threadIdx.x == 0) {
        tensor = launch.tensors == nullptr ? a.row : launch.tensors[owner];  // a.tensor(owner) spills on sm_90
        if (tensor.group != shared_group || *tensor.step != shared_step) {
          shared_step = *tensor.step;
          shared_group = tensor.group;
          const float factor = gradient_factor(launch.grad_scale, launch.grad_norm, launch.max_grad_norm);
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
      Operands<T, Moment, kMaster, 1> operands;
      operands.load(tensor, i, first);
      operands.update(shared_scalars, first);
      operands.store(tensor, i);
    }
  }

  if (!finishes_last(a.counters)) return;
  for (int i = threadIdx.x; i < launch.tensor_count; i += S::kThreads) *a.tensor(i).step += 1.0f;
}

// Every `strips`-th chunk is a strip. Blocks take strips in any order, but a strip's sum and the order in which the
// strips are added depend on the grid alone, so the norm is the same in every run.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    norm_kernel(const __grid_constant__ NormOnDevice a) {
  __shared__ double warp_sums[kWarps];
  const int64_t strips = min(a.launch.chunk_count, static_cast<int64_t>(kStripsPerBlock) * gridDim.x);
  for (int64_t strip = blockIdx.x; strip < strips; strip = take_next(a.counters)) {
    double total = 0.0;
    int row = 0;
    for (int64_t chunk = strip; chunk < a.launch.chunk_count; chunk += strips) {
      row = a.owner_of(chunk, row);
      const AdanTensor& tensor = a.tensor(row);
      const int64_t begin = (chunk - tensor.first_chunk) * kCudaChunk;
      const int count = static_cast<int>(min(kCudaChunk, tensor.numel - begin));
      const T* __restrict__ gradients = static_cast<const T*>(tensor.grad) + begin;
      const int vectors = tensor.aligned ? count / 4 : 0;
      float sum = 0.0f;
#pragma unroll 4
      for (int k = threadIdx.x; k < vectors; k += kThreads) {
        const Elements<4> gradient = load_elements<4>(gradients + 4 * k);
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
struct Launchable {
  void (*kernel)(StepOnDevice);
  unsigned int threads;
  int blocks;  // per multiprocessor
};
Launchable float32_kernel(bool bfloat16_moments);
Launchable bfloat16_kernel(Master master, bool bfloat16_moments);
Launchable float16_kernel(Master master, bool bfloat16_moments);

template <typename T, Master kMaster>
Launchable choose_kernel(bool bfloat16_moments) {
  return {bfloat16_moments ? adan_kernel<Shipped, T, __nv_bfloat16, kMaster> : adan_kernel<Shipped, T, float, kMaster>,
          Shipped::kThreads, Shipped::kBlocks};
}

}  // namespace stillhouse::cuda
