#include "schedule.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "../integers.h"

namespace packedconv {
namespace {

// Outputs of more bytes than this would push everything else out of the caches.
constexpr std::int64_t kStreamBytes = 4 << 20;
// Of the first cache for the input of a block; the rest passes through.
constexpr double kTileShare = 0.85;

Geometry geometry_of(const CpuSchedule& schedule, const Isa& isa,
                     const packedconv_layer_shape& shape) {
  return make_geometry(shape, isa.lanes, schedule.rows, schedule.vectors,
                       schedule.path == CpuPath::aligned);
}

std::int64_t block_bytes(const Geometry& g, std::int64_t channels) {
  const std::int64_t row = g.row_step + g.edge_floats;
  return channels * g.channel_rows * row * static_cast<std::int64_t>(sizeof(float));
}

// As many equal blocks of channels as let each stay in the first cache.
std::int64_t block_for(const Geometry& g, std::int64_t l1) {
  const double budget = kTileShare * static_cast<double>(l1);
  const std::int64_t most = std::max<std::int64_t>(
      8, static_cast<std::int64_t>(budget / static_cast<double>(block_bytes(g, 1))));
  return ceil_div(g.channels, ceil_div(g.channels, most));
}

// Tiles filled at once: those of a row of blocks, whose input rows are then read from end to
// end, as long as they fit into a third of the second cache and leave every thread some.
std::int64_t strip_for(const Geometry& g, std::int64_t l2, int threads) {
  if (g.pieces_per_tile > 1 || g.column_blocks == 1) return 1;
  const std::int64_t fitting = l2 / 3 / std::max<std::int64_t>(1, block_bytes(g, g.channels));
  const std::int64_t shared = ceil_div(g.tiles, 4 * static_cast<std::int64_t>(threads));
  return std::max<std::int64_t>(1, std::min({g.column_blocks, fitting, shared}));
}

const char* path_name(CpuPath path) {
  if (path == CpuPath::naive) return "naive";
  return path == CpuPath::loose ? "loose" : "aligned";
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("schedule: " + what + "; choose one that cpu_schedules lists");
}

}  // namespace

CacheSizes cache_sizes() {
  CacheSizes sizes{32 << 10, 1 << 20};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  const long l1 = sysconf(_SC_LEVEL1_DCACHE_SIZE), l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l1 > 0) sizes.l1 = l1;
  if (l2 > 0) sizes.l2 = l2;
#endif
  return sizes;
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
      (kernel->aligned == nullptr || !aligned_fits(shape, isa.lanes, schedule.rows,
                                                   schedule.vectors,
                                                   kernel->aligned_edges != nullptr)))
    refuse("expected path loose or naive, since the aligned one has no tile of " +
           std::to_string(schedule.rows) + " x " + std::to_string(schedule.vectors) +
           " for this layer (" + isa.name + "), got path aligned");
  if (schedule.block_channels < 1)
    refuse("expected block_channels of at least 1, got " + std::to_string(schedule.block_channels));
  if (schedule.strip < 1) refuse("expected strip of at least 1, got " +
                                 std::to_string(schedule.strip));
}

double estimate_cycles(const CpuSchedule& schedule, const Isa& isa,
                       const packedconv_layer_shape& shape, double nonzeros) {
  const Geometry g = geometry_of(schedule, isa, shape);
  const CacheSizes caches = cache_sizes();
  const double sums = schedule.rows * schedule.vectors;
  const double group_nonzeros = nonzeros / static_cast<double>(shape.groups);
  const double out_channels = static_cast<double>(shape.out_channels / shape.groups);
  const double blocks = static_cast<double>(ceil_div(g.channels, schedule.block_channels));
  const double tiles = static_cast<double>(g.tiles * shape.groups);

  // Two loads a cycle, of which one at any address costs two where it crosses a line of 64
  // bytes, as 1/16 of its addresses, or all but that, do.
  const double crossing = isa.lanes * 4.0 / 64.0 * 15.0 / 16.0;
  const double columns = static_cast<double>(shape.kernel_width);
  double loads = sums;
  if (schedule.path == CpuPath::loose) {
    loads += sums * (columns > 1 || g.row_step % isa.lanes ? crossing : 0.0);
  } else if (g.edge_floats > 0) {
    loads += 1.7 * (1.0 - 1.0 / columns);
  }
  // Few sums wait for their own FMAs.
  const double latency_bound = 4.0 / (sums <= 8 ? 2.0 : 1.0);
  double per_nonzero = std::max(0.5 * loads + 0.6, latency_bound);
  // Input that does not stay in the first cache comes from the second.
  const std::int64_t bytes = block_bytes(g, std::min(g.channels, schedule.block_channels));
  if (static_cast<double>(bytes) > static_cast<double>(caches.l1)) per_nonzero *= 1.5;

  const double shift = schedule.path == CpuPath::aligned ? g.shifts() * sums * 0.5 : 0.0;
  const double channel_block = 8.0 + shift + (blocks > 1 ? 2.0 * sums : 0.0);
  const double store = sums * (g.pieces_per_tile > 1 || g.tile_lanes != g.piece_columns ? 2.5 : 1.2);
  const double fill = static_cast<double>(g.channels * g.channel_rows) *
                      (1.5 * static_cast<double>(ceil_div(g.row_step, isa.lanes)) +
                       (g.edge_floats > 0 ? 3.0 : 0.0));
  return tiles * (group_nonzeros * per_nonzero + out_channels * (blocks * channel_block + store) +
                  fill);
}

std::vector<CpuSchedule> list_schedules(const Isa& isa, const packedconv_layer_shape& shape,
                                        double nonzeros, int threads) {
  const CacheSizes caches = cache_sizes();
  const std::int64_t output = shape.batch * shape.out_channels * shape.out_height *
                              shape.out_width * static_cast<std::int64_t>(sizeof(float));
  struct Candidate {
    CpuSchedule schedule;
    double cycles;
  };
  std::vector<Candidate> candidates;
  for (int i = 0; i < isa.kernel_count; ++i) {
    const TileKernel& kernel = isa.kernels[i];
    for (const CpuPath path : {CpuPath::aligned, CpuPath::loose}) {
      const bool aligned = path == CpuPath::aligned;
      if (aligned && (kernel.aligned == nullptr ||
                      !aligned_fits(shape, isa.lanes, kernel.rows, kernel.vectors,
                                    kernel.aligned_edges != nullptr)))
        continue;
      CpuSchedule schedule;
      schedule.path = path;
      schedule.rows = kernel.rows;
      schedule.vectors = kernel.vectors;
      const Geometry g = geometry_of(schedule, isa, shape);
      schedule.strip = strip_for(g, caches.l2, threads);
      schedule.prefetch = false;
      schedule.stream = output > kStreamBytes;
      const std::int64_t blocked = block_for(g, caches.l1);
      for (const std::int64_t block : {blocked, g.channels}) {
        if (block == g.channels && blocked == g.channels && block != blocked) continue;
        schedule.block_channels = block;
        candidates.push_back({schedule, estimate_cycles(schedule, isa, shape, nonzeros)});
        if (blocked == g.channels) break;
      }
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.cycles < b.cycles; });
  std::vector<CpuSchedule> schedules;
  for (const Candidate& candidate : candidates) schedules.push_back(candidate.schedule);
  return schedules;
}

std::string explain(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape, const Geometry& g) {
  std::ostringstream why;
  if (schedule.path == CpuPath::naive) {
    why << "Algorithm 1 as it stands, as asked for";
    return why.str();
  }
  why << path_name(schedule.path) << " tile of " << schedule.rows << " x " << schedule.vectors
      << " vectors of " << isa.lanes << ": " << static_cast<int>(100.0 * g.lanes_used() + 0.5)
      << " % of its pixels are output";
  if (g.pieces_per_tile > 1) why << ", " << g.pieces_per_tile << " pieces side by side";
  if (g.flat) why << ", pixels in a row since the kernel is 1 x 1";
  const std::int64_t block = std::min(g.channels, schedule.block_channels);
  why << "; " << block << " of " << g.channels << " input channels at a time read "
      << block_bytes(g, block) / 1024 << " KiB of a first cache of " << cache_sizes().l1 / 1024
      << " KiB";
  if (schedule.strip > 1) why << "; the input of " << schedule.strip << " tiles is copied at once";
  if (schedule.stream)
    why << "; the output of "
        << shape.batch * shape.out_channels * shape.out_height * shape.out_width * 4 / (1 << 20)
        << " MiB is written past the caches";
  return why.str();
}

}  // namespace packedconv
