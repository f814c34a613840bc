#include "column_estimate.h"

#include <algorithm>
#include <cmath>

#include "../integers.h"

namespace packedconv {
namespace {

// A multiprocessor as the estimate sees it: rough, and the same for all devices.
constexpr double kIssueSlots = 4;           // instructions a clock
constexpr double kFillBytes = 32;           // a clock from the L2 cache
constexpr double kMemoryBytes = 12;         // a clock to and from memory
constexpr double kHiddenFill = 0.3;         // of a fill's time that is felt though it overlaps
constexpr double kHiddenWork = 0.2;         // and of the shorter of computing and storing
constexpr double kRecordInstructions = 24;  // of an output channel, beside its nonzeros and stores
constexpr double kLoadsWanted = 96;         // shared loads under way that keep the unit busy
constexpr double kLoadsOfWarp = 8;          // that a warp has under way at most
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kRegisters = 65536, kRegistersPerThread = 64;

// Lanes of a warp that read another word of the same bank, at most: clocks of one shared load.
int bank_conflicts(const ColumnConfig& config) {
  constexpr int kBanks = 32;
  int lanes[kBanks] = {};
  for (int lane = 0; lane < ColumnConfig::kWarp; ++lane) {
    const int row = lane / config.lane_columns, column = lane % config.lane_columns;
    ++lanes[(row * config.rows_per_thread * config.pitch + column) % kBanks];
  }
  return *std::max_element(lanes, lanes + kBanks);
}

}  // namespace

int resident_blocks(const ColumnPlan& plan, const DeviceLimits& limits) {
  constexpr std::int64_t kReserved = 1024;  // bytes of a block that the system takes, from sm_80
  const int threads = plan.config.warps * ColumnConfig::kWarp;
  const std::int64_t by_memory =
      limits.shared_per_multiprocessor / (plan.shared_bytes + kReserved);
  const std::int64_t by_threads =
      std::min(kThreadsPerMultiprocessor, kRegisters / kRegistersPerThread) / threads;
  return static_cast<int>(std::max<std::int64_t>(1, std::min(by_memory, by_threads)));
}

// An item takes the longest of its shared loads (one warp a clock), its instructions and its
// output's way to memory, a part of what that hides, and the tile's fill.
double estimate_cycles(const packedconv_layer_shape& shape, const ColumnPlan& plan,
                       const DeviceLimits& limits, std::int64_t nonzeros) {
  const ColumnConfig& config = plan.config;
  const std::int64_t grid = std::int64_t{plan.grid_blocks} * plan.parts;
  // Blocks that a multiprocessor runs at once, and how often.
  const std::int64_t fitting = resident_blocks(plan, limits);
  const std::int64_t resident =
      std::min(fitting, ceil_div(grid, std::int64_t{limits.multiprocessors}));
  const std::int64_t waves = ceil_div(grid, limits.multiprocessors * fitting);
  const double pixels = config.rows_per_thread * config.column_groups;
  const double per_part = static_cast<double>(nonzeros) / plan.parts;
  const double channels = static_cast<double>(shape.out_channels) / plan.parts;
  // Output channels that do not divide among the warps leave some of them idle.
  const double share = channels / plan.channel_warps;
  const double imbalance = std::ceil(share) / share;
  const double loads =
      per_part * config.row_warps * (pixels * bank_conflicts(config) + 0.5) * imbalance;
  const double instructions =
      config.row_warps * imbalance *
      (per_part * (2 * pixels + 2) + channels * plan.blocks * (kRecordInstructions + 2 * pixels));
  const double under_way =
      static_cast<double>(resident * config.warps) * std::min(pixels, kLoadsOfWarp);
  const double compute = std::max(loads, instructions / kIssueSlots) *
                         std::max(1.0, kLoadsWanted / under_way);

  // Each block of input channels but the first reads the sums so far, and all write them.
  const double output = 4.0 * plan.tile_rows * plan.tile_columns * channels;
  // Runs of a row shorter than a line of 128 bytes leave more of them incomplete.
  const double runs = config.lane_columns == ColumnConfig::kWarp ? 1 : 1.2;
  const double memory = runs * output * (2 * plan.blocks - 1) / kMemoryBytes;

  // A copy for each column takes four times the instructions of a copy of four.
  const bool by_four = plan.columns.stride == 1 && plan.in_width % 4 == 0;
  double fill = 4.0 * plan.group_channels * plan.stored_rows *
                (plan.left + plan.columns.stored()) / kFillBytes * (by_four ? 1 : 2);
  if (!plan.resident) fill += 8 * per_part / kFillBytes;
  const bool hidden = resident > 1 || (config.buffers == 2 && limits.asynchronous_copies());

  const double item = std::max(compute, memory) + kHiddenWork * std::min(compute, memory) +
                      (hidden ? kHiddenFill : 1) * fill;
  // Blocks that share a multiprocessor share its clocks.
  return static_cast<double>(waves * ceil_div(plan.items, plan.grid_blocks) * resident) * item;
}

}  // namespace packedconv
