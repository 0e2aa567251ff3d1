// What the kernels are asked for. One table of them is compiled for each instruction set (variants), and chosen when the library
// is loaded. Nothing here may be inline: a variant's copy could end up in code that runs on every processor.

#pragma once

#include <cstddef>
#include <cstdint>

namespace transmuter {

// Runs `task(context, i)` for each i below `count`, on the threads that XLA has, and returns when all are done.
// `scratch(thread-local slot, bytes)` is memory of the calling thread, aligned to 64 bytes, valid until it asks again.
struct Tasks {
  long threads;
  void (*run)(const Tasks& tasks, long count, void (*task)(void*, long), void* context);
  void* (*scratch)(int slot, size_t bytes);
  void* pool;
};

constexpr int kBatchDimensions = 3;
constexpr long kPanel = 32;  // columns of a packed right operand that lie side by side, whatever the instruction set

// result[b, m, n] = sum over k of left[b, m, k] * right[b, k, n], by strides in elements. The result has a stride of 1
// along n. Packed, a matrix of the right operand is [ceil(n / kPanel), k, kPanel], zero behind its last column.
struct Product {
  long batch[kBatchDimensions];
  long rows, depth, columns;
  const float* left;
  const float* right;
  float* result;
  long left_batch[kBatchDimensions], left_row, left_depth;
  long right_batch[kBatchDimensions], right_depth, right_column;
  long result_batch[kBatchDimensions], result_row;
  bool is_packed;
};

// result[m, n] = first[n] + sum over k of left[m, k] * right[k, n], where `left` has bytes without sign, or signed ones to
// each of which 128 is added. `right` is packed as [ceil(n / kPanel), ceil(k / 4), kPanel, 4], zero behind its last row and
// column. The operands and the result lie row by row.
struct IntegerProduct {
  long rows, depth, columns;
  const uint8_t* left;
  bool is_signed;
  const int8_t* right;
  const int32_t* first;
  int32_t* result;
};

// The tensor's range, with zero in it, as 256 steps of `scale`, of which `zero` is the one of zero; and each element's step.
struct Quantization {
  long size;
  const float* values;
  uint8_t* steps;
  float* scale;
  uint8_t* zero;
};

// A convolution of images with two spatial dimensions, of which one of the three is wanted, as are the other two given.
// The input is [batch, height, width, groups * channels], the output [batch, height, width, groups * features], both
// dense. A kernel has steps in elements along its height, width, channels and features, of which a group's follow one
// another, or is packed: [groups, ceil(features / kPanel), height, width, channels, kPanel], zero behind the last feature.
struct Convolution {
  enum Wanted { kOutput, kInput, kKernel } wanted;
  long batch, groups, channels, features;
  long input_size[2], output_size[2], kernel_size[2], stride[2], dilation[2], low[2];
  float* input;
  float* output;
  float* kernel;
  long kernel_step[4];
  bool is_packed;
};

// An array of [batch, heads, rows, elements], by strides in elements.
struct Strided {
  float* data;
  long step[4];
};

// output = softmax(scale * query * key^T + bias) * value for each head; or, where `output` has its gradients, those of the
// query, the key and the value. No size is 0. There may be no bias; its steps may be 0.
struct Attention {
  long batch, heads, queries, keys, depth, width;
  float scale;
  Strided query, key, value, bias, output;
  Strided query_gradient, key_gradient, value_gradient;
};

// result[m, n] = sum over k of left[m, k] * (q[k, n] - zero[b, n]) * scale[b, n], where b is the block that k falls into. Words
// of 32 bits hold the q that follow one another along k, the first in the lowest bits, and are packed as
// [ceil(n / kPanel), words of k, kPanel], as are the scales and zeros of blocks. A block fills words. Without zeros they
// are half of the range.
struct FewBits {
  long rows, depth, columns, blocks;
  int bits;
  const float* left;
  const int32_t* right;
  const float* scales;
  const void* zeros;  // bytes or floats
  bool has_float_zeros;
  float* result;
};

struct Kernels {
  const char* name;
  void (*product)(const Product& product, const Tasks& tasks);
  void (*integer_product)(const IntegerProduct& product, const Tasks& tasks);
  void (*quantization)(const Quantization& quantization, const Tasks& tasks);
  void (*convolution)(const Convolution& convolution, const Tasks& tasks);
  void (*attention)(const Attention& attention, const Tasks& tasks);
  void (*attention_gradients)(const Attention& attention, const Tasks& tasks);
  void (*few_bits)(const FewBits& product, const Tasks& tasks);
};

extern "C" const Kernels kKernelsAvx512Vnni;
extern "C" const Kernels kKernelsAvx512;
extern "C" const Kernels kKernelsAvx2;

}  // namespace transmuter
