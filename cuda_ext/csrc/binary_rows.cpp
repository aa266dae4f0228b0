// Products with packed binary weights: by XNOR and popcount where activations are bits, by sums of signed activations
// where they are numbers. Each set's registers hold outputs side by side, so that no sum crosses a register.
//
// Both are the same number in every set. Popcounts are integers. Signed sums have one order: the inputs of a word in
// eight groups of four, a group from left to right, the groups as a tree, and then word after word.

#include "binary_rows.h"

#include <algorithm>
#include <vector>

#if defined(STILLHOUSE_NEON)
#include <arm_neon.h>
#endif

#include "lanes.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {
namespace {

using Values = Register<float>::Type;
using Words = Register<uint32_t>::Type;
constexpr int kLanes = Register<float>::count;
constexpr int kParts = kPanel / kLanes;  // registers of a panel's outputs

// A buffer that a thread keeps from call to call, on a cache line's border.
template <typename T, int kWhich>
T* scratch(int64_t count) {
  thread_local std::vector<char> memory;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 64;
  if (memory.size() < bytes) memory.resize(bytes);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
}

// A row as floats, with zeros up to the end of its last word.
const float* widened(const BinaryProduct& p, int64_t row) {
  const int64_t padded = p.words * kWordBits;
  float* wide = scratch<float, 0>(padded);
  if (p.bfloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * p.inputs;
    for (int64_t i = 0; i < p.inputs; ++i) wide[i] = bfloat16_to_float(x[i]);
  } else {
    memcpy(wide, static_cast<const float*>(p.x) + row * p.inputs, p.inputs * sizeof(float));
  }
  std::fill(wide + p.inputs, wide + padded, 0.0f);
  return wide;
}

// The first `count` elements of a panel, 0 in the other lanes. Copies of a constant size are one move.
template <typename V, typename T>
STILLHOUSE_LANES V panel_of(const T* from, int64_t count) {
  if (count == kPanel) return loaded<V>(from);
  V values{};
  memcpy(&values, from, count * sizeof(T));
  return values;
}

// Stores the outputs of one panel of a row.
STILLHOUSE_LANES void finish(const BinaryProduct& p, int64_t row, int64_t panel, Floats sums) {
  const int64_t first = panel * kPanel;
  const int64_t count = std::min<int64_t>(kPanel, p.outputs - first);
  sums *= p.scale_step == 0 ? Floats{} + p.scale[0] : panel_of<Floats>(p.scale + first, count);
  if (p.bias != nullptr) sums += panel_of<Floats>(p.bias + first, count);
  const int64_t place = row * p.outputs + first;
  if (p.bfloat16) {
    uint16_t* out = static_cast<uint16_t*>(p.out) + place;
    for (int64_t i = 0; i < count; ++i) out[i] = float_to_bfloat16(sums[i]);
  } else if (count == kPanel) {
    memcpy(static_cast<float*>(p.out) + place, &sums, sizeof(sums));
  } else {
    memcpy(static_cast<float*>(p.out) + place, &sums, count * sizeof(float));
  }
}

// The same by the number of bits in which activations and weights differ.
STILLHOUSE_LANES void finish_xnor(const BinaryProduct& p, int64_t row, int64_t panel, Ints differing) {
  const int64_t first = panel * kPanel;
  const int64_t count = std::min<int64_t>(kPanel, p.outputs - first);
  const Ints sums = p.positives == nullptr ? static_cast<int32_t>(p.inputs) - 2 * differing
                                           : panel_of<Ints>(p.positives + first, count) - differing;
  finish(p, row, panel, __builtin_convertvector(sums, Floats));
}

// Bits of the first `count` inputs of a word; `unordered` becomes other than 0 where a NaN is compared.
STILLHOUSE_LANES uint32_t sign_bits(const float* x, const float* threshold, int64_t step, int64_t count,
                                    uint32_t& unordered) {
  uint32_t word = 0, nans = 0;
  for (int64_t bit = 0; bit < count; ++bit) {
    const float border = threshold[bit * step];
    word |= static_cast<uint32_t>(x[bit] >= border) << bit;
    nans |= static_cast<uint32_t>(__builtin_isunordered(x[bit], border));
  }
  unordered |= nans;
  return word;
}

// Calls `body(row, rows)` for blocks of rows, the largest first; `rows` is a constant of its type.
template <int kMost, typename Body>
void for_blocks(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kMost <= end; i += kMost) body(i, std::integral_constant<int, kMost>{});
  if constexpr (kMost > 1) for_blocks<kMost / 2>(i, end, body);
}

// Rows that are stored to in turn: more than a store buffer translates at once would each cost a page walk.
constexpr int64_t kRowsAtOnce = 16;

uint8_t* codes_of(const BinaryProduct& p, int64_t row);

#if defined(__AVX2__) && !defined(__AVX512VPOPCNTDQ__)

// A word's eight nibbles, each as a quarter of its table's place: the address is 8 times that, which x86 scales itself.
constexpr int kCodeBytes = 8;

struct DifferingTables {
  alignas(32) uint8_t bits[16][32];
  constexpr DifferingTables() : bits() {
    for (int activation = 0; activation < 16; ++activation) {
      for (int i = 0; i < 32; ++i) {
        bits[activation][i] = static_cast<uint8_t>(__builtin_popcount(activation ^ (i % 16)));
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
void xnor_block(const BinaryProduct& p, const uint8_t* nibbles, int64_t row, int64_t panel, bool both) {
  const uint8_t* codes[kRows];
  for (int r = 0; r < kRows; ++r) codes[r] = codes_of(p, row + r);
  Ints differing[kRows][2] = {};
  const char* tables = reinterpret_cast<const char*>(kDiffering.bits);
  for (int64_t begin = 0; begin < p.words; begin += kWordsAsShorts) {
    const int64_t end = std::min(p.words, begin + kWordsAsShorts);
    __m256i shorts[kRows][2] = {};
    for (int64_t first = begin; first < end; first += kWordsAsBytes) {
      __m256i bytes[kRows] = {};
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
    finish_xnor(p, row + r, panel, differing[r][0]);
    if (both) finish_xnor(p, row + r, panel + 1, differing[r][1]);
  }
}

void xnor(const BinaryProduct& p, const BinaryTile& tile) {
  uint8_t* nibbles = scratch<uint8_t, 1>(p.words * 8 * kPair);
  for (int64_t begin = tile.begin; begin < tile.end; begin += kRowsAtOnce) {
    const int64_t end = std::min(tile.end, begin + kRowsAtOnce);
    for (int64_t panel = tile.first; panel < tile.last; panel += 2) {
      const uint32_t* weight = p.weight + panel * p.words * kPanel;
      const bool both = panel + 1 < tile.last;
      spread(weight, both ? weight + p.words * kPanel : weight, p.words, nibbles);
      for_blocks<4>(begin, end, [&](int64_t row, auto rows) {
        xnor_block<decltype(rows)::value>(p, nibbles, row, panel, both);
      });
    }
  }
}

#else

constexpr int kCodeBytes = 4;

void store_code(uint8_t* code, uint32_t word) { memcpy(code, &word, sizeof(word)); }

#if defined(__AVX512VPOPCNTDQ__)

constexpr int kXnorBlock = 4;       // rows and panels that are worked on together
constexpr int64_t kWordsAtOnce = 0;  // no limit

STILLHOUSE_LANES Words bits_set(Words words) { return bits_as<Words>(_mm512_popcnt_epi32(bits_as<__m512i>(words))); }

#else

constexpr int kXnorBlock = 1;
constexpr int64_t kWordsAtOnce = 31;  // of at most 8 bits in each byte: a byte holds them

STILLHOUSE_LANES Words bits_set(Words words) {
#if defined(STILLHOUSE_NEON)
  return bits_as<Words>(vcntq_u8(bits_as<uint8x16_t>(words)));
#else
  words -= words >> 1 & 0x55555555u;
  words = (words & 0x33333333u) + (words >> 2 & 0x33333333u);
  return (words + (words >> 4)) & 0x0f0f0f0fu;
#endif
}

#endif

// Sums of the bytes of each word.
STILLHOUSE_LANES Words bytes_added(Words bytes) {
  const Words pairs = (bytes & 0x00ff00ffu) + (bytes >> 8 & 0x00ff00ffu);
  return (pairs & 0xffffu) + (pairs >> 16);
}

template <int kRows, int kPanels>
void xnor_block(const BinaryProduct& p, int64_t row, int64_t panel) {
  using Counts = Words[kRows][kPanels][kParts];
  const auto count = [&](int64_t first, int64_t last, Counts& counts) STILLHOUSE_LAMBDA {
    for (int64_t w = first; w < last; ++w) {
      Words weights[kPanels][kParts];
      for (int i = 0; i < kPanels; ++i) memcpy(weights[i], p.weight + ((panel + i) * p.words + w) * kPanel, 64);
      for (int r = 0; r < kRows; ++r) {
        const Words activation = Words{} + loaded<uint32_t>(codes_of(p, row + r) + w * kCodeBytes);
        for (int i = 0; i < kPanels; ++i) {
          for (int part = 0; part < kParts; ++part) counts[r][i][part] += bits_set(activation ^ weights[i][part]);
        }
      }
    }
  };
  Counts differing = {};
  if constexpr (kWordsAtOnce == 0) {
    count(0, p.words, differing);
  } else {
    for (int64_t first = 0; first < p.words; first += kWordsAtOnce) {
      Counts bytes = {};
      count(first, std::min(p.words, first + kWordsAtOnce), bytes);
      for (int part = 0; part < kParts; ++part) differing[0][0][part] += bytes_added(bytes[0][0][part]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPanels; ++i) finish_xnor(p, row + r, panel + i, loaded<Ints>(differing[r][i]));
  }
}

void xnor(const BinaryProduct& p, const BinaryTile& tile) {
  for (int64_t begin = tile.begin; begin < tile.end; begin += kRowsAtOnce) {
    const int64_t end = std::min(tile.end, begin + kRowsAtOnce);
    for_blocks<kXnorBlock>(tile.first, tile.last, [&](int64_t panel, auto panels) {
      for_blocks<kXnorBlock>(begin, end, [&](int64_t row, auto rows) {
        xnor_block<decltype(rows)::value, decltype(panels)::value>(p, row, panel);
      });
    });
  }
}

#endif

uint8_t* codes_of(const BinaryProduct& p, int64_t row) {
  return static_cast<uint8_t*>(p.codes) + row * p.words * kCodeBytes;
}

// Compares the activations of rows [begin, end) with the threshold.
void signs(const BinaryProduct& p, int64_t begin, int64_t end) {
  const int64_t step = p.threshold_step;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = p.bfloat16 ? widened(p, row) : static_cast<const float*>(p.x) + row * p.inputs;
    const float* threshold = p.threshold;
    uint8_t* code = codes_of(p, row);
    uint32_t unordered = 0;
    for (int64_t left = p.inputs; left > 0; left -= kWordBits) {
      const uint32_t word = left < kWordBits ? sign_bits(x, threshold, step, left, unordered)
                            : step == 0      ? sign_bits(x, threshold, 0, kWordBits, unordered)
                                             : sign_bits(x, threshold, 1, kWordBits, unordered);
      store_code(code, word);
      x += kWordBits;
      threshold += step * kWordBits;
      code += kCodeBytes;
    }
    p.unordered[row] = unordered;
  }
}

#if defined(__AVX2__)

// The sums of a group of four activations by the signs that its weights give them; the sums of a register's outputs
// are then one permutation. 8 lanes have those in which the last one is positive; the others are their negatives.
constexpr int64_t kGroupSums = kLanes;
constexpr int kSumRows = kLanes / 4, kSumPanels = kLanes == 16 ? 4 : 1;

struct GroupSigns {
  alignas(64) uint32_t bits[4][kLanes];
  constexpr GroupSigns() : bits() {
    for (int i = 0; i < 4 * kLanes; ++i) bits[i / kLanes][i % kLanes] = (i | kLanes) >> (i / kLanes) & 1 ? 0 : 1u << 31;
  }
} constexpr kGroupSigns;

STILLHOUSE_LANES void group_sums(const float* x, float* to) {
  const auto term = [&](int i) STILLHOUSE_LAMBDA {
    return bits_as<Values>((Words{} + bits_of(x[i])) ^ loaded<Words>(kGroupSigns.bits[i]));
  };
  const Values sum = ((term(0) + term(1)) + term(2)) + term(3);
  memcpy(to, &sum, sizeof(sum));
}

struct Weights {
  Words places, negative;

  explicit STILLHOUSE_LANES Weights(Words bits) : places(bits), negative(~bits & 0x88888888u) {
    // Where a group's last weight is -1, the place in the table is that of the negated others.
    if constexpr (kLanes == 8) places ^= negative - (negative >> 3);
  }

  STILLHOUSE_LANES Values sum(const float* sums, int group) const {
    const Values chosen = __builtin_shuffle(loaded<Values>(sums), places >> 4 * group);
    if constexpr (kLanes == 16) return chosen;
    return bits_as<Values>(bits_as<Words>(chosen) ^ (negative << (28 - 4 * group) & 0x80000000u));
  }
};

#else

constexpr int64_t kGroupSums = 4;  // the activations themselves
constexpr int kSumRows = 1, kSumPanels = 1;

void group_sums(const float* x, float* to) { memcpy(to, x, kGroupSums * sizeof(float)); }

struct Weights {
  Words negative;

  explicit STILLHOUSE_LANES Weights(Words bits) : negative(~bits) {}

  STILLHOUSE_LANES Values sum(const float* x, int group) const {
    const auto term = [&](int i) STILLHOUSE_LAMBDA {
      return bits_as<Values>((Words{} + bits_of(x[i])) ^ (negative << (31 - 4 * group - i) & 0x80000000u));
    };
    return ((term(0) + term(1)) + term(2)) + term(3);
  }
};

#endif

template <int kRows, int kPanels>
void signed_block(const BinaryProduct& p, const float* const* tables, int64_t row, int64_t panel) {
  Values totals[kRows][kPanels][kParts] = {};
  for (int64_t w = 0; w < p.words; ++w) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanels * kParts; ++i) {
      const int64_t place = ((panel + i / kParts) * p.words + w) * kPanel + i % kParts * kLanes;
      const Weights weights(loaded<Words>(p.weight + place));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto group = [&](int g) STILLHOUSE_LAMBDA {
          return weights.sum(tables[r] + (w * 8 + g) * kGroupSums, g);
        };
        const Values lower = (group(0) + group(1)) + (group(2) + group(3));
        const Values upper = (group(4) + group(5)) + (group(6) + group(7));
        totals[r][i / kParts][i % kParts] += lower + upper;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPanels; ++i) finish(p, row + r, panel + i, loaded<Floats>(totals[r][i]));
  }
}

void signed_sums(const BinaryProduct& p, const BinaryTile& tile) {
  const int64_t groups = p.words * 8;
  float* memory = scratch<float, 1>(groups * kGroupSums * kSumRows);
  for_blocks<kSumRows>(tile.begin, tile.end, [&](int64_t row, auto rows) {
    const float* tables[decltype(rows)::value];
    for (int r = 0; r < rows; ++r) {
      float* table = memory + r * groups * kGroupSums;
      const float* x = widened(p, row + r);
      for (int64_t g = 0; g < groups; ++g) group_sums(x + 4 * g, table + g * kGroupSums);
      tables[r] = table;
    }
    for_blocks<kSumPanels>(tile.first, tile.last, [&](int64_t panel, auto panels) {
      signed_block<decltype(rows)::value, decltype(panels)::value>(p, tables, row, panel);
    });
  });
}

}  // namespace

BinaryKernels binary_kernels() { return {kCodeBytes, signs, xnor, signed_sums}; }

}  // namespace stillhouse::cpu::STILLHOUSE_ISA
