#include "schedule.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "../integers.h"

namespace packedconv {
namespace {

// What the caches of a core may keep from one call to the next. A larger output would push
// everything else out of them.
constexpr std::int64_t kCacheBytes = 4 << 20;
constexpr std::int64_t kItemsPerThread = 4;
constexpr std::int64_t kLineBytes = 64;
// Bytes of the copy that a thread works with, above which tiles are no way to compute a layer.
constexpr std::int64_t kMostCopied = 256 << 20;
// Of the first cache for the input of a block; the rest passes through.
constexpr double kTileShare = 0.85;
// Of the second cache for the input of a tile that stays there, beside weights and sums.
constexpr double kSecondShare = 1.0 / 6.0;

// What schedules are compared by, about cycles of one core: fitted to the times of all
// candidates on layers of many shapes, on two cores.
struct Costs {
  double nonzero;  // of each nonzero and tile, beside those of its sums
  double sum;      // of a multiply-add with a load that crosses no line
  double latency;  // of a multiply-add until its sum is there
  double from_l2, beyond_l2;  // factors for what does not stay in the first cache
  double channel;  // of an output channel and block
  double shift, carry;  // of moving a sum by a pixel, and through memory between two blocks
  double neighbor;  // of a row for which a tile passes sums to the next, with each shift
  double store, store_pieces;  // of a vector of sums
  double store_far;            // factor for an output beyond the caches that is not streamed
  double short_row;            // of a row of a tile, under two lines, in such an output
  double fill, fill_block;     // of a vector of the copy, and of one that stays in the first cache
  double second, gather;       // factors for every second pixel, and for others
  double idle;  // share of the time that threads without an item would wait for the last ones
};
// AMD Zen 4 with AVX-512, where two vectors are two lines.
constexpr Costs kLongVectorCosts{0.86, 0.97, 4.0, 1.63, 2.18, 17.4, 0.44, 2.41, 4.76,
                                 2.35, 7.4,  7.0, 0.0,  8.7,  8.4,  2.23, 16.0, 0.25};
// AMD Zen 3 with AVX2.
constexpr Costs kShortVectorCosts{1.86, 0.72, 4.0, 1.63, 1.88, 16.4, 0.43, 2.1,  4.0,
                                  1.89, 7.4,  6.5, 2.1,  11.3, 8.5,  2.5,  16.0, 0.25};

const Costs& costs_of(const Isa& isa) {
  return isa.lanes * static_cast<std::int64_t>(sizeof(float)) < kLineBytes ? kShortVectorCosts
                                                                           : kLongVectorCosts;
}

// Bytes of the caches of one core; common values where the system does not tell.
struct CacheSizes {
  std::int64_t l1, l2;
};

CacheSizes cache_sizes() {
  CacheSizes sizes{32 << 10, 1 << 20};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  const long l1 = sysconf(_SC_LEVEL1_DCACHE_SIZE), l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l1 > 0) sizes.l1 = l1;
  if (l2 > 0) sizes.l2 = l2;
#endif
  return sizes;
}

Geometry geometry_of(const CpuSchedule& schedule, const Isa& isa,
                     const packedconv_layer_shape& shape) {
  return make_geometry(shape, isa.lanes, schedule.rows, schedule.vectors,
                       schedule.path == CpuPath::aligned);
}

std::int64_t input_bytes(const packedconv_layer_shape& shape) {
  return shape.batch * shape.in_channels * shape.in_height * shape.in_width *
         static_cast<std::int64_t>(sizeof(float));
}

std::int64_t output_bytes(const packedconv_layer_shape& shape) {
  return shape.batch * shape.out_channels * shape.out_height * shape.out_width *
         static_cast<std::int64_t>(sizeof(float));
}

std::int64_t block_bytes(const Geometry& g, std::int64_t channels) {
  return channels * g.channel_rows * g.row_step * static_cast<std::int64_t>(sizeof(float));
}

// As many equal blocks of channels as let each stay in the first cache.
std::int64_t block_for(const Geometry& g, std::int64_t l1) {
  const double budget = kTileShare * static_cast<double>(l1);
  const std::int64_t most = std::max<std::int64_t>(
      8, static_cast<std::int64_t>(budget / static_cast<double>(block_bytes(g, 1))));
  return ceil_div(g.channels, ceil_div(g.channels, most));
}

// Tiles copied at once: those of a row, whose input rows are then read from end to end, as long
// as they fit into a third of the second cache (where an image is one row anyway, an eighth) and
// leave every thread some.
std::int64_t strip_for(const Geometry& g, std::int64_t l2, int threads) {
  if (g.carries) return g.column_blocks;
  if (g.pieces_per_tile > 1 || g.column_blocks == 1) return 1;
  const std::int64_t share = g.flat ? l2 / 8 : l2 / 3;
  const std::int64_t fitting = share / std::max<std::int64_t>(1, block_bytes(g, g.channels));
  const std::int64_t shared = ceil_div(g.tiles, wanted_items(threads));
  return std::max<std::int64_t>(1, std::min({g.column_blocks, fitting, shared}));
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("schedule: " + what +
                              "; leave it out, or change one that a plan shows");
}

// Cycles that the layer takes on as many cores, as far as the schedule decides it.
double estimate_cycles(const CpuSchedule& schedule, const Isa& isa,
                       const packedconv_layer_shape& shape, double nonzeros, int threads) {
  const Costs& cost = costs_of(isa);
  const Geometry g = geometry_of(schedule, isa, shape);
  const CacheSizes caches = cache_sizes();
  const double sums = schedule.rows * schedule.vectors;
  const double groups = static_cast<double>(shape.groups);
  const double out_channels = static_cast<double>(shape.out_channels) / groups;
  const double blocks = static_cast<double>(ceil_div(g.channels, schedule.block_channels));
  const double tiles = static_cast<double>(g.tiles) * groups;
  const std::int64_t strip = g.carries ? g.column_blocks : schedule.strip;
  const std::int64_t strips =
      ceil_div(std::max<std::int64_t>(1, g.tiles), strip) * shape.groups;

  // A load costs two where it crosses a line, as it does at all addresses but one in 16 when it
  // is as long as a line.
  const double crossing = isa.lanes * 4.0 / kLineBytes * 15.0 / 16.0;
  const bool anywhere = schedule.path == CpuPath::loose &&
                        (shape.kernel_width > 1 || g.row_step % isa.lanes != 0);
  double per_nonzero = cost.nonzero + sums * cost.sum * (anywhere ? 1.0 + crossing : 1.0);
  // Few sums wait for their own multiply-adds.
  per_nonzero = std::max(per_nonzero, cost.latency / (sums <= kFewSums ? 2.0 : 1.0));
  // What does not stay in the first cache comes from the second, or from beyond.
  const double l1 = static_cast<double>(caches.l1), l2 = static_cast<double>(caches.l2);
  const double block = static_cast<double>(block_bytes(g, schedule.block_channels));
  if (block > l1) {
    const double factor = static_cast<double>(block_bytes(g, g.channels)) > kSecondShare * l2
                              ? cost.beyond_l2
                              : cost.from_l2;
    per_nonzero *= 1.0 + (factor - 1.0) * (1.0 - kTileShare * l1 / block);
  }

  const double shift =
      g.shifts() * (sums * cost.shift + (g.carries ? schedule.rows * cost.neighbor : 0.0));
  const double carried = blocks > 1 ? sums * cost.carry : 0.0;
  const bool far = output_bytes(shape) > kCacheBytes;
  double store = sums * (g.pieces_per_tile > 1 ? cost.store_pieces : cost.store) *
                 (far && !schedule.stream ? cost.store_far : 1.0);
  const std::int64_t row_bytes = g.tile_lanes * static_cast<std::int64_t>(sizeof(float));
  if (far && g.column_blocks > 1 && row_bytes < 2 * kLineBytes)
    store += static_cast<double>(g.tile_rows) * cost.short_row;
  const double per_channel = blocks * (cost.channel + shift + carried) + store;
  const double compute = tiles * (nonzeros / groups * per_nonzero + out_channels * per_channel);

  const double step = static_cast<double>(shape.stride_width);
  const double per_vector = step == 1 ? 1.0 : step == 2 ? cost.second : cost.gather;
  const std::int64_t slices = ceil_div(wanted_items(threads), strips);
  const bool blockwise = copies_blocks(g, schedule, slices);
  const double fill_strip = static_cast<double>(strip * g.channels * g.channel_rows) * per_vector *
                            (blockwise ? cost.fill_block : cost.fill) *
                            static_cast<double>(ceil_div(g.row_step, isa.lanes));
  // Every thread fills the strips of which it computes a slice.
  const double fills = static_cast<double>(ceil_div(strips, std::int64_t{threads}));
  const double items = static_cast<double>(strips * slices);
  const double most = static_cast<double>(ceil_div(strips * slices, std::int64_t{threads}));
  const double waiting = 1.0 + cost.idle * (most * threads / items - 1.0);
  return compute / threads * waiting + fill_strip * fills;
}

// Whether all that a tile writes is whole lines of 64 bytes.
bool writes_lines(const Geometry& g, const packedconv_layer_shape& shape) {
  const auto lines = [](std::int64_t floats) { return floats % 16 == 0; };
  if (!lines(shape.out_height * shape.out_width) || g.pieces_per_tile > 1) return false;
  if (g.flat) return lines(g.tile_lanes);
  return lines(g.out_columns) ? lines(g.tile_lanes)
                              : g.column_blocks == 1 && lines(g.tile_rows * g.out_columns);
}

}  // namespace

std::int64_t wanted_items(int threads) { return threads > 1 ? kItemsPerThread * threads : 1; }

bool copies_blocks(const Geometry& g, const CpuSchedule& schedule, std::int64_t slices) {
  return schedule.block_channels < g.channels && slices == 1 && (g.carries || schedule.strip == 1);
}

std::int64_t tiles_at_once(const Geometry& g, const CpuSchedule& schedule) {
  if (!g.carries) return schedule.strip;
  const std::int64_t tile = std::max<std::int64_t>(1, block_bytes(g, g.channels));
  return std::max<std::int64_t>(1, std::min(schedule.strip, cache_sizes().l2 / 2 / tile));
}

const TileKernel* find_kernel(const Isa& isa, int rows, int vectors) {
  for (int i = 0; i < isa.kernel_count; ++i)
    if (isa.kernels[i].rows == rows && isa.kernels[i].vectors == vectors) return &isa.kernels[i];
  return nullptr;
}

void check_schedule(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape) {
  if (schedule.path == CpuPath::naive) return;
  const TileKernel* const kernel = find_kernel(isa, schedule.rows, schedule.vectors);
  if (kernel == nullptr) {
    std::ostringstream sizes;
    for (int i = 0; i < isa.kernel_count; ++i)
      sizes << (i ? ", " : "") << isa.kernels[i].rows << " x " << isa.kernels[i].vectors;
    refuse("expected rows x vectors of " + sizes.str() + " (" + isa.name + "), got " +
           std::to_string(schedule.rows) + " x " + std::to_string(schedule.vectors));
  }
  if (schedule.path == CpuPath::aligned &&
      (kernel->aligned == nullptr ||
       !aligned_fits(shape, isa.lanes, schedule.rows, schedule.vectors)))
    refuse("expected path loose or naive, since the aligned one has no tile of " +
           std::to_string(schedule.rows) + " x " + std::to_string(schedule.vectors) +
           " for this layer (" + isa.name + "), got path aligned");
  if (!fits(geometry_of(schedule, isa, shape)))
    throw std::length_error("schedule: expected tiles under 2^31 elements; use path naive");
  if (schedule.block_channels < 1)
    refuse("expected block_channels of at least 1, got " + std::to_string(schedule.block_channels));
  if (schedule.strip < 1) refuse("expected strip of at least 1, got " +
                                 std::to_string(schedule.strip));
}

CpuSchedule naive_schedule(const packedconv_layer_shape& shape) {
  return {CpuPath::naive, 1, 1, shape.in_channels / shape.groups, 1, false, false};
}

std::vector<CpuSchedule> list_schedules(const Isa& isa, const packedconv_layer_shape& shape,
                                        double nonzeros, int threads) {
  const CacheSizes caches = cache_sizes();
  struct Candidate {
    CpuSchedule schedule;
    double cycles;
  };
  std::vector<Candidate> candidates;
  for (int i = 0; i < isa.kernel_count; ++i) {
    const TileKernel& kernel = isa.kernels[i];
    for (const CpuPath path : {CpuPath::aligned, CpuPath::loose}) {
      if (path == CpuPath::aligned &&
          (kernel.aligned == nullptr ||
           !aligned_fits(shape, isa.lanes, kernel.rows, kernel.vectors)))
        continue;
      CpuSchedule schedule;
      schedule.path = path;
      schedule.rows = kernel.rows;
      schedule.vectors = kernel.vectors;
      const Geometry g = geometry_of(schedule, isa, shape);
      if (!fits(g) || block_bytes(g, g.channels) > kMostCopied) continue;
      schedule.strip = strip_for(g, caches.l2, threads);
      schedule.stream = output_bytes(shape) > kCacheBytes && writes_lines(g, shape);
      std::vector<std::int64_t> blocks{g.most_block()};
      if (block_for(g, caches.l1) < blocks.front()) blocks.push_back(block_for(g, caches.l1));
      for (const std::int64_t block : blocks) {
        schedule.block_channels = block;
        schedule.prefetch = input_bytes(shape) > kCacheBytes;
        candidates.push_back({schedule, estimate_cycles(schedule, isa, shape, nonzeros, threads)});
      }
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.cycles < b.cycles; });
  if (candidates.empty()) return {naive_schedule(shape)};
  std::vector<CpuSchedule> schedules;
  for (const Candidate& candidate : candidates) schedules.push_back(candidate.schedule);
  return schedules;
}

std::string explain(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape, const Geometry& g, std::int64_t copied) {
  if (schedule.path == CpuPath::naive) return "Algorithm 1 as it stands, without tiles";
  if (g.tiles == 0) return "no output";
  std::ostringstream why;
  why << (schedule.path == CpuPath::loose ? "loose" : "aligned") << " tile of " << schedule.rows
      << " x " << schedule.vectors << " vectors of " << isa.lanes << ": "
      << static_cast<int>(100.0 * g.lanes_used() + 0.5) << " % of its pixels are output";
  if (g.pieces_per_tile > 1) why << ", " << g.pieces_per_tile << " pieces side by side";
  if (g.flat) why << ", pixels in a row since the kernel is 1 x 1";
  const std::int64_t block = std::min(g.channels, schedule.block_channels);
  why << "; " << block << " of " << g.channels << " input channels at a time read "
      << block_bytes(g, block) / 1024 << " KiB of a first cache of " << cache_sizes().l1 / 1024
      << " KiB";
  if (g.carries) why << "; the " << g.column_blocks << " tiles of a row pass sums on";
  if (copied > 1) why << "; the input of " << copied << " tiles is copied at once";
  if (schedule.stream)
    why << "; the output of " << output_bytes(shape) / (1 << 20)
        << " MiB is written past the caches, where it lies at multiples of a vector";
  return why.str();
}

}  // namespace packedconv
