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

// The noise sums of one chunk, in fp32 lanes that are emptied into doubles before they grow inexact.
struct NoiseLanes {
  float product[kLanes] = {}, difference[kLanes] = {}, square[kLanes] = {};

  void empty_into(double* sums) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[0] += product[lane];
      sums[1] += difference[lane];
      sums[2] += square[lane];
      product[lane] = difference[lane] = square[lane] = 0.0f;
    }
  }
};

template <bool kFirst, bool kWritePrevious, bool kNoise>
inline __attribute__((always_inline)) void update_lane(int64_t i, int lane, float* __restrict theta,
                                                       const float* __restrict gradient, float* __restrict m,
                                                       float* __restrict v, float* __restrict n,
                                                       float* __restrict g_prev, const AdanScalars& s,
                                                       NoiseLanes& noise) {
  AdanElement e{theta[i], m[i], v[i], n[i], kFirst ? 0.0f : g_prev[i]};
  const float previous = e.g_prev;
  adan_update(e, gradient[i], s, kFirst);
  theta[i] = e.theta;
  m[i] = e.m;
  v[i] = e.v;
  n[i] = e.n;
  if (kWritePrevious) g_prev[i] = e.g_prev;
  if (kNoise && !kFirst) {
    const float difference = e.g_prev - previous;
    noise.product[lane] += e.g_prev * previous;
    noise.difference[lane] += difference * difference;
    noise.square[lane] += e.g_prev * e.g_prev;
  }
}

template <bool kFirst, bool kWritePrevious, bool kNoise>
void update_floats(int64_t count, float* __restrict theta, const float* __restrict gradient, float* __restrict m,
                   float* __restrict v, float* __restrict n, float* __restrict g_prev, const AdanScalars& scalars,
                   double* sums) {
  const AdanScalars s = scalars;
  NoiseLanes noise;
  if constexpr (kNoise) {
    constexpr int64_t kEmptyEvery = 4096;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        update_lane<kFirst, kWritePrevious, true>(i + lane, lane, theta, gradient, m, v, n, g_prev, s, noise);
      }
      if ((i + kLanes) % kEmptyEvery == 0) noise.empty_into(sums);
    }
    for (int lane = 0; i < count; ++i, ++lane) {
      update_lane<kFirst, kWritePrevious, true>(i, lane, theta, gradient, m, v, n, g_prev, s, noise);
    }
    noise.empty_into(sums);
    if (!kFirst) sums[3] += static_cast<double>(count);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      update_lane<kFirst, kWritePrevious, false>(i, 0, theta, gradient, m, v, n, g_prev, s, noise);
    }
  }
}

using UpdateFloats = void (*)(int64_t, float*, const float*, float*, float*, float*, float*, const AdanScalars&,
                              double*);

UpdateFloats choose(const ChunkWork& work) {
  static constexpr UpdateFloats kTable[2][2][2] = {
      {{update_floats<false, false, false>, update_floats<false, false, true>},
       {update_floats<false, true, false>, update_floats<false, true, true>}},
      {{update_floats<true, false, false>, update_floats<true, false, true>},
       {update_floats<true, true, false>, update_floats<true, true, true>}},
  };
  return kTable[work.first][work.write_g_prev][work.noise != nullptr];
}

void widen(const void* from, Storage storage, int64_t begin, int64_t count, float* __restrict to) {
  if (storage == Storage::kFloat32) {
    memcpy(to, static_cast<const float*>(from) + begin, count * sizeof(float));
    return;
  }
  const uint16_t* __restrict stored = static_cast<const uint16_t*>(from) + begin;
  if (storage == Storage::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_to_float(stored[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(stored[i]);
  }
}

void narrow(const float* __restrict from, Storage storage, int64_t begin, int64_t count, void* to) {
  if (storage == Storage::kFloat32) {
    memcpy(static_cast<float*>(to) + begin, from, count * sizeof(float));
    return;
  }
  uint16_t* __restrict stored = static_cast<uint16_t*>(to) + begin;
  if (storage == Storage::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) stored[i] = float_to_bfloat16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) stored[i] = float_to_half(from[i]);
  }
}

void load_theta(const ChunkWork& work, int64_t begin, int64_t count, float* __restrict theta) {
  const AdanTensor& t = *work.tensor;
  if (work.master == Master::kFull) {
    widen(t.master, Storage::kFloat32, begin, count, theta);
  } else if (work.master == Master::kSplit) {
    const uint16_t* __restrict upper = static_cast<const uint16_t*>(t.param) + begin;
    const int16_t* __restrict remainder = static_cast<const int16_t*>(t.master) + begin;
    for (int64_t i = 0; i < count; ++i) theta[i] = join_split(upper[i], remainder[i]);
  } else {
    widen(t.param, work.storage, begin, count, theta);
  }
}

void store_theta(const ChunkWork& work, int64_t begin, int64_t count, const float* __restrict theta) {
  const AdanTensor& t = *work.tensor;
  if (work.master == Master::kSplit) {
    uint16_t* __restrict upper = static_cast<uint16_t*>(t.param) + begin;
    int16_t* __restrict remainder = static_cast<int16_t*>(t.master) + begin;
    for (int64_t i = 0; i < count; ++i) {
      upper[i] = split_upper(theta[i]);
      remainder[i] = split_remainder(theta[i]);
    }
    return;
  }
  if (work.master == Master::kFull) narrow(theta, Storage::kFloat32, begin, count, t.master);
  narrow(theta, work.storage, begin, count, t.param);
}

void update_staged(const ChunkWork& work, UpdateFloats update) {
  const AdanTensor& t = *work.tensor;
  const Storage moments = work.bfloat16_moments ? Storage::kBFloat16 : Storage::kFloat32;
  alignas(64) float theta[kStage], gradient[kStage], m[kStage], v[kStage], g_prev[kStage];
  for (int64_t begin = work.begin; begin < work.end; begin += kStage) {
    const int64_t count = work.end - begin < kStage ? work.end - begin : kStage;
    load_theta(work, begin, count, theta);
    widen(t.grad, work.storage, begin, count, gradient);
    widen(t.m, moments, begin, count, m);
    widen(t.v, moments, begin, count, v);
    if (!work.first) widen(t.g_prev, work.storage, begin, count, g_prev);
    update(count, theta, gradient, m, v, t.n + begin, g_prev, work.scalars, work.noise);
    store_theta(work, begin, count, theta);
    narrow(m, moments, begin, count, t.m);
    narrow(v, moments, begin, count, t.v);
    if (work.write_g_prev) narrow(g_prev, work.storage, begin, count, t.g_prev);
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

}  // namespace

void update_chunk(const ChunkWork& work) {
  const UpdateFloats update = choose(work);
  if (work.storage != Storage::kFloat32 || work.bfloat16_moments) {
    update_staged(work, update);
    return;
  }
  const AdanTensor& t = *work.tensor;
  const int64_t begin = work.begin;
  update(work.end - begin, static_cast<float*>(t.param) + begin, static_cast<const float*>(t.grad) + begin,
         static_cast<float*>(t.m) + begin, static_cast<float*>(t.v) + begin, t.n + begin,
         static_cast<float*>(t.g_prev) + begin, work.scalars, work.noise);
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

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
