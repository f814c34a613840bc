#include "paper_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../integers.h"
#include "../packed_word.h"
#include "../weight_check.h"
#include "conv2d.h"

namespace packedconv {
namespace {

// The kernels count tiles, channels and images in 32 bits.
constexpr std::int64_t kCountLimit = std::int64_t{1} << 31;

std::string text(std::int64_t value) { return std::to_string(value); }

std::string rounded(double value) {
  std::string digits = std::to_string(value);
  return digits.substr(0, digits.find('.'));
}

void check_count(const std::string& what, double count) {
  if (count >= static_cast<double>(kCountLimit))
    throw std::length_error("conv2d: expected fewer than 2^31 " + what +
                            ", which is what the CUDA kernels count to; split the batch or the "
                            "layer");
}

CudaPlan new_plan(CudaKernel kernel, const packedconv_layer_shape& shape, const PackedView& weight,
                  const DeviceLimits& limits) {
  check_weight(shape, weight);
  check_count("input channels", static_cast<double>(shape.in_channels));
  check_count("output channels", static_cast<double>(shape.out_channels));
  CudaPlan plan{};
  plan.kernel = kernel;
  plan.shape = shape;
  plan.limits = limits;
  return plan;
}

// The words, and the offsets as they are packed.
void write_offsets(CudaPlan* plan, const PackedView& weight) {
  PaperPlan& paper = plan->paper;
  paper.blocks = weight.blocks;
  paper.channels_per_block = PACKEDCONV_BLOCK_CHANNELS;
  paper.begins_at = weight.word_count;
  paper.ends_at = paper.begins_at + 1;
  paper.bounds_step = plan->shape.out_channels + 1;
  plan->table.reserve(static_cast<std::size_t>(weight.word_count + weight.offset_count));
  plan->table.assign(weight.words, weight.words + weight.word_count);
  plan->table.insert(plan->table.end(), weight.offsets, weight.offsets + weight.offset_count);
}

// The words, and where those of each block of `channels_per_block` input channels begin and end.
void write_bounds(CudaPlan* plan, const PackedView& weight, std::int64_t channels_per_block) {
  const packedconv_layer_shape& shape = plan->shape;
  const std::int64_t channels = shape.in_channels / shape.groups;
  std::vector<std::uint32_t> begins, ends;
  for (std::int64_t first = 0, next; first < channels; first = next) {
    next = next_block(first, channels_per_block, channels);
    const std::int64_t packed_block = first / PACKEDCONV_BLOCK_CHANNELS;
    const std::uint32_t* const offsets =
        weight.offsets + packed_block * (shape.out_channels + 1);
    // A channel's words are ordered by input channel, so those below a channel come first.
    const auto below = [&](std::int64_t channel) {
      return [&weight, packed_block, channel](std::uint32_t word) {
        return packed_block * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word) < channel;
      };
    };
    for (std::int64_t oc = 0; oc < shape.out_channels; ++oc) {
      const std::uint32_t* const from = weight.words + offsets[oc];
      const std::uint32_t* const to = weight.words + offsets[oc + 1];
      begins.push_back(static_cast<std::uint32_t>(
          std::partition_point(from, to, below(first)) - weight.words));
      ends.push_back(static_cast<std::uint32_t>(
          std::partition_point(from, to, below(next)) - weight.words));
    }
    ++plan->paper.blocks;
  }
  PaperPlan& paper = plan->paper;
  paper.channels_per_block = channels_per_block;
  paper.begins_at = weight.word_count;
  paper.ends_at = paper.begins_at + static_cast<std::int64_t>(begins.size());
  paper.bounds_step = shape.out_channels;
  plan->table.assign(weight.words, weight.words + weight.word_count);
  plan->table.insert(plan->table.end(), begins.begin(), begins.end());
  plan->table.insert(plan->table.end(), ends.begin(), ends.end());
}

}  // namespace

CudaPlan plan_paper(const packedconv_layer_shape& shape, const PackedView& weight,
                    const DeviceLimits& limits, const MappingConfig& mapping) {
  if (!mapping.compiled())
    throw std::invalid_argument(
        "mapping: expected col_per_warp 4, 8, 16 or 32, rows_per_thread 1, 2, 4 or 8, "
        "warps_per_block 2, 4 or 8, and slices of 1 or more, got (" +
        text(mapping.col_per_warp) + ", " + text(mapping.rows_per_thread) + ", " +
        text(mapping.warps_per_block) + ", " + text(mapping.slices) + ")");
  CudaPlan plan = new_plan(CudaKernel::paper, shape, weight, limits);
  PaperPlan& paper = plan.paper;
  paper.mapping = mapping;
  paper.paper_shape = shape.kernel_height == 3 && shape.kernel_width == 3 &&
                      shape.stride_height == 1 && shape.stride_width == 1 &&
                      shape.dilation_height == 1 && shape.dilation_width == 1;
  const std::int64_t floats_per_block =
      limits.shared_per_block / static_cast<std::int64_t>(sizeof(float));
  // As doubles first, which do not wrap.
  const auto extent = [](double outputs, double stride, double kernel, double dilation) {
    return (outputs - 1) * stride + (kernel - 1) * dilation + 1;
  };
  const auto wide = [](std::int64_t value) { return static_cast<double>(value); };
  const double rows = extent(mapping.rows_per_thread, wide(shape.stride_height),
                             wide(shape.kernel_height), wide(shape.dilation_height));
  const double columns = extent(mapping.columns(), wide(shape.stride_width),
                                wide(shape.kernel_width), wide(shape.dilation_width));
  if (rows * columns > wide(floats_per_block))
    throw std::invalid_argument(
        "mapping: expected a tile that fits shared memory, got " + rounded(rows) + " x " +
        rounded(columns) + " floats for one input channel, where a block may have " +
        text(limits.shared_per_block) +
        " bytes; use fewer columns, rows or warps, or the general kernel");
  paper.tile_rows = static_cast<std::int64_t>(rows);
  paper.tile_columns = static_cast<std::int64_t>(columns);

  const std::int64_t channels = shape.in_channels / shape.groups;
  const std::int64_t packed_channels = std::min<std::int64_t>(channels, PACKEDCONV_BLOCK_CHANNELS);
  const std::string tile = "the tile of mapping (" + text(mapping.col_per_warp) + ", " +
                           text(mapping.rows_per_thread) + ", " + text(mapping.warps_per_block) +
                           "), " + text(paper.tile_rows) + " x " + text(paper.tile_columns);
  const std::int64_t channel_floats = paper.tile_rows * paper.tile_columns;
  const std::int64_t channels_that_fit = floats_per_block / channel_floats;
  if (channels_that_fit >= packed_channels) {
    write_offsets(&plan, weight);
    paper.channels_per_block = packed_channels;
  } else {
    // As equal as they can be.
    const std::int64_t parts = ceil_div(packed_channels, channels_that_fit);
    write_bounds(&plan, weight, ceil_div(packed_channels, parts));
  }
  paper.shared_bytes = paper.channels_per_block * channel_floats *
                       static_cast<std::int64_t>(sizeof(float));

  const std::int64_t group_out_channels = shape.out_channels / shape.groups;
  paper.slice_channels = ceil_div(group_out_channels, mapping.slices);
  paper.grid_x = ceil_div(shape.out_width, mapping.columns());
  paper.grid_y = ceil_div(shape.out_height, mapping.rows_per_thread);
  check_count("tiles along each axis",
              static_cast<double>(std::max(paper.grid_x, paper.grid_y)));
  check_count("image x group x slice", static_cast<double>(shape.batch) *
                                           static_cast<double>(shape.groups) *
                                           static_cast<double>(mapping.slices));
  paper.grid_z = shape.batch * shape.groups * mapping.slices;

  plan.why = "Algorithm 1: " + tile + " x " + text(paper.channels_per_block) +
             " input channels, takes " + text(paper.shared_bytes) + " of " +
             text(limits.shared_per_block) + " bytes of shared memory";
  if (paper.blocks > 1)
    plan.why += ", so that " + text(channels) + " input channels pass in " + text(paper.blocks) +
                " blocks";
  return plan;
}

CudaPlan plan_general(const packedconv_layer_shape& shape, const PackedView& weight,
                      const DeviceLimits& limits) {
  CudaPlan plan = new_plan(CudaKernel::general, shape, weight, limits);
  write_offsets(&plan, weight);
  plan.paper.grid_x = ceil_div(shape.out_height * shape.out_width, kGeneralThreads);
  plan.paper.grid_y = shape.out_channels;
  plan.paper.grid_z = shape.batch;
  plan.why = "any layer: one thread per output pixel reads the input from global memory";
  return plan;
}

}  // namespace packedconv
