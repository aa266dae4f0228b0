// Small matrix products that stay in the cache, in tiles that stay in registers. Included once per instruction set,
// like lanes.h. An element's terms are added in the order of k, in every instruction set.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

// A tile of 6 rows by this many registers is what a set's registers hold, with room for their operands.
#if defined(__AVX512F__)
constexpr int kTileRegisters = 4;
#else
constexpr int kTileRegisters = 2;
#endif
constexpr int kTileRows = 6;
constexpr int64_t kTermsAtOnce = 128;  // rows of B that stay in the first cache

template <typename T>
constexpr int kTile = Register<T>::count * kTileRegisters;  // columns of a tile, and of a panel of B

// C = A B, or C + A B. B lies in panels of `kTile<T>` columns.
template <typename T>
struct Product {
  int64_t rows, columns, terms;  // columns: a multiple of 16
  const T* a;                    // A(i, k) = a[i a_row + k a_step]
  int64_t a_row, a_step;
  const T* b;  // B(k, j) = b[(j / tile) b_panel + k b_row + j % tile]
  int64_t b_panel, b_row;
  T* c;  // C(i, j) = c[i c_row + j]
  int64_t c_row;
  bool adds;
};

template <typename T, int kRows, int kRegisters>
void tile(int64_t terms, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row, T* c, int64_t c_row,
          bool adds) {
  using R = typename Register<T>::Type;
  constexpr int lanes = Register<T>::count;
  R sums[kRows][kRegisters];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      sums[i][j] = R{};
      if (adds) memcpy(&sums[i][j], c + i * c_row + j * lanes, sizeof(R));
    }
  }
  for (int64_t k = 0; k < terms; ++k, a += a_step, b += b_row) {
    R columns[kRegisters];
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) memcpy(&columns[j], b + j * lanes, sizeof(R));
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const T factor = a[i * a_row];
#pragma GCC unroll 4
      for (int j = 0; j < kRegisters; ++j) sums[i][j] += factor * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) memcpy(c + i * c_row + j * lanes, &sums[i][j], sizeof(R));
  }
}

template <typename T, int kRegisters>
void tiles(const Product<T>& p) {
  int64_t i = 0;
  const auto next = [&](auto rows) STILLHOUSE_LAMBDA {
    tile<T, decltype(rows)::value, kRegisters>(p.terms, p.a + i * p.a_row, p.a_row, p.a_step, p.b, p.b_row,
                                               p.c + i * p.c_row, p.c_row, p.adds);
    i += rows;
  };
  while (p.rows - i >= kTileRows) next(std::integral_constant<int, kTileRows>{});
  if (p.rows - i >= 4) next(std::integral_constant<int, 4>{});
  if (p.rows - i >= 2) next(std::integral_constant<int, 2>{});
  if (p.rows - i >= 1) next(std::integral_constant<int, 1>{});
}

template <typename T>
void multiply(Product<T> p) {
  const Product<T> whole = p;
  for (int64_t k = 0; k < whole.terms; k += kTermsAtOnce) {
    p.terms = std::min(kTermsAtOnce, whole.terms - k);
    p.a = whole.a + k * whole.a_step;
    p.adds = whole.adds || k > 0;
    for (int64_t j = 0; j < whole.columns; j += kTile<T>) {
      p.b = whole.b + j / kTile<T> * whole.b_panel + k * whole.b_row;
      p.c = whole.c + j;
      constexpr void (*of_registers[])(const Product<T>&) = {
          tiles<T, 1>, tiles<T, 2>, tiles<T, std::min(3, kTileRegisters)>, tiles<T, kTileRegisters>};
      const int64_t registers = (whole.columns - j) / Register<T>::count;
      of_registers[std::min<int64_t>(registers, kTileRegisters) - 1](p);
    }
  }
}

// Writes (rows, width) as the panels of its transpose, which has `width` rows. rows: a multiple of 16;
// width: a multiple of 4.
template <typename T>
void transpose(const T* from, int64_t rows, int64_t width, T* to) {
  typedef T Quad __attribute__((vector_size(4 * sizeof(T))));
  using Indices = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef Indices Order __attribute__((vector_size(4 * sizeof(T))));
  constexpr int64_t panel = kTile<T>;
  for (int64_t row = 0; row < rows; row += 4) {
    T* column = to + row / panel * panel * width + row % panel;
    for (int64_t k = 0; k < width; k += 4) {
      Quad q[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) memcpy(&q[i], from + (row + i) * width + k, sizeof(Quad));
      const Order first{0, 4, 1, 5}, second{2, 6, 3, 7};
      const Quad a = __builtin_shuffle(q[0], q[1], first), b = __builtin_shuffle(q[0], q[1], second);
      const Quad c = __builtin_shuffle(q[2], q[3], first), d = __builtin_shuffle(q[2], q[3], second);
      q[0] = __builtin_shuffle(a, c, Order{0, 1, 4, 5});
      q[1] = __builtin_shuffle(a, c, Order{2, 3, 6, 7});
      q[2] = __builtin_shuffle(b, d, Order{0, 1, 4, 5});
      q[3] = __builtin_shuffle(b, d, Order{2, 3, 6, 7});
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) memcpy(column + (k + i) * panel, &q[i], sizeof(Quad));
    }
  }
}

}  // namespace
}  // namespace stillhouse::cpu::STILLHOUSE_ISA
