// The paper's kernel: Algorithm 1, its line numbers in the comments.
//
// A block loads the input tile of its output pixels, halo included, into shared memory. Then
// every thread computes R output rows of one column, for every (32 / COL_PER_WARP)-th output
// channel, and reads the packed words of each from global memory.
//
// What the paper leaves open: output channels are split along grid z by
// z = (image * groups + group) * slices + slice; where the tile of all input channels does
// not fit, blocks of them pass one after another and the sums wait in the output.
#ifndef PACKEDCONV_CUDA_PAPER_KERNEL_CUH
#define PACKEDCONV_CUDA_PAPER_KERNEL_CUH

#include <cstdint>

#include "conv2d.h"
#include "platform.h"

namespace packedconv {

// What the kernel is told, by value.
struct PaperArguments {
  packedconv_strides input_strides, output_strides;
  std::int64_t in_height, in_width, out_height, out_width;
  std::int64_t pad_top, pad_left, stride_height, stride_width;
  std::int64_t bounds_step;
  int in_channels, out_channels;  // of a group
  int channels_per_block;
  unsigned groups, slices;
  int slice_channels;
  unsigned first_x, first_y, first_z;  // where this launch's part of the whole grid begins
  bool relu;
  // Read by the kernel of any shape only; of the paper's shape they are constants.
  int warps;
  int tile_rows, tile_columns;
  int row_step, column_step;  // floats between what neighbouring output rows and columns read
  int row_tap, column_tap;    // floats between what neighbouring kernel rows and columns read
};

// The tile of a 3x3 kernel at stride 1 and dilation 1, in floats. All constants, so that the R
// shared loads of a nonzero differ by the offset in the instruction only.
template <int kColPerWarp, int kRows, int kWarps>
struct PaperTile {
  // Blocks that an A100's 164 KiB hold at the paper's 32 input channels, up to 1024 threads:
  // the compiler is asked for no more registers than leave room for them.
  static constexpr int resident_blocks() {
    return bounded(164 * 1024 / ((kRows + 2) * (kColPerWarp * kWarps + 2) * 32 * 4 + 1024),
                   1024 / (kWarps * MappingConfig::kWarp));
  }
  static constexpr int bounded(int blocks, int most) {
    return blocks < 1 ? 1 : blocks < most ? blocks : most;
  }

  // Loads of a warp for one row.
  static constexpr int kColumnSteps =
      (kColPerWarp * kWarps + 2 + MappingConfig::kWarp - 1) / MappingConfig::kWarp;

  __device__ explicit PaperTile(const PaperArguments&) {}
  __device__ static constexpr int warps() { return kWarps; }
  __device__ static constexpr int rows() { return kRows + 2; }
  __device__ static constexpr int columns() { return kColPerWarp * kWarps + 2; }
  __device__ static constexpr int row_step() { return columns(); }
  __device__ static constexpr int column_step() { return 1; }
  __device__ static constexpr int row_tap() { return columns(); }
  __device__ static constexpr int column_tap() { return 1; }
};

// The tile of any kernel size, stride and dilation.
struct AnyTile {
  static constexpr int kColumnSteps = 4;  // at a time
  const PaperArguments& arguments;

  __device__ explicit AnyTile(const PaperArguments& arguments) : arguments(arguments) {}
  __device__ int warps() const { return arguments.warps; }
  __device__ int rows() const { return arguments.tile_rows; }
  __device__ int columns() const { return arguments.tile_columns; }
  __device__ int row_step() const { return arguments.row_step; }
  __device__ int column_step() const { return arguments.column_step; }
  __device__ int row_tap() const { return arguments.row_tap; }
  __device__ int column_tap() const { return arguments.column_tap; }
};

// Tile positions that lie inside the image, along one axis.
struct TileWindow {
  int begin;
  unsigned count;

  __device__ bool holds(int position) const {
    return static_cast<unsigned>(position - begin) < count;
  }
};

// `first` is the input position of the tile's first; there are `length` in the tile and `size`
// in the image.
__device__ __forceinline__ TileWindow tile_window(std::int64_t first, int length,
                                                  std::int64_t size) {
  const auto clamp = [length](std::int64_t position) {
    return position < 0 ? 0 : position > length ? length : static_cast<int>(position);
  };
  const int begin = clamp(-first);
  return {begin, static_cast<unsigned>(clamp(size - first) - begin)};
}

// Lines 5-8: the block's threads load the tile, a warp per row, zero outside the image (of a tile
// narrower than a warp some lanes have no work). Several loads are on their way before the first
// is stored. `source` is the element of `input` at the
// tile's first position.
template <bool kUnitColumns, typename Tile>
__device__ __forceinline__ void load_tile(float* shared, const Tile& tile,
                                          const float* __restrict__ input, std::int64_t source,
                                          const packedconv_strides& strides, int channels,
                                          const TileWindow& row_window,
                                          const TileWindow& column_window) {
  constexpr int kSteps = Tile::kColumnSteps;
  constexpr int kLines = kSteps < 12 ? 12 / kSteps : 1;
  const int lane = threadIdx.x % MappingConfig::kWarp;
  const int lines = channels * tile.rows();
  const std::int64_t column_stride = kUnitColumns ? 1 : strides.column;
  for (int first_line = threadIdx.x / MappingConfig::kWarp; first_line < lines;
       first_line += kLines * tile.warps()) {
    for (int first = 0; first < tile.columns(); first += kSteps * MappingConfig::kWarp) {
      float held[kLines][kSteps];
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int line = first_line + i * tile.warps();
        const int channel = line / tile.rows();
        const int row = line - channel * tile.rows();
        const bool line_inside = line < lines && row_window.holds(row);
        const std::int64_t start = source + channel * strides.channel + row * strides.row +
                                   (first + lane) * column_stride;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int column = step * MappingConfig::kWarp;
          const bool inside = line_inside && column_window.holds(first + lane + column);
          held[i][step] = inside ? __ldg(input + start + column * column_stride) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int line = first_line + i * tile.warps();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int column = first + lane + step * MappingConfig::kWarp;
          if (line < lines && column < tile.columns())
            shared[line * tile.columns() + column] = held[i][step];
        }
      }
    }
  }
}

// Lines 16-20 for one packed word.
template <int kRows, typename Tile>
__device__ __forceinline__ void accumulate(float (&sums)[kRows], const Tile& tile,
                                           const float* shared, int origin, int channel_step,
                                           std::uint32_t word) {
  const float value = high_half_to_float(word);
  const float* const tap =
      shared + (origin + static_cast<int>(packed_word_channel(word)) * channel_step +
                static_cast<int>(packed_word_py(word)) * tile.row_tap() +
                static_cast<int>(packed_word_px(word)) * tile.column_tap());
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = fmaf(value, tap[r * tile.row_step()], sums[r]);
}

template <int kColPerWarp, int kRows, typename Tile>
__device__ __forceinline__ void algorithm1(const float* __restrict__ input,
                                           const std::uint32_t* __restrict__ words,
                                           const std::uint32_t* __restrict__ begins,
                                           const std::uint32_t* __restrict__ ends,
                                           const float* __restrict__ bias,
                                           float* __restrict__ output,
                                           const PaperArguments& arguments) {
  constexpr int kChannelLanes = MappingConfig::kWarp / kColPerWarp;
  const Tile tile(arguments);
  const packedconv_strides& in = arguments.input_strides;
  const packedconv_strides& out = arguments.output_strides;

  // Lines 1-3: image, group and slice; the tile's first output row and column.
  const unsigned z = arguments.first_z + blockIdx.z;
  const int slice = static_cast<int>(z % arguments.slices);
  const int group = static_cast<int>(z / arguments.slices % arguments.groups);
  const std::int64_t image = z / arguments.slices / arguments.groups;
  const std::int64_t first_row =
      static_cast<std::int64_t>(arguments.first_y + blockIdx.y) * kRows;
  const std::int64_t first_column =
      static_cast<std::int64_t>(arguments.first_x + blockIdx.x) * (tile.warps() * kColPerWarp);
  // With more slices than channels some have none. 64 bits, as both may be large.
  const std::int64_t slice_begin = static_cast<std::int64_t>(slice) * arguments.slice_channels;
  if (slice_begin >= arguments.out_channels) return;

  // Lines 10-12: the thread's column and first output channel.
  const int lane = threadIdx.x % MappingConfig::kWarp;
  const int column =
      static_cast<int>(threadIdx.x / MappingConfig::kWarp) * kColPerWarp + lane / kChannelLanes;
  const int group_begin = group * arguments.out_channels;
  const int oc_begin = group_begin + static_cast<int>(slice_begin) + lane % kChannelLanes;
  const int oc_end = group_begin + (slice_begin + arguments.slice_channels < arguments.out_channels
                                        ? static_cast<int>(slice_begin) + arguments.slice_channels
                                        : arguments.out_channels);

  // Line 23: which of the thread's pixels lie inside the output.
  const std::int64_t rows_left = arguments.out_height - first_row;
  const int rows_inside = first_column + column >= arguments.out_width ? 0
                          : rows_left < kRows ? static_cast<int>(rows_left)
                                              : kRows;
  const std::int64_t pixel =
      image * out.batch + first_row * out.row + (first_column + column) * out.column;

  const std::int64_t top = first_row * arguments.stride_height - arguments.pad_top;
  const std::int64_t left = first_column * arguments.stride_width - arguments.pad_left;
  const TileWindow row_window = tile_window(top, tile.rows(), arguments.in_height);
  const TileWindow column_window = tile_window(left, tile.columns(), arguments.in_width);
  const std::int64_t group_source = image * in.batch +
                                    static_cast<std::int64_t>(group) * arguments.in_channels *
                                        in.channel +
                                    top * in.row + left * in.column;
  const int channel_step = tile.rows() * tile.columns();

  float* const shared = shared_memory<float>();
  // Where the thread's first pixel would lie in the tile for channel 0 of a word, which counts
  // from a multiple of 256.
  int origin = column * tile.column_step();
  for (int first = 0, next; first < arguments.in_channels; first = next) {
    next = static_cast<int>(
        next_block(first, arguments.channels_per_block, arguments.in_channels));
    // The block before has been read by all before it is overwritten.
    if (first > 0) __syncthreads();
    const std::int64_t source = group_source + first * in.channel;
    if (in.column == 1)
      load_tile<true>(shared, tile, input, source, in, next - first, row_window, column_window);
    else
      load_tile<false>(shared, tile, input, source, in, next - first, row_window, column_window);
    __syncthreads();  // Line 9

    for (int oc = oc_begin; oc < oc_end; oc += kChannelLanes) {  // Line 13
      float sums[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;

      // Lines 15-21, several words at a time so that their loads overlap.
      constexpr int kWords = 4;
      const std::uint32_t begin = __ldg(begins + oc);
      const std::uint32_t* next_word = words + begin;
      std::uint32_t words_left = __ldg(ends + oc) - begin;
      std::uint32_t held[kWords];
      for (; words_left >= kWords; words_left -= kWords, next_word += kWords) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) held[i] = __ldg(next_word + i);
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          accumulate(sums, tile, shared, origin, channel_step, held[i]);
      }
#pragma unroll
      for (int i = 0; i < kWords - 1; ++i) {
        if (i < static_cast<int>(words_left)) held[i] = __ldg(next_word + i);
      }
#pragma unroll
      for (int i = 0; i < kWords - 1; ++i) {
        if (i < static_cast<int>(words_left))
          accumulate(sums, tile, shared, origin, channel_step, held[i]);
      }

      const float channel_bias = bias != nullptr && first == 0 ? __ldg(bias + oc) : 0.0f;
      float* const target = output + (pixel + oc * out.channel);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {  // Lines 22-26
        if (r < rows_inside) {
          float sum = sums[r] + (first == 0 ? channel_bias : target[r * out.row]);
          if (arguments.relu && next == arguments.in_channels && sum < 0.0f) sum = 0.0f;
          target[r * out.row] = sum;
        }
      }
    }
    begins += arguments.bounds_step;
    ends += arguments.bounds_step;
    origin = next % PACKEDCONV_BLOCK_CHANNELS == 0 ? column * tile.column_step()
                                                   : origin - (next - first) * channel_step;
  }
}

template <int kColPerWarp, int kRows, int kWarps>
__global__ void __launch_bounds__(kWarps* MappingConfig::kWarp,
                                  PaperTile<kColPerWarp, kRows, kWarps>::resident_blocks())
    paper_kernel(const float* __restrict__ input, const std::uint32_t* __restrict__ words,
                 const std::uint32_t* __restrict__ begins, const std::uint32_t* __restrict__ ends,
                 const float* __restrict__ bias, float* __restrict__ output,
                 const PaperArguments arguments) {
  algorithm1<kColPerWarp, kRows, PaperTile<kColPerWarp, kRows, kWarps>>(
      input, words, begins, ends, bias, output, arguments);
}

template <int kColPerWarp, int kRows>
__global__ void __launch_bounds__(8 * MappingConfig::kWarp, 1)
    paper_kernel_any_shape(const float* __restrict__ input,
                           const std::uint32_t* __restrict__ words,
                           const std::uint32_t* __restrict__ begins,
                           const std::uint32_t* __restrict__ ends,
                           const float* __restrict__ bias, float* __restrict__ output,
                           const PaperArguments arguments) {
  algorithm1<kColPerWarp, kRows, AnyTile>(input, words, begins, ends, bias, output, arguments);
}

using PaperKernel = void (*)(const float*, const std::uint32_t*, const std::uint32_t*,
                             const std::uint32_t*, const float*, float*, PaperArguments);

template <int kColPerWarp, int kRows>
PaperKernel paper_kernel_for(const PaperPlan& plan) {
  if (!plan.paper_shape) return paper_kernel_any_shape<kColPerWarp, kRows>;
  switch (plan.mapping.warps_per_block) {
    case 2: return paper_kernel<kColPerWarp, kRows, 2>;
    case 4: return paper_kernel<kColPerWarp, kRows, 4>;
    case 8: return paper_kernel<kColPerWarp, kRows, 8>;
  }
  return nullptr;
}

template <int kColPerWarp>
PaperKernel paper_kernel_for(const PaperPlan& plan) {
  switch (plan.mapping.rows_per_thread) {
    case 1: return paper_kernel_for<kColPerWarp, 1>(plan);
    case 2: return paper_kernel_for<kColPerWarp, 2>(plan);
    case 4: return paper_kernel_for<kColPerWarp, 4>(plan);
    case 8: return paper_kernel_for<kColPerWarp, 8>(plan);
  }
  return nullptr;
}

// Null for a mapping that is not compiled.
inline PaperKernel paper_kernel_for(const PaperPlan& plan) {
  switch (plan.mapping.col_per_warp) {
    case 4: return paper_kernel_for<4>(plan);
    case 8: return paper_kernel_for<8>(plan);
    case 16: return paper_kernel_for<16>(plan);
    case 32: return paper_kernel_for<32>(plan);
  }
  return nullptr;
}

// Launches the kernel, several times where the grid is larger than CUDA's. `table` is the
// plan's on the device. Returns what CUDA says about the launch.
inline cudaError_t launch_paper(const CudaPlan& plan, cudaStream_t stream, const float* input,
                                const packedconv_strides& input_strides,
                                const std::uint32_t* table, const float* bias, bool relu,
                                float* output, const packedconv_strides& output_strides) {
  const packedconv_layer_shape& shape = plan.shape;
  const PaperPlan& paper = plan.paper;
  const PaperKernel kernel = paper_kernel_for(paper);
  if (kernel == nullptr) return cudaErrorInvalidValue;

  PaperArguments arguments;
  arguments.input_strides = input_strides;
  arguments.output_strides = output_strides;
  arguments.in_height = shape.in_height;
  arguments.in_width = shape.in_width;
  arguments.out_height = shape.out_height;
  arguments.out_width = shape.out_width;
  arguments.pad_top = shape.pad_top;
  arguments.pad_left = shape.pad_left;
  arguments.stride_height = shape.stride_height;
  arguments.stride_width = shape.stride_width;
  arguments.bounds_step = paper.bounds_step;
  arguments.in_channels = static_cast<int>(shape.in_channels / shape.groups);
  arguments.out_channels = static_cast<int>(shape.out_channels / shape.groups);
  arguments.channels_per_block = static_cast<int>(paper.channels_per_block);
  arguments.groups = static_cast<unsigned>(shape.groups);
  arguments.slices = static_cast<unsigned>(paper.mapping.slices);
  arguments.slice_channels = static_cast<int>(paper.slice_channels);
  arguments.relu = relu;
  arguments.warps = paper.mapping.warps_per_block;
  arguments.tile_rows = static_cast<int>(paper.tile_rows);
  arguments.tile_columns = static_cast<int>(paper.tile_columns);
  // The stride between single rows or columns has no meaning and may be large, but nothing
  // reads past the tile by it: then the steps are multiplied by zero or not used.
  arguments.row_step = static_cast<int>(shape.stride_height * paper.tile_columns);
  arguments.column_step = static_cast<int>(shape.stride_width);
  arguments.row_tap = static_cast<int>(shape.dilation_height * paper.tile_columns);
  arguments.column_tap = static_cast<int>(shape.dilation_width);

  // What CUDA allows of a grid along x, y and z. Launches of one stream follow one another.
  constexpr std::int64_t kMostX = 0x7fffffff, kMostYZ = 65535;
  const auto part = [](std::int64_t whole, std::int64_t first, std::int64_t most) {
    return static_cast<unsigned>(whole - first < most ? whole - first : most);
  };
  for (std::int64_t z = 0; z < paper.grid_z; z += kMostYZ) {
    for (std::int64_t y = 0; y < paper.grid_y; y += kMostYZ) {
      for (std::int64_t x = 0; x < paper.grid_x; x += kMostX) {
        arguments.first_x = static_cast<unsigned>(x);
        arguments.first_y = static_cast<unsigned>(y);
        arguments.first_z = static_cast<unsigned>(z);
        const dim3 grid(part(paper.grid_x, x, kMostX), part(paper.grid_y, y, kMostYZ),
                        part(paper.grid_z, z, kMostYZ));
        const cudaError_t error =
            launch(kernel, grid, dim3(static_cast<unsigned>(paper.mapping.threads())),
                   static_cast<std::size_t>(paper.shared_bytes), stream, input, table,
                   table + paper.begins_at, table + paper.ends_at, bias, output, arguments);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace packedconv

#endif
