#include "decoded_weight.h"

#include <algorithm>
#include <cstring>

#include "../integers.h"
#include "../packed_word.h"

namespace packedconv {
namespace {

// Writing an output channel without nonzeros costs about as much as this many.
constexpr std::int64_t kChannelCost = 4;

NonzeroWord nonzero_word(const Nonzero& nonzero, int lanes) {
  NonzeroWord value;
  std::memcpy(&value, &nonzero.value, sizeof value);
  return value | static_cast<NonzeroWord>(nonzero.offset / lanes);
}

// Calls visit(group, nonzero) for every word, by output channel and in it by input channel;
// `group` counts from the first of the decoded weight.
template <typename Visit>
void for_nonzeros(const PackedView& weight, const packedconv_layer_shape& shape,
                  const Geometry& geometry, std::int64_t block_channels, std::int64_t groups,
                  Visit visit) {
  for (std::int64_t oc = 0; oc < shape.out_channels; ++oc) {
    for (std::int64_t b = 0; b < weight.blocks; ++b) {
      const std::uint32_t* const offsets = weight.offsets + b * (shape.out_channels + 1);
      for (std::uint32_t j = offsets[oc]; j < offsets[oc + 1]; ++j) {
        const std::uint32_t word = weight.words[j];
        const std::int64_t ic = b * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word);
        const int py = static_cast<int>(packed_word_py(word));
        const int px = static_cast<int>(packed_word_px(word));
        const std::int64_t column = geometry.column_axis.index[px];
        const std::int64_t row = geometry.row(ic % block_channels, py, px);
        const std::int64_t offset = row * geometry.row_step + (geometry.aligned ? 0 : column);
        // Shifts fall from group to group.
        const std::int64_t group = geometry.aligned ? geometry.shifts() - column : 0;
        visit((ic / block_channels * shape.out_channels + oc) * groups + group,
              Nonzero{packed_word_value(word), static_cast<std::int32_t>(offset)});
      }
    }
  }
}

}  // namespace

std::int64_t DecodedWeight::channel_nonzeros(std::int64_t channel) const {
  std::int64_t count = 0;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::uint32_t* const begin = channel_starts(block, channel);
    count += begin[groups] - begin[0];
  }
  return count;
}

std::int64_t DecodedWeight::bytes() const {
  return static_cast<std::int64_t>(nonzeros.size() * sizeof(Nonzero) +
                                   words.size() * sizeof(NonzeroWord) +
                                   starts.size() * sizeof(std::uint32_t));
}

DecodedWeight decode_weight(const PackedView& weight, const packedconv_layer_shape& shape,
                            const Geometry& geometry, std::int64_t block_channels) {
  DecodedWeight decoded;
  decoded.out_channels = shape.out_channels;
  decoded.blocks = ceil_div(geometry.channels, block_channels);
  decoded.groups = geometry.shifts() + 1;
  std::vector<std::uint32_t>& starts = decoded.starts;
  starts.assign(
      static_cast<std::size_t>(decoded.blocks * shape.out_channels * decoded.groups + 1), 0);
  for_nonzeros(weight, shape, geometry, block_channels, decoded.groups,
               [&](std::int64_t group, const Nonzero&) {
                 ++starts[static_cast<std::size_t>(group) + 1];
               });
  for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];

  const std::size_t count = static_cast<std::size_t>(weight.word_count);
  if (geometry.aligned)
    decoded.words.resize(count);
  else
    decoded.nonzeros.resize(count);
  std::vector<std::uint32_t> next(starts.begin(), starts.end() - 1);
  for_nonzeros(weight, shape, geometry, block_channels, decoded.groups,
               [&](std::int64_t group, const Nonzero& nonzero) {
                 const std::size_t i = next[static_cast<std::size_t>(group)]++;
                 if (geometry.aligned)
                   decoded.words[i] = nonzero_word(nonzero, geometry.lanes);
                 else
                   decoded.nonzeros[i] = nonzero;
               });
  return decoded;
}

std::vector<std::int64_t> cut_slices(const DecodedWeight& weight, std::int64_t first,
                                     std::int64_t channels, std::int64_t slices) {
  std::vector<std::int64_t> work(static_cast<std::size_t>(channels) + 1, 0);
  for (std::int64_t i = 0; i < channels; ++i)
    work[static_cast<std::size_t>(i) + 1] = work[static_cast<std::size_t>(i)] + kChannelCost +
                                            weight.channel_nonzeros(first + i);
  std::vector<std::int64_t> begins{first};
  for (std::int64_t k = 1; k < slices; ++k) {
    const double goal =
        static_cast<double>(work.back()) * static_cast<double>(k) / static_cast<double>(slices);
    const auto cut = std::lower_bound(work.begin(), work.end(), static_cast<std::int64_t>(goal));
    begins.push_back(std::max(begins.back(), first + (cut - work.begin())));
  }
  begins.push_back(first + channels);
  return begins;
}

}  // namespace packedconv
