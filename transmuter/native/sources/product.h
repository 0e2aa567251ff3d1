// Products of float32 matrices, after Goto and van de Geijn (2008): a block of rows of the left operand is copied so that
// it stays in the L2 cache, and meets panels of the right operand's columns, of which one stays in the L1 cache; their
// product is made in registers, tile by tile.

#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels.h"
#include "vector.h"

namespace transmuter {
namespace {

constexpr int kVectors = 2;                         // of a row of a tile
constexpr int kTileColumns = kVectors * kLanes;     // of a panel's columns, those that a tile has
constexpr int kTileRows = kLanes == 16 ? 14 : 6;    // so that sums, a row of the panel and one element fit the registers
constexpr long kBlockRows = kLanes == 16 ? 112 : 96;
constexpr long kBlockDepth = 384;
constexpr long kFewPanels = 6;                      // so many do not pay for a copy of the left operand
constexpr long kCopied = 4 << 20;                   // elements of the right operand that are copied at once, about
constexpr long kFewBlocks = 7;                      // so many do not pay for a copy of a right operand whose rows are long
constexpr long kShortRow = 768;                     // rows of a right operand up to which it is read as it lies
constexpr long kRowsAhead = 12;                     // that are fetched while one is copied
constexpr long kLine = 16;                          // elements of a cache line
constexpr long kSlack = 16;                         // elements behind a copy that whole vectors may reach

// Fetches, while a tile is computed, what later ones need: a step further after every so many rows of the right panel.
struct Ahead {
  const float* at;
  long step, every;
  long wait = every;
  [[gnu::always_inline]] void advance() {
    --wait;
    at += wait == 0 ? step : 0;
    wait = wait == 0 ? every : wait;
  }
};

// Fetches nothing else.
inline Ahead staying(const float* at) { return {at, 0, 1}; }

// The left operand of a tile: a copy as [depth, rows of the tile], or, if `row` is not 0, elements that lie side by side in
// rows that far apart.
struct Left {
  const float* data;
  long row;
};

// A right operand: panels of its columns, `panel` elements from one to the next, and `row` from one row to the next.
struct Right {
  const float* data;
  long panel, row;
};

// result = left * right, or is added to; of `right` a row has `right_step` elements. Of the next right panel, two cache
// lines are fetched in each step, of the next left block one.
template <int Rows, int Vectors, bool IsCopied>
[[gnu::noinline]] void tile(long depth, Left left, const float* __restrict right, long right_step,
                            float* __restrict result, long result_row, bool adds, Ahead next_right, Ahead next_left) {
  Vector sums[Rows][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) sums[i][j] = Vector{};
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)  // else the stores at the end wait for these, and the next tile for the stores
#pragma GCC unroll 4
    for (int j = 0; j < Vectors * kLanes; j += kLine) __builtin_prefetch(result + i * result_row + j, 1, 3);
  const float* thirds[(Rows + 2) / 3];  // a processor adds a register once or twice to an address for nothing
#pragma GCC unroll 16
  for (int i = 0; i < (Rows + 2) / 3; ++i) thirds[i] = left.data + 3 * i * left.row;
  for (long k = 0; k < depth; ++k) {
    __builtin_prefetch(next_right.at, 0, 2);
    __builtin_prefetch(next_right.at + kLine, 0, 2);
    __builtin_prefetch(next_left.at, 0, 2);
    Vector row[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) row[j] = load(right + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const float element = IsCopied ? left.data[k * Rows + i] : thirds[i / 3][(i % 3) * left.row + k];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sums[i][j] += element * row[j];
    }
    right += right_step;
    next_right.advance();
    next_left.advance();
  }
  if (adds) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sums[i][j] += load(result + i * result_row + j * kLanes);
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(result + i * result_row + j * kLanes, sums[i][j]);
}

using Tile = void (*)(long, Left, const float*, long, float*, long, bool, Ahead, Ahead);

template <int Vectors, bool IsCopied, int... Rows>
Tile tile_of(long rows, std::integer_sequence<int, Rows...>) {
  static constexpr Tile tiles[] = {tile<Rows + 1, Vectors, IsCopied>...};
  return tiles[rows - 1];
}

inline Tile tile_of(long rows, long columns, bool is_copied) {
  constexpr auto all = std::make_integer_sequence<int, kTileRows>();
  if (columns > kLanes) return is_copied ? tile_of<kVectors, true>(rows, all) : tile_of<kVectors, false>(rows, all);
  return is_copied ? tile_of<1, true>(rows, all) : tile_of<1, false>(rows, all);
}

// The tile of these rows and up to kTileColumns columns; what lies behind the last column of the result is not touched.
inline void compute(long rows, long columns, long depth, Left left, const float* right, long right_step, float* result,
                    long result_row, bool adds, Ahead next_right, Ahead next_left) {
  const Tile run = tile_of(rows, columns, left.row == 0);
  if (columns % kLanes == 0)
    return run(depth, left, right, right_step, result, result_row, adds, next_right, next_left);
  float part[kTileRows * kTileColumns];
  run(depth, left, right, right_step, part, kTileColumns, false, next_right, next_left);
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < columns; ++j) {
      const float sum = part[i * kTileColumns + j];
      result[i * result_row + j] = adds ? result[i * result_row + j] + sum : sum;
    }
}

// How a length is cut into parts that differ by one at most.
struct Cut {
  long length, parts;
  long start(long part) const { return length / parts * part + std::min(part, length % parts); }
  long size(long part) const { return length / parts + (part < length % parts ? 1 : 0); }
};

// Copies `count` rows, of which elements lie side by side, as [depth, width]: element k of row i is at k * width + i.
// Whole vectors are written, in order: where a row of the copy is shorter, the next one writes over what is too much, and
// behind the last one there are up to kSlack elements.
inline void copy_transposed(const float* from, long row, long count, long depth, float* to, long width) {
  for (long i = 0; i < count; i += kLanes) {
    const long last = std::min<long>(kLanes, count - i) - 1;
    const float* rows[kLanes];
    for (long r = 0; r < kLanes; ++r) rows[r] = from + (i + std::min(r, last)) * row;
    long k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      Vector block[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) block[r] = load(rows[r] + k);
      transpose(block);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) store(to + (k + r) * width + i, block[r]);
    }
    for (; k < depth; ++k)
      for (long r = 0; r <= last; ++r) to[k * width + i + r] = rows[r][k];
  }
}

// A row's first `Count` elements, in as few moves as there can be.
template <int Count>
[[gnu::always_inline]] inline void copy_elements(const float* from, float* to) {
  std::memcpy(to, from, Count * sizeof(float));
}

using CopyElements = void (*)(const float*, float*);

template <int... Count>
CopyElements elements_of(long count, std::integer_sequence<int, Count...>) {
  static constexpr CopyElements copies[] = {copy_elements<Count>...};
  return copies[count];
}

// Copies a block of a left operand's rows, tile after tile, each as [depth, rows of the tile].
inline void copy_left(const float* from, long row_step, long depth_step, const Cut& tiles, long depth, float* to) {
  if (row_step == 1 && depth_step != 1) {  // a row of the copy after the other, since these lie far apart
    const long larger = tiles.length % tiles.parts;
    const long sizes[] = {tiles.size(0), tiles.size(tiles.parts - 1)};
    const CopyElements copies[] = {elements_of(sizes[0], std::make_integer_sequence<int, kTileRows + 1>()),
                                   elements_of(sizes[1], std::make_integer_sequence<int, kTileRows + 1>())};
    for (long k = 0; k < depth; ++k) {
      const float* row = from + k * depth_step;
      for (long i = 0; i < tiles.length; i += kLine) __builtin_prefetch(row + kRowsAhead * depth_step + i, 0, 3);
      for (long t = 0; t < tiles.parts; ++t) {
        const long kind = t < larger ? 0 : 1, start = tiles.start(t);
        copies[kind](row + start, to + start * depth + k * sizes[kind]);
      }
    }
    return;
  }
  for (long t = 0; t < tiles.parts; ++t) {
    const long start = tiles.start(t), rows = tiles.size(t);
    float* tile = to + start * depth;
    if (depth_step == 1) {
      copy_transposed(from + start * row_step, row_step, rows, depth, tile, rows);
      continue;
    }
    for (long k = 0; k < depth; ++k)
      for (long i = 0; i < rows; ++i) tile[k * rows + i] = from[(start + i) * row_step + k * depth_step];
  }
}

// Copies up to kPanel columns of a right operand as [depth, kPanel]. Behind the last column is whatever was there.
inline void copy_panel(const float* from, long depth_step, long column_step, long columns, long depth, float* to) {
  if (depth_step == 1 && column_step != 1) return copy_transposed(from, column_step, columns, depth, to, kPanel);
  for (long k = 0; k < depth; ++k)
    if (column_step == 1)
      std::memcpy(to + k * kPanel, from + k * depth_step, columns * sizeof(float));
    else
      for (long j = 0; j < columns; ++j) to[k * kPanel + j] = from[k * depth_step + j * column_step];
}

// Copies all columns of a right operand, `panel_step` elements from one panel to the next.
inline void copy_panels(const float* from, long depth_step, long column_step, long columns, long depth, float* to,
                        long panel_step) {
  const long whole = column_step == 1 ? columns / kPanel : 0;
  for (long k = 0; whole > 0 && k < depth; ++k)  // a row after the other, since these lie far apart
    for (long j = 0; j < whole; ++j) {
      const float* next = from + (k + kRowsAhead) * depth_step + j * kPanel;
      __builtin_prefetch(next, 0, 3);
      __builtin_prefetch(next + kLine, 0, 3);
      copy_elements<kPanel>(from + k * depth_step + j * kPanel, to + j * panel_step + k * kPanel);
    }
  for (long j = whole; j * kPanel < columns; ++j)
    copy_panel(from + j * kPanel * column_step, depth_step, column_step, std::min(kPanel, columns - j * kPanel), depth,
               to + j * panel_step);
}

inline long ceiling(long a, long b) { return (a + b - 1) / b; }

// Runs a callable of an index for each index below `count`.
template <typename Body>
void run_all(const Tasks& tasks, long count, Body& body) {
  if (count == 1 || tasks.threads == 1) {
    for (long i = 0; i < count; ++i) body(i);
    return;
  }
  tasks.run(tasks, count, [](void* context, long i) { (*static_cast<Body*>(context))(i); }, &body);
}

// One product of a stack.
struct Place {
  const float* left;
  const float* right;
  float* result;
};

inline Place place(const Product& p, long index) {
  Place at{p.left, p.right, p.result};
  for (int d = kBatchDimensions - 1; d >= 0; --d) {
    const long i = index % p.batch[d];
    index /= p.batch[d];
    at.left += i * p.left_batch[d];
    at.right += i * p.right_batch[d];
    at.result += i * p.result_batch[d];
  }
  return at;
}

// Of the left operand's next block, which begins at `next`, what one of all tiles fetches: a row of it, or, where the rows
// lie side by side, a cache line of some of what follows them.
inline Ahead left_ahead(const Product& p, const float* next, long rows, long depth, long panel, long panels, long tile,
                        long tiles) {
  const long index = panel * tiles + tile;
  if (p.left_depth == 1 && index < rows) return {next + index * p.left_row, kLine, kLine};
  if (p.left_row == 1) return {next + tile * kLine + panel * (depth / panels) * p.left_depth, p.left_depth, panels};
  return staying(next);
}

// Some rows of the result and some of its panels, the first of which is at `right`.
inline void block(const Product& p, const Place& at, const Right& right, long row, long rows, long panel, long panels,
                  const Tasks& tasks) {
  const Cut tiles{rows, ceiling(rows, kTileRows)};
  const Cut depths{p.depth, ceiling(p.depth, kBlockDepth)};
  // rows that lie a power of two apart would push each other out of the cache
  const bool is_copied = p.left_depth != 1 || panels > kFewPanels || p.left_row % 1024 == 0;
  float* copied =
      is_copied ? static_cast<float*>(tasks.scratch(0, (rows * depths.size(0) + kSlack) * sizeof(float))) : nullptr;
  const long following = row + tasks.threads * rows;  // the block that this thread has next, about
  for (long d = 0; d < depths.parts; ++d) {
    const long start = depths.start(d), depth = depths.size(d);
    const bool is_last = d + 1 == depths.parts;
    const float* left = at.left + row * p.left_row + start * p.left_depth;
    const float* next_left = is_last ? at.left + following * p.left_row : left + depth * p.left_depth;
    if (is_copied) copy_left(left, p.left_row, p.left_depth, tiles, depth, copied);
    for (long j = 0; j < panels; ++j) {
      const float* from = right.data + j * right.panel + start * right.row;
      const float* next = j + 1 < panels ? from + right.panel : right.data + (is_last ? 0 : (start + depth) * right.row);
      const long end = std::min((panel + j + 1) * kPanel, p.columns);
      for (long column = (panel + j) * kPanel, inner = 0; column < end; column += kTileColumns, inner += kTileColumns)
        for (long t = 0; t < tiles.parts; ++t) {
          const long first = tiles.start(t);
          const Left of_tile = is_copied ? Left{copied + first * depth, 0} : Left{left + first * p.left_row, p.left_row};
          compute(tiles.size(t), std::min<long>(kTileColumns, end - column), depth, of_tile, from + inner, right.row,
                  at.result + (row + first) * p.result_row + column, p.result_row, d > 0,
                  Ahead{next + t * (depth / tiles.parts) * right.row, right.row, tiles.parts},
                  is_last && following >= p.rows ? staying(left)
                                                 : left_ahead(p, next_left, rows, depth, j, panels, t, tiles.parts));
        }
    }
  }
}

// The panels of one product from one number to another, on all threads, each of which has as many blocks of rows.
inline void some_panels(const Product& p, const Place& at, const Right& right, long panel, long panels,
                        const Tasks& tasks) {
  const long share = std::max<long>(kTileRows, ceiling(p.rows, tasks.threads));
  const long fewest = ceiling(p.rows, std::min(kBlockRows, share));
  const Cut blocks{p.rows, fewest < tasks.threads ? fewest : ceiling(fewest, tasks.threads) * tasks.threads};
  const Cut groups{panels, std::min(panels, blocks.parts >= tasks.threads ? 1 : ceiling(tasks.threads, blocks.parts))};
  auto body = [&](long i) {
    const long b = i / groups.parts, g = i % groups.parts;
    const Right first{right.data + groups.start(g) * right.panel, right.panel, right.row};
    block(p, at, first, blocks.start(b), blocks.size(b), panel + groups.start(g), groups.size(g), tasks);
  };
  run_all(tasks, blocks.parts * groups.parts, body);
}

// Whether the right operand is read as it lies, because a copy would not pay: its rows are not far apart, or there are few
// blocks that read it. Then its panels come from the L2 cache, not from L1, which is fast enough for wide vectors alone.
// Nothing behind the last column may be read, and rows a power of two apart would push each other out of the cache.
inline bool is_read_in_place(const Product& p) {
  return kLanes == 16 && p.right_column == 1 && p.columns % kLanes == 0 && p.rows >= 2 * kBlockRows &&
         p.right_depth % 1024 != 0 && (p.right_depth <= kShortRow || p.rows < kFewBlocks * kBlockRows);
}

// One product, on all threads, with a copy of the right operand, as much of it at once as kCopied allows.
inline void copying(const Product& p, const Place& at, const Tasks& tasks) {
  const long panel_size = p.depth * kPanel;
  const Cut turns{ceiling(p.columns, kPanel), ceiling(ceiling(p.columns, kPanel) * panel_size, kCopied)};
  float* copied = static_cast<float*>(tasks.scratch(1, (turns.size(0) * panel_size + kSlack) * sizeof(float)));
  for (long turn = 0; turn < turns.parts; ++turn) {
    const long first = turns.start(turn) * kPanel;
    const long columns = std::min(turns.size(turn) * kPanel, p.columns - first);
    const Cut parts{turns.size(turn), std::min(turns.size(turn), 4 * tasks.threads)};
    auto copy = [&](long i) {
      const long column = parts.start(i) * kPanel;
      copy_panels(at.right + (first + column) * p.right_column, p.right_depth, p.right_column,
                  std::min(parts.size(i) * kPanel, columns - column), p.depth, copied + column * p.depth, panel_size);
    };
    run_all(tasks, parts.parts, copy);
    some_panels(p, at, Right{copied, panel_size, kPanel}, turns.start(turn), turns.size(turn), tasks);
  }
}

inline void product(const Product& p, const Tasks& tasks) {
  const long stack = p.batch[0] * p.batch[1] * p.batch[2];
  if (stack == 0 || p.rows == 0 || p.columns == 0) return;
  if (p.depth == 0) {
    for (long s = 0; s < stack; ++s)
      for (long i = 0; i < p.rows; ++i)
        std::memset(place(p, s).result + i * p.result_row, 0, p.columns * sizeof(float));
    return;
  }
  auto multiply = [&](long s, const Tasks& threads) {
    const Place at = place(p, s);
    const long panels = ceiling(p.columns, kPanel);
    if (p.is_packed)
      some_panels(p, at, Right{at.right, p.depth * kPanel, kPanel}, 0, panels, threads);
    else if (is_read_in_place(p))
      some_panels(p, at, Right{at.right, kPanel, p.right_depth}, 0, panels, threads);
    else
      copying(p, at, threads);
  };
  if (stack < tasks.threads) {
    for (long s = 0; s < stack; ++s) multiply(s, tasks);
    return;
  }
  const Tasks alone{1, tasks.run, tasks.scratch, tasks.pool};
  auto body = [&](long s) { multiply(s, alone); };
  run_all(tasks, stack, body);
}

}  // namespace
}  // namespace transmuter
