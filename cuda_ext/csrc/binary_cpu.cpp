// The operators on packed binary weights: schemas and CPU kernels. A product is divided into tiles of rows and outputs,
// each of which one thread computes whole, so results do not depend on the threads.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "binary_arguments.h"
#include "binary_rows.h"

namespace {

using at::Tensor;
using stillhouse::BinaryArguments;
using stillhouse::BinaryProduct;
using namespace stillhouse::cpu;

struct BinarySet {
  const char* name;
  const char* needs;
  bool supported;
  BinaryKernels (*kernels)();

  bool available() const { return supported && kernels != nullptr; }
};

// Fastest last. What is not compiled for this kind of processor has no kernels.
const BinarySet sets[] = {{"scalar", "", true, scalar::binary_kernels},
                          {"neon", "NEON", true, neon::binary_kernels},
                          {"avx2", "AVX2 and FMA", has_avx2(), avx2::binary_kernels},
                          {"avx512", "AVX-512 VPOPCNTDQ", has_vpopcntdq(), avx512::binary_kernels}};
constexpr int kSets = std::size(sets);

// The set that STILLHOUSE_CPU_CAPABILITY names, else the fastest that this CPU has.
int chosen_set() {
  int fastest = kSets - 1;
  while (!sets[fastest].available()) --fastest;
  const char* named = std::getenv("STILLHOUSE_CPU_CAPABILITY");
  if (named == nullptr || *named == '\0') return fastest;
  for (int i = 0; i < kSets; ++i) {
    if (std::strcmp(named, sets[i].name) != 0) continue;
    TORCH_CHECK(sets[i].available(), "STILLHOUSE_CPU_CAPABILITY is ", named, ", but this CPU has no ",
                sets[i].needs, "; unset it, or set it to ", sets[fastest].name);
    return i;
  }
  TORCH_CHECK(false, "STILLHOUSE_CPU_CAPABILITY is ", named, "; set it to scalar, neon, avx2 or avx512, or unset it");
}

std::array<std::atomic<int64_t>, 2 * kSets> calls{};

const BinarySet& set_for(int product) {
  const int set = chosen_set();
  calls[product * kSets + set] += 1;
  return sets[set];
}

constexpr int64_t kRowsAtOnce = 128;
constexpr int64_t kPanelsAtOnce = 16;

// Calls `work(tile)` for tiles of all rows and panels. A product of fewer than `alone` terms takes one thread.
template <typename Work>
void for_tiles(const BinaryProduct& p, int64_t alone, const Work& work) {
  if (p.rows == 0 || p.panels == 0) return;
  const int64_t threads = p.rows * p.inputs * p.outputs < alone ? 1 : at::get_num_threads();
  if (threads == 1) {
    for (int64_t row = 0; row < p.rows; row += kRowsAtOnce) {
      work({row, std::min(p.rows, row + kRowsAtOnce), 0, p.panels});
    }
    return;
  }
  const int64_t row_tiles = (p.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  int64_t width = kPanelsAtOnce;  // a multiple of 4, which the kernels take at once
  while (width > 4 && row_tiles * ((p.panels + width - 1) / width) < 4 * threads) width /= 2;
  const int64_t panel_tiles = (p.panels + width - 1) / width;
  at::parallel_for(0, row_tiles * panel_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end;) {
      // Neighbouring tiles of the same rows are one: what a kernel prepares of its rows is then prepared once.
      const int64_t rows = tile / panel_tiles, first = tile % panel_tiles;
      const int64_t count = std::min(end - tile, panel_tiles - first);
      work({rows * kRowsAtOnce, std::min(p.rows, (rows + 1) * kRowsAtOnce), first * width,
            std::min(p.panels, (first + count) * width)});
      tile += count;
    }
  });
}

Tensor binary_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& positives,
                     const Tensor& scale, const std::optional<Tensor>& bias, const Tensor& threshold,
                     int64_t outputs) {
  BinaryArguments arguments(x, weight, scale, bias, outputs);
  arguments.compare(threshold, positives);
  BinaryProduct& p = arguments.product;
  const BinaryKernels kernels = set_for(0).kernels();
  thread_local std::vector<uint8_t> codes;
  thread_local std::vector<uint32_t> unordered;
  codes.resize(std::max(codes.size(), static_cast<size_t>(p.rows * p.words * kernels.code_bytes)));
  unordered.resize(std::max(unordered.size(), static_cast<size_t>(p.rows)));
  p.codes = codes.data();
  p.unordered = unordered.data();
  const int64_t rows_alone = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, p.inputs));
  at::parallel_for(0, p.rows, rows_alone, [&](int64_t begin, int64_t end) { kernels.signs(p, begin, end); });
  for_tiles(p, int64_t{1} << 22, [&](const BinaryTile& tile) { kernels.xnor(p, tile); });
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.unordered[row] != 0) arguments.out.view({p.rows, outputs}).select(0, row).fill_(NAN);
  }
  return arguments.out;
}

Tensor binary_weight_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& bias, int64_t outputs) {
  const BinaryArguments arguments(x, weight, scale, bias, outputs);
  const BinaryKernels kernels = set_for(1).kernels();
  for_tiles(arguments.product, int64_t{1} << 19,
            [&](const BinaryTile& tile) { kernels.signed_sums(arguments.product, tile); });
  return arguments.out;
}

std::string binary_capability() { return sets[chosen_set()].name; }

// Names of the instruction sets, and the calls of each since the process began: of binary_linear, then of the other.
std::vector<std::string> binary_capabilities() {
  std::vector<std::string> names;
  for (const BinarySet& set : sets) names.emplace_back(set.name);
  return names;
}

std::vector<int64_t> binary_counters() { return {calls.begin(), calls.end()}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(stillhouse, m) {
  for (const char* schema :
       {"binary_linear(Tensor x, Tensor weight, Tensor? positives, Tensor scale, Tensor? bias, Tensor threshold, "
        "int outputs) -> Tensor",
        "binary_weight_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int outputs) -> Tensor"}) {
    m.def(schema, {at::Tag::pt2_compliant_tag});
  }
  m.def("binary_capability() -> str", &binary_capability);
  m.def("binary_capabilities() -> str[]", &binary_capabilities);
  m.def("binary_counters() -> int[]", &binary_counters);
}

TORCH_LIBRARY_IMPL(stillhouse, CPU, m) {
  m.impl("binary_linear", &binary_linear);
  m.impl("binary_weight_linear", &binary_weight_linear);
}
