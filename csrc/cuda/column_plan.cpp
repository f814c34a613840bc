#include "column_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "../integers.h"
#include "../weight_check.h"
#include "column_estimate.h"
#include "column_table.h"
#include "conv2d.h"

namespace packedconv {
namespace {

constexpr std::int64_t kInt = std::numeric_limits<std::int32_t>::max();

ColumnAxis make_axis(std::int64_t stride, std::int64_t dilation, std::int64_t kernel,
                     std::int64_t outputs) {
  ColumnAxis axis = {};
  axis.stride = static_cast<int>(stride);
  std::int64_t most = 0;
  for (std::int64_t tap = 0; tap < kernel; ++tap) {
    const int residue = static_cast<int>(tap * dilation % stride);
    int* const end = axis.residue + axis.residues;
    if (std::find(axis.residue, end, residue) == end) axis.residue[axis.residues++] = residue;
    most = std::max(most, tap * dilation / stride);
  }
  axis.per_residue = static_cast<int>(outputs + most);
  return axis;
}

// The geometry of the tile; block_channels and what follows from it are still open.
bool set_tile(const packedconv_layer_shape& shape, const ColumnConfig& config, ColumnPlan* plan) {
  plan->config = config;
  plan->tile_rows = config.tile_rows();
  plan->tile_columns = config.tile_columns();
  plan->lane_rows = config.lane_rows();
  plan->channel_warps = config.channel_warps();
  // Positions in the tile and in the padded image are 32-bit numbers. Summed as doubles, which do
  // not wrap.
  const auto reach = [](std::int64_t outputs, int tile, std::int64_t stride, std::int64_t kernel,
                        std::int64_t dilation, std::int64_t padding) {
    return (static_cast<double>(outputs) + tile) * static_cast<double>(stride) +
           static_cast<double>(kernel) * static_cast<double>(dilation) +
           static_cast<double>(padding) + kUnitWords;
  };
  if (reach(shape.out_height, plan->tile_rows, shape.stride_height, shape.kernel_height,
            shape.dilation_height, shape.pad_top) > kInt ||
      reach(shape.out_width, plan->tile_columns, shape.stride_width, shape.kernel_width,
            shape.dilation_width, shape.pad_left) > kInt) {
    return false;
  }
  plan->rows = make_axis(shape.stride_height, shape.dilation_height, shape.kernel_height,
                         config.tile_rows());
  plan->columns = make_axis(shape.stride_width, shape.dilation_width, shape.kernel_width,
                            config.tile_columns());
  const std::int64_t width = std::int64_t{plan->columns.residues} * plan->columns.per_residue;
  if (width > config.pitch) return false;
  // Copies of four columns want the first stored one to be a multiple of four.
  const int left = static_cast<int>((4 - shape.pad_left % 4) % 4);
  const bool align = shape.stride_width == 1 && shape.in_width % 4 == 0 &&
                     config.pitch % 4 == 0 && left + width <= config.pitch;
  plan->left = align ? left : 0;
  const std::int64_t stored = std::int64_t{plan->rows.residues} * plan->rows.per_residue;
  if (stored * config.pitch > kInt / 4) return false;
  plan->stored_rows = static_cast<int>(stored);
  plan->row_divisor =
      static_cast<std::uint32_t>(ceil_div(std::int64_t{1} << 32, plan->stored_rows));
  plan->plane = plan->stored_rows * config.pitch;

  plan->group_channels = static_cast<int>(shape.in_channels / shape.groups);
  plan->in_height = static_cast<int>(shape.in_height);
  plan->in_width = static_cast<int>(shape.in_width);
  plan->out_height = static_cast<int>(shape.out_height);
  plan->out_width = static_cast<int>(shape.out_width);
  plan->pad_top = static_cast<int>(shape.pad_top);
  plan->pad_left = static_cast<int>(shape.pad_left);
  plan->row_tiles = static_cast<int>(ceil_div(shape.out_height, config.tile_rows()));
  plan->column_tiles = static_cast<int>(ceil_div(shape.out_width, config.tile_columns()));
  const std::int64_t parts = shape.groups * config.slices;
  const std::int64_t per_image = std::int64_t{plan->row_tiles} * plan->column_tiles;
  if (parts > kInt || shape.batch > kInt || per_image > kInt ||
      per_image * std::max<std::int64_t>(shape.batch, 1) > kInt / 2) {
    return false;
  }
  plan->parts = static_cast<int>(parts);
  plan->items = static_cast<int>(per_image * shape.batch);
  return true;
}

std::int64_t tile_words(const ColumnPlan& plan, std::int64_t channels) {
  return round_up(channels * plan.plane, kUnitWords);
}

// Divides input and output channels so that tile and nonzeros fit; false when they do not.
bool set_blocks(const packedconv_layer_shape& shape, const DeviceLimits& limits,
                ColumnWeight* weight, ColumnPlan* plan) {
  const ColumnConfig& config = plan->config;
  const std::int64_t words = limits.shared_per_block / 4;
  const std::int64_t part_channels = ceil_div(shape.out_channels / shape.groups, config.slices);
  // A word tells no more channels apart than it does when packed.
  const int most_channels = std::min<int>(plan->group_channels, PACKEDCONV_BLOCK_CHANNELS);
  for (std::int64_t channels = most_channels; channels > 0;
       channels = channels > 1 ? ceil_div(channels, 2) : 0) {
    const std::int64_t tiles = config.buffers * tile_words(*plan, channels);
    if (tiles >= words) continue;
    int chunks = 1;
    std::int64_t staged = weight->largest_part(config, channels);
    const bool resident = tiles + staged <= words;
    if (!resident) {
      staged = weight->largest_segment(config, channels, chunks);
      while (tiles + staged > words && chunks < part_channels) {
        chunks *= 2;
        staged = weight->largest_segment(config, channels, chunks);
      }
      if (tiles + staged > words) continue;
    }
    plan->block_channels = static_cast<int>(channels);
    plan->blocks = static_cast<int>(ceil_div(plan->group_channels, channels));
    plan->chunks = chunks;
    plan->resident = resident;
    plan->tile_words = static_cast<int>(tile_words(*plan, channels));
    plan->weight_words = static_cast<int>(staged);
    plan->shared_bytes = 4 * (tiles + staged);
    if (std::int64_t{plan->parts} * plan->blocks * chunks > kInt / kUnitWords) return false;
    // As many blocks as the device runs at once, all parts together. One more would start when the
    // others have finished, and then take as long as they did.
    const std::int64_t wave = std::int64_t{limits.multiprocessors} * resident_blocks(*plan, limits);
    plan->grid_blocks = static_cast<int>(
        std::max<std::int64_t>(1, std::min<std::int64_t>(plan->items, wave / plan->parts)));
    plan->cycles = estimate_cycles(shape, *plan, limits, weight->nonzeros());
    return true;
  }
  return false;
}

std::string describe(const ColumnConfig& config) {
  return std::to_string(config.rows_per_thread) + " rows and " +
         std::to_string(config.column_groups) + " column group(s) a thread, pitch " +
         std::to_string(config.pitch) + ", " + std::to_string(config.lane_columns) +
         " lane columns, " + std::to_string(config.warps) + " warps (" +
         std::to_string(config.row_warps) + " below one another), " +
         std::to_string(config.buffers) + " tile buffer(s), " + std::to_string(config.slices) +
         " slice(s)";
}

CudaPlan finish(const packedconv_layer_shape& shape, const DeviceLimits& limits,
                ColumnWeight* weight, const ColumnPlan& column, const std::string& why) {
  CudaPlan plan = {};
  plan.kernel = CudaKernel::column;
  plan.shape = shape;
  plan.limits = limits;
  plan.column = column;
  plan.why = why;
  plan.table = weight->table(column);
  return plan;
}

}  // namespace

CudaPlan plan_column(const packedconv_layer_shape& shape, const PackedView& packed,
                     const DeviceLimits& limits, const ColumnConfig& config) {
  check_weight(shape, packed);
  ColumnWeight weight(shape, packed);
  if (!config.valid() || !is_compiled(config)) {
    throw std::invalid_argument("config: expected one that is compiled in (column_config.h), got " +
                                describe(config));
  }
  const std::int64_t channels = shape.out_channels / shape.groups;
  if (config.slices > channels) {
    throw std::invalid_argument("config: expected at most a slice for each of the " +
                                std::to_string(channels) + " output channels of a group, got " +
                                std::to_string(config.slices));
  }
  ColumnPlan plan = {};
  if (!set_tile(shape, config, &plan)) {
    throw std::invalid_argument("config: this layer's tile rows do not fit a pitch of " +
                                std::to_string(config.pitch) +
                                " floats, or its size 32-bit positions; take another "
                                "configuration, or leave the choice to the plan");
  }
  if (!set_blocks(shape, limits, &weight, &plan)) {
    throw std::invalid_argument(
        "config: a tile of one input channel (" + std::to_string(4 * plan.plane) +
        " bytes) and the nonzeros of one output channel do not fit the " +
        std::to_string(limits.shared_per_block) +
        " bytes of shared memory; take a smaller tile, or leave the choice to the plan");
  }
  return finish(shape, limits, &weight, plan, "as given: " + describe(config));
}

CudaPlan plan_column(const packedconv_layer_shape& shape, const PackedView& packed,
                     const DeviceLimits& limits) {
  check_weight(shape, packed);
  ColumnWeight weight(shape, packed);
  const std::int64_t group_out_channels = shape.out_channels / shape.groups;
  ColumnPlan best = {};
  bool found = false;
  for (const ColumnKernel& kernel : kColumnKernels) {
    for (const int lane_columns : {32, 16, 8}) {
      for (const int warps : {4, 8, 16}) {
        for (const int row_warps : {1, 2, 4}) {
          for (const int buffers : {1, 2}) {
            for (int slices = 1; slices <= 64 && slices <= group_out_channels; slices *= 2) {
              const ColumnConfig config = {kernel.rows_per_thread, kernel.column_groups,
                                           kernel.pitch,           lane_columns,
                                           warps,                  row_warps,
                                           buffers,                slices};
              ColumnPlan plan = {};
              if (!config.valid() || (buffers == 2 && !limits.asynchronous_copies()) ||
                  !set_tile(shape, config, &plan) ||
                  !set_blocks(shape, limits, &weight, &plan)) {
                continue;
              }
              if (!found || plan.cycles < best.cycles) best = plan;
              found = true;
            }
          }
        }
      }
    }
  }
  if (!found) {
    CudaPlan plan = plan_general(shape, packed, limits);
    plan.why = "no tile of the column kernel fits this layer on this device (" +
               std::to_string(limits.shared_per_block) + " bytes of shared memory a block)";
    return plan;
  }
  return finish(shape, limits, &weight, best,
                "least estimated time of all configurations that fit: " + describe(best.config));
}

}  // namespace packedconv
