// A packed weight in the order in which the kernels read it.
#ifndef PACKEDCONV_CPU_DECODED_WEIGHT_H
#define PACKEDCONV_CPU_DECODED_WEIGHT_H

#include <cstdint>
#include <vector>

#include "../layer_shape.h"
#include "../packed_view.h"
#include "geometry.h"
#include "kernel.h"

namespace packedconv {

// Blocks of input channels one after the other, in each the output channels, and of those the
// groups of nonzeros that the kernel reads with the same shift of its sums. Within a group the
// nonzeros keep the order of the words. Offsets count from the first channel of the block. They
// are words where the geometry is aligned.
struct DecodedWeight {
  std::int64_t out_channels, blocks;
  std::int64_t groups;  // of an output channel in a block
  std::vector<Nonzero> nonzeros;
  std::vector<NonzeroWord> words;
  std::vector<std::uint32_t> starts;  // of each group; one more ends the last

  const std::uint32_t* channel_starts(std::int64_t block, std::int64_t channel) const {
    return starts.data() + (block * out_channels + channel) * groups;
  }
  // Of an output channel, in all blocks.
  std::int64_t channel_nonzeros(std::int64_t channel) const;
  std::int64_t bytes() const;
};

// The weight must have been checked. Throws std::bad_alloc.
DecodedWeight decode_weight(const PackedView& weight, const packedconv_layer_shape& shape,
                            const Geometry& geometry, std::int64_t block_channels);

// Output channels where slices begin, and one more where the last ends: each slice has about
// the same work, of the channels from `first` on.
std::vector<std::int64_t> cut_slices(const DecodedWeight& weight, std::int64_t first,
                                     std::int64_t channels, std::int64_t slices);

}  // namespace packedconv

#endif
