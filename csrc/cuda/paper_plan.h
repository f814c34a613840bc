// What a launch of the paper's kernel (Algorithm 1) or of the general kernel needs to know
// about the layer. Free of CUDA; made by plan_paper and plan_general (conv2d.h).
#ifndef PACKEDCONV_CUDA_PAPER_PLAN_H
#define PACKEDCONV_CUDA_PAPER_PLAN_H

#include <cstdint>

#include "../packed_word.h"
#include "mapping_config.h"

namespace packedconv {

// Where the block of input channels that starts at `first` ends. A word counts channels within
// 256, so no block reaches across them.
PACKEDCONV_INLINE std::int64_t next_block(std::int64_t first, std::int64_t channels_per_block,
                                          std::int64_t channels) {
  const std::int64_t packed_end =
      (first / PACKEDCONV_BLOCK_CHANNELS + 1) * PACKEDCONV_BLOCK_CHANNELS;
  const std::int64_t end = first + channels_per_block < packed_end ? first + channels_per_block
                                                                   : packed_end;
  return end < channels ? end : channels;
}

// The table of both kernels is the words, then for every block of input channels and output
// channel, where its words begin and end. Positions count 32-bit values of the table.
struct PaperPlan {
  // Both kernels.
  std::int64_t begins_at;           // of block 0
  std::int64_t ends_at;             // of block 0; begins_at + 1 where offsets are as packed
  std::int64_t bounds_step;         // from one block's begins to the next block's
  std::int64_t blocks;              // of input channels
  std::int64_t channels_per_block;  // at most; blocks do not reach across 256 channels
  // All blocks of threads: column tiles, row tiles, (image * groups + group) * slices + slice;
  // for the general kernel those over pixels, output channels, images. Launched in parts
  // where CUDA's grid is smaller.
  std::int64_t grid_x, grid_y, grid_z;

  // The paper's kernel only.
  MappingConfig mapping;
  bool paper_shape;             // 3x3, stride 1, dilation 1: the tile's size is a constant
  std::int64_t tile_rows;       // with halo
  std::int64_t tile_columns;    // with halo: the pitch
  std::int64_t slice_channels;  // output channels per slice, at most
  std::int64_t shared_bytes;    // of the tile
};

// Threads per block of the general kernel.
constexpr int kGeneralThreads = 128;

}  // namespace packedconv

#endif
