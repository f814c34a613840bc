// Copies of the input that tiles read, and where their sums go.
#ifndef PACKEDCONV_CPU_TILES_H
#define PACKEDCONV_CPU_TILES_H

#include <cstddef>
#include <cstdint>

#include "../layer_shape.h"
#include "geometry.h"
#include "kernel.h"

namespace packedconv {

// Memory that one thread works in, cut out of one block.
struct ThreadMemory {
  float* tiles;  // those copied at once
  float* edges;
  float* sums;
  float* carry;
  float* bias;  // scaled
  float* stage;
  LanePart* lane_parts;
  EdgePart* edge_parts;
  std::int32_t* row_place;
  std::int64_t* row_source;
  StorePart* store_parts;
  std::int32_t* part_ends;
  const char** prefetch_rows;
};

// Rows that a PrefetchWork can name at most.
constexpr std::int64_t kPrefetchRows = 4096;

// What of a plan decides how much memory a thread needs.
struct MemoryCounts {
  std::int64_t tiles, in_channels;  // copied at once
  std::int64_t sums_floats, carry_floats, bias_floats;
};

// Sets `parts` to where they lie from `memory` on; returns their bytes.
std::size_t cut_memory(char* memory, const Geometry& geometry, const MemoryCounts& counts,
                       ThreadMemory* parts);

// Channels of a group.
struct ChannelRange {
  std::int64_t first, count;
};

// Fills the buffers of `count` tiles from `first_tile` on with `channels`, scaled if asked, from
// the start of each buffer. `input` is the first channel of the group in the first image.
// Returns the magnitudes of what was copied.
Magnitudes fill_tiles(const ThreadMemory& memory, const Geometry& geometry, const Isa& isa,
                      const packedconv_layer_shape& shape, const float* input,
                      const packedconv_strides& strides, ChannelRange channels, bool scaled,
                      std::int64_t first_tile, std::int64_t count);

// The rows of the input that `fill_tiles` would read, less those that the row block above has
// in common; none when there are too many.
PrefetchWork next_rows(const ThreadMemory& memory, const Geometry& geometry,
                       const packedconv_layer_shape& shape, const float* input,
                       const packedconv_strides& strides, ChannelRange channels,
                       std::int64_t first_tile, std::int64_t count);

// Sets where the sums of a tile go in `work`: whole, or run, or parts; and `stream`, where it
// is asked for and the place allows it. `work.output` is the first channel of the range in the
// first image.
void place_tile(TileWork* work, const ThreadMemory& memory, const Geometry& geometry,
                const packedconv_layer_shape& shape, const packedconv_strides& strides,
                bool stream, std::int64_t tile);

}  // namespace packedconv

#endif
