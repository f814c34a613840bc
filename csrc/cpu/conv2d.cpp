#include "conv2d.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "tile.h"

namespace packedconv {
namespace {

// Outputs of more bytes than this would push everything else out of the caches.
constexpr std::int64_t kStreamBytes = 4 << 20;

struct DecodedWeight {
  std::vector<Nonzero> nonzeros;
  std::vector<std::uint32_t> starts;  // out_channels + 1
};

DecodedWeight decode(const PackedView& weight, const packedconv_layer_shape& s,
                     const TileLayout& layout) {
  DecodedWeight decoded;
  const std::int64_t stride = s.out_channels + 1;
  decoded.starts.reserve(static_cast<std::size_t>(stride));
  decoded.starts.push_back(0);
  decoded.nonzeros.reserve(weight.offsets[weight.blocks * stride - 1]);
  for (std::int64_t oc = 0; oc < s.out_channels; ++oc) {
    for (std::int64_t block = 0; block < weight.blocks; ++block) {
      const std::uint32_t* const offsets = weight.offsets + block * stride;
      for (std::uint32_t j = offsets[oc]; j < offsets[oc + 1]; ++j) {
        const std::uint32_t word = weight.words[j];
        const std::int64_t channel =
            block * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word);
        const std::int64_t offset =
            layout.offset(channel, packed_word_py(word), packed_word_px(word));
        decoded.nonzeros.push_back({packed_word_value(word), static_cast<std::int32_t>(offset)});
      }
    }
    decoded.starts.push_back(static_cast<std::uint32_t>(decoded.nonzeros.size()));
  }
  return decoded;
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

std::unique_ptr<float, Free> allocate_floats(std::size_t count) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, count * sizeof(float)) != 0) throw std::bad_alloc();
  return std::unique_ptr<float, Free>(static_cast<float*>(memory));
}

}  // namespace

void conv2d(const packedconv_layer_shape& shape, const float* input,
            const packedconv_strides& input_strides, const PackedView& weight, const float* bias,
            bool relu, float* output, const packedconv_strides& output_strides, int threads) {
  const Isa& isa = selected_isa();
  const TileLayout layout = tile_layout(isa.lanes, shape);
  const DecodedWeight decoded = decode(weight, shape, layout);

  const std::int64_t tile_width = static_cast<std::int64_t>(layout.size.vectors) * isa.lanes;
  const std::int64_t tile_rows = ceil_div(shape.out_height, layout.size.rows);
  const std::int64_t tile_columns = ceil_div(shape.out_width, tile_width);
  const std::int64_t group_channels = shape.out_channels / shape.groups;
  const std::int64_t tiles = shape.batch * shape.groups * tile_rows * tile_columns;
  if (tiles == 0) return;

  // Few tiles leave threads idle, so the output channels of a tile are split among them,
  // at the price of filling the tile once per slice.
  const std::int64_t slices =
      std::max<std::int64_t>(1, std::min<std::int64_t>(ceil_div(4 * threads, tiles),
                                                       threads > 1 ? group_channels : 1));
  const std::int64_t slice_channels = ceil_div(group_channels, slices);
  const std::int64_t work_items = tiles * slices;

  // One tile buffer per thread, a cache line apart, allocated here since an exception
  // must not leave the parallel region.
  const std::size_t buffer_floats = (static_cast<std::size_t>(layout.floats()) + 15) / 16 * 16;
  const int workers = static_cast<int>(std::min<std::int64_t>(threads, work_items));
  const auto buffers = allocate_floats(buffer_floats * static_cast<std::size_t>(workers));

  const bool stream = shape.batch * shape.out_channels * shape.out_height * shape.out_width *
                          static_cast<std::int64_t>(sizeof(float)) >
                      kStreamBytes;

#pragma omp parallel for schedule(dynamic) num_threads(workers)
  for (std::int64_t item = 0; item < work_items; ++item) {
    std::int64_t rest = item;
    const std::int64_t slice = rest % slices;
    rest /= slices;
    const std::int64_t first_column = rest % tile_columns * tile_width;
    rest /= tile_columns;
    const std::int64_t first_row = rest % tile_rows * layout.size.rows;
    rest /= tile_rows;
    const std::int64_t group = rest % shape.groups;
    const std::int64_t image = rest / shape.groups;

    const std::int64_t slice_begin = slice * slice_channels;
    const std::int64_t slice_end = std::min(group_channels, slice_begin + slice_channels);
    if (slice_begin >= slice_end) continue;
    const std::int64_t first_channel = group * group_channels + slice_begin;

    float* const tile = buffers.get() + buffer_floats * omp_get_thread_num();
    fill_tile(tile, layout, isa, shape,
              input + image * input_strides.batch +
                  group * layout.channels * input_strides.channel,
              input_strides, first_row, first_column);

    TileWork work;
    work.size = layout.size;
    work.tile = tile;
    work.row_step = layout.row_step();
    work.nonzeros = decoded.nonzeros.data();
    work.starts = decoded.starts.data() + first_channel;
    work.channels = slice_end - slice_begin;
    work.bias = bias == nullptr ? nullptr : bias + first_channel;
    work.relu = relu;
    work.stream = stream;
    work.output = output + image * output_strides.batch + first_channel * output_strides.channel +
                  first_row * output_strides.row + first_column * output_strides.column;
    work.channel_stride = output_strides.channel;
    work.row_stride = output_strides.row;
    work.column_stride = output_strides.column;
    work.rows = std::min<std::int64_t>(layout.size.rows, shape.out_height - first_row);
    work.columns = std::min(tile_width, shape.out_width - first_column);
    isa.compute(work);
    isa.finish();
  }
}

}  // namespace packedconv
