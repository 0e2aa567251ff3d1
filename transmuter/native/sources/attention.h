// Attention, whose scores are never written to memory: those of some queries at a time stay in the cache.

#pragma once

#include <limits>

#include "product.h"

namespace transmuter {
namespace {

constexpr long kQueries = 4 * kTileRows;  // whose scores are there at once, at most
constexpr long kFewQueries = kTileRows;   // whose scores are there at once, at least
constexpr long kScores = 1 << 16;         // that are there at once, if these are enough queries
constexpr long kShares = 4;               // of the work, for each thread, if there are too few heads and many queries

[[gnu::always_inline]] inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

#if defined(__clang__)
template <int Distance, int... I>
[[gnu::always_inline]] inline Vector turned(Vector v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, ((I + Distance) % kLanes)...);
}
#else
template <int Distance, int... I>
[[gnu::always_inline]] inline Vector turned(Vector v, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(v, Lanes{((I + Distance) % kLanes)...});
}
#endif

template <int Distance>
[[gnu::always_inline]] inline Vector turned(Vector v) {
  return turned<Distance>(v, std::make_integer_sequence<int, kLanes>());
}

[[gnu::always_inline]] inline float sum_of(Vector v) {
  if (kLanes == 16) v += turned<kLanes / 2>(v);
  v += turned<4>(v);
  v += turned<2>(v);
  v += turned<1>(v);
  return v[0];
}

[[gnu::always_inline]] inline float largest_of(Vector v) {
  if (kLanes == 16) v = larger(v, turned<kLanes / 2>(v));
  v = larger(v, turned<4>(v));
  v = larger(v, turned<2>(v));
  v = larger(v, turned<1>(v));
  return v[0];
}

// Coefficients of a polynomial for 2^x - 1, where x is at most 0.5 off 0; with it 2^x is off by 9.2e-8 of itself.
constexpr float kPowers[] = {6.931469776e-1f, 2.402224208e-1f, 5.550733744e-2f, 9.671512710e-3f, 1.326472726e-3f};

// 2 to the power of what is not above 0; 0 where that would be no normal number.
[[gnu::always_inline]] inline Vector power_of_two(Vector x) {
  constexpr float kRounding = 12582912.0f + 127.0f;  // added, it leaves an integer, and an exponent, in the last bits
  const Vector shifted = x + kRounding;
  const Vector r = x - (shifted - kRounding);
  Vector y = r * kPowers[4] + kPowers[3];
  y = y * r + kPowers[2];
  y = y * r + kPowers[1];
  y = y * r + kPowers[0];
  y = y * r + 1.0f;
  return x < Vector{} - 126.0f ? Vector{} : y * (Vector)((Lanes)shifted << 23);
}

template <int... I>
[[gnu::always_inline]] inline Lanes numbers(std::integer_sequence<int, I...>) {
  return Lanes{I...};
}

// A bias of one row of scores, if there is any; `step` is 0 if it is the same for all keys.
struct Bias {
  const float* row;
  long step;

  Vector at(long j, long count) const {
    if (step == 0) return Vector{} + *row;
    if (j + kLanes <= count) return load(row + j);
    float part[kLanes] = {};
    std::memcpy(part, row + j, (count - j) * sizeof(float));
    return load(part);
  }
};

// Makes scale * score + bias of a row's scores, and, if they are bounded, a finite number of -inf. Returns the largest.
// Whole vectors are written, with -inf behind the last score.
template <bool HasBias, bool IsBounded>
[[gnu::always_inline]] inline float finish(float* row, long count, float scale, Bias bias) {
  const Vector nothing = Vector{} - std::numeric_limits<float>::infinity();
  const Vector bound = Vector{} - std::numeric_limits<float>::max();
  Vector largest = nothing;
  for (long j = 0; j < count; j += kLanes) {
    Vector x = scale * load(row + j);
    if (HasBias) x += bias.at(j, count);
    if (IsBounded) x = x < bound ? bound : x;
    if (j + kLanes > count)
      x = numbers(std::make_integer_sequence<int, kLanes>()) < static_cast<int>(count - j) ? x : nothing;
    store(row + j, x);
    largest = larger(x, largest);
  }
  return largest_of(largest);
}

[[gnu::always_inline]] inline Vector power(Vector x, float largest) {
  return power_of_two((x - largest) * 1.44269504088896341f);
}

// Makes powers of a row's scores, from 0 to 1, and returns their sum.
template <bool HasBias>
float powers(float* row, long count, float scale, Bias bias) {
  const float largest = finish<HasBias, false>(row, count, scale, bias);
  Vector sum{};
  for (long j = 0; j < count; j += kLanes) {
    const Vector made = power(load(row + j), largest);
    store(row + j, made);
    sum += made;
  }
  return sum_of(sum);
}

// Makes shares of a row's scores, and, of the gradients that the shares get, those that the products get.
template <bool HasBias>
void through_softmax(float* row, float* gradients, long count, float scale, Bias bias) {
  const float largest = finish<HasBias, true>(row, count, scale, bias);
  Vector sum{}, weighted{};
  for (long j = 0; j < count; j += kLanes) {
    const Vector made = power(load(row + j), largest);
    store(row + j, made);
    sum += made;
    weighted += made * load(gradients + j);
  }
  const float share = 1.0f / sum_of(sum), mean = sum_of(weighted) * share;
  for (long j = 0; j < count; j += kLanes) {
    const Vector made = load(row + j) * share;
    store(row + j, made);
    store(gradients + j, made * ((load(gradients + j) - mean) * scale));
  }
}

// result = left * right, or is added to. Whole vectors of columns are computed.
inline void multiply(const Cut& tiles, long columns, long depth, Left left, Right right, float* result,
                     long result_row, bool adds) {
  const long whole = ceiling(columns, kLanes) * kLanes;
  for (long column = 0; column < whole; column += kTileColumns) {
    const float* from = right.data + column / kPanel * right.panel + column % kPanel;
    for (long t = 0; t < tiles.parts; ++t) {
      const long first = tiles.start(t);
      compute(tiles.size(t), std::min<long>(kTileColumns, whole - column), depth,
              Left{left.data + first * (left.row == 0 ? depth : left.row), left.row},
              from, right.row, result + first * result_row + column, result_row, adds, staying(from), staying(from));
    }
  }
}

// An operand's rows for one head.
struct Matrix {
  float* data;
  long row, element;
  Matrix from(long i) const { return {data + i * row, row, element}; }
};

inline Matrix head(const Strided& all, long b, long h) {
  return {all.data + b * all.step[0] + h * all.step[1], all.step[2], all.step[3]};
}

// Rows as the left operand of a product, copied to `copy` if they have to be.
inline Left rows_of(const Matrix& m, const Cut& tiles, long depth, float* copy) {
  if (m.element == 1 && m.row != 0 && m.row % 1024 != 0) return {m.data, m.row};
  copy_left(m.data, m.row, m.element, tiles, depth, copy);
  return {copy, 0};
}

// Copies rows as a right operand: [panels of elements, rows, kPanel]; transposed, [panels of rows, elements, kPanel].
inline Right copied(const Matrix& m, long rows, long elements, float* to) {
  copy_panels(m.data, m.row, m.element, elements, rows, to, rows * kPanel);
  return {to, rows * kPanel, kPanel};
}

inline Right copied_transposed(const Matrix& m, long rows, long elements, float* to) {
  const long whole = rows / kPanel * kPanel * elements;
  if (rows % kPanel != 0) std::memset(to + whole, 0, elements * kPanel * sizeof(float));  // columns that nobody fills
  copy_panels(m.data, m.element, m.row, rows, elements, to, elements * kPanel);
  return {to, elements * kPanel, kPanel};
}

// Writes a row of `count` elements, `factor` times.
inline void write(const float* from, long count, float factor, float* to, long step) {
  long j = 0;
  for (; step == 1 && j + kLanes <= count; j += kLanes) store(to + j, load(from + j) * factor);
  for (; j < count; ++j) to[j * step] = from[j] * factor;
}

// Writes rows of which `from` is the transpose.
inline void write_transposed(const float* from, long step, long rows, long elements, const Matrix& to) {
  if (to.element == 1 && elements % kLanes == 0) return copy_transposed(from, step, elements, rows, to.data, to.row);
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < elements; ++j) to.data[i * to.row + j * to.element] = from[j * step + i];
}

// How much a head needs of what.
struct Extents {
  long queries, keys, depth, width;                // of a block of queries, all keys, elements of keys, of values
  long keys_whole, depth_whole, width_whole, row;  // the same in whole panels; from one row of scores to the next

  explicit Extents(const Attention& a) : keys(a.keys), depth(a.depth), width(a.width) {
    keys_whole = ceiling(keys, kPanel) * kPanel;
    depth_whole = ceiling(depth, kPanel) * kPanel;
    width_whole = ceiling(width, kPanel) * kPanel;
    // rows that lie a power of two apart would push each other out of the cache
    row = keys_whole + (keys_whole % 256 == 0 ? kLine : 0);
    queries = std::min(a.queries, std::min(kQueries, std::max(kFewQueries, kScores / row)));
  }
};

// Parts of a thread's memory, of so many elements each.
template <int Count>
struct Parts {
  float* at[Count];

  Parts(const Tasks& tasks, const long (&sizes)[Count]) {
    const auto whole = [](long size) { return ceiling(size + kSlack, kLine) * kLine; };
    long all = 0;
    for (long size : sizes) all += whole(size);
    float* next = static_cast<float*>(tasks.scratch(2, all * sizeof(float)));
    for (int i = 0; i < Count; next += whole(sizes[i++])) at[i] = next;
  }
};

inline Bias bias_of(const Attention& a, long b, long h, long query) {
  if (a.bias.data == nullptr) return {nullptr, 0};
  const Matrix m = head(a.bias, b, h);
  return {m.data + query * m.row, m.element};
}

// Some queries of one head.
template <bool HasBias>
void attend(const Attention& a, long b, long h, long query, long queries, const Tasks& tasks) {
  const Extents n(a);
  const Parts<5> parts(tasks, {n.keys_whole * n.depth, n.width_whole * n.keys, n.queries * n.depth, n.queries * n.row,
                               n.queries * n.width_whole});
  const auto& [keys_copy, values_copy, queries_copy, scores, mixed] = parts.at;
  const Right keys = copied_transposed(head(a.key, b, h), n.keys, n.depth, keys_copy);
  const Right values = copied(head(a.value, b, h), n.keys, n.width, values_copy);
  const Cut blocks{queries, ceiling(queries, n.queries)};
  for (long i = 0; i < blocks.parts; ++i) {
    const long first = query + blocks.start(i), rows = blocks.size(i);
    const Cut tiles{rows, ceiling(rows, kTileRows)};
    const Left left = rows_of(head(a.query, b, h).from(first), tiles, n.depth, queries_copy);
    multiply(tiles, n.keys, n.depth, left, keys, scores, n.row, false);
    float totals[kQueries];
    for (long r = 0; r < rows; ++r)
      totals[r] = powers<HasBias>(scores + r * n.row, n.keys, a.scale, bias_of(a, b, h, first + r));
    multiply(tiles, n.width, n.keys, {scores, n.row}, values, mixed, n.width_whole, false);
    const Matrix output = head(a.output, b, h).from(first);
    for (long r = 0; r < rows; ++r)
      write(mixed + r * n.width_whole, n.width, 1.0f / totals[r], output.data + r * output.row, output.element);
  }
}

// The gradients of one head. Where a query sees nothing, its result is NaN, but its shares here are all the same.
template <bool HasBias>
void differentiate(const Attention& a, long b, long h, const Tasks& tasks) {
  const Extents n(a);
  const Parts<10> parts(tasks, {n.keys_whole * n.depth, n.keys_whole * n.width, n.depth_whole * n.keys,
                                n.queries * n.depth, n.queries * n.width, n.queries * n.row, n.queries * n.row,
                                n.queries * n.depth_whole, n.keys_whole * n.depth, n.keys_whole * n.width});
  const auto& [keys_copy, values_copy, keys_as_they_are, queries_copy, outputs_copy, shares, scores, of_queries,
               of_keys, of_values] = parts.at;
  const Right keys = copied_transposed(head(a.key, b, h), n.keys, n.depth, keys_copy);
  const Right values = copied_transposed(head(a.value, b, h), n.keys, n.width, values_copy);
  const Right rows_of_keys = copied(head(a.key, b, h), n.keys, n.depth, keys_as_they_are);
  const Cut depths{n.depth, ceiling(n.depth, kTileRows)}, widths{n.width, ceiling(n.width, kTileRows)};
  const Cut blocks{a.queries, ceiling(a.queries, n.queries)};
  for (long i = 0; i < blocks.parts; ++i) {
    const long first = blocks.start(i), rows = blocks.size(i);
    const Cut tiles{rows, ceiling(rows, kTileRows)};
    const Matrix query = head(a.query, b, h).from(first), output = head(a.output, b, h).from(first);
    multiply(tiles, n.keys, n.depth, rows_of(query, tiles, n.depth, queries_copy), keys, shares, n.row, false);
    multiply(tiles, n.keys, n.width, rows_of(output, tiles, n.width, outputs_copy), values, scores, n.row, false);
    for (long r = 0; r < rows; ++r)
      through_softmax<HasBias>(shares + r * n.row, scores + r * n.row, n.keys, a.scale, bias_of(a, b, h, first + r));
    copy_left(output.data, output.element, output.row, widths, rows, outputs_copy);
    multiply(widths, n.keys, rows, {outputs_copy, 0}, {shares, kPanel, n.row}, of_values, n.keys_whole, i > 0);
    copy_left(query.data, query.element, query.row, depths, rows, queries_copy);
    multiply(depths, n.keys, rows, {queries_copy, 0}, {scores, kPanel, n.row}, of_keys, n.keys_whole, i > 0);
    multiply(tiles, n.depth, n.keys, {scores, n.row}, rows_of_keys, of_queries, n.depth_whole, false);
    const Matrix gradient = head(a.query_gradient, b, h).from(first);
    for (long r = 0; r < rows; ++r)
      write(of_queries + r * n.depth_whole, n.depth, 1.0f, gradient.data + r * gradient.row, gradient.element);
  }
  write_transposed(of_keys, n.keys_whole, n.keys, n.depth, head(a.key_gradient, b, h));
  write_transposed(of_values, n.keys_whole, n.keys, n.width, head(a.value_gradient, b, h));
}

inline void attention(const Attention& a, const Tasks& tasks) {
  const long heads = a.batch * a.heads;
  // each part of a head's queries copies its keys and values anew
  const long most = std::max<long>(1, a.queries / (2 * kQueries));
  const Cut parts{a.queries, std::min(most, std::max<long>(1, ceiling(kShares * tasks.threads, heads)))};
  auto body = [&](long i) {
    const long b = i / parts.parts / a.heads, h = i / parts.parts % a.heads, part = i % parts.parts;
    (a.bias.data == nullptr ? attend<false> : attend<true>)(a, b, h, parts.start(part), parts.size(part), tasks);
  };
  run_all(tasks, heads * parts.parts, body);
}

inline void attention_gradients(const Attention& a, const Tasks& tasks) {
  auto body = [&](long i) {
    (a.bias.data == nullptr ? differentiate<false> : differentiate<true>)(a, i / a.heads, i % a.heads, tasks);
  };
  run_all(tasks, a.batch * a.heads, body);
}

}  // namespace
}  // namespace transmuter
