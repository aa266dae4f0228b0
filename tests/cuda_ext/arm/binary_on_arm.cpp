// Products with packed binary weights by NEON and by plain C++, over random shapes: every bit must be the same, and
// that of a sum written down as it is defined. Prints how many shapes were compared; ends with 1 at a difference.

#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "binary_rows.h"

using namespace stillhouse;
using namespace stillhouse::cpu;

namespace {

std::mt19937 generator(0);

int64_t below(int64_t most) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(most)); }

struct Shape {
  int64_t rows, inputs, outputs;
  bool bfloat16, two_valued, with_bias;

  int64_t words() const { return (inputs + kWordBits - 1) / kWordBits; }
  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
};

struct Problem {
  explicit Problem(const Shape& shape) : shape(shape) {
    x.resize(shape.rows * shape.inputs);
    for (float& value : x) value = std::normal_distribution<float>()(generator);
    half.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &x[i], sizeof(bits));
      half[i] = static_cast<uint16_t>(bits >> 16);
      bits &= 0xffff0000u;
      if (shape.bfloat16) std::memcpy(&x[i], &bits, sizeof(bits));
    }
    weight.assign(shape.panels() * shape.words() * kPanel, 0);
    positives.assign(shape.outputs, 0);
    for (int64_t o = 0; o < shape.outputs; ++o) {
      for (int64_t i = 0; i < shape.inputs; ++i) {
        if (generator() & 1u) {
          weight[(o / kPanel * shape.words() + i / kWordBits) * kPanel + o % kPanel] |= 1u << (i % kWordBits);
          positives[o] += 1;
        }
      }
    }
    scale.resize(shape.outputs);
    bias.resize(shape.outputs);
    for (float& value : scale) value = std::normal_distribution<float>()(generator);
    for (float& value : bias) value = std::normal_distribution<float>()(generator);
  }

  bool is_positive(int64_t output, int64_t input) const {
    const uint32_t word = weight[(output / kPanel * shape.words() + input / kWordBits) * kPanel + output % kPanel];
    return word >> (input % kWordBits) & 1u;
  }

  BinaryProduct product() const {
    BinaryProduct p{};
    p.x = shape.bfloat16 ? static_cast<const void*>(half.data()) : x.data();
    p.weight = weight.data();
    p.scale = scale.data();
    p.bias = shape.with_bias ? bias.data() : nullptr;
    p.rows = shape.rows;
    p.inputs = shape.inputs;
    p.outputs = shape.outputs;
    p.words = shape.words();
    p.panels = shape.panels();
    p.scale_step = 1;
    p.bfloat16 = shape.bfloat16;
    p.positives = shape.two_valued ? positives.data() : nullptr;
    p.threshold = &zero;
    return p;
  }

  std::vector<uint8_t> xnor(const BinaryKernels& kernels) const {
    std::vector<uint8_t> codes(shape.rows * shape.words() * kernels.code_bytes), out(bytes());
    std::vector<uint32_t> unordered(shape.rows);
    BinaryProduct p = product();
    p.out = out.data();
    p.codes = codes.data();
    p.unordered = unordered.data();
    kernels.signs(p, 0, shape.rows);
    kernels.xnor(p, {0, shape.rows, 0, shape.panels()});
    return out;
  }

  std::vector<uint8_t> signed_sums(const BinaryKernels& kernels) const {
    std::vector<uint8_t> out(bytes());
    BinaryProduct p = product();
    p.out = out.data();
    kernels.signed_sums(p, {0, shape.rows, 0, shape.panels()});
    return out;
  }

  // Whether the kernels find the rows that have a NaN, in turn in each place.
  bool finds_nan(const BinaryKernels& kernels) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<uint8_t> codes(shape.rows * shape.words() * kernels.code_bytes);
    std::vector<uint32_t> unordered(shape.rows);
    for (int64_t place = 0; place < shape.rows * shape.inputs; ++place) {
      const float kept = x[place];
      const uint16_t kept_half = half[place];
      x[place] = nan;
      half[place] = 0x7fc0;
      BinaryProduct p = product();
      p.codes = codes.data();
      p.unordered = unordered.data();
      kernels.signs(p, 0, shape.rows);
      x[place] = kept;
      half[place] = kept_half;
      for (int64_t row = 0; row < shape.rows; ++row) {
        if ((unordered[row] != 0) != (row == place / shape.inputs)) return false;
      }
    }
    return true;
  }

  // What `xnor` is to give, for outputs in fp32.
  std::vector<uint8_t> defined() const {
    std::vector<uint8_t> out(bytes());
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t o = 0; o < shape.outputs; ++o) {
        int32_t sum = 0;
        for (int64_t i = 0; i < shape.inputs; ++i) {
          const bool on = x[row * shape.inputs + i] >= 0.0f;
          const int sign = is_positive(o, i) ? 1 : -1;
          sum += shape.two_valued ? (on ? sign : 0) : (on ? sign : -sign);
        }
        volatile float product = static_cast<float>(sum) * scale[o];
        const float value = shape.with_bias ? product + bias[o] : product;
        std::memcpy(&out[(row * shape.outputs + o) * sizeof(float)], &value, sizeof(value));
      }
    }
    return out;
  }

  int64_t bytes() const { return shape.rows * shape.outputs * (shape.bfloat16 ? 2 : 4); }

  Shape shape;
  std::vector<float> x, scale, bias;
  std::vector<uint16_t> half;
  std::vector<uint32_t> weight;
  std::vector<int32_t> positives;
  float zero = 0.0f;
};

}  // namespace

int main() {
  const BinaryKernels plain = scalar::binary_kernels(), arm = neon::binary_kernels();
  int compared = 0;
  for (; compared < 300; ++compared) {
    // A thousand inputs are more words than a byte counts: NEON adds them up in between.
    const Shape shape{1 + below(5), 1 + below(compared % 10 == 0 ? 1500 : 130), 1 + below(70), (generator() & 1u) != 0,
                      (generator() & 1u) != 0, (generator() & 1u) != 0};
    Problem problem(shape);
    const bool same = problem.xnor(plain) == problem.xnor(arm) &&
                      problem.signed_sums(plain) == problem.signed_sums(arm) &&
                      (shape.bfloat16 || problem.xnor(arm) == problem.defined()) && problem.finds_nan(plain) &&
                      problem.finds_nan(arm);
    if (!same) {
      std::printf("rows %lld, inputs %lld, outputs %lld, bfloat16 %d, two-valued %d, bias %d differ\n",
                  static_cast<long long>(shape.rows), static_cast<long long>(shape.inputs),
                  static_cast<long long>(shape.outputs), shape.bfloat16, shape.two_valued, shape.with_bias);
      return 1;
    }
  }
  std::printf("%d shapes\n", compared);
  return 0;
}
