// CUDA's runtime for the host, as far as the kernels of Adan need it: their sources compile as C++ against this
// header and run without a GPU.
//
// A block is a host thread, so that `__shared__` can be thread_local; its CUDA threads are fibers. One block at a time
// has the turn, and runs its fibers one after the other up to their next barrier: a round. The schedule decides the
// order of blocks and fibers and for how many rounds a block keeps its turn, so that a result that depends on the
// order, or a missing barrier, shows.
//
// Barriers are checked as well: all threads of a block must meet at the same one. Shuffles count as barriers of the
// whole block, which is more than CUDA asks for. Memory is sequentially consistent here: fences are not tested.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <semaphore>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#define CUDART_VERSION 13000
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }

inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace host_cuda {

enum class Order : int32_t { kForward = 0, kReverse = 1, kRandom = 2 };

struct Device {
  int multiprocessors = 1;
  Order order = Order::kForward;
  std::mt19937 random{0};
  std::string error;  // of the first thing that a kernel did wrong
  std::vector<std::unique_ptr<char[]>> stacks;  // by block; kept between launches of as many threads
  unsigned int stack_threads = 0;
};
inline Device device;

inline void report(const std::string& error) {
  if (device.error.empty()) device.error = error;
}

constexpr size_t kStackBytes = 128 * 1024;  // a fiber's; kernel arguments alone may take 32 KiB

class Block;
inline thread_local Block* running = nullptr;

// The fibers of one block.
class Block {
 public:
  Block(const std::function<void()>& kernel, unsigned int threads, char* stacks)
      : kernel_(kernel), fibers_(threads), waits_at_(threads), turn_(threads), shuffled_(2, std::vector<double>(threads)) {
    for (unsigned int i = 0; i < threads; ++i) {
      getcontext(&fibers_[i]);
      fibers_[i].uc_stack.ss_sp = stacks + i * kStackBytes;
      fibers_[i].uc_stack.ss_size = kStackBytes;
      fibers_[i].uc_link = &scheduler_;
      makecontext(&fibers_[i], &Block::enter, 0);
    }
    std::iota(turn_.begin(), turn_.end(), 0u);
    if (device.order == Order::kReverse) std::reverse(turn_.begin(), turn_.end());
  }

  // Runs every fiber to its next barrier. False when the block has ended, or cannot continue.
  bool round() {
    if (device.order == Order::kRandom) std::shuffle(turn_.begin(), turn_.end(), device.random);
    for (const unsigned int thread : turn_) {
      threadIdx.x = thread;
      waits_at_[thread] = kEnded;
      swapcontext(&scheduler_, &fibers_[thread]);
    }
    for (size_t i = 1; i < waits_at_.size(); ++i) {
      if (waits_at_[i] == waits_at_[0]) continue;
      report("threads 0 and " + std::to_string(i) + " are at different barriers: lines " +
             std::to_string(waits_at_[0]) + " and " + std::to_string(waits_at_[i]) + " (0: ended)");
      return false;
    }
    return waits_at_[0] != kEnded;
  }

  void wait(unsigned int line) {
    const unsigned int thread = threadIdx.x;
    waits_at_[thread] = line;
    swapcontext(&fibers_[thread], &scheduler_);
  }

  // Two buffers in turn: a fiber can pass the next shuffle before another has read this one's value.
  double shuffle_down(double value, unsigned int offset, unsigned int line) {
    const unsigned int thread = threadIdx.x;
    std::vector<double>& values = shuffled_[shuffles_[thread]++ % 2];
    values[thread] = value;
    wait(line);
    return thread % 32 + offset < 32 ? values[thread + offset] : value;
  }

 private:
  static constexpr unsigned int kEnded = 0;

  static void enter() { running->kernel_(); }

  const std::function<void()>& kernel_;
  std::vector<ucontext_t> fibers_;
  ucontext_t scheduler_;
  std::vector<unsigned int> waits_at_;  // lines
  std::vector<unsigned int> turn_;
  std::vector<std::vector<double>> shuffled_;
  std::vector<unsigned int> shuffles_ = std::vector<unsigned int>(fibers_.size());
};

// The blocks of one launch, of which one has the turn.
class Grid {
 public:
  Grid(std::function<void()> kernel, dim3 blocks, dim3 threads)
      : kernel_(std::move(kernel)), blocks_(blocks), threads_(threads), unfinished_(blocks.x) {
    std::iota(unfinished_.begin(), unfinished_.end(), 0u);
    for (unsigned int i = 0; i < blocks.x; ++i) turns_.push_back(std::make_unique<std::binary_semaphore>(0));
    if (device.stack_threads != threads.x) device.stacks.clear();
    device.stack_threads = threads.x;
    while (device.stacks.size() < blocks.x) {
      device.stacks.push_back(std::make_unique_for_overwrite<char[]>(threads.x * kStackBytes));
    }
  }

  void run() {
    std::vector<std::jthread> hosts;
    for (unsigned int i = 0; i < blocks_.x; ++i) hosts.emplace_back([this, i] { run_block(i); });
    turns_[next()]->release();
  }

 private:
  unsigned int next() const {
    switch (device.order) {
      case Order::kForward: return unfinished_.front();
      case Order::kReverse: return unfinished_.back();
      default: return unfinished_[device.random() % unfinished_.size()];
    }
  }

  void run_block(unsigned int number) {
    turns_[number]->acquire();
    gridDim = blocks_;
    blockDim = threads_;
    blockIdx.x = number;
    Block block(kernel_, threads_.x, device.stacks[number].get());
    running = &block;
    while (block.round()) {
      if (device.order != Order::kRandom || device.random() % 4 != 0) continue;
      turns_[next()]->release();
      turns_[number]->acquire();
    }
    std::erase(unfinished_, number);
    if (!unfinished_.empty()) turns_[next()]->release();
  }

  std::function<void()> kernel_;
  dim3 blocks_, threads_;
  std::vector<unsigned int> unfinished_;
  std::vector<std::unique_ptr<std::binary_semaphore>> turns_;
};

template <typename T>
T* aligned(T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(T) != 0) report("a vector access is not aligned");
  return pointer;
}

}  // namespace host_cuda

inline void __syncthreads(std::source_location here = std::source_location::current()) {
  host_cuda::running->wait(here.line());
}
inline void __threadfence() {}
inline double __shfl_down_sync(unsigned int, double value, unsigned int offset,
                               std::source_location here = std::source_location::current()) {
  return host_cuda::running->shuffle_down(value, offset, here.line());
}
inline unsigned int atomicAdd(unsigned int* address, unsigned int value) {
  const unsigned int before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T __ldcs(const T* address) {
  T value;
  std::memcpy(&value, host_cuda::aligned(address), sizeof(T));
  return value;
}
template <typename T>
void __stcs(T* address, T value) {
  std::memcpy(host_cuda::aligned(address), &value, sizeof(T));
}
inline float __uint_as_float(unsigned int bits) { return std::bit_cast<float>(bits); }
inline unsigned int __float_as_uint(float value) { return std::bit_cast<unsigned int>(value); }
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorAssert = 710 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline const char* cudaGetErrorString(cudaError_t) { return host_cuda::device.error.c_str(); }
inline cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = host_cuda::device.multiprocessors;
  return cudaSuccess;
}

template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments, size_t,
                             cudaStream_t) {
  host_cuda::device.error.clear();
  const auto call = [=]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    kernel(*static_cast<Parameters*>(arguments[kIndex])...);
  };
  host_cuda::Grid([=] { call(std::index_sequence_for<Parameters...>{}); }, blocks, threads).run();
  return host_cuda::device.error.empty() ? cudaSuccess : cudaErrorAssert;
}
