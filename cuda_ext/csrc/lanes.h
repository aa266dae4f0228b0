// A vector of sixteen floats or eight doubles, written as the compiler's vector type: the same source becomes
// AVX-512, two AVX2 registers or four of SSE, with the same order of additions. Included once per instruction set
// (STILLHOUSE_ISA), so everything here is in an anonymous namespace.
#pragma once

#include <cmath>
#include <cstdint>
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
using Longs = int64_t __attribute__((vector_size(64)));

template <typename To, typename From>
STILLHOUSE_LANES To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
struct LanesOf;
template <>
struct LanesOf<Floats> {
  using Scalar = float;
  using Integers = Ints;
  static constexpr int count = 16;
};
template <>
struct LanesOf<Doubles> {
  using Scalar = double;
  using Integers = Longs;
  static constexpr int count = 8;
};

template <typename V>
STILLHOUSE_LANES V all(typename LanesOf<V>::Scalar value) {
  return V{} + value;
}

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

// `test(a, b) ? yes : no` in each lane, a register at a time: comparisons of wider vectors become a lane at a time.
template <typename V, typename Test>
STILLHOUSE_LANES V choose(const Test& test, V a, V b, V yes, V no) {
  using R = typename Register<typename LanesOf<V>::Scalar>::Type;
  constexpr int registers = sizeof(V) / sizeof(R);
  R as[registers], bs[registers], yeses[registers], noes[registers];
  memcpy(as, &a, sizeof(V));
  memcpy(bs, &b, sizeof(V));
  memcpy(yeses, &yes, sizeof(V));
  memcpy(noes, &no, sizeof(V));
#pragma GCC unroll 4
  for (int i = 0; i < registers; ++i) yeses[i] = test(as[i], bs[i]) ? yeses[i] : noes[i];
  memcpy(&a, yeses, sizeof(V));
  return a;
}

// The larger of each lane; NaN where b is.
template <typename V>
STILLHOUSE_LANES V larger(V a, V b) {
  return choose([](auto x, auto y) STILLHOUSE_LAMBDA { return x >= y; }, a, b, a, b);
}

// Pairs of lanes are added, then pairs of sums: one order for every instruction set.
template <typename V>
STILLHOUSE_LANES auto sum_of(V values) {
  constexpr int count = sizeof(V) / sizeof(values[0]);
  std::remove_reference_t<decltype(values[0])> lanes[count];
  memcpy(lanes, &values, sizeof(values));
  for (int width = count / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <typename V>
STILLHOUSE_LANES auto largest_of(V values) {
  constexpr int count = sizeof(V) / sizeof(values[0]);
  std::remove_reference_t<decltype(values[0])> lanes[count];
  memcpy(lanes, &values, sizeof(values));
  for (int width = count / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      if (!(lanes[lane] >= lanes[lane + width])) lanes[lane] = lanes[lane + width];  // NaN moves up
    }
  }
  return lanes[0];
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
  using R = typename Register<typename LanesOf<V>::Scalar>::Type;
  R parts[sizeof(V) / sizeof(R)];
  memcpy(parts, &x, sizeof(V));
#pragma GCC unroll 4
  for (R& part : parts) part = exp_of(part);
  memcpy(&x, parts, sizeof(V));
  return x;
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
  return choose([](auto a, auto b) STILLHOUSE_LAMBDA { return a > b; }, t, all<Floats>(0.927734375f), far, near);
}

STILLHOUSE_LANES Doubles erf(Doubles x) {
  for (int lane = 0; lane < 8; ++lane) x[lane] = std::erf(x[lane]);
  return x;
}

// How elements lie in memory, and the vector that they are computed in.
template <typename Vector>
struct Plain {
  using Stored = typename LanesOf<Vector>::Scalar;
  using V = Vector;
  static STILLHOUSE_LANES V load(const Stored* from) {
    V values;
    memcpy(&values, from, sizeof(values));
    return values;
  }
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

// A whole vector, or the first few lanes of one at the end of a row.
struct Whole {
  template <typename S>
  STILLHOUSE_LANES typename S::V load(const typename S::Stored* from) const {
    return S::load(from);
  }
  template <typename S>
  STILLHOUSE_LANES void store(typename S::Stored* to, typename S::V values) const {
    S::store(to, values);
  }
  template <typename V>
  STILLHOUSE_LANES V only(V values, V) const {
    return values;
  }
};

struct Part {
  int64_t lanes;

  template <typename S>
  STILLHOUSE_LANES typename S::V load(const typename S::Stored* from) const {
    typename S::Stored padded[LanesOf<typename S::V>::count] = {};
    memcpy(padded, from, lanes * sizeof(*from));
    return S::load(padded);
  }
  template <typename S>
  STILLHOUSE_LANES void store(typename S::Stored* to, typename S::V values) const {
    typename S::Stored padded[LanesOf<typename S::V>::count];
    S::store(padded, values);
    memcpy(to, padded, lanes * sizeof(*to));
  }
  // The values of the lanes that there are, `otherwise` in the others.
  template <typename V>
  STILLHOUSE_LANES V only(V values, V otherwise) const {
    for (int lane = static_cast<int>(lanes); lane < LanesOf<V>::count; ++lane) values[lane] = otherwise[lane];
    return values;
  }
};

// Calls `body(column, part)` for each vector of a row.
template <typename V, typename Body>
STILLHOUSE_LANES void for_columns(int64_t width, const Body& body) {
  int64_t column = 0;
  for (; column + LanesOf<V>::count <= width; column += LanesOf<V>::count) body(column, Whole{});
  if (column < width) body(column, Part{width - column});
}

}  // namespace
}  // namespace stillhouse::cpu::STILLHOUSE_ISA
