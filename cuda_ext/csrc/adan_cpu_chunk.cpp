// Compiled once per instruction set with STILLHOUSE_ISA naming the set and the compiler's flags choosing it.
// The loops are plain; the compiler makes vector code of them. Everything here is inlined or in an anonymous
// namespace: a function shared between the objects could be linked from the wrong instruction set.

#include "adan_cpu_chunk.h"

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

using UpdateFloats = void (*)(int64_t, float*, const float*, float*, float*, float*, float*, const AdanScalars&);

// Between 16-bit storage and fp32.
void widen(const void* from, Storage storage, int64_t begin, int64_t count, float* __restrict to) {
  const uint16_t* __restrict stored = static_cast<const uint16_t*>(from) + begin;
  if (storage == Storage::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_to_float(stored[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(stored[i]);
  }
}

void narrow(const float* __restrict from, Storage storage, int64_t begin, int64_t count, void* to) {
  uint16_t* __restrict stored = static_cast<uint16_t*>(to) + begin;
  if (storage == Storage::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) stored[i] = float_to_bfloat16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) stored[i] = float_to_half(from[i]);
  }
}

// Where a block of fp32 values is worked on: in place when memory holds fp32, otherwise in a stage that is filled
// from 16-bit storage and emptied into it again.
struct Block {
  float* values;
  bool staged;

  Block(void* memory, Storage storage, int64_t begin, float* stage)
      : values(storage == Storage::kFloat32 ? static_cast<float*>(memory) + begin : stage),
        staged(storage != Storage::kFloat32) {}
};

void split_theta(const float* __restrict theta, int64_t count, uint16_t* __restrict upper,
                 int16_t* __restrict remainder) {
  for (int64_t i = 0; i < count; ++i) {
    upper[i] = split_upper(theta[i]);
    remainder[i] = split_remainder(theta[i]);
  }
}

void join_theta(float* __restrict theta, int64_t count, const uint16_t* __restrict upper,
                const int16_t* __restrict remainder) {
  for (int64_t i = 0; i < count; ++i) theta[i] = join_split(upper[i], remainder[i]);
}

void update_staged(const ChunkWork& work, UpdateFloats update) {
  const AdanTensor& t = *work.tensor;
  const Storage moments = work.bfloat16_moments ? Storage::kBFloat16 : Storage::kFloat32;
  const Storage previous = previous_storage(work.storage);
  const bool full = work.master == Master::kFull, split = work.master == Master::kSplit;
  alignas(64) float theta_stage[kStage], gradient_stage[kStage], m_stage[kStage], v_stage[kStage],
      g_prev_stage[kStage];
  for (int64_t begin = work.begin; begin < work.end; begin += kStage) {
    const int64_t count = work.end - begin < kStage ? work.end - begin : kStage;
    const Block theta(full ? t.master : t.param, full ? Storage::kFloat32 : work.storage, begin, theta_stage);
    const Block gradient(const_cast<void*>(t.grad), work.storage, begin, gradient_stage);
    const Block m(t.m, moments, begin, m_stage), v(t.v, moments, begin, v_stage);
    const Block g_prev(t.g_prev, previous, begin, g_prev_stage);
    uint16_t* const upper = static_cast<uint16_t*>(t.param) + begin;
    int16_t* const remainder = static_cast<int16_t*>(t.master) + begin;  // used when the master is split

    if (split) {
      join_theta(theta.values, count, upper, remainder);
    } else if (theta.staged) {
      widen(t.param, work.storage, begin, count, theta.values);
    }
    if (gradient.staged) widen(t.grad, work.storage, begin, count, gradient.values);
    if (m.staged) widen(t.m, moments, begin, count, m.values);
    if (v.staged) widen(t.v, moments, begin, count, v.values);
    if (g_prev.staged && !work.first) widen(t.g_prev, previous, begin, count, g_prev.values);

    update(count, theta.values, gradient.values, m.values, v.values, t.n + begin, g_prev.values, work.scalars);

    if (split) {
      split_theta(theta.values, count, upper, remainder);
    } else if (work.storage != Storage::kFloat32) {
      narrow(theta.values, work.storage, begin, count, t.param);
    }
    if (m.staged) narrow(m.values, moments, begin, count, t.m);
    if (v.staged) narrow(v.values, moments, begin, count, t.v);
    if (g_prev.staged) narrow(g_prev.values, previous, begin, count, t.g_prev);
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

void update_chunk(const ChunkWork& work) {
  const UpdateFloats update = work.first ? update_floats<true> : update_floats<false>;
  if (work.storage != Storage::kFloat32 || work.bfloat16_moments) {
    update_staged(work, update);
    return;
  }
  const AdanTensor& t = *work.tensor;
  const int64_t begin = work.begin;
  update(work.end - begin, static_cast<float*>(t.param) + begin, static_cast<const float*>(t.grad) + begin,
         static_cast<float*>(t.m) + begin, static_cast<float*>(t.v) + begin, t.n + begin,
         static_cast<float*>(t.g_prev) + begin, work.scalars);
}

double squares_of_chunk(const ChunkWork& work) {
  const void* gradient = work.tensor->grad;
  if (work.storage == Storage::kFloat32) {
    return squares(static_cast<const float*>(gradient) + work.begin, work.end - work.begin);
  }
  alignas(64) float staged[kStage];
  double total = 0.0;
  for (int64_t begin = work.begin; begin < work.end; begin += kStage) {
    const int64_t count = work.end - begin < kStage ? work.end - begin : kStage;
    widen(gradient, work.storage, begin, count, staged);
    total += squares(staged, count);
  }
  return total;
}

}  // namespace

ChunkKernels chunk_kernels() { return {update_chunk, squares_of_chunk}; }

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
