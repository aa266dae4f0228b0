// Rows in memory: of activations, of the wide numbers that go with them, and in buffers. Included once per
// instruction set, like lanes.h.
#pragma once

#include <cstdlib>

#include "encoder_rows.h"
#include "lanes.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

// Storage of parameters, statistics and sums that go with a storage of activations.
template <typename S>
using Wide = Plain<typename S::V>;
template <typename S>
using Number = typename Wide<S>::Stored;

template <typename S>
STILLHOUSE_LANES const typename S::Stored* row_of(const void* matrix, int64_t row, int64_t width) {
  return static_cast<const typename S::Stored*>(matrix) + row * width;
}

template <typename S>
STILLHOUSE_LANES typename S::Stored* row_of(void* matrix, int64_t row, int64_t width) {
  return static_cast<typename S::Stored*>(matrix) + row * width;
}

// Memory of whole vectors. No std::vector: its functions would be shared between the objects.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t width)
      : memory_(static_cast<T*>(std::aligned_alloc(64, (width + 63) / 64 * 64 * sizeof(T)))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }
  T* data() { return memory_; }

 private:
  T* memory_;
};

template <typename Body>
auto with_storage(Element element, const Body& body) {
  switch (element) {
    case Element::kFloat64: return body(Float64{});
    case Element::kBFloat16: return body(BFloat16{});
    case Element::kFloat16: return body(Float16{});
    default: return body(Float32{});
  }
}

}  // namespace
}  // namespace stillhouse::cpu::STILLHOUSE_ISA
