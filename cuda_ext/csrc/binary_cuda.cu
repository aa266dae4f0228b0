// Products with packed binary weights on CUDA: a thread has outputs of its own, so that no sum crosses threads and
// results are those of the CPU kernels bit for bit.

#include <cuda_runtime.h>

#include <algorithm>

#include "binary_product.h"
#include "number_formats.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // of a multiprocessor at once: 64 registers a thread

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

__device__ float input_at(const BinaryProduct& p, int64_t place) {
  return p.bfloat16 ? bfloat16_to_float(static_cast<const uint16_t*>(p.x)[place]) : static_cast<const float*>(p.x)[place];
}

// Rounds the product with the scale before the bias is added: no fused multiply and add.
__device__ void finish(const BinaryProduct& p, int64_t row, int64_t output, float sum) {
  float value = __fmul_rn(sum, p.scale[output * p.scale_step]);
  if (p.bias != nullptr) value = __fadd_rn(value, p.bias[output]);
  const int64_t place = row * p.outputs + output;
  if (p.bfloat16) {
    static_cast<uint16_t*>(p.out)[place] = float_to_bfloat16(value);
  } else {
    static_cast<float*>(p.out)[place] = value;
  }
}

// A warp compares the 32 inputs of a word.
__global__ void __launch_bounds__(kThreads) sign_kernel(BinaryProduct p) {
  const int lane = threadIdx.x % kWordBits;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWordBits);
  const int64_t count = p.rows * p.words;
  for (int64_t i = blockIdx.x * (kThreads / kWordBits) + threadIdx.x / kWordBits; i < count; i += warps) {
    const int64_t row = i / p.words, input = i % p.words * kWordBits + lane;
    bool reached = false, unordered = false;
    if (input < p.inputs) {
      const float x = input_at(p, row * p.inputs + input), border = p.threshold[input * p.threshold_step];
      reached = x >= border;
      unordered = !reached && !(x < border);
    }
    const uint32_t word = __ballot_sync(0xffffffffu, reached);
    if (lane == 0) static_cast<uint32_t*>(p.codes)[i] = word;
    if (unordered) p.unordered[row] = 1u;
  }
}

// A block computes 32 rows by 64 outputs, a thread 2 rows of 4 outputs, 16 words at a time in shared memory.
constexpr int kTileRows = 32;
constexpr int kTile = 64;
constexpr int kEachRows = 2;
constexpr int kEach = 4;
constexpr int kWordsAtOnce = 16;

__global__ void __launch_bounds__(kThreads, kBlocks) xnor_kernel(BinaryProduct p) {
  __shared__ uint32_t codes[kWordsAtOnce][kTileRows + 1], weights[kWordsAtOnce][kTile];
  const int lane = threadIdx.x % kPanel, group = threadIdx.x / kPanel;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTileRows; first_row < p.rows;
       first_row += static_cast<int64_t>(gridDim.y) * kTileRows) {
    int differing[kEachRows][kEach] = {};
    for (int64_t first = 0; first < p.words; first += kWordsAtOnce) {
      const int count = static_cast<int>(min(static_cast<int64_t>(kWordsAtOnce), p.words - first));
#pragma unroll 1
      for (int i = threadIdx.x; i < kWordsAtOnce * kTileRows; i += kThreads) {
        const int word = i % kWordsAtOnce;
        const int64_t row = first_row + i / kWordsAtOnce;
        codes[word][i / kWordsAtOnce] =
            row < p.rows && word < count ? static_cast<const uint32_t*>(p.codes)[row * p.words + first + word] : 0u;
      }
#pragma unroll 1
      for (int i = threadIdx.x; i < kWordsAtOnce * kTile; i += kThreads) {
        const int output = i % kPanel, word = i / kPanel % kWordsAtOnce, part = i / (kPanel * kWordsAtOnce);
        const int64_t panel = first_output / kPanel + part;
        weights[word][part * kPanel + output] =
            panel < p.panels && word < count ? p.weight[(panel * p.words + first + word) * kPanel + output] : 0u;
      }
      __syncthreads();
#pragma unroll 1  // more at once would not fit the registers
      for (int word = 0; word < count; ++word) {
#pragma unroll
        for (int r = 0; r < kEachRows; ++r) {
          const uint32_t activation = codes[word][group * kEachRows + r];
#pragma unroll
          for (int o = 0; o < kEach; ++o) differing[r][o] += __popc(activation ^ weights[word][o * kPanel + lane]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kEachRows; ++r) {
      const int64_t row = first_row + group * kEachRows + r;
#pragma unroll
      for (int o = 0; o < kEach; ++o) {
        const int64_t output = first_output + o * kPanel + lane;
        if (row >= p.rows || output >= p.outputs) continue;
        const int sum = p.positives == nullptr ? static_cast<int>(p.inputs) - 2 * differing[r][o]
                                               : p.positives[output] - differing[r][o];
        finish(p, row, output, p.unordered[row] != 0u ? float_of(0x7fc00000u) : static_cast<float>(sum));
      }
    }
  }
}

// A block computes 2 rows of 256 outputs, a thread one output of each, 16 words at a time in shared memory.
constexpr int kRows = 2;

__device__ float signed_input(uint32_t negative, const float* x, int bit) {
  return float_of(bits_of(x[bit]) ^ ((negative << (31 - bit)) & 0x80000000u));
}

__device__ float group_sum(uint32_t negative, const float* x, int bit) {
  const float two = __fadd_rn(signed_input(negative, x, bit), signed_input(negative, x, bit + 1));
  return __fadd_rn(__fadd_rn(two, signed_input(negative, x, bit + 2)), signed_input(negative, x, bit + 3));
}

__device__ float word_sum(uint32_t negative, const float* x) {
  float sum = 0.0f;
#pragma unroll 1
  for (int half = 0; half < 2; ++half, negative >>= 16, x += 16) {
    const float own = __fadd_rn(__fadd_rn(group_sum(negative, x, 0), group_sum(negative, x, 4)),
                                __fadd_rn(group_sum(negative, x, 8), group_sum(negative, x, 12)));
    sum = half == 0 ? own : __fadd_rn(sum, own);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads, kBlocks) signed_sum_kernel(BinaryProduct p) {
  __shared__ float inputs[kRows][kWordsAtOnce * kWordBits];
  const int64_t output = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint32_t* weight = p.weight + output / kPanel * p.words * kPanel + output % kPanel;
  for (int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows; first_row < p.rows;
       first_row += static_cast<int64_t>(gridDim.y) * kRows) {
    float totals[kRows] = {};
    for (int64_t first = 0; first < p.words; first += kWordsAtOnce) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kRows * kWordsAtOnce * kWordBits; i += kThreads) {
        const int r = i / (kWordsAtOnce * kWordBits), offset = i % (kWordsAtOnce * kWordBits);
        const int64_t row = first_row + r, input = first * kWordBits + offset;
        inputs[r][offset] = row < p.rows && input < p.inputs ? input_at(p, row * p.inputs + input) : 0.0f;
      }
      __syncthreads();
      const int count = static_cast<int>(min(static_cast<int64_t>(kWordsAtOnce), p.words - first));
#pragma unroll 1
      for (int word = 0; output < p.outputs && word < count; ++word) {
        const uint32_t negative = ~weight[(first + word) * kPanel];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          totals[r] = __fadd_rn(totals[r], word_sum(negative, inputs[r] + word * kWordBits));
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (output < p.outputs && first_row + r < p.rows) finish(p, first_row + r, output, totals[r]);
    }
  }
}

unsigned int blocks_for(int64_t count, int64_t each, int64_t most) {
  return static_cast<unsigned int>(std::min<int64_t>(most, (count + each - 1) / each));
}

constexpr int64_t kMostBlocksX = 0x7fffffff;
constexpr int64_t kMostBlocksY = 65535;

}  // namespace

const char* binary_linear(const BinaryProduct& p, void* stream) {
  if (p.rows == 0 || p.outputs == 0) return nullptr;
  const auto on = static_cast<cudaStream_t>(stream);
  if (p.words > 0) {
    sign_kernel<<<blocks_for(p.rows * p.words, kThreads / kWordBits, kMostBlocksX), kThreads, 0, on>>>(p);
    if (const char* error = text_of(cudaGetLastError())) return error;
  }
  const dim3 blocks(blocks_for(p.outputs, kTile, kMostBlocksX), blocks_for(p.rows, kTileRows, kMostBlocksY));
  xnor_kernel<<<blocks, kThreads, 0, on>>>(p);
  return text_of(cudaGetLastError());
}

const char* binary_weight_linear(const BinaryProduct& p, void* stream) {
  if (p.rows == 0 || p.outputs == 0) return nullptr;
  const dim3 blocks(blocks_for(p.outputs, kThreads, kMostBlocksX), blocks_for(p.rows, kRows, kMostBlocksY));
  signed_sum_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return text_of(cudaGetLastError());
}

}  // namespace stillhouse::cuda
