// Products with packed binary weights: by XNOR and popcount where activations are bits, by sums of signed activations
// where they are numbers. Each set's registers hold outputs side by side, so that no sum crosses a register.
//
// Both are the same number in every set. Popcounts are integers. Signed sums have one order: the inputs of a word in
// eight groups of four, a group from left to right, the groups as a tree, and then word after word.

#include "binary_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(STILLHOUSE_NEON)
#include <arm_neon.h>
#endif

#include "number_formats.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

// A buffer that a thread keeps from call to call, on a cache line's border.
template <typename T, int kWhich>
T* scratch(int64_t count) {
  thread_local std::vector<char> memory;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 64;
  if (memory.size() < bytes) memory.resize(bytes);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
}

// A row as floats, with zeros up to the end of its last word.
const float* widened(const BinaryInput& input, int64_t row) {
  const int64_t padded = input.words * kWordBits;
  float* wide = scratch<float, 0>(padded);
  if (input.bfloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(input.x) + row * input.inputs;
    for (int64_t i = 0; i < input.inputs; ++i) wide[i] = bfloat16_to_float(x[i]);
  } else {
    memcpy(wide, static_cast<const float*>(input.x) + row * input.inputs, input.inputs * sizeof(float));
  }
  std::fill(wide + input.inputs, wide + padded, 0.0f);
  return wide;
}

// The first `count` elements of a panel, 0 in the other lanes. Copies of a constant size are one move.
template <typename V, typename T>
STILLHOUSE_INLINE V panel_of(const T* from, int64_t count) {
  V values{};
  if (count == kPanel) {
    memcpy(&values, from, sizeof(values));
  } else {
    memcpy(&values, from, count * sizeof(T));
  }
  return values;
}

// Stores the outputs of one panel of a row.
STILLHOUSE_INLINE void finish(const BinaryOutput& output, int64_t row, int64_t panel, Floats sums) {
  const int64_t first = panel * kPanel;
  const int64_t count = std::min(kPanel, output.outputs - first);
  sums *= output.scale_step == 0 ? Floats{} + output.scale[0] : panel_of<Floats>(output.scale + first, count);
  if (output.bias != nullptr) sums += panel_of<Floats>(output.bias + first, count);
  const int64_t place = row * output.outputs + first;
  if (output.bfloat16) {
    uint16_t* out = static_cast<uint16_t*>(output.out) + place;
    for (int64_t i = 0; i < count; ++i) out[i] = float_to_bfloat16(sums[i]);
  } else if (count == kPanel) {
    memcpy(static_cast<float*>(output.out) + place, &sums, sizeof(sums));
  } else {
    memcpy(static_cast<float*>(output.out) + place, &sums, count * sizeof(float));
  }
}

// The same by the number of bits in which activations and weights differ. Sums of {-1, 1} are inputs - 2 differing;
// of {0, 1} they are positives - differing, since |t ^ w| = |t| + |w| - 2 |t & w|.
STILLHOUSE_INLINE void finish_xnor(const XnorWork& work, int64_t row, int64_t panel, Ints differing) {
  const int64_t first = panel * kPanel;
  const int64_t count = std::min(kPanel, work.output.outputs - first);
  const Ints sums = work.positives == nullptr ? static_cast<int32_t>(work.inputs) - 2 * differing
                                              : panel_of<Ints>(work.positives + first, count) - differing;
  finish(work.output, row, panel, __builtin_convertvector(sums, Floats));
}

// Bits of the first `count` inputs of a word; `unordered` becomes other than 0 where a NaN is compared.
uint32_t sign_bits(const float* x, const float* threshold, int64_t step, int64_t count, uint32_t& unordered) {
  uint32_t word = 0;
  for (int64_t bit = 0; bit < count; ++bit) {
    const float border = threshold[bit * step];
    word |= static_cast<uint32_t>(x[bit] >= border) << bit;
    unordered |= static_cast<uint32_t>(__builtin_isunordered(x[bit], border));
  }
  return word;
}

// The same of all 32 inputs.
uint32_t sign_word(const float* x, const float* threshold, int64_t step, uint32_t& unordered) {
#if defined(__AVX512F__)
  if (step == 0) {
    const __m512 border = _mm512_set1_ps(*threshold), first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
    const uint32_t low = _mm512_cmp_ps_mask(first, border, _CMP_GE_OQ);
    const uint32_t high = _mm512_cmp_ps_mask(second, border, _CMP_GE_OQ);
    unordered |= _mm512_cmp_ps_mask(first, border, _CMP_UNORD_Q);
    unordered |= _mm512_cmp_ps_mask(second, border, _CMP_UNORD_Q);
    return low | high << 16;
  }
#elif defined(__AVX2__)
  if (step == 0) {
    const __m256 border = _mm256_set1_ps(*threshold);
    uint32_t word = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256 values = _mm256_loadu_ps(x + 8 * part);
      const __m256 reached = _mm256_cmp_ps(values, border, _CMP_GE_OQ);
      word |= static_cast<uint32_t>(_mm256_movemask_ps(reached)) << 8 * part;
      unordered |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(values, border, _CMP_UNORD_Q)));
    }
    return word;
  }
#endif
  return sign_bits(x, threshold, step, kWordBits, unordered);
}

void store_code(uint8_t* code, uint32_t word);

// Compares the activations of rows [begin, end) with the threshold.
template <int kCodeBytes>
void signs(const SignWork& work, int64_t begin, int64_t end) {
  const BinaryInput& input = work.input;
  const int64_t whole = input.inputs / kWordBits;
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* codes = work.codes + row * input.words * kCodeBytes;
    const float* x = input.bfloat16 ? widened(input, row) : static_cast<const float*>(input.x) + row * input.inputs;
    uint32_t unordered = 0;
    for (int64_t w = 0; w < input.words; ++w) {
      const int64_t first = w * kWordBits, step = work.threshold_step;
      const float* threshold = work.threshold + first * step;
      store_code(codes + w * kCodeBytes,
                 w < whole ? sign_word(x + first, threshold, step, unordered)
                           : sign_bits(x + first, threshold, step, input.inputs - first, unordered));
    }
    work.unordered[row] = unordered != 0;
  }
}

// Calls `body(row, rows)` for blocks of rows, the largest first; `rows` is a constant of its type.
template <int kMost, typename Body>
void for_blocks(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kMost <= end; i += kMost) body(i, std::integral_constant<int, kMost>{});
  if constexpr (kMost > 1) for_blocks<kMost / 2>(i, end, body);
}

// Rows that are stored to in turn: more than a store buffer translates at once would each cost a page walk.
[[maybe_unused]] constexpr int64_t kRowsAtOnce = 16;

#if defined(__AVX512VPOPCNTDQ__)

constexpr int kCodeBytes = 4;

void store_code(uint8_t* code, uint32_t word) { memcpy(code, &word, sizeof(word)); }

template <int kRows, int kPanels>
void xnor_block(const XnorWork& work, int64_t row, int64_t panel) {
  const uint8_t* codes[kRows];
  const uint32_t* weight[kPanels];
  for (int r = 0; r < kRows; ++r) codes[r] = work.codes + (row + r) * work.words * kCodeBytes;
  for (int p = 0; p < kPanels; ++p) weight[p] = work.weight + (panel + p) * work.words * kPanel;
  __m512i differing[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) differing[r][p] = _mm512_setzero_si512();
  }
  for (int64_t w = 0; w < work.words; ++w) {
    __m512i bits[kPanels];
    for (int p = 0; p < kPanels; ++p) bits[p] = _mm512_loadu_si512(weight[p] + w * kPanel);
    for (int r = 0; r < kRows; ++r) {
      int32_t word;
      memcpy(&word, codes[r] + w * kCodeBytes, sizeof(word));
      const __m512i activation = _mm512_set1_epi32(word);
      for (int p = 0; p < kPanels; ++p) {
        const __m512i differs = _mm512_popcnt_epi32(_mm512_xor_si512(activation, bits[p]));
        differing[r][p] = _mm512_add_epi32(differing[r][p], differs);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      finish_xnor(work, row + r, panel + p, reinterpret_cast<Ints>(differing[r][p]));
    }
  }
}

void xnor(const XnorWork& work, const BinaryTile& tile) {
  for (int64_t begin = tile.begin; begin < tile.end; begin += kRowsAtOnce) {
    const int64_t end = std::min(tile.end, begin + kRowsAtOnce);
    for_blocks<4>(tile.first, tile.last, [&](int64_t panel, auto panels) {
      for_blocks<4>(begin, end, [&](int64_t row, auto rows) {
        xnor_block<decltype(rows)::value, decltype(panels)::value>(work, row, panel);
      });
    });
  }
}

#elif defined(__AVX2__)

// A word's eight nibbles, each as a quarter of its table's place: the address is 8 times that, which x86 scales itself.
constexpr int kCodeBytes = 8;

struct DifferingTables {
  alignas(32) uint8_t bits[16][32];
  constexpr DifferingTables() : bits() {
    for (int activation = 0; activation < 16; ++activation) {
      for (int i = 0; i < 32; ++i) {
        const int differing = activation ^ (i % 16);
        bits[activation][i] = static_cast<uint8_t>((differing & 1) + (differing >> 1 & 1) + (differing >> 2 & 1) +
                                                   (differing >> 3));
      }
    }
  }
};

// How many bits of a nibble of activations differ from each nibble of weights.
constexpr DifferingTables kDiffering;

void store_code(uint8_t* code, uint32_t word) {
  for (int nibble = 0; nibble < 8; ++nibble) code[nibble] = static_cast<uint8_t>((word >> 4 * nibble & 15) * 4);
}

constexpr int64_t kPair = 2 * kPanel;  // outputs side by side as bytes
constexpr int64_t kWordsAsBytes = 7;   // 56 nibbles of at most 4: a byte holds them
constexpr int64_t kWordsAsShorts = 292 * kWordsAsBytes;

// Writes the weights of two panels as nibbles, a byte each: (words, 8, 32).
void spread(const uint32_t* one, const uint32_t* other, int64_t words, uint8_t* nibbles) {
  const __m256i by_place = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  // What is unpacked within each half of a register: outputs of the first half lie before those of the second.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i low = _mm256_set1_epi8(15);
  const auto load = [&](const uint32_t* from) {
    return _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), by_place);
  };
  for (int64_t w = 0; w < words; ++w, one += kPanel, other += kPanel) {
    const __m256i a = load(one), b = load(one + 8), c = load(other), d = load(other + 8);
    const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    const __m256i upper_ab = _mm256_unpackhi_epi32(a, b), upper_cd = _mm256_unpackhi_epi32(c, d);
    const __m256i bytes[4] = {_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd),
                              _mm256_unpacklo_epi64(upper_ab, upper_cd), _mm256_unpackhi_epi64(upper_ab, upper_cd)};
    for (const __m256i& unordered : bytes) {
      const __m256i byte = _mm256_permutevar8x32_epi32(unordered, in_order);
      __m256i* to = reinterpret_cast<__m256i*>(nibbles);
      _mm256_store_si256(to, _mm256_and_si256(byte, low));
      _mm256_store_si256(to + 1, _mm256_and_si256(_mm256_srli_epi16(byte, 4), low));
      nibbles += 2 * kPair;
    }
  }
}

template <int kRows>
void xnor_block(const XnorWork& work, const uint8_t* nibbles, int64_t row, int64_t panel, bool both) {
  const uint8_t* codes[kRows];
  for (int r = 0; r < kRows; ++r) codes[r] = work.codes + (row + r) * work.words * kCodeBytes;
  Ints differing[kRows][2] = {};
  const char* tables = reinterpret_cast<const char*>(kDiffering.bits);
  for (int64_t begin = 0; begin < work.words; begin += kWordsAsShorts) {
    const int64_t end = std::min(work.words, begin + kWordsAsShorts);
    __m256i shorts[kRows][2];
    for (int r = 0; r < kRows; ++r) shorts[r][0] = shorts[r][1] = _mm256_setzero_si256();
    for (int64_t first = begin; first < end; first += kWordsAsBytes) {
      __m256i bytes[kRows];
      for (int r = 0; r < kRows; ++r) bytes[r] = _mm256_setzero_si256();
      for (int64_t w = first; w < std::min(end, first + kWordsAsBytes); ++w) {
#pragma GCC unroll 8
        for (int nibble = 0; nibble < 8; ++nibble) {
          const int64_t place = w * 8 + nibble;
          const __m256i bits = _mm256_load_si256(reinterpret_cast<const __m256i*>(nibbles + place * kPair));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const char* table = tables + 8 * static_cast<size_t>(codes[r][place]);
            const __m256i counts = _mm256_load_si256(reinterpret_cast<const __m256i*>(table));
            bytes[r] = _mm256_add_epi8(bytes[r], _mm256_shuffle_epi8(counts, bits));
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        const __m256i lower = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes[r]));
        const __m256i upper = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes[r], 1));
        shorts[r][0] = _mm256_add_epi16(shorts[r][0], lower);
        shorts[r][1] = _mm256_add_epi16(shorts[r][1], upper);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int half = 0; half < 2; ++half) {
        const __m256i counts[2] = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(shorts[r][half])),
                                   _mm256_cvtepu16_epi32(_mm256_extracti128_si256(shorts[r][half], 1))};
        Ints wide;
        memcpy(&wide, counts, sizeof(wide));
        differing[r][half] += wide;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    finish_xnor(work, row + r, panel, differing[r][0]);
    if (both) finish_xnor(work, row + r, panel + 1, differing[r][1]);
  }
}

void xnor(const XnorWork& work, const BinaryTile& tile) {
  uint8_t* nibbles = scratch<uint8_t, 1>(work.words * 8 * kPair);
  for (int64_t begin = tile.begin; begin < tile.end; begin += kRowsAtOnce) {
    const int64_t end = std::min(tile.end, begin + kRowsAtOnce);
    for (int64_t panel = tile.first; panel < tile.last; panel += 2) {
      const uint32_t* weight = work.weight + panel * work.words * kPanel;
      const bool both = panel + 1 < tile.last;
      spread(weight, both ? weight + work.words * kPanel : weight, work.words, nibbles);
      for_blocks<4>(begin, end, [&](int64_t row, auto rows) {
        xnor_block<decltype(rows)::value>(work, nibbles, row, panel, both);
      });
    }
  }
}

#else

constexpr int kCodeBytes = 4;

void store_code(uint8_t* code, uint32_t word) { memcpy(code, &word, sizeof(word)); }

#if defined(STILLHOUSE_NEON)

constexpr int64_t kWordsAsBytes = 31;  // of at most 8 bits each: a byte holds them

Ints xnor_row(const XnorWork& work, const uint8_t* codes, const uint32_t* weight) {
  uint32x4_t counts[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
  for (int64_t first = 0; first < work.words; first += kWordsAsBytes) {
    uint8x16_t bytes[4] = {vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0)};
    for (int64_t w = first; w < std::min(work.words, first + kWordsAsBytes); ++w) {
      uint32_t word;
      memcpy(&word, codes + w * kCodeBytes, sizeof(word));
      const uint32x4_t activation = vdupq_n_u32(word);
      for (int quad = 0; quad < 4; ++quad) {
        const uint32x4_t differs = veorq_u32(activation, vld1q_u32(weight + w * kPanel + 4 * quad));
        bytes[quad] = vaddq_u8(bytes[quad], vcntq_u8(vreinterpretq_u8_u32(differs)));
      }
    }
    for (int quad = 0; quad < 4; ++quad) {
      counts[quad] = vaddq_u32(counts[quad], vpaddlq_u16(vpaddlq_u8(bytes[quad])));
    }
  }
  Ints differing;
  memcpy(&differing, counts, sizeof(differing));
  return differing;
}

#else

inline int32_t bits_set(uint32_t word) {
  word -= word >> 1 & 0x55555555u;
  word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
  word = (word + (word >> 4)) & 0x0f0f0f0fu;
  word += word >> 8;
  return static_cast<int32_t>((word + (word >> 16)) & 0x3fu);
}

Ints xnor_row(const XnorWork& work, const uint8_t* codes, const uint32_t* weight) {
  Ints differing{};
  for (int64_t w = 0; w < work.words; ++w) {
    uint32_t word;
    memcpy(&word, codes + w * kCodeBytes, sizeof(word));
    for (int i = 0; i < kPanel; ++i) differing[i] += bits_set(weight[w * kPanel + i] ^ word);
  }
  return differing;
}

#endif

void xnor(const XnorWork& work, const BinaryTile& tile) {
  for (int64_t panel = tile.first; panel < tile.last; ++panel) {
    const uint32_t* weight = work.weight + panel * work.words * kPanel;
    for (int64_t row = tile.begin; row < tile.end; ++row) {
      finish_xnor(work, row, panel, xnor_row(work, work.codes + row * work.words * kCodeBytes, weight));
    }
  }
}

#endif

#if defined(__AVX512F__)

// All 16 sums of a group of four activations by the signs that its weights give them; the sums of 16 outputs are then
// one permutation of a register.
constexpr int64_t kGroupSums = 16;
using Sums = __m512;

void group_sums(const float* x, float* to) {
  const __m512 negative = _mm512_set1_ps(-0.0f);
  const __m512 a = _mm512_set1_ps(x[0]), b = _mm512_set1_ps(x[1]), c = _mm512_set1_ps(x[2]), d = _mm512_set1_ps(x[3]);
  const auto signed_by = [&](__m512 value, __mmask16 positive) {
    return _mm512_mask_xor_ps(value, static_cast<__mmask16>(~positive), value, negative);
  };
  __m512 sum = _mm512_add_ps(signed_by(a, 0xaaaa), signed_by(b, 0xcccc));
  sum = _mm512_add_ps(sum, signed_by(c, 0xf0f0));
  _mm512_store_ps(to, _mm512_add_ps(sum, signed_by(d, 0xff00)));
}

template <int kRows, int kPanels>
void signed_block(const SignedSumWork& work, const float* const* tables, int64_t row, int64_t panel) {
  const int64_t words = work.input.words;
  const uint32_t* weight = work.weight + panel * words * kPanel;
  __m512 totals[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) totals[r][p] = _mm512_setzero_ps();
  }
  for (int64_t w = 0; w < words; ++w) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const __m512i bits = _mm512_loadu_si512(weight + (p * words + w) * kPanel);
      const __m512i places[8] = {bits,
                                 _mm512_srli_epi32(bits, 4),
                                 _mm512_srli_epi32(bits, 8),
                                 _mm512_srli_epi32(bits, 12),
                                 _mm512_srli_epi32(bits, 16),
                                 _mm512_srli_epi32(bits, 20),
                                 _mm512_srli_epi32(bits, 24),
                                 _mm512_srli_epi32(bits, 28)};
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const float* table = tables[r] + w * 8 * kGroupSums;
        const auto group = [&](int g) {
          return _mm512_permutexvar_ps(places[g], _mm512_load_ps(table + g * kGroupSums));
        };
        const __m512 lower =
            _mm512_add_ps(_mm512_add_ps(group(0), group(1)), _mm512_add_ps(group(2), group(3)));
        const __m512 upper =
            _mm512_add_ps(_mm512_add_ps(group(4), group(5)), _mm512_add_ps(group(6), group(7)));
        totals[r][p] = _mm512_add_ps(totals[r][p], _mm512_add_ps(lower, upper));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      finish(work.output, row + r, panel + p, totals[r][p]);
    }
  }
}

#elif defined(__AVX2__)

// The 8 sums of a group of four activations in which the last one is positive; the others are their negatives.
constexpr int64_t kGroupSums = 8;

void group_sums(const float* x, float* to) {
  const __m256 a = _mm256_xor_ps(_mm256_set1_ps(x[0]), _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f));
  const __m256 b = _mm256_xor_ps(_mm256_set1_ps(x[1]), _mm256_setr_ps(0.f, 0.f, -0.f, -0.f, 0.f, 0.f, -0.f, -0.f));
  const __m256 c = _mm256_xor_ps(_mm256_set1_ps(x[2]), _mm256_setr_ps(0.f, 0.f, 0.f, 0.f, -0.f, -0.f, -0.f, -0.f));
  _mm256_store_ps(to, _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(a, b), c), _mm256_set1_ps(x[3])));
}

template <int kRows, int kPanels>
void signed_block(const SignedSumWork& work, const float* const* tables, int64_t row, int64_t panel) {
  static_assert(kPanels == 1);
  const int64_t words = work.input.words;
  const uint32_t* weight = work.weight + panel * words * kPanel;
  const __m256i last = _mm256_set1_epi32(static_cast<int32_t>(0x88888888u));
  const __m256i sign = _mm256_set1_epi32(INT32_MIN);
  __m256 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = _mm256_setzero_ps();
  for (int64_t w = 0; w < words; ++w) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i bits =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + w * kPanel + 8 * half));
      // Where a group's last weight is +1, the place in the table is that of the negated others.
      const __m256i positive = _mm256_and_si256(bits, last);
      const __m256i places = _mm256_xor_si256(bits, _mm256_sub_epi32(positive, _mm256_srli_epi32(positive, 3)));
      const __m256i negative = _mm256_andnot_si256(bits, last);
      const auto group = [&](const float* table, int g) __attribute__((always_inline)) {
        const __m256i place = _mm256_srli_epi32(places, 4 * g);
        const __m256i flips = _mm256_and_si256(_mm256_slli_epi32(negative, 28 - 4 * g), sign);
        return _mm256_xor_ps(_mm256_permutevar8x32_ps(_mm256_load_ps(table + g * kGroupSums), place),
                             _mm256_castsi256_ps(flips));
      };
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const float* table = tables[r] + w * 8 * kGroupSums;
        const __m256 lower = _mm256_add_ps(_mm256_add_ps(group(table, 0), group(table, 1)),
                                           _mm256_add_ps(group(table, 2), group(table, 3)));
        const __m256 upper = _mm256_add_ps(_mm256_add_ps(group(table, 4), group(table, 5)),
                                           _mm256_add_ps(group(table, 6), group(table, 7)));
        totals[r][half] = _mm256_add_ps(totals[r][half], _mm256_add_ps(lower, upper));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    Floats sums;
    memcpy(&sums, totals[r], sizeof(sums));
    finish(work.output, row + r, panel, sums);
  }
}

#endif

#if defined(__AVX2__)

#if defined(__AVX512F__)
constexpr int kSumPanels = 4;
constexpr int kSumRows = 4;
#else
constexpr int kSumPanels = 1;
constexpr int kSumRows = 2;
#endif

void signed_sums(const SignedSumWork& work, const BinaryTile& tile) {
  const int64_t groups = work.input.words * 8;
  float* memory = scratch<float, 1>(groups * kGroupSums * kSumRows);
  for_blocks<kSumRows>(tile.begin, tile.end, [&](int64_t row, auto rows) {
    const float* tables[decltype(rows)::value];
    for (int r = 0; r < rows; ++r) {
      float* table = memory + r * groups * kGroupSums;
      const float* x = widened(work.input, row + r);
      for (int64_t g = 0; g < groups; ++g) group_sums(x + 4 * g, table + g * kGroupSums);
      tables[r] = table;
    }
    for_blocks<kSumPanels>(tile.first, tile.last, [&](int64_t panel, auto panels) {
      signed_block<decltype(rows)::value, decltype(panels)::value>(work, tables, row, panel);
    });
  });
}

#else

using Words = uint32_t __attribute__((vector_size(64)));

STILLHOUSE_INLINE Floats signed_input(Words negative, float x, int bit) {
  return reinterpret_cast<Floats>((bits_of(x) + Words{}) ^ (negative << (31 - bit) & 0x80000000u));
}

STILLHOUSE_INLINE Floats group(Words negative, const float* x, int g) {
  const int bit = 4 * g;
  return ((signed_input(negative, x[bit], bit) + signed_input(negative, x[bit + 1], bit + 1)) +
          signed_input(negative, x[bit + 2], bit + 2)) +
         signed_input(negative, x[bit + 3], bit + 3);
}

void signed_sums(const SignedSumWork& work, const BinaryTile& tile) {
  const int64_t words = work.input.words;
  for (int64_t row = tile.begin; row < tile.end; ++row) {
    const float* x = widened(work.input, row);
    for (int64_t panel = tile.first; panel < tile.last; ++panel) {
      Floats total{};
      for (int64_t w = 0; w < words; ++w) {
        Words negative;
        memcpy(&negative, work.weight + (panel * words + w) * kPanel, sizeof(negative));
        negative = ~negative;
        const float* terms = x + w * kWordBits;
        const Floats lower = (group(negative, terms, 0) + group(negative, terms, 1)) +
                             (group(negative, terms, 2) + group(negative, terms, 3));
        const Floats upper = (group(negative, terms, 4) + group(negative, terms, 5)) +
                             (group(negative, terms, 6) + group(negative, terms, 7));
        total += lower + upper;
      }
      finish(work.output, row, panel, total);
    }
  }
}

#endif

}  // namespace

BinaryKernels binary_kernels() { return {kCodeBytes, signs<kCodeBytes>, xnor, signed_sums}; }

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
