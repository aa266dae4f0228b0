// A vector of sixteen floats or eight doubles, written as the compiler's vector type: the same source becomes
// AVX-512, two AVX2 registers or four of SSE, with the same order of additions. Included once per instruction set
// (STILLHOUSE_ISA), so everything here is in an anonymous namespace. Then rows in memory, given or in buffers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "number_formats.h"

#define STILLHOUSE_LANES inline __attribute__((always_inline))
#define STILLHOUSE_LAMBDA __attribute__((always_inline))

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

using Floats = float __attribute__((vector_size(64)));
using Doubles = double __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

template <typename To, typename From>
STILLHOUSE_LANES To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
STILLHOUSE_LANES V loaded(const void* from) {
  V values;
  memcpy(&values, from, sizeof(values));
  return values;
}

template <typename V>
using ScalarOf = std::remove_cvref_t<decltype(V{}[0])>;
template <typename V>
constexpr int kLanesOf = sizeof(V) / sizeof(ScalarOf<V>);

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

// What one register holds of a number format.
template <typename T>
struct Register {
  typedef T Type __attribute__((vector_size(kRegisterBytes)));
  static constexpr int count = kRegisterBytes / sizeof(T);
};

// A vector as the registers that hold it.
template <typename V>
struct Registers {
  static constexpr int count = sizeof(V) / kRegisterBytes;
  typename Register<ScalarOf<V>>::Type own[count];
};

// `test(a, b) ? yes : no` in each lane, a register at a time: comparisons of wider vectors become a lane at a time.
template <typename V, typename Test>
STILLHOUSE_LANES V choose(const Test& test, V a, V b, V yes, V no) {
  const auto as = bits_as<Registers<V>>(a), bs = bits_as<Registers<V>>(b), noes = bits_as<Registers<V>>(no);
  auto chosen = bits_as<Registers<V>>(yes);
#pragma GCC unroll 4
  for (int i = 0; i < chosen.count; ++i) chosen.own[i] = test(as.own[i], bs.own[i]) ? chosen.own[i] : noes.own[i];
  return bits_as<V>(chosen);
}

// Pairs of lanes are joined, then pairs of those: one order for every instruction set.
template <typename V, typename Join>
STILLHOUSE_LANES ScalarOf<V> joined(V values, const Join& join) {
  ScalarOf<V> lanes[kLanesOf<V>];
  memcpy(lanes, &values, sizeof(values));
  for (int width = kLanesOf<V> / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] = join(lanes[lane], lanes[lane + width]);
  }
  return lanes[0];
}

template <typename V>
STILLHOUSE_LANES auto sum_of(V values) {
  return joined(values, [](auto a, auto b) STILLHOUSE_LAMBDA { return a + b; });
}

template <typename V>
STILLHOUSE_LANES auto largest_of(V values) {
  return joined(values, [](auto a, auto b) STILLHOUSE_LAMBDA { return a >= b ? a : b; });  // NaN moves up
}

// e^x of a register, to 2 units in the last place; below -87.3 the smallest normal number, above 88.3 about 2.4e38.
STILLHOUSE_LANES Register<float>::Type exp_of(Register<float>::Type x) {
  using R = Register<float>::Type;
  using Integers = decltype(x < x);
  x = x < -87.33f ? R{} - 87.33f : x;
  x = x > 88.3f ? R{} + 88.3f : x;
  const R shifted = x * 1.44269504f + 12582912.0f;  // 1.5 x 2^23: the sum is rounded to an integer
  const R n = shifted - 12582912.0f;
  R r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  R y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Integers exponent = (bits_as<Integers>(shifted) - bits_as<int32_t>(12582912.0f) + 127) << 23;
  return y * bits_as<R>(exponent);
}

STILLHOUSE_LANES Register<double>::Type exp_of(Register<double>::Type x) {
  for (int lane = 0; lane < Register<double>::count; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

template <typename V>
STILLHOUSE_LANES V exp(V x) {
  auto parts = bits_as<Registers<V>>(x);
#pragma GCC unroll 4
  for (auto& part : parts.own) part = exp_of(part);
  return bits_as<V>(parts);
}

// erf x to about 1 unit in the last place: a polynomial near 0, and 1 - e^p(|x|) beyond 0.9277.
STILLHOUSE_LANES Floats erf(Floats x) {
  const Ints sign = bits_as<Ints>(x) & INT32_MIN;
  const Floats t = bits_as<Floats>(bits_as<Ints>(x) & INT32_MAX), s = x * x;
  Floats r = t * -1.72853470e-5f + 3.83197126e-4f;
  const Floats u = t * -3.88396438e-3f + 2.42546219e-2f;
  r = r * s + u;
  r = r * t + -1.06777877e-1f;
  r = r * t + -6.34846687e-1f;
  r = r * t + -1.28717512e-1f;
  r = r * t - t;
  const Floats far = bits_as<Floats>(bits_as<Ints>(1.0f - exp(r)) | sign);
  Floats near = s * -5.96761703e-4f + 4.99119423e-3f;
  near = near * s + -2.67681349e-2f;
  near = near * s + 1.12819925e-1f;
  near = near * s + -3.76125336e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * x + x;
  return choose([](auto a, auto b) STILLHOUSE_LAMBDA { return a > b; }, t, Floats{} + 0.927734375f, far, near);
}

STILLHOUSE_LANES Doubles erf(Doubles x) {
  for (int lane = 0; lane < 8; ++lane) x[lane] = std::erf(x[lane]);
  return x;
}

// How elements lie in memory, and the vector that they are computed in.
template <typename Vector>
struct Plain {
  using Stored = ScalarOf<Vector>;
  using V = Vector;
  static STILLHOUSE_LANES V load(const Stored* from) { return loaded<V>(from); }
  static STILLHOUSE_LANES void store(Stored* to, V values) { memcpy(to, &values, sizeof(values)); }
};
using Float32 = Plain<Floats>;
using Float64 = Plain<Doubles>;

template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
struct Bits16 {
  using Stored = uint16_t;
  using V = Floats;
  static STILLHOUSE_LANES V load(const Stored* from) {
    float lanes[16];
    for (int lane = 0; lane < 16; ++lane) lanes[lane] = kWiden(from[lane]);
    return Float32::load(lanes);
  }
  static STILLHOUSE_LANES void store(Stored* to, V values) {
    float lanes[16];
    Float32::store(lanes, values);
    for (int lane = 0; lane < 16; ++lane) to[lane] = kNarrow(lanes[lane]);
  }
};
using BFloat16 = Bits16<bfloat16_to_float, float_to_bfloat16>;
using Float16 = Bits16<half_to_float, float_to_half>;

// Storage of parameters, statistics and sums that go with a storage of activations.
template <typename S>
using Wide = Plain<typename S::V>;
template <typename S>
using Number = typename Wide<S>::Stored;

// Of a pointer into activations or into what goes with them.
template <typename S, typename T>
using StorageOf = std::conditional_t<std::is_same_v<T, typename S::Stored>, S, Wide<S>>;

// A whole vector, or the first few lanes of one at the end of a row.
template <typename S, bool kWhole = false>
struct Part {
  using V = typename S::V;
  int64_t lanes;

  template <typename T>
  STILLHOUSE_LANES V load(const T* from) const {
    if constexpr (kWhole) return StorageOf<S, T>::load(from);
    T padded[kLanesOf<V>] = {};
    memcpy(padded, from, lanes * sizeof(T));
    return StorageOf<S, T>::load(padded);
  }
  template <typename T>
  STILLHOUSE_LANES void store(T* to, V values) const {
    if constexpr (kWhole) return StorageOf<S, T>::store(to, values);
    T padded[kLanesOf<V>];
    StorageOf<S, T>::store(padded, values);
    memcpy(to, padded, lanes * sizeof(T));
  }
  // The values of the lanes that there are, `otherwise` in the others.
  STILLHOUSE_LANES V only(V values, V otherwise) const {
    if constexpr (kWhole) return values;
    for (int lane = static_cast<int>(lanes); lane < kLanesOf<V>; ++lane) values[lane] = otherwise[lane];
    return values;
  }
};

// Calls `body(column, part)` for each vector of a row.
template <typename S, typename Body>
STILLHOUSE_LANES void for_columns(int64_t width, const Body& body) {
  constexpr int count = kLanesOf<typename S::V>;
  int64_t column = 0;
  for (; column + count <= width; column += count) body(column, Part<S, true>{count});
  if (column < width) body(column, Part<S>{width - column});
}

template <typename S, typename Void>
STILLHOUSE_LANES auto* row_of(Void* matrix, int64_t row, int64_t width) {
  using Stored = std::conditional_t<std::is_const_v<Void>, const typename S::Stored, typename S::Stored>;
  return static_cast<Stored*>(matrix) + row * width;
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
auto with_storage(Storage storage, const Body& body) {
  switch (storage) {
    case Storage::kFloat64: return body(Float64{});
    case Storage::kBFloat16: return body(BFloat16{});
    case Storage::kFloat16: return body(Float16{});
    default: return body(Float32{});
  }
}

}  // namespace
}  // namespace stillhouse::cpu::STILLHOUSE_ISA
