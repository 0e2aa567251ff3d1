// Convolutions of float32 images, channels last, and their gradients, as products whose left operand is never made. The
// element of it that belongs to a position and a tap is read where it lies: a tile's positions are neighbours, so that what
// they see through one tap and channel is one run of memory, once the channels of a few rows of the image are transposed.

#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "product.h"

namespace transmuter {
namespace {

constexpr int kHeight = 0, kWidth = 1;
constexpr long kPanelDepth = 640;        // of a panel that comes into the caches at once
constexpr long kBlockPositions = 448;    // about as many results per channel has a task
constexpr long kBlockWidth = 56;         // of them in a row of the result, four tiles
constexpr long kBlockBytes = 640 << 10;  // of the image's part that a task transposes, which is to stay in the L2 cache
constexpr long kPartBytes = 640 << 10;   // of a kernel's gradient that each thread may have for itself
constexpr long kSumPositions = 384;      // that a kernel's gradient sums in registers
constexpr long kPieceRows = 256;         // of a kernel that are packed at once
constexpr long kUnitRows = 112;          // channels of a tap that one task takes at once
constexpr long kAhead = 16;              // rows of a panel, by which it is fetched before it is used
constexpr int kPaired = kTileRows / 2;   // positions of a tile in each of two rows

alignas(64) const float kZeros[kLanes] = {};

// A tile's rows: `Runs` of neighbours in memory, which begin `shift`, and `shift + gap`, behind where a depth's pointer is.
struct Spot {
  long shift, gap;
  float* result;
  long result_row, result_gap;
};

// result = the sum over k of lefts[k] * panel[k], or is added to.
template <int Rows, int Runs, int Vectors>
[[gnu::noinline]] void sum(long depth, const float* const* __restrict lefts, const float* __restrict panel,
                           const Spot& spot, bool adds) {
  constexpr int kRows = Rows * Runs;
  Vector sums[kRows][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) sums[i][j] = Vector{};
  const long shift = spot.shift, gap = spot.gap;
#pragma GCC unroll 2
  for (long k = 0; k < depth; ++k) {
    Vector row[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) row[j] = load(panel + j * kLanes);
    const float* left = lefts[k] + shift;
    asm("" : "+r"(left));  // one address to count from: the compiler would keep one for each row
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sums[i][j] += left[i] * row[j];
    if constexpr (Runs == 2) {
      const float* other = left + gap;
      asm("" : "+r"(other));
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) sums[Rows + i][j] += other[i] * row[j];
    }
#pragma GCC unroll 4
    for (int j = 0; j < Vectors * kLanes; j += 16) __builtin_prefetch(panel + kAhead * kPanel + j);
    panel += kPanel;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    float* to = spot.result + (i < Rows ? i * spot.result_row : spot.result_gap + (i - Rows) * spot.result_row);
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) store(to + j * kLanes, adds ? sums[i][j] + load(to + j * kLanes) : sums[i][j]);
  }
}

using Sum = void (*)(long, const float* const*, const float*, const Spot&, bool);

template <int Runs, int Vectors, int... Rows>
Sum sum_of(long rows, std::integer_sequence<int, Rows...>) {
  static constexpr Sum sums[] = {sum<Rows + 1, Runs, Vectors>...};
  return sums[rows - 1];
}

template <int Vectors>
Sum sum_of(long rows, long runs) {
  if (runs == 2) return sum_of<2, Vectors>(rows, std::make_integer_sequence<int, kPaired>());
  return sum_of<1, Vectors>(rows, std::make_integer_sequence<int, kTileRows>());
}

// The tile of `rows` positions in each of `runs`, and of up to kTileColumns columns; nothing behind the last is touched.
inline void sum_tile(long rows, long runs, long columns, long depth, const float* const* lefts, const float* panel,
                     const Spot& spot, bool adds) {
  if (columns == kTileColumns) return sum_of<kVectors>(rows, runs)(depth, lefts, panel, spot, adds);
  if (columns == kLanes) return sum_of<1>(rows, runs)(depth, lefts, panel, spot, adds);
  float part[kTileRows * kTileColumns];
  const Spot aside{spot.shift, spot.gap, part, kTileColumns, rows * kTileColumns};
  (columns < kLanes ? sum_of<1>(rows, runs) : sum_of<kVectors>(rows, runs))(depth, lefts, panel, aside, false);
  for (long i = 0; i < rows * runs; ++i) {
    float* to = spot.result + (i < rows ? i * spot.result_row : spot.result_gap + (i - rows) * spot.result_row);
    for (long j = 0; j < columns; ++j) to[j] = (adds ? to[j] : 0.0f) + part[i * kTileColumns + j];
  }
}

// Positions in one spatial dimension, and the taps that they see: position i sees tap `first_tap + m * tap_step` at
// `i * stride + first + m * step` of the source, for m below `taps`.
struct Axis {
  long positions, stride;
  long taps, first_tap, tap_step;
  long first, step;
  long lowest() const { return first + std::min(0L, (taps - 1) * step); }
  long highest() const { return first + std::max(0L, (taps - 1) * step); }
};

// One dimension of the depth: its length, its step in the kernel, and where its elements lie in a frame.
struct Extent {
  long length, kernel_step;
  int dimension;  // kHeight, kWidth, or the channels'
};

constexpr int kChannels = 2;

// Results at positions that see the same taps, all of them or, of a strided convolution's input gradient, one residue.
struct Phase {
  Axis axes[2];
  long result_start;    // elements before the first result
  Extent extents[3];    // of the depth, outermost first
  long depth;
  const float* kernel;  // at the first tap, where it is not packed
  float* packed;        // [groups, panels, depth, kPanel]
};

// What turns a source into a result of as many images: both a convolution and its input gradient are.
struct Sweep {
  const float* source;
  float* result;
  long batch, groups, channels, columns;  // the last two of a group
  long size[2];                           // of the source
  long source_batch, source_step[2];
  long result_batch, result_step[2];      // steps between neighbouring positions of a phase
  long kernel_column, kernel_group;       // steps of a kernel that is not packed
  long count;
  Phase* phases;
};

// How a block of positions finds what it sees: [slots, residues, channels, pitch], of which a slot is a row of the source,
// and a residue those of its pixels that are `stride` apart. Only what some tap sees is in it. It is written in order, by
// whole vectors: what goes beyond half a vector is written over, or slack at the end.
struct Frame {
  long lowest[2], span[2], stride[2];
  long advance, channels, residues, pitch, slot_pitch;
  long slots(long rows) const { return (rows - 1) * advance + span[kHeight]; }
  long source_row(long slot) const {
    return stride[kHeight] > advance ? slot / advance * stride[kHeight] + slot % advance : slot;
  }
  long offset(int dimension, long seen) const {
    if (dimension == kChannels) return seen * pitch;
    seen -= lowest[dimension];
    if (dimension == kHeight) return seen * slot_pitch;
    return seen % stride[kWidth] * channels * pitch + seen / stride[kWidth];
  }
};

inline Frame frame_of(const Sweep& s, long width) {
  Frame f{};
  for (int d = 0; d < 2; ++d) {
    bool any = false;
    long highest = 0;
    for (long p = 0; p < s.count; ++p) {
      const Axis& axis = s.phases[p].axes[d];
      f.stride[d] = axis.stride;
      if (s.phases[p].depth == 0) continue;
      f.lowest[d] = any ? std::min(f.lowest[d], axis.lowest()) : axis.lowest();
      highest = any ? std::max(highest, axis.highest()) : axis.highest();
      any = true;
    }
    f.span[d] = highest - f.lowest[d] + 1;
  }
  f.channels = s.channels;
  f.advance = std::min(f.stride[kHeight], f.span[kHeight]);
  f.residues = std::min(f.stride[kWidth], f.span[kWidth]);
  const long seen = width + (f.span[kWidth] - 1) / f.stride[kWidth];
  f.pitch = seen <= kLanes / 2 ? kLanes / 2 : ceiling(seen, kLanes) * kLanes;
  f.slot_pitch = f.residues * s.channels * f.pitch;
  return f;
}

// Transposes one row of the source into a slot, from the pixel `start` on; zeros stand for pixels that are outside.
inline void copy_slot(const Sweep& s, const Frame& f, const float* row, long start, float* to) {
  const long size = s.size[kWidth], step = s.source_step[kWidth], stride = f.stride[kWidth];
  for (long residue = 0; residue < f.residues; ++residue, to += s.channels * f.pitch) {
    for (long j = 0; j < f.pitch; j += kLanes) {
      const float* pixels[kLanes];
      long inside[kLanes];  // all bits where the pixel is inside
      for (int i = 0; i < kLanes; ++i) {
        const long x = start + (j + i) * stride + residue;
        inside[i] = x >= 0 && x < size ? -1 : 0;
        pixels[i] = inside[i] ? row + x * step : kZeros;
      }
      if (s.channels < kLanes && inside[0] && inside[kLanes - 1]) {
        const float* from = pixels[0];
        for (long c = 0; c < s.channels; ++c, ++from)
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) to[c * f.pitch + j + i] = from[i * stride * step];
        continue;
      }
      if (s.channels < kLanes) {
        for (long c = 0; c < s.channels; ++c)
          for (int i = 0; i < kLanes; ++i) to[c * f.pitch + j + i] = pixels[i][c & inside[i]];
        continue;
      }
      for (long next = 0; next < s.channels; next += kLanes) {
        const long c = std::min(next, s.channels - kLanes);
        Vector block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = load(pixels[i] + (c & inside[i]));
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + (c + i) * f.pitch + j, block[i]);
      }
    }
  }
}

// Pointers into a frame for every depth of a phase.
inline void point(const Phase& phase, const Frame& f, const float* frame, const float** lefts) {
  const auto at = [&](const Extent& extent, long i) {
    if (extent.dimension == kChannels) return f.offset(kChannels, i);
    const Axis& axis = phase.axes[extent.dimension];
    return f.offset(extent.dimension, axis.first + i * axis.step);
  };
  const Extent* e = phase.extents;
  for (long a = 0; a < e[0].length; ++a)
    for (long b = 0; b < e[1].length; ++b)
      for (long c = 0; c < e[2].length; ++c) *lefts++ = frame + at(e[0], a) + at(e[1], b) + at(e[2], c);
}

// A part of the result: of some images, some rows, some positions in each of them, and some panels of the columns.
struct Block {
  long group, image, images, row, rows, position, positions, panel, panels;
};

// Of a block, what a phase has results for, by rows that are counted through all images.
struct Part {
  long images, rows, positions;
  float* result;
  long result_image, result_row;
  float* row_of(long i) const { return result + i / rows * result_image + i % rows * result_row; }
};

inline Part part_of(const Sweep& s, const Phase& phase, const Block& block) {
  return Part{block.images, std::min(block.rows, phase.axes[kHeight].positions - block.row),
              std::min(block.positions, phase.axes[kWidth].positions - block.position),
              s.result + block.image * s.result_batch + block.group * s.columns + phase.result_start +
                  block.row * s.result_step[kHeight] + block.position * s.result_step[kWidth],
              s.result_batch, s.result_step[kHeight]};
}

inline void zero_phase(const Sweep& s, const Block& block, const Part& part) {
  const long start = block.panel * kPanel;
  const long columns = std::min(s.columns, (block.panel + block.panels) * kPanel) - start;
  for (long i = 0; i < part.images * part.rows; ++i)
    for (long j = 0; j < part.positions; ++j)
      std::memset(part.row_of(i) + j * s.result_step[kWidth] + start, 0, columns * sizeof(float));
}

inline void sum_phase(const Sweep& s, const Phase& phase, const Frame& f, const Block& block, const Part& part,
                      const float* frame, const Tasks& tasks) {
  auto lefts = static_cast<const float**>(tasks.scratch(2, phase.depth * sizeof(float*)));
  point(phase, f, frame, lefts);
  const auto shift_of = [&](long i) {
    return (i / part.rows * f.slots(block.rows) + i % part.rows * f.advance) * f.slot_pitch;
  };
  const long rows = part.images * part.rows, panels = ceiling(s.columns, kPanel);
  const Cut tiles{part.positions, ceiling(part.positions, kTileRows)};
  const Cut depths{phase.depth, ceiling(phase.depth, kPanelDepth)};
  for (long d = 0; d < depths.parts; ++d) {
    for (long j = block.panel; j < block.panel + block.panels; ++j) {
      const float* panel = phase.packed + ((block.group * panels + j) * phase.depth + depths.start(d)) * kPanel;
      for (long column = j * kPanel; column < std::min((j + 1) * kPanel, s.columns); column += kTileColumns) {
        const long columns = std::min<long>(kTileColumns, s.columns - column);
        for (long i = 0; i < rows;) {
          const long runs = tiles.size(0) <= kPaired && i + 1 < rows ? 2 : 1;
          float* result = part.row_of(i) + column;
          const long shift = shift_of(i);
          const long gap = runs == 2 ? shift_of(i + 1) - shift : 0;
          const long result_gap = runs == 2 ? part.row_of(i + 1) + column - result : 0;
          for (long t = 0; t < tiles.parts; ++t) {
            const Spot spot{shift + tiles.start(t), gap, result + tiles.start(t) * s.result_step[kWidth],
                            s.result_step[kWidth], result_gap};
            sum_tile(tiles.size(t), runs, columns, depths.size(d), lefts + depths.start(d), panel + column - j * kPanel,
                     spot, d > 0);
          }
          i += runs;
        }
      }
    }
  }
}

// Transposes what a block sees, image by image.
inline void copy_frame(const Sweep& s, const Frame& f, const Block& block, float* to) {
  const long top = block.row * f.stride[kHeight] + f.lowest[kHeight];
  const long start = block.position * f.stride[kWidth] + f.lowest[kWidth];
  for (long image = block.image; image < block.image + block.images; ++image) {
    const float* source = s.source + image * s.source_batch + block.group * s.channels;
    for (long slot = 0; slot < f.slots(block.rows); ++slot, to += f.slot_pitch) {
      const long y = top + f.source_row(slot);
      if (y < 0 || y >= s.size[kHeight])
        std::memset(to, 0, f.slot_pitch * sizeof(float));
      else
        copy_slot(s, f, source + y * s.source_step[kHeight], start, to);
    }
  }
}

inline void sweep_block(const Sweep& s, const Frame& f, const Block& block, const Tasks& tasks) {
  const size_t size = block.images * f.slots(block.rows) * f.slot_pitch;
  float* frame = static_cast<float*>(tasks.scratch(0, (size + kSlack) * sizeof(float)));
  copy_frame(s, f, block, frame);
  for (long p = 0; p < s.count; ++p) {
    const Part part = part_of(s, s.phases[p], block);
    if (part.rows <= 0 || part.positions <= 0) continue;
    if (s.phases[p].depth == 0)
      zero_phase(s, block, part);
    else
      sum_phase(s, s.phases[p], f, block, part, frame, tasks);
  }
}

// The rows of a phase's depth, where those that are equally far apart in the kernel are one run of the innermost.
struct Runs {
  long lengths[3] = {1, 1, 1}, steps[3] = {0, 0, 0};
};

inline Runs runs_of(const Phase& phase) {
  Runs runs;
  int at = 2;
  runs.lengths[at] = phase.extents[2].length, runs.steps[at] = phase.extents[2].kernel_step;
  for (int i = 1; i >= 0; --i) {
    const Extent& extent = phase.extents[i];
    if (extent.kernel_step != runs.lengths[at] * runs.steps[at]) runs.steps[--at] = extent.kernel_step;
    runs.lengths[at] *= extent.length;
  }
  return runs;
}

// Copies what a phase uses of the kernel to panels, in the order that it has in memory.
inline void pack_phase(const Sweep& s, const Phase& phase, const Tasks& tasks) {
  const Runs runs = runs_of(phase);
  const Cut pieces{runs.lengths[2], ceiling(runs.lengths[2], kPieceRows)};
  const long panels = ceiling(s.columns, kPanel), count = runs.lengths[0] * runs.lengths[1];
  auto body = [&](long i) {
    const long piece = i % pieces.parts, run = i / pieces.parts % count, group = i / pieces.parts / count;
    const float* from = phase.kernel + group * s.kernel_group + run / runs.lengths[1] * runs.steps[0] +
                        run % runs.lengths[1] * runs.steps[1] + pieces.start(piece) * runs.steps[2];
    const long row = run * runs.lengths[2] + pieces.start(piece);
    copy_panels(from, runs.steps[2], s.kernel_column, s.columns, pieces.size(piece),
                phase.packed + (group * panels * phase.depth + row) * kPanel, phase.depth * kPanel);
  };
  run_all(tasks, s.groups * count * pieces.parts, body);
}

inline void pack(const Sweep& s, const Tasks& tasks) {
  const long size = s.groups * ceiling(s.columns, kPanel) * kPanel;  // for each row of the depth
  long depth = 0;
  for (long p = 0; p < s.count; ++p) depth += s.phases[p].depth;
  float* packed = static_cast<float*>(tasks.scratch(1, (size * depth + kSlack) * sizeof(float)));
  for (long p = 0; p < s.count; ++p) {
    s.phases[p].packed = packed;
    packed += size * s.phases[p].depth;
    if (s.phases[p].depth > 0) pack_phase(s, s.phases[p], tasks);
  }
}

inline void sweep(const Sweep& s, const Tasks& tasks) {
  long height = 0, width = 0;
  for (long p = 0; p < s.count; ++p) {
    height = std::max(height, s.phases[p].axes[kHeight].positions);
    width = std::max(width, s.phases[p].axes[kWidth].positions);
  }
  if (s.batch == 0 || s.columns == 0 || height == 0 || width == 0) return;
  const Cut across{width, ceiling(width, kBlockWidth)};
  const Frame f = frame_of(s, across.size(0));
  const long panels = ceiling(s.columns, kPanel);
  const long wanted = 2 * tasks.threads;
  // Blocks are as large as the caches allow, so that what they share is copied and fetched seldom.
  const auto fits = [&](long images, long rows) {
    return images * rows * across.size(0) <= kBlockPositions &&
           images * f.slots(rows) * f.slot_pitch * long(sizeof(float)) <= kBlockBytes &&
           s.groups * ceiling(s.batch, images) * ceiling(height, rows) * across.parts * panels >= wanted;
  };
  long rows = height, images = 1;
  while (rows > 1 && !fits(1, rows)) --rows;
  while (rows == height && images < s.batch && fits(images + 1, rows)) ++images;
  const Cut batches{s.batch, ceiling(s.batch, images)};
  const long others = s.groups * batches.parts * across.parts;
  Cut down{height, ceiling(height, rows)};
  if (others * down.parts >= wanted)  // as many for each thread
    for (long more = 1; more < tasks.threads && others * down.parts % tasks.threads != 0 && down.parts < height; ++more)
      ++down.parts;
  const Cut columns{panels, std::min(panels, ceiling(wanted, others * down.parts))};
  auto body = [&](long i) {
    Block block;
    const auto next = [&i](const Cut& cut, long& start, long& size) {
      start = cut.start(i % cut.parts), size = cut.size(i % cut.parts);
      i /= cut.parts;
    };
    next(columns, block.panel, block.panels);
    next(across, block.position, block.positions);
    next(down, block.row, block.rows);
    next(batches, block.image, block.images);
    block.group = i;
    sweep_block(s, f, block, tasks);
  };
  run_all(tasks, others * down.parts * columns.parts, body);
}

inline Axis axis_of_output(const Convolution& c, int d) {
  return Axis{c.output_size[d], c.stride[d], c.kernel_size[d], 0, 1, -c.low[d], c.dilation[d]};
}

// The input's positions that are `residue` modulo the stride, which see outputs through every few of the taps.
inline Axis axis_of_input(const Convolution& c, int d, long residue) {
  const long stride = c.stride[d], dilation = c.dilation[d];
  long apart = 1;  // taps whose sight differs by a whole number of outputs
  while (apart * dilation % stride != 0) ++apart;
  Axis axis{ceiling(std::max(0L, c.input_size[d] - residue), stride), 1, 0, 0, apart, 0, -apart * dilation / stride};
  for (long tap = 0; tap < std::min(apart, c.kernel_size[d]); ++tap) {
    if ((residue + c.low[d] - tap * dilation) % stride != 0) continue;
    axis.first_tap = tap;
    axis.first = (residue + c.low[d] - tap * dilation) / stride;
    axis.taps = ceiling(c.kernel_size[d] - tap, apart);
  }
  return axis;
}

// Sets the depth, in the order that the kernel has in memory.
inline void set_depth(const Convolution& c, long channels, long channel_step, Phase& phase) {
  phase.depth = channels;
  phase.kernel = c.kernel;
  for (int d = 0; d < 2; ++d) {
    const Axis& axis = phase.axes[d];
    phase.depth *= axis.taps;
    phase.kernel += axis.first_tap * c.kernel_step[d];
    phase.extents[d] = Extent{axis.taps, axis.tap_step * c.kernel_step[d], d};
  }
  phase.extents[2] = Extent{channels, channel_step, kChannels};
  if (c.is_packed) return;
  for (int i = 1; i < 3; ++i)
    for (int j = i; j > 0 && phase.extents[j - 1].kernel_step < phase.extents[j].kernel_step; --j)
      std::swap(phase.extents[j - 1], phase.extents[j]);
}

// Of a sum over taps, the channels of a vector at neighbouring positions: every tap's elements times those of the source.
struct Taps {
  long rows, columns;
  long source_row, source_column;  // steps in the source between what two taps see
  const float* kernel;
  long kernel_row, kernel_column;
  long position, result;  // steps between neighbouring positions
};

template <int Positions>
[[gnu::noinline]] void sum_taps(const Taps& taps, const float* source, float* result) {
  Vector sums[Positions];
#pragma GCC unroll 8
  for (int i = 0; i < Positions; ++i) sums[i] = Vector{};
  for (long r = 0; r < taps.rows; ++r)
    for (long q = 0; q < taps.columns; ++q) {
      const Vector tap = load(taps.kernel + r * taps.kernel_row + q * taps.kernel_column);
      const float* from = source + r * taps.source_row + q * taps.source_column;
#pragma GCC unroll 8
      for (int i = 0; i < Positions; ++i) sums[i] += tap * load(from + i * taps.position);
    }
#pragma GCC unroll 8
  for (int i = 0; i < Positions; ++i) store(result + i * taps.result, sums[i]);
}

using SumTaps = void (*)(const Taps&, const float*, float*);
constexpr SumTaps kSumTaps[] = {nullptr,     sum_taps<1>, sum_taps<2>, sum_taps<3>, sum_taps<4>,
                                sum_taps<5>, sum_taps<6>, sum_taps<7>, sum_taps<8>};
constexpr long kTapPositions = 8;

// The taps whose sight from a position is inside, [first, last).
struct Inside {
  long first, last;
};

inline Inside inside(const Axis& axis, long position, long size) {
  const auto is_inside = [&](long m) {
    const long seen = position * axis.stride + axis.first + m * axis.step;
    return seen >= 0 && seen < size;
  };
  Inside taps{0, axis.taps};
  while (taps.first < taps.last && !is_inside(taps.first)) ++taps.first;
  while (taps.last > taps.first && !is_inside(taps.last - 1)) --taps.last;
  return taps;
}

// One row of a phase's result where every channel is a group of its own. The kernel is [height, width, channels].
inline void sum_channels(const Convolution& c, const Sweep& s, const Phase& phase, const float* kernel, long image,
                         long row) {
  const Axis& down = phase.axes[kHeight];
  const Axis& across = phase.axes[kWidth];
  const Inside rows = inside(down, row, s.size[kHeight]);
  const long y = row * down.stride + down.first + rows.first * down.step;
  const float* source = s.source + image * s.source_batch + y * s.source_step[kHeight];
  float* result = s.result + image * s.result_batch + phase.result_start + row * s.result_step[kHeight];
  const long tap_column = s.groups, tap_row = c.kernel_size[kWidth] * tap_column;
  kernel += (down.first_tap + rows.first * down.tap_step) * tap_row;
  Taps taps{rows.last - rows.first, 0, down.step * s.source_step[kHeight], across.step * s.source_step[kWidth], nullptr,
            down.tap_step * tap_row, across.tap_step * tap_column, across.stride * s.source_step[kWidth],
            s.result_step[kWidth]};
  // From `first` on and below `last`, positions see all taps inside.
  const long first = across.lowest() < 0 ? ceiling(-across.lowest(), across.stride) : 0;
  const long last = (s.size[kWidth] - across.highest() + across.stride - 1) / across.stride;
  for (long next = 0; next < s.groups; next += kLanes) {
    const long channel = std::min(next, s.groups - kLanes);
    for (long j = 0; j < across.positions;) {
      const bool is_inner = across.taps > 0 && j >= first && j < last;
      const long count = is_inner ? std::min(kTapPositions, std::min(last, across.positions) - j) : 1;
      const Inside columns = is_inner ? Inside{0, across.taps} : inside(across, j, s.size[kWidth]);
      const long x = j * across.stride + across.first + columns.first * across.step;
      taps.columns = taps.rows > 0 ? columns.last - columns.first : 0;
      taps.kernel = kernel + (across.first_tap + columns.first * across.tap_step) * tap_column + channel;
      kSumTaps[count](taps, source + x * s.source_step[kWidth] + channel, result + j * s.result_step[kWidth] + channel);
      j += count;
    }
  }
}

inline void sweep_channels(const Convolution& c, const Sweep& s, const Tasks& tasks) {
  const float* kernel = c.kernel;
  const long width = c.kernel_size[kWidth];
  const bool is_dense = c.kernel_step[3] == 1 && c.kernel_step[1] == s.groups && c.kernel_step[0] == width * s.groups;
  if (!is_dense) {
    float* copy = static_cast<float*>(tasks.scratch(1, c.kernel_size[kHeight] * width * s.groups * sizeof(float)));
    for (long tap = 0; tap < c.kernel_size[kHeight] * width; ++tap)
      for (long i = 0; i < s.groups; ++i)
        copy[tap * s.groups + i] =
            kernel[tap / width * c.kernel_step[0] + tap % width * c.kernel_step[1] + i * c.kernel_step[3]];
    kernel = copy;
  }
  for (long p = 0; p < s.count; ++p) {
    const long height = s.phases[p].axes[kHeight].positions, rows = s.batch * height;
    if (rows == 0) continue;
    const Cut parts{rows, std::min(rows, 8 * tasks.threads)};
    auto body = [&](long i) {
      for (long row = parts.start(i); row < parts.start(i) + parts.size(i); ++row)
        sum_channels(c, s, s.phases[p], kernel, row / height, row % height);
    };
    run_all(tasks, parts.parts, body);
  }
}

// Whether every channel is a group of its own, and there are enough of them for a vector.
inline bool are_channels_apart(const Convolution& c) { return c.channels == 1 && c.features == 1 && c.groups >= kLanes; }

inline void convolve(const Convolution& c, const Tasks& tasks) {
  const bool is_gradient = c.wanted == Convolution::kInput;
  const long* source_size = is_gradient ? c.output_size : c.input_size;
  const long* result_size = is_gradient ? c.input_size : c.output_size;
  Sweep s{};
  s.batch = c.batch, s.groups = c.groups;
  s.channels = is_gradient ? c.features : c.channels;
  s.columns = is_gradient ? c.channels : c.features;
  s.source = is_gradient ? c.output : c.input;
  s.result = is_gradient ? c.input : c.output;
  const long row_step = s.groups * s.columns;
  s.source_step[kWidth] = s.groups * s.channels;
  s.source_step[kHeight] = s.source_step[kWidth] * source_size[kWidth];
  s.source_batch = s.source_step[kHeight] * source_size[kHeight];
  s.result_batch = row_step * result_size[kWidth] * result_size[kHeight];
  s.kernel_column = c.kernel_step[is_gradient ? 2 : 3];
  s.kernel_group = c.kernel_step[3] * c.features;
  const long residues[2] = {is_gradient ? c.stride[0] : 1, is_gradient ? c.stride[1] : 1};
  s.count = residues[0] * residues[1];
  s.phases = static_cast<Phase*>(tasks.scratch(3, s.count * sizeof(Phase)));
  for (int d = 0; d < 2; ++d) s.size[d] = source_size[d];
  s.result_step[kWidth] = row_step * residues[kWidth];
  s.result_step[kHeight] = row_step * result_size[kWidth] * residues[kHeight];
  for (long p = 0; p < s.count; ++p) {
    Phase& phase = s.phases[p];
    const long at[2] = {p / residues[1], p % residues[1]};
    for (int d = 0; d < 2; ++d) phase.axes[d] = is_gradient ? axis_of_input(c, d, at[d]) : axis_of_output(c, d);
    phase.result_start = (at[kHeight] * result_size[kWidth] + at[kWidth]) * row_step;
    set_depth(c, s.channels, c.kernel_step[is_gradient ? 3 : 2], phase);
  }
  if (are_channels_apart(c) && !c.is_packed) return sweep_channels(c, s, tasks);
  if (c.is_packed)
    s.phases[0].packed = c.kernel;
  else
    pack(s, tasks);
  sweep(s, tasks);
}

// What a kernel's gradient sees of the input: the sum over all positions of what a tap sees there, times the output there.
struct Sight {
  const float* data;
  long size[2], step[2], image_step;
  long low[2], taps[2];
  long channels;       // that a tap sees side by side
  const float* zeros;  // as many, for what is outside
};

// Copies the input with zeros around it, so that all that a position sees in a row of it is side by side, as if the taps of
// a row were more channels of one tap: few channels alone would fill no tile.
inline void widen(const Convolution& c, Sight& sight, const Tasks& tasks) {
  long size[2], step[2] = {0, c.channels};
  for (int d = 0; d < 2; ++d)
    size[d] = (c.output_size[d] - 1) * c.stride[d] + (c.kernel_size[d] - 1) * c.dilation[d] + 1;
  step[kHeight] = size[kWidth] * c.channels;
  float* copy = static_cast<float*>(tasks.scratch(1, c.batch * size[kHeight] * step[kHeight] * sizeof(float)));
  const long first = std::clamp(c.low[kWidth], 0L, size[kWidth]);  // pixels of the copy that are inside, and behind
  const long last = std::clamp(c.low[kWidth] + c.input_size[kWidth], first, size[kWidth]);
  auto body = [&](long i) {
    const long y = i % size[kHeight] - c.low[kHeight];
    float* to = copy + i * step[kHeight];
    if (y < 0 || y >= c.input_size[kHeight]) {
      std::memset(to, 0, step[kHeight] * sizeof(float));
      return;
    }
    const float* from = sight.data + i / size[kHeight] * sight.image_step + y * sight.step[kHeight];
    std::memset(to, 0, first * c.channels * sizeof(float));
    if (last > first)
      std::memcpy(to + first * c.channels, from + (first - c.low[kWidth]) * c.channels,
                  (last - first) * c.channels * sizeof(float));
    std::memset(to + last * c.channels, 0, (size[kWidth] - last) * c.channels * sizeof(float));
  };
  auto rows = [&](long i) {
    const Cut all{c.batch * size[kHeight], 4 * tasks.threads};
    for (long row = all.start(i); row < all.start(i) + all.size(i); ++row) body(row);
  };
  run_all(tasks, 4 * tasks.threads, rows);
  sight.data = copy;
  sight.image_step = size[kHeight] * step[kHeight];
  for (int d = 0; d < 2; ++d) sight.size[d] = size[d], sight.step[d] = step[d], sight.low[d] = 0;
  sight.taps[kWidth] = 1;
  sight.channels = c.kernel_size[kWidth] * c.channels;
}

// Pointers to what a tap sees at `count` positions from `start` on, which are counted through all images.
inline void point(const Convolution& c, const Sight& sight, long tap, long start, long count, const float** to) {
  const long width = c.output_size[kWidth], height = c.output_size[kHeight], stride = c.stride[kWidth];
  const long down = tap / sight.taps[kWidth] * c.dilation[kHeight] - sight.low[kHeight];
  const long across = tap % sight.taps[kWidth] * c.dilation[kWidth] - sight.low[kWidth];
  // Positions below `first`, and from `last` on, see what is outside.
  const long first = across < 0 ? ceiling(-across, stride) : 0;
  const long last = std::min(width, sight.size[kWidth] > across ? ceiling(sight.size[kWidth] - across, stride) : 0);
  while (count > 0) {
    const long row = start / width, position = start % width, end = std::min(width, position + count);
    const long y = row % height * c.stride[kHeight] + down;
    long j = position;
    if (y >= 0 && y < sight.size[kHeight]) {
      const float* from = sight.data + row / height * sight.image_step + y * sight.step[kHeight];
      for (; j < std::min(first, end); ++j) *to++ = sight.zeros;
      for (; j < std::min(last, end); ++j) *to++ = from + (j * stride + across) * sight.step[kWidth];
    }
    for (; j < end; ++j) *to++ = sight.zeros;
    start += end - position;
    count -= end - position;
  }
}

// A matrix of [taps * channels, features] in memory for every group, and how it is shared out: parts of the positions, whose
// sums are separate matrices, units of rows, and panels of the columns.
struct Sharing {
  float* result;
  long row, group_step, part_step;
  long unit_parts;  // of the channels of a tap
  Cut positions, units, panels;
};

inline void sum_part(const Convolution& c, const Sight& sight, const Sharing& share, long index, const Tasks& tasks) {
  const long column_part = index % share.panels.parts;
  index /= share.panels.parts;
  const long unit_part = index % share.units.parts;
  index /= share.units.parts;
  const long position_part = index % share.positions.parts, group = index / share.positions.parts;
  const long column = share.panels.start(column_part) * kPanel;
  const long columns = std::min(c.features, column + share.panels.size(column_part) * kPanel) - column;
  const long output_step = c.groups * c.features;
  const Cut blocks{share.positions.size(position_part), ceiling(share.positions.size(position_part), kSumPositions)};
  const Cut channels{sight.channels, share.unit_parts};
  const size_t packed = share.panels.size(column_part) * blocks.size(0) * kPanel + kSlack;
  float* panels = static_cast<float*>(tasks.scratch(0, packed * sizeof(float)));
  auto lefts = static_cast<const float**>(tasks.scratch(2, blocks.size(0) * sizeof(float*)));
  for (long b = 0; b < blocks.parts; ++b) {
    const long start = share.positions.start(position_part) + blocks.start(b), count = blocks.size(b);
    copy_panels(c.output + start * output_step + group * c.features + column, output_step, 1, columns, count, panels,
                count * kPanel);
    long pointed = -1;
    for (long u = share.units.start(unit_part); u < share.units.start(unit_part) + share.units.size(unit_part); ++u) {
      const long tap = u / channels.parts, part = u % channels.parts;
      const long first = channels.start(part), rows = channels.size(part);
      if (tap != pointed) point(c, sight, tap, start, count, lefts);
      pointed = tap;
      const Cut tiles{rows, ceiling(rows, kTileRows)};
      float* result = share.result + group * share.group_step + position_part * share.part_step +
                      (tap * sight.channels + first) * share.row + column;
      for (long j = 0; j < columns; j += kTileColumns) {
        const float* panel = panels + j / kPanel * count * kPanel + j % kPanel;
        for (long t = 0; t < tiles.parts; ++t) {
          const Spot spot{group * c.channels + first + tiles.start(t), 0, result + tiles.start(t) * share.row + j,
                          share.row, 0};
          sum_tile(tiles.size(t), 1, std::min<long>(kTileColumns, columns - j), count, lefts, panel, spot, b > 0);
        }
      }
    }
  }
}

// Adds the parts of the positions, and writes the kernel in its own order: a few features at once, of which each has a part
// of memory that is written from its begin to its end where features are outermost.
inline void add_parts(const Convolution& c, const Sharing& share, const Tasks& tasks) {
  const long blocks = ceiling(c.features, kLanes), width = c.kernel_size[kWidth], taps = c.kernel_size[kHeight] * width;
  auto body = [&](long i) {
    const long group = i / blocks, start = i % blocks * kLanes, count = std::min<long>(kLanes, c.features - start);
    const float* from = share.result + group * share.group_step + start;
    float* to = c.kernel + (group * c.features + start) * c.kernel_step[3];
    for (long channel = 0; channel < c.channels; ++channel)
      for (long tap = 0; tap < taps; ++tap) {
        const float* parts = from + (tap * c.channels + channel) * share.row;
        float* at = to + tap / width * c.kernel_step[0] + tap % width * c.kernel_step[1] + channel * c.kernel_step[2];
        for (long j = 0; j < count; ++j) {
          float sum = parts[j];
          for (long p = 1; p < share.positions.parts; ++p) sum += parts[p * share.part_step + j];
          at[j * c.kernel_step[3]] = sum;
        }
      }
  };
  run_all(tasks, c.groups * blocks, body);
}

inline void kernel_gradient(const Convolution& c, const Tasks& tasks) {
  Sight sight{};
  const long taps = c.kernel_size[0] * c.kernel_size[1];
  sight.data = c.input;
  sight.channels = c.channels;
  sight.step[kWidth] = c.groups * c.channels;
  sight.step[kHeight] = sight.step[kWidth] * c.input_size[kWidth];
  sight.image_step = sight.step[kHeight] * c.input_size[kHeight];
  for (int d = 0; d < 2; ++d) sight.size[d] = c.input_size[d], sight.low[d] = c.low[d], sight.taps[d] = c.kernel_size[d];
  const long positions = c.batch * c.output_size[0] * c.output_size[1];
  if (taps * c.channels * c.features == 0) return;
  if (positions > 0 && c.channels < kTileRows && c.groups == 1 && c.kernel_size[kWidth] > 1 && c.dilation[kWidth] == 1)
    widen(c, sight, tasks);
  const long rows = taps * c.channels, panels = ceiling(c.features, kPanel);
  const long wanted = 2 * tasks.threads;
  Sharing share{};
  share.unit_parts = ceiling(sight.channels, kUnitRows);
  const long units = sight.taps[0] * sight.taps[1] * share.unit_parts;
  const bool is_small = rows * c.features * long(sizeof(float)) <= kPartBytes;
  const long position_parts = is_small ? std::max(1L, std::min(ceiling(wanted, c.groups), positions / kSumPositions)) : 1;
  share.positions = Cut{positions, position_parts};
  share.units = Cut{units, std::min(units, ceiling(wanted, c.groups * position_parts))};
  share.panels = Cut{panels, std::min(panels, ceiling(wanted, c.groups * position_parts * share.units.parts))};
  const bool is_in_order = c.kernel_step[3] == 1 && c.kernel_step[1] == c.channels * c.kernel_step[2] &&
                           c.kernel_step[0] == c.kernel_size[kWidth] * c.kernel_step[1];
  const bool is_direct = is_in_order && position_parts == 1 && positions > 0;
  const size_t apart = is_direct ? 0 : position_parts * c.groups * rows * c.features;
  float* own = static_cast<float*>(tasks.scratch(3, (apart + c.groups * c.channels + sight.channels) * sizeof(float)));
  std::memset(own + apart, 0, (c.groups * c.channels + sight.channels) * sizeof(float));
  sight.zeros = own + apart;
  share.result = is_direct ? c.kernel : own;
  share.row = is_direct ? c.kernel_step[2] : c.features;
  share.group_step = is_direct ? c.features : rows * c.features;
  share.part_step = c.groups * rows * c.features;
  auto body = [&](long i) { sum_part(c, sight, share, i, tasks); };
  if (positions > 0)
    run_all(tasks, c.groups * position_parts * share.units.parts * share.panels.parts, body);
  else
    std::memset(own, 0, apart * sizeof(float));
  if (!is_direct) add_parts(c, share, tasks);
}

constexpr long kMostTaps = 64;  // of a kernel whose gradient is summed channel by channel

// The sum over positions of one tap's products, for the channels of a vector.
inline Vector sum_positions(long count, const float* input, long input_step, const float* output, long output_step) {
  Vector sums[4] = {};
  long i = 0;
  for (; i + 4 <= count; i += 4)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += load(input + (i + j) * input_step) * load(output + (i + j) * output_step);
  for (; i < count; ++i) sums[0] += load(input + i * input_step) * load(output + i * output_step);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

// A kernel's gradient from some rows of the output, for the channels of a vector, where every channel is its own group.
inline void sum_channels(const Convolution& c, long channel, long row, long rows, float* to) {
  const long height = c.output_size[kHeight], width = c.output_size[kWidth], stride = c.stride[kWidth];
  Vector sums[kMostTaps] = {};
  for (long end = row + rows; row < end; ++row)
    for (long r = 0; r < c.kernel_size[kHeight]; ++r) {
      const long y = row % height * c.stride[kHeight] + r * c.dilation[kHeight] - c.low[kHeight];
      if (y < 0 || y >= c.input_size[kHeight]) continue;
      const float* input = c.input + (row / height * c.input_size[kHeight] + y) * c.input_size[kWidth] * c.groups + channel;
      const float* output = c.output + row * width * c.groups + channel;
      for (long q = 0; q < c.kernel_size[kWidth]; ++q) {
        const long across = q * c.dilation[kWidth] - c.low[kWidth], behind = c.input_size[kWidth] - across;
        const long first = across < 0 ? ceiling(-across, stride) : 0;
        const long last = std::min(width, behind > 0 ? ceiling(behind, stride) : 0);
        if (first >= last) continue;
        sums[r * c.kernel_size[kWidth] + q] +=
            sum_positions(last - first, input + (first * stride + across) * c.groups, stride * c.groups,
                          output + first * c.groups, c.groups);
      }
    }
  for (long tap = 0; tap < c.kernel_size[kHeight] * c.kernel_size[kWidth]; ++tap) store(to + tap * c.groups, sums[tap]);
}

inline void kernel_gradient_of_channels(const Convolution& c, const Tasks& tasks) {
  const long taps = c.kernel_size[kHeight] * c.kernel_size[kWidth], rows = c.batch * c.output_size[kHeight];
  const Cut parts{rows, std::clamp(rows, 1L, 4 * tasks.threads)};
  float* sums = static_cast<float*>(tasks.scratch(0, parts.parts * taps * c.groups * sizeof(float)));
  auto body = [&](long i) {
    for (long next = 0; next < c.groups; next += kLanes) {
      const long channel = std::min(next, c.groups - kLanes);
      sum_channels(c, channel, parts.start(i), parts.size(i), sums + i * taps * c.groups + channel);
    }
  };
  run_all(tasks, parts.parts, body);
  for (long tap = 0; tap < taps; ++tap)
    for (long channel = 0; channel < c.groups; ++channel) {
      float sum = 0.0f;
      for (long i = 0; i < parts.parts; ++i) sum += sums[(i * taps + tap) * c.groups + channel];
      c.kernel[tap / c.kernel_size[kWidth] * c.kernel_step[0] + tap % c.kernel_size[kWidth] * c.kernel_step[1] +
               channel * c.kernel_step[3]] = sum;
    }
}

inline void convolution(const Convolution& c, const Tasks& tasks) {
  if (c.wanted != Convolution::kKernel) return convolve(c, tasks);
  if (are_channels_apart(c) && c.kernel_size[kHeight] * c.kernel_size[kWidth] <= kMostTaps)
    return kernel_gradient_of_channels(c, tasks);
  kernel_gradient(c, tasks);
}

}  // namespace
}  // namespace transmuter
