// One parallel region over the flat list of chunks of all tensors.
//
// Threads take chunks from a shared counter: a neighbour that slows one core down does not make the other wait.
// Every sum is kept per chunk and added in the order of the chunks, so results do not depend on the threads.

#include "adan_launch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "adan_cpu_chunk.h"

namespace stillhouse::cpu {
namespace {

// The tensor that owns a chunk. Tensors without elements own none and are stepped over.
int64_t owner_of(const AdanTensor* tensors, int64_t tensor_count, int64_t chunk) {
  const AdanTensor* after = std::upper_bound(
      tensors, tensors + tensor_count, chunk,
      [](int64_t wanted, const AdanTensor& tensor) { return wanted < tensor.first_chunk; });
  return after - tensors - 1;
}

// Calls `work(chunk, tensor, begin, end)` once for every chunk.
template <typename Work>
void for_each_chunk(const AdanTensor* tensors, int64_t tensor_count, int64_t chunk_count, int threads,
                    const Work& work) {
  std::atomic<int64_t> next{0};
  const int wanted = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, chunk_count)));
#pragma omp parallel num_threads(wanted) if (wanted > 1)
  {
    for (;;) {
      const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunk_count) break;
      const AdanTensor& tensor = tensors[owner_of(tensors, tensor_count, chunk)];
      const int64_t begin = (chunk - tensor.first_chunk) * kCpuChunk;
      work(chunk, tensor, begin, std::min(begin + kCpuChunk, tensor.numel));
    }
  }
}

}  // namespace

int64_t update(const AdanLaunch& launch, int threads) {
  if (launch.found_inf != nullptr && *launch.found_inf != 0.0f) return 0;
  const ChunkKernels kernels = STILLHOUSE_CHOSEN(chunk_kernels)();
  const float factor = gradient_factor(launch.grad_scale, launch.grad_norm, launch.max_grad_norm);
  std::atomic<int64_t> updated{0};

  for_each_chunk(launch.tensors, launch.tensor_count, launch.chunk_count, threads,
                 [&](int64_t, const AdanTensor& tensor, int64_t begin, int64_t end) {
                   const double finished = static_cast<double>(*tensor.step);
                   ChunkWork work;
                   work.tensor = &tensor;
                   work.begin = begin;
                   work.end = end;
                   work.scalars = adan_scalars(launch.groups[tensor.group], finished + 1.0, factor);
                   work.storage = launch.storage;
                   work.master = launch.master;
                   work.bfloat16_moments = launch.bfloat16_moments;
                   work.first = finished == 0.0;
                   kernels.update(work);
                   updated.fetch_add(end - begin, std::memory_order_relaxed);
                 });

  for (int64_t i = 0; i < launch.tensor_count; ++i) *launch.tensors[i].step += 1.0f;
  return updated.load();
}

double gradient_norm(const AdanTensor* tensors, int64_t tensor_count, int64_t chunk_count, Storage storage,
                     int threads) {
  const ChunkKernels kernels = STILLHOUSE_CHOSEN(chunk_kernels)();
  std::vector<double> partial(chunk_count, 0.0);
  for_each_chunk(tensors, tensor_count, chunk_count, threads,
                 [&](int64_t chunk, const AdanTensor& tensor, int64_t begin, int64_t end) {
                   ChunkWork work{};
                   work.tensor = &tensor;
                   work.begin = begin;
                   work.end = end;
                   work.storage = storage;
                   partial[chunk] = kernels.squares(work);
                 });
  double total = 0.0;
  for (double squares : partial) total += squares;
  return std::sqrt(total);
}

}  // namespace stillhouse::cpu
