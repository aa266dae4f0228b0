// The operators on packed binary weights: schemas and CPU kernels. A product is divided into tiles of rows and outputs,
// each of which one thread computes whole, so results do not depend on the threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "binary_arguments.h"
#include "binary_rows.h"

namespace {

using at::Tensor;
using stillhouse::BinaryShape;
using namespace stillhouse::cpu;

struct BinarySet {
  const char* name;
  const char* needs;
  bool supported;
  BinaryKernels (*kernels)();

  bool available() const { return supported && kernels != nullptr; }
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vpopcntdq");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

constexpr int kSets = 4;

// Fastest last. What is not compiled for this kind of processor has no kernels.
const std::array<BinarySet, kSets>& sets() {
#if defined(__x86_64__)
  constexpr auto neon_kernels = nullptr;
  constexpr auto avx2_kernels = avx2::binary_kernels;
  constexpr auto avx512_kernels = avx512::binary_kernels;
#else
#if defined(__aarch64__)
  constexpr auto neon_kernels = neon::binary_kernels;
#else
  constexpr auto neon_kernels = nullptr;
#endif
  constexpr auto avx2_kernels = nullptr;
  constexpr auto avx512_kernels = nullptr;
#endif
  static const std::array<BinarySet, kSets> known{
      {{"scalar", "", true, scalar::binary_kernels},
       {"neon", "NEON", true, neon_kernels},
       {"avx2", "AVX2 and FMA", has_avx2(), avx2_kernels},
       {"avx512", "AVX-512 VPOPCNTDQ", has_avx512(), avx512_kernels}}};
  return known;
}

// The set that STILLHOUSE_CPU_CAPABILITY names, else the fastest that this CPU has.
int chosen_set() {
  static const int fastest = [] {
    int best = 0;
    for (int i = 0; i < kSets; ++i) {
      if (sets()[i].available()) best = i;
    }
    return best;
  }();
  const char* named = std::getenv("STILLHOUSE_CPU_CAPABILITY");
  if (named == nullptr || *named == '\0') return fastest;
  for (int i = 0; i < kSets; ++i) {
    if (std::strcmp(named, sets()[i].name) != 0) continue;
    TORCH_CHECK(sets()[i].available(), "STILLHOUSE_CPU_CAPABILITY is ", named, ", but this CPU has no ",
                sets()[i].needs, "; unset it, or set it to ", sets()[fastest].name);
    return i;
  }
  TORCH_CHECK(false, "STILLHOUSE_CPU_CAPABILITY is ", named, "; set it to scalar, neon, avx2 or avx512, or unset it");
}

std::array<std::atomic<int64_t>, 2 * kSets> calls{};

const BinarySet& set_for(int product) {
  const int set = chosen_set();
  calls[product * kSets + set] += 1;
  return sets()[set];
}

constexpr int64_t kRowsAtOnce = 128;
constexpr int64_t kPanelsAtOnce = 16;

// Calls `work(tile)` for tiles of all rows and panels. A product of fewer than `alone` terms takes one thread.
template <typename Work>
void for_tiles(const BinaryShape& shape, int64_t alone, const Work& work) {
  if (shape.rows == 0 || shape.panels == 0) return;
  const int64_t threads = shape.rows * shape.inputs * shape.outputs < alone ? 1 : at::get_num_threads();
  if (threads == 1) {
    for (int64_t row = 0; row < shape.rows; row += kRowsAtOnce) {
      work({row, std::min(shape.rows, row + kRowsAtOnce), 0, shape.panels});
    }
    return;
  }
  const int64_t row_tiles = (shape.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  int64_t width = kPanelsAtOnce;  // a multiple of 4, which the kernels take at once
  while (width > 4 && row_tiles * ((shape.panels + width - 1) / width) < 4 * threads) width /= 2;
  const int64_t panel_tiles = (shape.panels + width - 1) / width;
  at::parallel_for(0, row_tiles * panel_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end;) {
      // Neighbouring tiles of the same rows are one: what a kernel prepares of its rows is then prepared once.
      const int64_t rows = tile / panel_tiles, first = tile % panel_tiles;
      const int64_t count = std::min(end - tile, panel_tiles - first);
      work({rows * kRowsAtOnce, std::min(shape.rows, (rows + 1) * kRowsAtOnce), first * width,
            std::min(shape.panels, (first + count) * width)});
      tile += count;
    }
  });
}

BinaryOutput output_of(const BinaryShape& shape, const Tensor& scale, const std::optional<Tensor>& bias, Tensor& out) {
  return {scale.const_data_ptr<float>(),
          bias.has_value() ? bias->const_data_ptr<float>() : nullptr,
          shape.scale_step,
          out.mutable_data_ptr(),
          shape.outputs,
          shape.bfloat16};
}

const uint32_t* words_of(const Tensor& weight) {
  return reinterpret_cast<const uint32_t*>(weight.const_data_ptr<int32_t>());
}

void fill_with_nan(Tensor& out, int64_t first, int64_t count) {
  if (out.scalar_type() == at::kBFloat16) {
    std::fill_n(out.mutable_data_ptr<at::BFloat16>() + first, count, std::numeric_limits<at::BFloat16>::quiet_NaN());
  } else {
    std::fill_n(out.mutable_data_ptr<float>() + first, count, std::numeric_limits<float>::quiet_NaN());
  }
}

Tensor binary_linear(const Tensor& given, const Tensor& weight, const std::optional<Tensor>& positives,
                     const Tensor& scale, const std::optional<Tensor>& bias, const Tensor& threshold,
                     int64_t outputs) {
  const BinaryShape shape(given, weight, scale, bias, outputs);
  const int64_t threshold_step = shape.require_threshold(threshold, given);
  shape.require_positives(positives, given);
  const Tensor x = given.contiguous();
  Tensor out = shape.result(x);
  const BinaryKernels kernels = set_for(0).kernels();
  thread_local std::vector<uint8_t> codes, unordered;
  const size_t bytes = static_cast<size_t>(shape.rows * shape.words * kernels.code_bytes);
  if (codes.size() < bytes) codes.resize(bytes);
  if (unordered.size() < static_cast<size_t>(shape.rows)) unordered.resize(shape.rows);
  const BinaryInput input{x.const_data_ptr(), shape.inputs, shape.words, shape.bfloat16};
  const SignWork signs{input, threshold.const_data_ptr<float>(), threshold_step, codes.data(), unordered.data()};
  const int64_t rows_alone = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, shape.inputs));
  at::parallel_for(0, shape.rows, rows_alone, [&](int64_t begin, int64_t end) { kernels.signs(signs, begin, end); });
  const XnorWork work{codes.data(),
                      words_of(weight),
                      positives.has_value() ? positives->const_data_ptr<int32_t>() : nullptr,
                      shape.inputs,
                      shape.words,
                      output_of(shape, scale, bias, out)};
  for_tiles(shape, int64_t{1} << 22, [&](const BinaryTile& tile) { kernels.xnor(work, tile); });
  for (int64_t row = 0; row < shape.rows; ++row) {
    if (signs.unordered[row] != 0) fill_with_nan(out, row * outputs, outputs);
  }
  return out;
}

Tensor binary_weight_linear(const Tensor& given, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& bias, int64_t outputs) {
  const BinaryShape shape(given, weight, scale, bias, outputs);
  const Tensor x = given.contiguous();
  Tensor out = shape.result(x);
  const BinaryKernels kernels = set_for(1).kernels();
  const SignedSumWork work{{x.const_data_ptr(), shape.inputs, shape.words, shape.bfloat16},
                           words_of(weight),
                           output_of(shape, scale, bias, out)};
  for_tiles(shape, int64_t{1} << 19, [&](const BinaryTile& tile) { kernels.signed_sums(work, tile); });
  return out;
}

std::string binary_capability() { return sets()[chosen_set()].name; }

// Names of the instruction sets, and the calls of each since the process began: of binary_linear, then of the other.
std::vector<std::string> binary_capabilities() {
  std::vector<std::string> names;
  for (const BinarySet& set : sets()) names.emplace_back(set.name);
  return names;
}

std::vector<int64_t> binary_counters() { return {calls.begin(), calls.end()}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "binary_linear(Tensor x, Tensor weight, Tensor? positives, Tensor scale, Tensor? bias, Tensor threshold, "
      "int outputs) -> Tensor",
      tags);
  m.def("binary_weight_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int outputs) -> Tensor", tags);
  m.def("binary_capability() -> str", &binary_capability);
  m.def("binary_capabilities() -> str[]", &binary_capabilities);
  m.def("binary_counters() -> int[]", &binary_counters);
}

TORCH_LIBRARY_IMPL(stillhouse, CPU, m) {
  m.impl("binary_linear", &binary_linear);
  m.impl("binary_weight_linear", &binary_weight_linear);
}
