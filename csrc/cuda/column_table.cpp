#include "column_table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "../integers.h"

namespace packedconv {
namespace {

constexpr std::size_t kMostWords = std::numeric_limits<std::int32_t>::max();

// Where the tap of output 0 is stored.
int stored_index(const ColumnAxis& axis, std::int64_t dilation, std::int64_t tap) {
  const int residue = static_cast<int>(tap * dilation % axis.stride);
  const int* const found = std::find(axis.residue, axis.residue + axis.residues, residue);
  return static_cast<int>(found - axis.residue) * axis.per_residue +
         static_cast<int>(tap * dilation / axis.stride);
}

ColumnLists make_lists(const packedconv_layer_shape& shape, const PackedView& weight,
                 std::int64_t block_channels) {
  const std::int64_t channels = shape.in_channels / shape.groups;
  const std::int64_t blocks = ceil_div(channels, block_channels);
  ColumnLists lists;
  lists.out_channels = shape.out_channels;
  lists.begins.assign(blocks * shape.out_channels + 1, 0);
  const auto each = [&](const auto& use) {
    for (std::int64_t packed = 0; packed < weight.blocks; ++packed) {
      const std::uint32_t* const offsets = weight.offsets + packed * (shape.out_channels + 1);
      for (std::int64_t out = 0; out < shape.out_channels; ++out) {
        for (std::uint32_t index = offsets[out]; index < offsets[out + 1]; ++index) {
          const std::uint32_t word = weight.words[index];
          const std::int64_t channel =
              packed * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word);
          const std::int64_t block = channel / block_channels;
          use(block * shape.out_channels + out, word, channel - block * block_channels);
        }
      }
    }
  };
  each([&](std::int64_t list, std::uint32_t, std::int64_t) { ++lists.begins[list + 1]; });
  std::partial_sum(lists.begins.begin(), lists.begins.end(), lists.begins.begin());
  std::vector<std::int64_t> next(lists.begins.begin(), lists.begins.end() - 1);
  lists.words.resize(lists.begins.back());
  each([&](std::int64_t list, std::uint32_t word, std::int64_t channel) {
    lists.words[next[list]++] =
        packed_word_encode(packed_word_fp16(word), static_cast<std::uint32_t>(channel),
                           packed_word_px(word), packed_word_py(word));
  });
  return lists;
}

// The output channels of a part: one slice of one group.
struct Range {
  std::int64_t begin, end;
};

Range part_channels(const packedconv_layer_shape& shape, const ColumnConfig& config, int part) {
  const std::int64_t channels = shape.out_channels / shape.groups;
  const std::int64_t group = part / config.slices, slice = part % config.slices;
  const std::int64_t per_slice = ceil_div(channels, config.slices);
  const std::int64_t begin = std::min(channels, slice * per_slice);
  return {group * channels + begin,
          group * channels + std::min(channels, begin + per_slice)};
}

// The channels of chunk `chunk` of a part's.
Range chunk_channels(const Range& part, int chunks, int chunk) {
  const std::int64_t per_chunk = ceil_div(part.end - part.begin, chunks);
  const std::int64_t begin = std::min(part.end, part.begin + chunk * per_chunk);
  return {begin, std::min(part.end, begin + per_chunk)};
}

std::int64_t head_words(const ColumnConfig& config) {
  return round_up(config.channel_warps() + 1, kUnitWords);
}

// Words of the segment of these channels: every list begins on a whole unit.
std::int64_t segment_words(const ColumnConfig& config, const ColumnLists& lists, std::int64_t block,
                           const Range& channels) {
  std::int64_t words = head_words(config) + (channels.end - channels.begin) * kUnitWords;
  for (std::int64_t channel = channels.begin; channel < channels.end; ++channel) {
    words += round_up(2 * lists.count(block, channel), kUnitWords);
  }
  return words;
}

std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Deals the channels to the warps: the longest list first, each to the warp with the least.
std::vector<std::vector<std::int64_t>> deal_channels(const ColumnConfig& config,
                                                     const ColumnLists& lists, std::int64_t block,
                                                     const Range& channels) {
  std::vector<std::int64_t> order(channels.end - channels.begin);
  std::iota(order.begin(), order.end(), channels.begin);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return lists.count(block, a) > lists.count(block, b);
  });
  std::vector<std::vector<std::int64_t>> warps(config.channel_warps());
  std::vector<std::int64_t> load(warps.size(), 0);
  for (const std::int64_t channel : order) {
    const std::size_t warp = std::min_element(load.begin(), load.end()) - load.begin();
    warps[warp].push_back(channel);
    // An empty list costs its stores.
    load[warp] += lists.count(block, channel) + 2;
  }
  return warps;
}

void append_segment(const packedconv_layer_shape& shape, const ColumnPlan& plan,
                    const ColumnLists& lists, std::int64_t block, const Range& channels,
                    std::vector<std::uint32_t>* table, std::uint32_t* directory) {
  const std::size_t begin = table->size();
  const std::int64_t records = head_words(plan.config);
  const std::int64_t nonzeros = records + (channels.end - channels.begin) * kUnitWords;
  table->resize(begin + segment_words(plan.config, lists, block, channels), 0);
  std::uint32_t* const segment = table->data() + begin;
  std::uint32_t record = 0, pair = 0;
  std::size_t warp = 0;
  for (const auto& dealt : deal_channels(plan.config, lists, block, channels)) {
    segment[warp++] = record;
    for (const std::int64_t channel : dealt) {
      const std::int64_t list = block * lists.out_channels + channel;
      const std::int64_t count = lists.count(block, channel);
      std::uint32_t* const entry = segment + records + record++ * kUnitWords;
      entry[0] = static_cast<std::uint32_t>(channel);
      entry[1] = pair;
      entry[2] = static_cast<std::uint32_t>(count);
      std::uint32_t* nonzero = segment + nonzeros + pair * kUnitWords;
      for (std::int64_t index = lists.begins[list]; index < lists.begins[list + 1]; ++index) {
        const std::uint32_t word = lists.words[index];
        *nonzero++ = float_bits(packed_word_value(word));
        *nonzero++ = static_cast<std::uint32_t>(
            sizeof(float) *
            (packed_word_channel(word) * plan.plane +
             stored_index(plan.rows, shape.dilation_height, packed_word_py(word)) *
                 plan.config.pitch +
             plan.left +
             stored_index(plan.columns, shape.dilation_width, packed_word_px(word))));
      }
      pair += static_cast<std::uint32_t>(ceil_div(count, 2));
    }
  }
  segment[warp] = record;
  directory[0] = static_cast<std::uint32_t>(begin / kUnitWords);
  directory[1] = static_cast<std::uint32_t>(table->size() / kUnitWords);
  directory[2] = static_cast<std::uint32_t>(nonzeros / kUnitWords);
}

}  // namespace

ColumnWeight::ColumnWeight(const packedconv_layer_shape& shape, const PackedView& packed)
    : shape_(shape), packed_(packed) {
  for (std::int64_t block = 0; block < packed.blocks; ++block) {
    const std::uint32_t* const offsets = packed.offsets + block * (shape.out_channels + 1);
    nonzeros_ += offsets[shape.out_channels] - offsets[0];
  }
}

std::int64_t ColumnWeight::largest_part(const ColumnConfig& config,
                                        std::int64_t block_channels) {
  return largest(config, block_channels, 0);
}

std::int64_t ColumnWeight::largest_segment(const ColumnConfig& config,
                                           std::int64_t block_channels, int chunks) {
  return largest(config, block_channels, chunks);
}

const ColumnLists& ColumnWeight::lists(std::int64_t block_channels) {
  const auto found = lists_.find(block_channels);
  if (found != lists_.end()) return found->second;
  return lists_.emplace(block_channels, make_lists(shape_, packed_, block_channels))
      .first->second;
}

// No chunks stands for the whole part.
std::int64_t ColumnWeight::largest(const ColumnConfig& config, std::int64_t block_channels,
                                   int chunks) {
  const auto key =
      std::make_tuple(block_channels, config.channel_warps(), config.slices, chunks);
  const auto found = sizes_.find(key);
  if (found != sizes_.end()) return found->second;
  const ColumnLists& lists = this->lists(block_channels);
  const std::int64_t blocks =
      ceil_div(shape_.in_channels / shape_.groups, block_channels);
  std::int64_t most = 0;
  for (int part = 0; part < shape_.groups * config.slices; ++part) {
    const Range channels = part_channels(shape_, config, part);
    std::int64_t whole = 0;
    for (int chunk = 0; chunk < std::max(chunks, 1); ++chunk) {
      const Range some = chunk_channels(channels, std::max(chunks, 1), chunk);
      for (std::int64_t block = 0; block < blocks; ++block) {
        const std::int64_t words = segment_words(config, lists, block, some);
        whole += words;
        most = std::max(most, chunks == 0 ? whole : words);
      }
    }
  }
  sizes_.emplace(key, most);
  return most;
}

std::vector<std::uint32_t> ColumnWeight::table(const ColumnPlan& plan) {
  const ColumnLists& lists = this->lists(plan.block_channels);
  std::vector<std::uint32_t> table(std::size_t{kUnitWords} * plan.segments(), 0);
  std::size_t segment = 0;
  for (int part = 0; part < plan.parts; ++part) {
    const Range channels = part_channels(shape_, plan.config, part);
    for (int block = 0; block < plan.blocks; ++block) {
      for (int chunk = 0; chunk < plan.chunks; ++chunk, ++segment) {
        std::uint32_t entry[kUnitWords] = {};
        append_segment(shape_, plan, lists, block, chunk_channels(channels, plan.chunks, chunk),
                       &table, entry);
        std::copy(entry, entry + kUnitWords, table.begin() + segment * kUnitWords);
        if (table.size() > kMostWords) {
          throw std::length_error("weight: expected nonzeros that 32-bit indices reach");
        }
      }
    }
  }
  return table;
}

}  // namespace packedconv
