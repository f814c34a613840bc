// The copy of a piece of the input that one tile of outputs reads.
#ifndef PACKEDCONV_CPU_TILE_H
#define PACKEDCONV_CPU_TILE_H

#include <array>
#include <cstdint>

#include "../integers.h"
#include "../layer_shape.h"
#include "../packed_word.h"
#include "isa.h"

namespace packedconv {

// How one axis of a tile lies in its buffer: [phase][index].
//
// Output t reads through kernel position i the input t * stride + i * dilation. Inputs are
// kept apart by their remainder modulo the stride (the phase), so that neighbouring
// outputs read neighbouring elements whatever the stride; phases that no kernel position
// reads are left out.
struct TileAxis {
  std::int64_t stride;
  std::int64_t length;  // elements per phase
  int phases;
  std::array<std::int64_t, PACKEDCONV_MAX_KERNEL> phase;   // remainders, in buffer order
  std::array<std::int64_t, PACKEDCONV_MAX_KERNEL> offset;  // of kernel position i at output 0

  std::int64_t elements() const { return phases * length; }
};

// `outputs` of the axis read through `kernel` positions.
TileAxis tile_axis(std::int64_t outputs, std::int64_t kernel, std::int64_t stride,
                   std::int64_t dilation);

// The buffer of a tile: [channel of the group][row axis][column axis].
struct TileLayout {
  TileSize size;
  std::int64_t channels;
  TileAxis rows, columns;

  // Distance between what consecutive output rows read.
  std::int64_t row_step() const { return columns.elements(); }
  std::int64_t channel_step() const { return rows.elements() * columns.elements(); }
  std::int64_t floats() const { return channels * channel_step(); }
  std::int64_t offset(std::int64_t channel, std::uint32_t py, std::uint32_t px) const {
    return channel * channel_step() + rows.offset[py] * row_step() + columns.offset[px];
  }
};

// Layout for the tile size that suits the layer. Throws std::length_error when a tile
// would hold 2^31 floats or more.
TileLayout tile_layout(int lanes, const packedconv_layer_shape& shape);

// Copies what the outputs from (first_row, first_column) on read, zero outside the image.
// `input` is the first channel of the group in its image.
void fill_tile(float* tile, const TileLayout& layout, const Isa& isa,
               const packedconv_layer_shape& shape, const float* input,
               const packedconv_strides& strides, std::int64_t first_row,
               std::int64_t first_column);

}  // namespace packedconv

#endif
