// The weight in the order that the column kernel's warps read it: its table (column_plan.h).
#ifndef PACKEDCONV_CUDA_COLUMN_TABLE_H
#define PACKEDCONV_CUDA_COLUMN_TABLE_H

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "../layer_shape.h"
#include "../packed_view.h"
#include "column_plan.h"

namespace packedconv {

constexpr int kUnitWords = 4;  // of the table: 16 bytes, one copy

// Nonzeros of every (block of input channels, output channel), in the order of their words.
struct ColumnLists {
  std::vector<std::uint32_t> words;        // with the channel replaced by that in the block
  std::vector<std::int64_t> begins;        // blocks * out_channels + 1
  std::int64_t out_channels;

  std::int64_t count(std::int64_t block, std::int64_t channel) const {
    const std::int64_t list = block * out_channels + channel;
    return begins[list + 1] - begins[list];
  }
};

// A weight that a tile is chosen for. What the many configurations ask about it is computed once.
class ColumnWeight {
 public:
  // Keeps references to both.
  ColumnWeight(const packedconv_layer_shape& shape, const PackedView& packed);

  std::int64_t nonzeros() const { return nonzeros_; }

  // Words of the largest part, all its segments together.
  std::int64_t largest_part(const ColumnConfig& config, std::int64_t block_channels);
  // Words of the largest segment when the output channels of a part make `chunks`.
  std::int64_t largest_segment(const ColumnConfig& config, std::int64_t block_channels,
                               int chunks);

  // The plan's table. Throws std::length_error when 32-bit indices do not reach all of it.
  std::vector<std::uint32_t> table(const ColumnPlan& plan);

 private:
  const ColumnLists& lists(std::int64_t block_channels);
  std::int64_t largest(const ColumnConfig& config, std::int64_t block_channels, int chunks);

  const packedconv_layer_shape& shape_;
  const PackedView& packed_;
  std::int64_t nonzeros_ = 0;
  std::map<std::int64_t, ColumnLists> lists_;
  std::map<std::tuple<std::int64_t, int, int, int>, std::int64_t> sizes_;
};

}  // namespace packedconv

#endif
