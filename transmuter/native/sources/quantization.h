// Dynamic quantization: a tensor of float32 as bytes, in steps of a scale that its own range decides.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "product.h"
#include "vector.h"

namespace transmuter {
namespace {

constexpr long kValuesAtOnce = 1 << 15;  // by one task
constexpr long kChunk = 256;
constexpr float kClose = 0.4999f;  // of values below 256, an inverse's rounding and a product's change less than 1e-4

struct Range {
  float low = 0, high = 0;
  bool has_nan = false;
};

inline Range range_of(const float* values, long size) {
  Range range;
  Vector low{}, high{};
  Lanes nan{};
  long i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vector value = load(values + i);
    low = value < low ? value : low;
    high = value > high ? value : high;
    nan |= value != value;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    range.low = std::min(range.low, low[lane]);
    range.high = std::max(range.high, high[lane]);
    range.has_nan |= nan[lane] != 0;
  }
  for (; i < size; ++i) {
    range.low = std::min(range.low, values[i]);
    range.high = std::max(range.high, values[i]);
    range.has_nan |= values[i] != values[i];
  }
  return range;
}

// The steps of up to kChunk values. Rounds half to even; says whether any value is so close to the middle between two steps
// that multiplying by the inverse of the scale, not dividing by the scale, may have rounded it to the other one.
template <bool Divides>
bool quantize(const float* __restrict values, long size, float scale, float zero, uint8_t* __restrict steps) {
  const float least = -zero, most = 255 - zero, inverse = 1 / scale;
  int32_t farthest = 0;  // bits of a float, which has the order of the integers
  for (long i = 0; i < size; ++i) {
    const float exact = Divides ? values[i] / scale : values[i] * inverse;
    const float step = std::nearbyint(exact);
    const float distance = std::abs(exact - step);
    int32_t bits;
    std::memcpy(&bits, &distance, sizeof bits);
    farthest = std::max(farthest, bits);
    const float above = step > least ? step : least;
    const float inside = above < most ? above : most;
    steps[i] = static_cast<uint8_t>(static_cast<int32_t>(inside + zero));
  }
  float distance;
  std::memcpy(&distance, &farthest, sizeof distance);
  return !(distance < kClose);
}

inline void quantization(const Quantization& q, const Tasks& tasks) {
  const Cut parts{q.size, std::max<long>(1, q.size / kValuesAtOnce)};
  auto* ranges = static_cast<Range*>(tasks.scratch(3, parts.parts * sizeof(Range)));
  auto find = [&](long i) { ranges[i] = range_of(q.values + parts.start(i), parts.size(i)); };
  run_all(tasks, parts.parts, find);
  Range range;
  for (long i = 0; i < parts.parts; ++i) {
    range.low = std::min(range.low, ranges[i].low);
    range.high = std::max(range.high, ranges[i].high);
    range.has_nan |= ranges[i].has_nan;
  }
  const float width = range.has_nan ? NAN : range.high - range.low;
  const float scale = width == 0 ? 1 : width / 255;
  const float zero = std::min(255.0f, std::max(0.0f, std::nearbyint(-range.low / scale)));
  *q.scale = scale;
  *q.zero = static_cast<uint8_t>(static_cast<int32_t>(zero));
  auto round = [&](long i) {
    const long end = parts.start(i) + parts.size(i);
    for (long at = parts.start(i); at < end; at += kChunk) {
      const long size = std::min(kChunk, end - at);
      if (quantize<false>(q.values + at, size, scale, zero, q.steps + at))
        quantize<true>(q.values + at, size, scale, zero, q.steps + at);
    }
  };
  run_all(tasks, parts.parts, round);
}

}  // namespace
}  // namespace transmuter
