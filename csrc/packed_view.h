// The packed weight in memory, as FORMAT.md specifies it.
#ifndef PACKEDCONV_PACKED_VIEW_H
#define PACKEDCONV_PACKED_VIEW_H

#include <cstdint>

namespace packedconv {

struct PackedView {
  const std::uint32_t* words;
  const std::uint32_t* offsets;  // blocks * (out_channels + 1)
  std::int64_t blocks;
  std::int64_t word_count, offset_count;  // elements of the arrays
};

}  // namespace packedconv

#endif
