// Dropout's bits: Philox4x32-10 (Salmon et al., SC 2011) with the seed as its key and (row block, offset) as its
// counter. Element c of row r takes half-word c % 8 of counter r * ceil(width / 8) + c / 8, least significant
// first; the Triton kernels draw the same. Included once per instruction set, like lanes.h.
#pragma once

#include "encoder_kernels.h"
#include "lanes.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

// One register of 64-bit lanes: wider vectors would go through memory between their operations.
using Lanes64 = Register<uint64_t>::Type;

// Products of the low halves of 64-bit lanes with a 32-bit number.
STILLHOUSE_LANES Lanes64 product(Lanes64 a, uint32_t b) {
#if defined(__AVX512F__)
  return bits_as<Lanes64>(_mm512_mul_epu32(bits_as<__m512i>(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  return bits_as<Lanes64>(_mm256_mul_epu32(bits_as<__m256i>(a), _mm256_set1_epi64x(b)));
#elif defined(__x86_64__)
  return bits_as<Lanes64>(_mm_mul_epu32(bits_as<__m128i>(a), _mm_set1_epi64x(b)));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Lanes of two registers in turn: the first half of them, or the second.
template <bool kSecond>
STILLHOUSE_LANES Lanes64 in_turn(Lanes64 a, Lanes64 b) {
  constexpr int count = Register<uint64_t>::count;
  Lanes64 order;
#pragma GCC unroll 8
  for (int lane = 0; lane < count; ++lane) order[lane] = lane / 2 + kSecond * count / 2 + lane % 2 * count;
  return __builtin_shuffle(a, b, order);
}

// Writes the half-words of as many counters as a register has 64-bit lanes.
STILLHOUSE_LANES void philox(uint64_t seed, uint64_t offset, uint64_t counter, uint16_t* to) {
  constexpr int count = Register<uint64_t>::count;
  Lanes64 c0;
#pragma GCC unroll 8
  for (int lane = 0; lane < count; ++lane) c0[lane] = counter + lane;
  Lanes64 c1 = c0 >> 32, c2 = Lanes64{} + (offset & 0xffffffffu), c3 = Lanes64{} + (offset >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  // Only the low half of each lane counts; what is left above it never gets into a product.
  for (int round = 0; round < 10; ++round) {
    const Lanes64 a = product(c0, 0xD2511F53u), b = product(c2, 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ (Lanes64{} + k0);
    c2 = (a >> 32) ^ c3 ^ (Lanes64{} + k1);
    c1 = b;
    c3 = a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const Lanes64 first = (c0 & 0xffffffffu) | (c1 << 32), second = (c2 & 0xffffffffu) | (c3 << 32);
  const Lanes64 low = in_turn<false>(first, second), high = in_turn<true>(first, second);
  memcpy(to, &low, sizeof(low));
  memcpy(to + 4 * count, &high, sizeof(high));
}

// The first `count` half-words of a row of `width`; `to` has room for the count rounded up to 64.
STILLHOUSE_LANES void draw_row(const DropoutWork& dropout, int64_t row, int64_t width, int64_t count, uint16_t* to) {
  const int64_t blocks = (width + 7) / 8, wanted = (count + 7) / 8;
  for (int64_t block = 0; block < wanted; block += Register<uint64_t>::count) {
    philox(dropout.seed, dropout.offset, static_cast<uint64_t>(row * blocks + block), to + 8 * block);
  }
}

// The factors of dropout for one register: its scale where the bits keep an element, 0 elsewhere.
template <typename T>
STILLHOUSE_LANES typename Register<T>::Type kept_of(const DropoutWork& dropout, const uint16_t* bits) {
  using R = typename Register<T>::Type;
  typedef uint16_t Drawn __attribute__((vector_size(2 * Register<T>::count)));
  using Integers = decltype(R{} < R{});
  Drawn drawn;
  memcpy(&drawn, bits, sizeof(drawn));
  const R scale = R{} + static_cast<T>(dropout.scale);
  return __builtin_convertvector(drawn, Integers) >= Integers{} + dropout.below ? scale : R{};
}

template <typename V>
STILLHOUSE_LANES V kept(const DropoutWork& dropout, const uint16_t* bits) {
  using T = ScalarOf<V>;
  Registers<V> factors;
#pragma GCC unroll 4
  for (int i = 0; i < factors.count; ++i) factors.own[i] = kept_of<T>(dropout, bits + i * Register<T>::count);
  return bits_as<V>(factors);
}

}  // namespace
}  // namespace stillhouse::cpu::STILLHOUSE_ISA
