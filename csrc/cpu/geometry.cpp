#include "geometry.h"

#include <algorithm>
#include <limits>

#include "../integers.h"
#include "kernel.h"

namespace packedconv {
namespace {

// Lanes from the start of a piece to that of the next, when one row of an image is a piece.
// Where both the columns right of an image and those left of the next are padding, the two
// share lanes.
std::int64_t row_pitch(const packedconv_layer_shape& s, const Geometry& g) {
  const std::int64_t own = g.out_columns + g.column_axis.reach;
  if (g.flat || g.column_axis.stride != 1) return own;
  return std::max({g.out_columns, own - s.pad_left, s.in_width + s.pad_left});
}

}  // namespace

TileAxis tile_axis(std::int64_t outputs, std::int64_t kernel, std::int64_t stride,
                   std::int64_t dilation) {
  TileAxis axis{};
  axis.stride = stride;
  axis.reach = (kernel - 1) * dilation / stride;
  axis.length = outputs + axis.reach;
  for (std::int64_t i = 0; i < kernel; ++i) {
    const auto known = axis.phase.begin() + axis.phases;
    const auto found = std::find(axis.phase.begin(), known, i * dilation % stride);
    if (found == known) axis.phase[axis.phases++] = i * dilation % stride;
    axis.phase_of[i] = static_cast<int>(found - axis.phase.begin());
    axis.index[i] = i * dilation / stride;
  }
  return axis;
}

std::int64_t Geometry::tile_floats(std::int64_t of_channels) const {
  return round_up(of_channels * channel_floats(), std::int64_t{16});
}

std::int64_t Geometry::edges_floats(std::int64_t of_channels) const {
  return edge_floats == 0 ? 0 : of_channels * channel_rows * edge_floats + kEdgeFloats;
}

std::int64_t Geometry::most_block() const {
  if (!aligned) return channels;
  return std::min(channels, (std::int64_t{1} << kOffsetBits) / (channel_floats() / lanes));
}

double Geometry::lanes_used() const {
  if (tiles == 0) return 1.0;
  return static_cast<double>(batch) * static_cast<double>(out_rows * out_columns) /
         (static_cast<double>(tiles) * static_cast<double>(tile_rows * tile_lanes));
}

bool aligned_fits(const packedconv_layer_shape& shape, int lanes, int rows, int vectors) {
  const Geometry g = make_geometry(shape, lanes, rows, vectors, true);
  return fits(g) && g.column_axis.reach < lanes && g.edge_floats * rows <= kEdgeFloats &&
         g.most_block() > 0;
}

bool fits(const Geometry& g) {
  const double floats = static_cast<double>(g.channels) * static_cast<double>(g.channel_rows) *
                        static_cast<double>(g.row_step);
  return floats <= std::numeric_limits<std::int32_t>::max();
}

Geometry make_geometry(const packedconv_layer_shape& shape, int lanes, int rows, int vectors,
                       bool aligned) {
  Geometry g{};
  g.lanes = lanes;
  g.rows = rows;
  g.vectors = vectors;
  g.aligned = aligned;
  g.flat = shape.kernel_height == 1 && shape.kernel_width == 1;
  g.batch = shape.batch;
  g.channels = shape.in_channels / shape.groups;
  g.out_rows = g.flat ? 1 : shape.out_height;
  g.out_columns = g.flat ? shape.out_height * shape.out_width : shape.out_width;
  g.tile_rows = g.flat ? 1 : rows;
  g.tile_lanes = static_cast<std::int64_t>(g.flat ? rows * vectors : vectors) * lanes;
  g.row_axis = tile_axis(g.tile_rows, shape.kernel_height, shape.stride_height,
                         shape.dilation_height);
  g.column_axis =
      tile_axis(g.tile_lanes, shape.kernel_width, shape.stride_width, shape.dilation_width);

  g.row_blocks = ceil_div(g.out_rows, g.tile_rows);
  const std::int64_t pitch = row_pitch(shape, g);
  if (pitch <= g.tile_lanes) {
    g.pitch = pitch;
    g.piece_columns = g.out_columns;
    g.column_blocks = 1;
    g.pieces = g.batch * g.row_blocks;
    g.pieces_per_tile =
        std::max<std::int64_t>(1, std::min(g.tile_lanes / pitch, g.pieces));
  } else {
    g.pitch = g.piece_columns = g.tile_lanes;
    g.column_blocks = ceil_div(g.out_columns, g.piece_columns);
    g.carries = aligned && g.column_axis.reach > 0;
    const std::int64_t end = g.column_blocks * g.piece_columns * shape.stride_width;
    if (g.carries && end < shape.in_width + shape.pad_left) g.edge_floats = g.column_axis.reach;
    g.pieces = g.batch * g.row_blocks * g.column_blocks;
    g.pieces_per_tile = 1;
  }
  g.tiles = ceil_div(g.pieces, g.pieces_per_tile);

  // The loose path reads on into what follows the lanes of a row.
  g.row_step = aligned ? g.tile_lanes : g.tile_lanes + g.column_axis.reach;
  g.channel_rows = g.column_axis.phases * g.row_axis.phases * g.row_axis.length;
  return g;
}

}  // namespace packedconv
