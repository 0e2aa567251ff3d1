// Products with weights of few bits, in blocks that share a scale. Few rows multiply weights that are unpacked in registers;
// for more of them a piece of a panel is unpacked at a time, and meets the rows as in any product.

#pragma once

#include <algorithm>

#include "kernels.h"
#include "product.h"
#include "vector.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace transmuter {
namespace {

constexpr int kWordBits = 32;
constexpr int kRowsAtOnce = kLanes == 16 ? 8 : 3;   // that meet weights in registers
constexpr long kFewRows = 2 * kRowsAtOnce;          // that do so, one group after the other
constexpr long kManyRows = 168;                     // that meet a piece of a panel
constexpr long kUnpackedDepth = 256;                // rows of a panel that are unpacked at a time
constexpr long kWordsAhead = 16;                    // rows of words that are fetched ahead
constexpr long kWeightsAtOnce = 1 << 18;            // by one task; fewer take less time than another thread to begin

typedef Lanes UnalignedLanes __attribute__((aligned(4), may_alias));

[[gnu::always_inline]] inline Lanes load_words(const int32_t* from) {
  return *reinterpret_cast<const UnalignedLanes*>(from);
}

// Fields of words as floats, less half of their range: around zero, sums lose fewer digits.
#if defined(__AVX512F__)
template <int Bits>
struct Fields {
  static constexpr bool kByTable = Bits <= 4;  // of which the instruction reads the last four bits of an index

  Vector table;
  Fields() {
    for (int i = 0; i < kLanes; ++i) table[i] = static_cast<float>(i % (1 << Bits) - (1 << (Bits - 1)));
  }
#else
template <int Bits>
struct Fields {
  static constexpr bool kByTable = false;
#endif

  // Words whose fields have a sign.
  [[gnu::always_inline]] static Lanes prepared(Lanes words) {
    constexpr unsigned ones = ~0u / ((1u << Bits) - 1);
    return kByTable ? words : words ^ static_cast<int>(ones << (Bits - 1));
  }

  [[gnu::always_inline]] Vector at(Lanes words, int field) const {
#if defined(__AVX512F__)
    if (kByTable) return (Vector)_mm512_permutexvar_ps((__m512i)(words >> (Bits * field)), (__m512)table);
#endif
    return __builtin_convertvector((words << (kWordBits - Bits - Bits * field)) >> (kWordBits - Bits), Vector);
  }
};

// Zero points of kLanes columns, less half of the range.
[[gnu::always_inline]] inline Vector centre(const FewBits& p, long at) {
  Vector zero{};
  for (int i = 0; i < kLanes; ++i)
    zero[i] = p.has_float_zeros ? static_cast<const float*>(p.zeros)[at + i]
                                : static_cast<float>(static_cast<const uint8_t*>(p.zeros)[at + i]);
  return zero - static_cast<float>(1 << (p.bits - 1));
}

// Rows of a left operand as [depth, Rows], and the sums of their blocks, [blocks, Rows].
struct FewRows {
  const float* data;
  const float* sums;
};

// Up to kTileColumns columns of a panel, from number `first` on, into rows of kPanel.
template <int Bits, int Rows>
[[gnu::noinline]] void few_rows(const FewBits& p, FewRows rows, long panel, long first, float* result) {
  constexpr int fields = kWordBits / Bits, chains = Rows == 1 ? 2 : 1;
  const Fields<Bits> unpack;
  const long words = p.depth / fields / p.blocks;
  const int32_t* right = p.right + panel * p.blocks * words * kPanel + first;
  const float* left = rows.data;
  long at = panel * p.blocks * kPanel + first;
  Vector totals[Rows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) totals[r][j] = Vector{};
  for (long b = 0; b < p.blocks; ++b, at += kPanel) {
    Vector sums[chains][Rows][kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < chains; ++c)
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sums[c][r][j] = Vector{};
    for (long w = 0; w < words; ++w) {
      Lanes word[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        word[j] = unpack.prepared(load_words(right + j * kLanes));
        __builtin_prefetch(right + kWordsAhead * kPanel + j * kLanes, 0, 3);
      }
#pragma GCC unroll 16
      for (int i = 0; i < fields; ++i) {
        Vector weight[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) weight[j] = unpack.at(word[j], i);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) sums[i % chains][r][j] += left[i * Rows + r] * weight[j];
      }
      left += fields * Rows;
      right += kPanel;
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Vector scale = load(p.scales + at + j * kLanes);
      const Vector zero = p.zeros ? centre(p, at + j * kLanes) : Vector{};
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        Vector sum = sums[0][r][j];
        if (chains > 1) sum += sums[chains - 1][r][j];
        if (p.zeros) sum -= rows.sums[b * Rows + r] * zero;
        totals[r][j] += scale * sum;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(result + r * kPanel + j * kLanes, totals[r][j]);
}

// Some rows of words of a panel as floats, [depth, kPanel].
template <int Bits, bool HasZeros>
[[gnu::noinline]] void unpack_panel(const FewBits& p, long panel, long start, long words, float* to) {
  constexpr int fields = kWordBits / Bits, vectors = kPanel / kLanes;
  const Fields<Bits> unpack;
  const long all = p.depth / fields, of_block = all / p.blocks;
  const int32_t* right = p.right + (panel * all + start) * kPanel;
  for (long w = 0; w < words;) {
    const long b = (start + w) / of_block, end = std::min(words, (b + 1) * of_block - start);
    const long at = (panel * p.blocks + b) * kPanel;
    Vector scale[vectors], zero[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      scale[j] = load(p.scales + at + j * kLanes);
      if (HasZeros) zero[j] = centre(p, at + j * kLanes);
    }
    for (; w < end; ++w, right += kPanel, to += fields * kPanel) {
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) {
        const Lanes word = unpack.prepared(load_words(right + j * kLanes));
#pragma GCC unroll 16
        for (int i = 0; i < fields; ++i) {
          const Vector field = unpack.at(word, i);
          store(to + i * kPanel + j * kLanes, (HasZeros ? field - zero[j] : field) * scale[j]);
        }
      }
    }
  }
}

using RunRows = void (*)(const FewBits&, FewRows, long, long, float*);
using UnpackPanel = void (*)(const FewBits&, long, long, long, float*);

template <int Bits, int... Rows>
RunRows rows_of(long rows, std::integer_sequence<int, Rows...>) {
  static constexpr RunRows all[] = {few_rows<Bits, Rows + 1>...};
  return all[rows - 1];
}

// Of one width of a field.
struct ByBits {
  RunRows (*rows)(long rows, std::make_integer_sequence<int, kRowsAtOnce> all);
  UnpackPanel unpack[2];  // without zeros, with zeros
};

template <int Bits>
ByBits of_bits() {
  return {rows_of<Bits>, {unpack_panel<Bits, false>, unpack_panel<Bits, true>}};
}

inline ByBits by_bits(int bits) { return bits == 2 ? of_bits<2>() : bits == 4 ? of_bits<4>() : of_bits<8>(); }

// Whether a number, times zero, is zero, for all of them: what the sum of a block takes out must not be infinite.
inline bool are_finite(const float* from, long count) {
  Vector zeros{};
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) zeros += load(from + i) * 0.0f;
  float zero = 0;
  for (int lane = 0; lane < kLanes; ++lane) zero += zeros[lane];
  for (; i < count; ++i) zero += from[i] * 0.0f;
  return zero == 0;
}

inline float sum_of(const float* from, long count) {
  Vector sums{};
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += load(from + i);
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; i < count; ++i) sum += from[i];
  return sum;
}

// Some panels of the result, for up to kRowsAtOnce rows.
inline void panels_of_few(const FewBits& p, long row, long rows, long panel, long panels, const Tasks& tasks) {
  const float* from = p.left + row * p.depth;
  float* const copied = static_cast<float*>(tasks.scratch(0, (rows * (p.depth + p.blocks) + kSlack) * sizeof(float)));
  float* const sums = copied + rows * p.depth + kSlack;
  const bool is_copied = rows > 1;
  for (long b = 0, size = p.depth / p.blocks; p.zeros && b < p.blocks; ++b)
    for (long r = 0; r < rows; ++r) sums[b * rows + r] = sum_of(from + r * p.depth + b * size, size);
  if (is_copied) copy_transposed(from, p.depth, rows, p.depth, copied, rows);
  const RunRows run = by_bits(p.bits).rows(rows, {});
  float part[kRowsAtOnce * kPanel];
  for (long j = panel; j < panel + panels; ++j) {
    const long columns = std::min(kPanel, p.columns - j * kPanel);
    for (long first = 0; first < columns; first += kTileColumns)
      run(p, {is_copied ? copied : from, sums}, j, first, part + first);
    for (long r = 0; r < rows; ++r)
      std::memcpy(p.result + (row + r) * p.columns + j * kPanel, part + r * kPanel, columns * sizeof(float));
  }
}

// Some panels of the result, for up to kManyRows rows.
inline void panels_of_many(const FewBits& p, long row, long rows, long panel, long panels, const Tasks& tasks) {
  const UnpackPanel unpack = by_bits(p.bits).unpack[p.zeros != nullptr];
  const long fields = kWordBits / p.bits, words = p.depth / fields;
  const Cut tiles{rows, ceiling(rows, kTileRows)};
  const Cut depths{words, ceiling(p.depth, kUnpackedDepth)};
  const long most = depths.size(0) * fields;
  float* const copied = static_cast<float*>(tasks.scratch(0, (rows * most + kSlack) * sizeof(float)));
  float* const right = static_cast<float*>(tasks.scratch(1, most * kPanel * sizeof(float)));
  for (long d = 0; d < depths.parts; ++d) {
    const long start = depths.start(d), depth = depths.size(d) * fields;
    copy_left(p.left + row * p.depth + start * fields, p.depth, 1, tiles, depth, copied);
    for (long j = panel; j < panel + panels; ++j) {
      unpack(p, j, start, depths.size(d), right);
      const auto* next = reinterpret_cast<const float*>(p.right + ((j + 1) * words + start) * kPanel);
      const long end = std::min((j + 1) * kPanel, p.columns);
      for (long column = j * kPanel, inner = 0; column < end; column += kTileColumns, inner += kTileColumns)
        for (long t = 0; t < tiles.parts; ++t) {
          const long first = tiles.start(t);
          compute(tiles.size(t), std::min<long>(kTileColumns, end - column), depth, Left{copied + first * depth, 0},
                  right + inner, kPanel, p.result + (row + first) * p.columns + column, p.columns, d > 0,
                  Ahead{next, t == 0 ? p.bits : 0, 1}, staying(copied));
        }
    }
  }
}

inline void few_bits(const FewBits& p, const Tasks& tasks) {
  if (p.rows == 0 || p.columns == 0) return;
  if (p.depth == 0) {
    std::memset(p.result, 0, p.rows * p.columns * sizeof(float));
    return;
  }
  const long panels = ceiling(p.columns, kPanel);
  const bool are_few = p.rows <= kFewRows && (!p.zeros || are_finite(p.left, p.rows * p.depth));
  const Cut blocks{p.rows, ceiling(p.rows, are_few ? kRowsAtOnce : kManyRows)};
  const long wanted = std::min(4 * tasks.threads, ceiling(p.rows * p.depth * p.columns, kWeightsAtOnce));
  const Cut groups{panels, std::min(panels, ceiling(wanted, blocks.parts))};
  auto body = [&](long i) {
    const long b = i % blocks.parts, g = i / blocks.parts;
    (are_few ? panels_of_few : panels_of_many)(p, blocks.start(b), blocks.size(b), groups.start(g), groups.size(g), tasks);
  };
  run_all(tasks, blocks.parts * groups.parts, body);
}

}  // namespace
}  // namespace transmuter
