#include "tile.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace packedconv {
namespace {

// Of the tile sizes that the kernel has, the one that computes the fewest pixels outside
// the output; the first of equals.
TileSize choose_tile_size(int lanes, const packedconv_layer_shape& s) {
  const TileSize sizes[] = {{6, 2}, {3, 4}, {12, 1}};
  TileSize best = sizes[0];
  std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
  for (const TileSize& size : sizes) {
    const std::int64_t width = static_cast<std::int64_t>(size.vectors) * lanes;
    const std::int64_t pixels =
        ceil_div(s.out_height, size.rows) * size.rows * ceil_div(s.out_width, width) * width;
    if (pixels < fewest) {
      fewest = pixels;
      best = size;
    }
  }
  return best;
}

// The elements of one phase of one row: input first, first + stride, ...
void fill_row(float* target, std::int64_t length, const float* source, std::int64_t first,
              std::int64_t stride, std::int64_t width, std::int64_t column_stride) {
  const std::int64_t begin =
      first < 0 ? std::min(length, ceil_div(-first, stride)) : std::int64_t{0};
  const std::int64_t end =
      first < width ? std::max(begin, std::min(length, ceil_div(width - first, stride))) : begin;
  std::fill(target, target + begin, 0.0f);
  if (stride == 1 && column_stride == 1) {
    if (end > begin)
      std::memcpy(target + begin, source + (first + begin),
                  static_cast<std::size_t>(end - begin) * sizeof(float));
  } else {
    for (std::int64_t i = begin; i < end; ++i)
      target[i] = source[(first + i * stride) * column_stride];
  }
  std::fill(target + end, target + length, 0.0f);
}

}  // namespace

TileAxis tile_axis(std::int64_t outputs, std::int64_t kernel, std::int64_t stride,
                   std::int64_t dilation) {
  TileAxis axis{};
  axis.stride = stride;
  axis.length = outputs + (kernel - 1) * dilation / stride;
  for (std::int64_t i = 0; i < kernel; ++i) {
    const auto known = axis.phase.begin() + axis.phases;
    const auto found = std::find(axis.phase.begin(), known, i * dilation % stride);
    if (found == known) axis.phase[axis.phases++] = i * dilation % stride;
    const std::int64_t index = found - axis.phase.begin();
    axis.offset[i] = index * axis.length + i * dilation / stride;
  }
  return axis;
}

TileLayout tile_layout(int lanes, const packedconv_layer_shape& shape) {
  TileLayout layout;
  layout.size = choose_tile_size(lanes, shape);
  layout.channels = shape.in_channels / shape.groups;
  layout.rows = tile_axis(layout.size.rows, shape.kernel_height, shape.stride_height,
                          shape.dilation_height);
  layout.columns = tile_axis(static_cast<std::int64_t>(layout.size.vectors) * lanes,
                             shape.kernel_width, shape.stride_width, shape.dilation_width);
  const double floats = static_cast<double>(layout.channels) *
                        static_cast<double>(layout.rows.elements()) *
                        static_cast<double>(layout.columns.elements());
  if (floats > std::numeric_limits<std::int32_t>::max())
    throw std::length_error("input: expected tiles under 2^31 elements; use less dilation");
  return layout;
}

void fill_tile(float* tile, const TileLayout& layout, const Isa& isa,
               const packedconv_layer_shape& shape, const float* input,
               const packedconv_strides& strides, std::int64_t first_row,
               std::int64_t first_column) {
  const TileAxis& rows = layout.rows;
  const TileAxis& columns = layout.columns;
  const std::int64_t top = first_row * shape.stride_height - shape.pad_top;
  const std::int64_t left = first_column * shape.stride_width - shape.pad_left;
  const bool inside = top >= 0 && top + rows.length <= shape.in_height && left >= 0 &&
                      left + columns.length <= shape.in_width;
  const bool plain = rows.stride == 1 && columns.stride == 1 && strides.column == 1;
  for (std::int64_t channel = 0; channel < layout.channels; ++channel) {
    const float* const plane = input + channel * strides.channel;
    if (inside && plain) {
      isa.copy_rows(tile, columns.length, plane + top * strides.row + left, strides.row,
                    rows.length, columns.length);
      tile += layout.channel_step();
      continue;
    }
    for (int row_phase = 0; row_phase < rows.phases; ++row_phase) {
      for (std::int64_t row = 0; row < rows.length; ++row, tile += columns.elements()) {
        const std::int64_t y = top + rows.phase[row_phase] + row * rows.stride;
        if (y < 0 || y >= shape.in_height) {
          std::fill(tile, tile + columns.elements(), 0.0f);
          continue;
        }
        for (int phase = 0; phase < columns.phases; ++phase)
          fill_row(tile + phase * columns.length, columns.length, plane + y * strides.row,
                   left + columns.phase[phase], columns.stride, shape.in_width, strides.column);
      }
    }
  }
}

}  // namespace packedconv
