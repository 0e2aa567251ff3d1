// Products of 8-bit matrices, exact in 32 bits, by the instruction that adds four products of an unsigned and a signed byte.

#pragma once

#include <algorithm>

#include "kernels.h"
#include "product.h"
#include "vector.h"

#if defined(__AVX512VNNI__)

#include <immintrin.h>

namespace transmuter {
namespace {

constexpr int kWord = 4;              // bytes that one instruction adds up in each lane
constexpr long kLineBytes = 64;       // bytes that come into the cache together
constexpr int kIntegerTileRows = 14;
constexpr long kIntegerBlockRows = 112;
constexpr long kIntegerBlockWords = 1024;
constexpr long kFewMultiplications = 1 << 18;  // fewer take less time than another thread to begin
constexpr uint32_t kFlips = 0x80808080;        // makes x + 128, unsigned, of signed bytes

typedef uint32_t Words __attribute__((vector_size(kLanes * kWord), aligned(1), may_alias));
typedef uint32_t Word __attribute__((aligned(1), may_alias));

// In so many sums each sum of a tile is made, so that enough of them are under way when there are few rows.
constexpr int chains_of(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows <= 4 ? 2 : 1; }

// Adds the products of four bytes to each lane. The intrinsic makes GCC 12 keep a copy of every sum in memory.
[[gnu::always_inline]] inline void add_products(__m512i& sums, __m512i bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(signed_bytes));
}

// Up to kPanel columns of the result: `first` plus the products of words of the left operand, [words, Rows], with a panel.
// `first` is a row for all rows of the tile, or `result` itself where `adds`.
template <int Rows>
[[gnu::noinline]] void integer_tile(long words, const uint32_t* __restrict left, const int8_t* __restrict right,
                                    const int8_t* next, const int32_t* first, int32_t* result, long result_row, long columns, bool adds) {
  constexpr int chains = chains_of(Rows);
  const uint32_t inside = columns >= kPanel ? ~0u : (1u << columns) - 1;
  const __mmask16 masks[2] = {static_cast<__mmask16>(inside), static_cast<__mmask16>(inside >> kLanes)};
  __m512i sums[chains][Rows][2];
#pragma GCC unroll 4
  for (int c = 0; c < chains; ++c)
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) sums[c][i][j] = _mm512_setzero_si512();
  for (long k = 0; k < words; k += chains) {
#pragma GCC unroll 4
    for (int c = 0; c < chains; ++c) {
      if (c > 0 && k + c >= words) break;
      _mm_prefetch(next + (k + c) * kLineBytes, _MM_HINT_T1);
      const __m512i row[2] = {_mm512_loadu_si512(right), _mm512_loadu_si512(right + kLanes * kWord)};
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const __m512i word = _mm512_set1_epi32(left[i]);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) add_products(sums[c][i][j], word, row[j]);
      }
      left += Rows;
      right += kPanel * kWord;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
#pragma GCC unroll 4
      for (int c = 1; c < chains; ++c) sums[0][i][j] = _mm512_add_epi32(sums[0][i][j], sums[c][i][j]);
      const int32_t* before = (adds ? result + i * result_row : first) + j * kLanes;
      _mm512_mask_storeu_epi32(result + i * result_row + j * kLanes, masks[j],
                               _mm512_add_epi32(sums[0][i][j], _mm512_maskz_loadu_epi32(masks[j], before)));
    }
}

using IntegerTile = void (*)(long, const uint32_t*, const int8_t*, const int8_t*, const int32_t*, int32_t*, long, long, bool);

constexpr IntegerTile kIntegerTiles[kIntegerTileRows] = {
    integer_tile<1>, integer_tile<2>, integer_tile<3>,  integer_tile<4>,  integer_tile<5>,  integer_tile<6>,  integer_tile<7>,
    integer_tile<8>, integer_tile<9>, integer_tile<10>, integer_tile<11>, integer_tile<12>, integer_tile<13>, integer_tile<14>,
};

// Copies words of up to kLanes rows as [words, rows], with some bits flipped. The last word of a row may have `last` bytes.
inline void copy_words(const uint8_t* from, long row, int rows, long words, long last, uint32_t flips, uint32_t* to) {
  const long whole = last == kWord ? words : words - 1;
  long k = 0;
  for (; k + kLanes <= whole; k += kLanes) {
    Vector block[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r)
      block[r] = (Vector)(*reinterpret_cast<const Words*>(from + std::min(r, rows - 1) * row + k * kWord) ^ flips);
    transpose(block);
    const __mmask16 inside = static_cast<__mmask16>((1u << rows) - 1);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) _mm512_mask_storeu_ps(to + (k + r) * rows, inside, (__m512)block[r]);
  }
  for (; k < whole; ++k)
    for (int r = 0; r < rows; ++r) to[k * rows + r] = *reinterpret_cast<const Word*>(from + r * row + k * kWord) ^ flips;
  if (whole == words) return;
  for (int r = 0; r < rows; ++r) {
    uint32_t word = 0;
    std::memcpy(&word, from + r * row + k * kWord, last);
    to[k * rows + r] = word ^ flips;
  }
}

// rows x panels of the result.
inline void integer_block(const IntegerProduct& p, long row, long rows, long panel, long panels, const Tasks& tasks) {
  const long words = ceiling(p.depth, kWord);
  const Cut tiles{rows, ceiling(rows, kIntegerTileRows)};
  const Cut depths{words, ceiling(words, kIntegerBlockWords)};
  auto* copied = static_cast<uint32_t*>(tasks.scratch(0, rows * depths.size(0) * sizeof(uint32_t)));
  for (long d = 0; d < depths.parts; ++d) {
    const long start = depths.start(d), size = depths.size(d);
    const long last = d + 1 < depths.parts ? kWord : p.depth - (words - 1) * kWord;
    for (long t = 0; t < tiles.parts; ++t)
      copy_words(p.left + (row + tiles.start(t)) * p.depth + start * kWord, p.depth, static_cast<int>(tiles.size(t)), size,
                 last, p.is_signed ? kFlips : 0, copied + tiles.start(t) * size);
    for (long j = panel; j < panel + panels; ++j) {
      const long column = j * kPanel;
      const int8_t* right = p.right + (j * words + start) * kPanel * kWord;
      for (long t = 0; t < tiles.parts; ++t)
        kIntegerTiles[tiles.size(t) - 1](size, copied + tiles.start(t) * size, right,
                                         right + (t < 2 ? words * kPanel * kWord + t * size * kLineBytes : 0), p.first + column,
                                         p.result + (row + tiles.start(t)) * p.columns + column, p.columns,
                                         p.columns - column, d > 0);
    }
  }
}

inline void integer_product(const IntegerProduct& p, const Tasks& tasks) {
  const long panels = ceiling(p.columns, kPanel);
  if (p.rows == 0 || p.columns == 0) return;
  if (p.depth == 0) {
    for (long i = 0; i < p.rows; ++i) std::copy_n(p.first, p.columns, p.result + i * p.columns);
    return;
  }
  const long wanted = std::min(4 * tasks.threads, ceiling(p.rows * p.depth * p.columns, kFewMultiplications));
  const Cut blocks{p.rows, ceiling(p.rows, std::min(kIntegerBlockRows,
                                                    std::max<long>(kIntegerTileRows, ceiling(p.rows, tasks.threads))))};
  const Cut groups{panels, std::min(panels, ceiling(wanted, blocks.parts))};
  auto body = [&](long i) {
    const long b = i / groups.parts, g = i % groups.parts;
    integer_block(p, blocks.start(b), blocks.size(b), groups.start(g), groups.size(g), tasks);
  };
  run_all(tasks, blocks.parts * groups.parts, body);
}

}  // namespace
}  // namespace transmuter

#else

namespace transmuter {
namespace {

// For processors without that instruction: right, but no faster than XLA.
inline void integer_product(const IntegerProduct& p, const Tasks& tasks) {
  const long words = (p.depth + 3) / 4;
  auto body = [&](long i) {
    for (long n = 0; n < p.columns; ++n) {
      const int8_t* column = p.right + (n / kPanel * words * kPanel + n % kPanel) * 4;
      int32_t sum = p.first[n];
      for (long k = 0; k < p.depth; ++k)
        sum += (p.left[i * p.depth + k] ^ (p.is_signed ? 128 : 0)) * column[k / 4 * kPanel * 4 + k % 4];
      p.result[i * p.columns + n] = sum;
    }
  };
  if (p.columns > 0) run_all(tasks, p.rows, body);
}

}  // namespace
}  // namespace transmuter

#endif
