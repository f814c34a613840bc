// The column kernel's plan: which tile, and the weight in the order that its warps read it.
#ifndef PACKEDCONV_CUDA_COLUMN_PLAN_H
#define PACKEDCONV_CUDA_COLUMN_PLAN_H

#include <cstdint>

#include "../packed_word.h"
#include "column_config.h"

namespace packedconv {

// One axis of the tile in shared memory. Positions that one kernel tap reads for neighbouring
// outputs lie `stride` apart in the input, and next to one another in the tile: it is stored
// by residue of the stride, and only the residues that some tap reads.
struct ColumnAxis {
  int stride;
  int residues;    // how many are stored
  int per_residue;  // positions stored of each
  int residue[PACKEDCONV_MAX_KERNEL];

  constexpr int stored() const { return residues * per_residue; }
};

// What the kernel is told, by value.
struct ColumnPlan {
  ColumnConfig config;
  int tile_rows, tile_columns, lane_rows, channel_warps;  // of the config
  ColumnAxis rows, columns;
  int left;                  // columns stored before the first, so that copies of four align
  int stored_rows;           // of the tile, per channel
  std::uint32_t row_divisor;  // ceil(2^32 / stored_rows), to divide without a division
  int plane;                 // floats of a channel in the tile
  int group_channels;        // input channels of a group
  int block_channels;        // input channels of the tile; a group has `blocks` such blocks
  int blocks;
  int chunks;    // parts of the output channels whose nonzeros are in shared memory at once
  bool resident;  // all nonzeros of a part stay in shared memory for all tiles
  int tile_words, weight_words;  // floats and words in shared memory
  int parts;  // groups * slices: what a block computes of the output channels
  int in_height, in_width, out_height, out_width, pad_top, pad_left;
  int row_tiles, column_tiles;
  int items;  // batch * row_tiles * column_tiles, dealt to the blocks in turn
  int grid_blocks;
  std::int64_t shared_bytes;
  double cycles;  // estimated, of the whole call on one multiprocessor

  // The table starts with a directory entry of four words for every segment (part, block,
  // chunk): where it begins and ends in units of 16 bytes, where its nonzeros begin in units
  // of 16 bytes from its own beginning, and a zero. A segment is one contiguous copy:
  // channel_warps + 1 record numbers, records of four words (output channel, first pair of
  // nonzeros, nonzeros, zero), nonzeros of two words (FP32 value, offset in the tile in bytes).
  constexpr int segments() const { return parts * blocks * chunks; }
  // Along y of the grid, which CUDA limits; its blocks go round the parts.
  constexpr int grid_parts() const { return parts < 65535 ? parts : 65535; }
};

}  // namespace packedconv

#endif
