// How a layer is cut into tiles, and how a tile's input lies in its buffer.
#ifndef PACKEDCONV_CPU_GEOMETRY_H
#define PACKEDCONV_CPU_GEOMETRY_H

#include <array>
#include <cstdint>

#include "../layer_shape.h"
#include "../packed_word.h"

namespace packedconv {

// One axis of a tile: output t reads through kernel position i the input
// t * stride + i * dilation. Inputs are kept apart by their remainder modulo the stride (the
// phase), so that neighbouring outputs read neighbouring elements whatever the stride; phases
// that no kernel position reads are left out.
struct TileAxis {
  std::int64_t stride;
  std::int64_t length;  // elements of a phase, for as many outputs as asked for
  // From what an output reads first in a phase to what it reads last there.
  std::int64_t reach;
  int phases;
  std::array<std::int64_t, PACKEDCONV_MAX_KERNEL> phase;  // remainders, in buffer order
  // Of kernel position i at output 0: which phase, and the element of it.
  std::array<int, PACKEDCONV_MAX_KERNEL> phase_of;
  std::array<std::int64_t, PACKEDCONV_MAX_KERNEL> index;
};

TileAxis tile_axis(std::int64_t outputs, std::int64_t kernel, std::int64_t stride,
                   std::int64_t dilation);

// A tile is computed in registers: rows of vectors. Side by side in its rows lie one or more
// pieces, each a block of rows and columns of one image's output:
//
//   lanes    0 .. pitch-1 | pitch .. 2*pitch-1 | ...
//   show     piece 0      | piece 1            | ...
//
// Its buffer has the rows [channel][column phase][row phase][row], each of row_step floats.
//
// A kernel of one element reads every pixel by itself, so that its output is cut as if it
// were one row (flat), in which a tile has rows * vectors vectors.
struct Geometry {
  int lanes;
  int rows, vectors;  // of the kernel: what is held in registers
  bool aligned;
  bool flat;
  std::int64_t batch, channels;          // channels of a group
  std::int64_t out_rows, out_columns;    // of an image; flat: 1 and all of its pixels
  std::int64_t tile_rows, tile_lanes;    // flat: 1 and all lanes of the tile
  TileAxis row_axis, column_axis;
  std::int64_t piece_columns;            // output columns of a piece
  std::int64_t pitch, pieces_per_tile;
  std::int64_t row_blocks, column_blocks;  // of an image
  std::int64_t pieces, tiles;            // of a group
  std::int64_t row_step;
  // Whether a tile needs sums of the one to its right, as on the aligned path with more than
  // one tile in a row; and the pixels that it reads beside each row of the last one.
  bool carries;
  std::int64_t edge_floats;
  std::int64_t channel_rows;

  int shifts() const { return aligned ? static_cast<int>(column_axis.reach) : 0; }
  std::int64_t channel_floats() const { return channel_rows * row_step; }
  // Buffers of some channels: of a tile, so that each begins at a multiple of 64 bytes, and of
  // the edges, with room behind for a vector at the last row.
  std::int64_t tile_floats(std::int64_t of_channels) const;
  std::int64_t edges_floats(std::int64_t of_channels) const;
  // Row of the buffer that output row 0 reads through (py, px).
  std::int64_t row(std::int64_t channel, int py, int px) const {
    const std::int64_t phases = channel * column_axis.phases + column_axis.phase_of[px];
    return (phases * row_axis.phases + row_axis.phase_of[py]) * row_axis.length +
           row_axis.index[py];
  }
  // Input channels that a block has at most, for a NonzeroWord to reach all of them; 0 when it
  // does not reach all of one.
  std::int64_t most_block() const;
  // Share of the computed pixels that are part of the output.
  double lanes_used() const;
};

// Whether the layer has a geometry for the aligned path with tiles of rows x vectors.
bool aligned_fits(const packedconv_layer_shape& shape, int lanes, int rows, int vectors);

// Whether the buffer of a tile can be indexed with 31 bits.
bool fits(const Geometry& geometry);

Geometry make_geometry(const packedconv_layer_shape& shape, int lanes, int rows, int vectors,
                       bool aligned);

}  // namespace packedconv

#endif
