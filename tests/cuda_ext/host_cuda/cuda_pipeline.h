// Asynchronous copies of CUDA, for the host. What was copied is there when it is waited for, and not before: a wait that
// is missing, or for too few, shows.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "cuda_runtime.h"

namespace host_cuda {

struct Copy {
  void* target;
  std::vector<char> bytes;
};
struct Pipeline {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> committed;
};
// By CUDA thread of the block, which is a host thread.
inline thread_local std::map<unsigned int, Pipeline> pipelines;

}  // namespace host_cuda

inline void __pipeline_memcpy_async(void* target, const void* source, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(source) % bytes != 0) host_cuda::report("an asynchronous copy is not aligned");
  const char* from = static_cast<const char*>(source);
  host_cuda::pipelines[threadIdx.x].open.push_back({target, {from, from + bytes}});
}
inline void __pipeline_commit() {
  host_cuda::Pipeline& pipeline = host_cuda::pipelines[threadIdx.x];
  pipeline.committed.push_back(std::move(pipeline.open));
  pipeline.open.clear();
}
inline void __pipeline_wait_prior(size_t still_under_way) {
  auto& committed = host_cuda::pipelines[threadIdx.x].committed;
  for (; committed.size() > still_under_way; committed.pop_front()) {
    for (const host_cuda::Copy& copy : committed.front()) std::memcpy(copy.target, copy.bytes.data(), copy.bytes.size());
  }
}
