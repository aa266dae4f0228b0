// Compiled once per instruction set with STILLHOUSE_ISA naming the set and the compiler's flags choosing it.
// The loops are plain; the compiler makes vector code of them. Everything here is inlined or in an anonymous
// namespace: a function shared between the objects could be linked from the wrong instruction set.

#include "adan_cpu_chunk.h"

#include <algorithm>

#include "number_formats.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

// Sums run in this many independent lanes, so that the order of additions, and with it the result to the
// last bit, is the same for every instruction set's vector width.
constexpr int kLanes = 16;

// Elements that are widened to fp32 at a time when storage is 16-bit: five arrays of 1 KiB stay in L1.
constexpr int64_t kStage = 256;

template <bool kFirst>
void update_floats(int64_t count, float* __restrict theta, const float* __restrict gradient, float* __restrict m,
                   float* __restrict v, float* __restrict n, float* __restrict g_prev, const AdanScalars& scalars) {
  const AdanScalars s = scalars;
  for (int64_t i = 0; i < count; ++i) {
    AdanElement e{theta[i], m[i], v[i], n[i], kFirst ? 0.0f : g_prev[i]};
    adan_update(e, gradient[i], s, kFirst);
    theta[i] = e.theta;
    m[i] = e.m;
    v[i] = e.v;
    n[i] = e.n;
    g_prev[i] = e.g_prev;
  }
}

// The fp32 values of a chunk, a block at a time: in place where memory holds fp32, otherwise in a stage that is filled
// from 16-bit storage and emptied into it again.
class Values {
 public:
  // `remainder`: the lower halves where the memory has the upper ones of split masters, else null.
  Values(Storage storage, void* memory, void* remainder = nullptr)
      : storage_(storage), memory_(memory), remainder_(static_cast<int16_t*>(remainder)) {}

  float* read(int64_t begin, int64_t count) {
    if (storage_ == Storage::kFloat32) return static_cast<float*>(memory_) + begin;
    const uint16_t* __restrict stored = static_cast<const uint16_t*>(memory_) + begin;
    float* __restrict to = stage_;
    if (remainder_ != nullptr) {
      const int16_t* __restrict lower = remainder_ + begin;
      for (int64_t i = 0; i < count; ++i) to[i] = join_split(stored[i], lower[i]);
    } else if (storage_ == Storage::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_to_float(stored[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(stored[i]);
    }
    return to;
  }

  void write(const float* __restrict from, int64_t begin, int64_t count) const {
    if (storage_ == Storage::kFloat32) return;
    uint16_t* __restrict stored = static_cast<uint16_t*>(memory_) + begin;
    if (remainder_ != nullptr) {
      int16_t* __restrict lower = remainder_ + begin;
      for (int64_t i = 0; i < count; ++i) {
        stored[i] = split_upper(from[i]);
        lower[i] = split_remainder(from[i]);
      }
    } else if (storage_ == Storage::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) stored[i] = float_to_bfloat16(from[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) stored[i] = float_to_half(from[i]);
    }
  }

 private:
  Storage storage_;
  void* memory_;
  int16_t* remainder_;
  alignas(64) float stage_[kStage];
};

void update(const AdanLaunch& launch, const AdanTensor& t, int64_t begin, int64_t end, const AdanScalars& scalars) {
  const bool first = *t.step == 0.0f;  // no previous gradient yet
  const auto step = first ? update_floats<true> : update_floats<false>;
  const Storage moments = launch.bfloat16_moments ? Storage::kBFloat16 : Storage::kFloat32;
  const bool full = launch.master == Master::kFull;
  Values param(launch.storage, t.param, launch.master == Master::kSplit ? t.master : nullptr);
  Values master(Storage::kFloat32, t.master), gradient(launch.storage, t.grad), m(moments, t.m), v(moments, t.v),
      g_prev(previous_storage(launch.storage), t.g_prev);
  const bool staged = launch.storage != Storage::kFloat32 || launch.bfloat16_moments;
  for (int64_t count; begin < end; begin += count) {
    count = staged ? std::min(kStage, end - begin) : end - begin;
    float* const theta = (full ? master : param).read(begin, count);
    float *const ms = m.read(begin, count), *const vs = v.read(begin, count), *const gs = g_prev.read(begin, count);
    step(count, theta, gradient.read(begin, count), ms, vs, static_cast<float*>(t.n) + begin, gs, scalars);
    param.write(theta, begin, count);
    m.write(ms, begin, count);
    v.write(vs, begin, count);
    g_prev.write(gs, begin, count);
  }
}

double squares(const float* __restrict values, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  double total = 0.0;
  for (; i < count; ++i) total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

double squares(const AdanLaunch& launch, const AdanTensor& tensor, int64_t begin, int64_t end) {
  Values gradient(launch.storage, tensor.grad);
  double total = 0.0;
  for (int64_t count; begin < end; begin += count) {
    count = launch.storage == Storage::kFloat32 ? end - begin : std::min(kStage, end - begin);
    total += squares(gradient.read(begin, count), count);
  }
  return total;
}

}  // namespace

ChunkKernels chunk_kernels() { return {update, squares}; }

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
