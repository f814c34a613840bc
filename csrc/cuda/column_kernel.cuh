// The column kernel: lane = output column, one broadcast nonzero for all of a thread's pixels.
//
// A block keeps the input tile of all channels (or a block of them) in shared memory, and
// beside it the nonzeros, decoded to {FP32 value, offset in the tile}. Its warps share the tile
// and split the output channels, so that a nonzero is read by all lanes at once, the lanes'
// inputs lie next to one another, and no two lanes wait for each other's list.
#ifndef PACKEDCONV_CUDA_COLUMN_KERNEL_CUH
#define PACKEDCONV_CUDA_COLUMN_KERNEL_CUH

#include "../layer_shape.h"
#include "column_plan.h"
#include "platform.h"

namespace packedconv {

struct ColumnArguments {
  ColumnPlan plan;
  const float* input;
  packedconv_strides input_strides;
  bool vector_fill;  // four columns a copy: the input is aligned for it
  const uint4* table;
  const float* bias;  // or null
  bool relu;
  float* output;
  packedconv_strides output_strides;
};

// Copies that a thread starts one after another. Where a copy waits for its data, the loads of
// all of them are on their way before the first is stored.
template <typename Value, int kCopies>
class CopyBatch {
 public:
  __device__ __forceinline__ void start(int index, bool wanted, Value* target,
                                        const Value* source, bool inside) {
    if (asynchronous_copies()) {
      if (wanted) start_copy<sizeof(Value)>(target, source, inside);
      return;
    }
    targets_[index] = wanted ? target : nullptr;
    values_[index] = wanted && inside ? __ldg(source) : Value{};
  }

  __device__ __forceinline__ void finish() {
    if (asynchronous_copies()) return;
#pragma unroll
    for (int index = 0; index < kCopies; ++index) {
      if (targets_[index] != nullptr) *targets_[index] = values_[index];
    }
  }

 private:
  Value* targets_[kCopies];
  Value values_[kCopies];
};

constexpr int kBatchCopies = 4;

// Where one tile of one image lies, and which of its input channels.
struct ColumnStep {
  int item, block;
};

struct ColumnTile {
  int image, out_row, out_column;
};

__device__ __forceinline__ ColumnTile column_tile(const ColumnPlan& plan, int item) {
  const int line = item / plan.column_tiles;
  const int image = line / plan.row_tiles;
  return {image, (line - image * plan.row_tiles) * plan.tile_rows,
          (item - line * plan.column_tiles) * plan.tile_columns};
}

// Starts the copies of the tile that a step needs; all threads of the block take part.
template <int kPitch>
__device__ __forceinline__ void start_fill(const ColumnArguments& arguments, float* tile, int group,
                                           const ColumnStep& step) {
  const ColumnPlan& plan = arguments.plan;
  const packedconv_strides& strides = arguments.input_strides;
  const ColumnTile at = column_tile(plan, step.item);
  const int first_channel = step.block * plan.block_channels;
  const int after = plan.group_channels - first_channel;
  const int channels = after < plan.block_channels ? after : plan.block_channels;
  const int first_row = at.out_row * plan.rows.stride - plan.pad_top;
  const int first_column = at.out_column * plan.columns.stride - plan.pad_left - plan.left;
  const float* const image =
      arguments.input + at.image * strides.batch +
      (static_cast<std::int64_t>(group) * plan.group_channels + first_channel) * strides.channel;
  const unsigned lines = channels * plan.stored_rows;

  // A line is a stored row of a channel.
  const auto line_of = [&](unsigned line, int& channel, int& row) {
    channel = static_cast<int>((static_cast<std::uint64_t>(line) * plan.row_divisor) >> 32);
    const int stored = static_cast<int>(line) - channel * plan.stored_rows;
    int residue = 0, index = stored;
    if (plan.rows.residues > 1) {
      residue = stored / plan.rows.per_residue;
      index = stored - residue * plan.rows.per_residue;
    }
    row = first_row + plan.rows.residue[residue] + index * plan.rows.stride;
  };

  if (arguments.vector_fill) {
    constexpr unsigned kCopies = kPitch / 4;
    const unsigned used = (plan.left + plan.columns.per_residue + 3) / 4;
    // Below 2^31, or the copies would not be of four.
    const int channel_stride = static_cast<int>(strides.channel);
    const int row_stride = static_cast<int>(strides.row);
    const unsigned copies = lines * kCopies;
    for (unsigned first = threadIdx.x; first < copies; first += kBatchCopies * blockDim.x) {
      CopyBatch<float4, kBatchCopies> batch;
#pragma unroll
      for (int index = 0; index < kBatchCopies; ++index) {
        const unsigned copy = first + index * blockDim.x;
        const unsigned line = copy / kCopies, x = copy - line * kCopies;
        int channel, row;
        line_of(line, channel, row);
        const int column = first_column + 4 * static_cast<int>(x);
        const bool inside =
            row >= 0 && row < plan.in_height && column >= 0 && column < plan.in_width;
        const float* const source =
            inside ? image + static_cast<std::int64_t>(channel) * channel_stride +
                         static_cast<std::int64_t>(row) * row_stride + column
                   : arguments.input;
        batch.start(index, copy < copies && x < used,
                    reinterpret_cast<float4*>(tile + line * kPitch + 4 * x),
                    reinterpret_cast<const float4*>(source), inside);
      }
      batch.finish();
    }
    return;
  }
  const unsigned lane = threadIdx.x % ColumnConfig::kWarp;
  const unsigned warps = blockDim.x / ColumnConfig::kWarp;
  for (unsigned line = threadIdx.x / ColumnConfig::kWarp; line < lines; line += warps) {
    int channel, row;
    line_of(line, channel, row);
    const bool row_inside = row >= 0 && row < plan.in_height;
    const float* const source = image + channel * strides.channel + row * strides.row;
    float* target = tile + line * kPitch + plan.left;
    for (int residue = 0; residue < plan.columns.residues; ++residue) {
      for (int index = lane; index < plan.columns.per_residue; index += ColumnConfig::kWarp) {
        const int column = first_column + plan.left + plan.columns.residue[residue] +
                           index * plan.columns.stride;
        const bool inside = row_inside && column >= 0 && column < plan.in_width;
        start_copy<4>(target + index, inside ? source + column * strides.column : arguments.input,
                      inside);
      }
      target += plan.columns.per_residue;
    }
  }
}

// Starts the copies of `count` units of 16 bytes of the table.
__device__ __forceinline__ void start_staging(const uint4* source, uint4* target, unsigned count) {
  for (unsigned first = threadIdx.x; first < count; first += kBatchCopies * blockDim.x) {
    CopyBatch<uint4, kBatchCopies> batch;
#pragma unroll
    for (int index = 0; index < kBatchCopies; ++index) {
      const unsigned unit = first + index * blockDim.x;
      batch.start(index, unit < count, target + unit, source + unit, true);
    }
    batch.finish();
  }
}

template <int kRows, int kGroups, int kPitch>
__device__ __forceinline__ void accumulate(float (&sums)[kGroups][kRows], const char* input,
                                           unsigned value_bits, unsigned offset) {
  const float value = bits_to_float(value_bits);
  // In bytes, so that the address takes one addition.
  const float* const tap = reinterpret_cast<const float*>(input + offset);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      sums[group][row] =
          fmaf(value, tap[group * ColumnConfig::kWarp + row * kPitch], sums[group][row]);
    }
  }
}

// Computes the output channels of one segment that are this warp's.
template <int kRows, int kGroups, int kPitch>
__device__ __forceinline__ void compute_segment(const ColumnArguments& arguments,
                                                const float* tile, const uint4* segment,
                                                unsigned first_nonzero, const ColumnTile& at,
                                                bool first_block, bool last_block) {
  const ColumnPlan& plan = arguments.plan;
  const packedconv_strides& strides = arguments.output_strides;
  const int lane = threadIdx.x % ColumnConfig::kWarp, warp = threadIdx.x / ColumnConfig::kWarp;
  const int row_warp = warp / plan.channel_warps;
  const int channel_warp = warp - row_warp * plan.channel_warps;
  const int lane_row = lane / plan.config.lane_columns;
  const int tile_row = (row_warp * plan.lane_rows + lane_row) * kRows;
  const int tile_column = lane - lane_row * plan.config.lane_columns;

  const char* const input =
      reinterpret_cast<const char*>(tile + tile_row * kPitch + tile_column);
  const int out_row = at.out_row + tile_row, out_column = at.out_column + tile_column;
  const int rows = plan.out_height - out_row;
  float* const image = arguments.output + at.image * strides.batch + out_row * strides.row +
                       out_column * strides.column;

  const unsigned* const starts = reinterpret_cast<const unsigned*>(segment);
  const uint4* const records = segment + (plan.channel_warps + 4) / 4;
  const uint4* const nonzeros = segment + first_nonzero;
  const unsigned end = starts[channel_warp + 1];
  for (unsigned record = starts[channel_warp]; record < end; ++record) {
    const uint4 entry = records[record];
    float* const pixels = image + entry.x * strides.channel;
    float sums[kGroups][kRows];
    const float initial =
        first_block && arguments.bias != nullptr ? __ldg(arguments.bias + entry.x) : 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) sums[group][row] = initial;
    }

    // Two nonzeros a unit; the second of the last unit may be none.
    const uint4* pair = nonzeros + entry.y;
    const uint4* const fours = pair + entry.z / 4 * 2;
    for (; pair != fours; pair += 2) {
      const uint4 a = pair[0], b = pair[1];
      accumulate<kRows, kGroups, kPitch>(sums, input, a.x, a.y);
      accumulate<kRows, kGroups, kPitch>(sums, input, a.z, a.w);
      accumulate<kRows, kGroups, kPitch>(sums, input, b.x, b.y);
      accumulate<kRows, kGroups, kPitch>(sums, input, b.z, b.w);
    }
#pragma unroll 1
    for (int left = entry.z % 4; left > 0; left -= 2, ++pair) {
      const uint4 a = pair[0];
      accumulate<kRows, kGroups, kPitch>(sums, input, a.x, a.y);
      if (left > 1) accumulate<kRows, kGroups, kPitch>(sums, input, a.z, a.w);
    }

#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (out_column + group * ColumnConfig::kWarp >= plan.out_width) continue;
      float* pixel = pixels + group * ColumnConfig::kWarp * strides.column;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        float sum = sums[group][row];
        // Earlier blocks of input channels left their sum in the output.
        if (!first_block) sum += *pixel;
        if (last_block && arguments.relu && sum < 0.0f) sum = 0.0f;
        *pixel = sum;
        pixel += strides.row;
      }
    }
  }
}

template <int kRows, int kGroups, int kPitch>
__global__ void __launch_bounds__(ColumnConfig::kMaxWarps* ColumnConfig::kWarp, 2)
    column_kernel(const ColumnArguments arguments) {
  const ColumnPlan& plan = arguments.plan;
  float* const tiles = shared_memory<float>();
  uint4* const weights = reinterpret_cast<uint4*>(tiles + plan.config.buffers * plan.tile_words);
  const bool overlap = plan.config.buffers == 2;

  for (int part = blockIdx.y; part < plan.parts; part += gridDim.y) {
    const int group = part / plan.config.slices;
    const uint4* const directory = arguments.table + part * plan.blocks * plan.chunks;
    const unsigned part_begin = __ldg(&directory[0].x);
    if (plan.resident) {
      const unsigned part_end = __ldg(&directory[plan.blocks * plan.chunks - 1].y);
      start_staging(arguments.table + part_begin, weights, part_end - part_begin);
    }
    ColumnStep step = {static_cast<int>(blockIdx.x), 0};
    if (step.item < plan.items) start_fill<kPitch>(arguments, tiles, group, step);
    commit_copies();

    int buffer = 0;
    while (step.item < plan.items) {
      ColumnStep next = {step.item, step.block + 1};
      if (next.block == plan.blocks) next = {step.item + static_cast<int>(gridDim.x), 0};
      float* const tile = tiles + buffer * plan.tile_words;
      const uint4* const segments = directory + step.block * plan.chunks;
      if (!plan.resident) {
        const unsigned begin = __ldg(&segments[0].x);
        start_staging(arguments.table + begin, weights, __ldg(&segments[0].y) - begin);
        commit_copies();
      }
      if (overlap) {
        buffer = 1 - buffer;
        if (next.item < plan.items) {
          start_fill<kPitch>(arguments, tiles + buffer * plan.tile_words, group, next);
        }
        commit_copies();
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();

      const ColumnTile at = column_tile(plan, step.item);
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        const unsigned begin = __ldg(&segments[chunk].x);
        if (!plan.resident && chunk > 0) {
          __syncthreads();
          start_staging(arguments.table + begin, weights, __ldg(&segments[chunk].y) - begin);
          commit_copies();
          wait_copies<0>();
          __syncthreads();
        }
        compute_segment<kRows, kGroups, kPitch>(
            arguments, tile, plan.resident ? weights + (begin - part_begin) : weights,
            __ldg(&segments[chunk].z), at, step.block == 0, step.block + 1 == plan.blocks);
      }
      __syncthreads();
      if (!overlap && next.item < plan.items) start_fill<kPitch>(arguments, tiles, group, next);
      if (!overlap) commit_copies();
      step = next;
    }
  }
}

// Whether a tile row can be copied four columns at a time from this input.
inline bool allows_vector_fill(const ColumnPlan& plan, const float* input,
                               const packedconv_strides& strides) {
  const auto aligned = [](std::int64_t stride) {
    return stride % 4 == 0 && stride >= 0 && stride < (std::int64_t{1} << 31);
  };
  return plan.config.pitch % 4 == 0 && plan.columns.stride == 1 &&
         (plan.pad_left + plan.left) % 4 == 0 && plan.in_width % 4 == 0 &&
         plan.left + plan.columns.per_residue <= plan.config.pitch && strides.column == 1 &&
         aligned(strides.row) && aligned(strides.channel) && strides.batch % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(input) % 16 == 0;
}

inline cudaError_t launch_column(const ColumnPlan& plan, cudaStream_t stream, const float* input,
                                 const packedconv_strides& input_strides,
                                 const std::uint32_t* table, const float* bias, bool relu,
                                 float* output, const packedconv_strides& output_strides) {
  const ColumnArguments arguments = {plan,
                                     input,
                                     input_strides,
                                     allows_vector_fill(plan, input, input_strides),
                                     reinterpret_cast<const uint4*>(table),
                                     bias,
                                     relu,
                                     output,
                                     output_strides};
  const dim3 grid(plan.grid_blocks, plan.grid_parts());
  const dim3 block(plan.config.warps * ColumnConfig::kWarp);
#define PACKEDCONV_LAUNCH_COLUMN(rows, groups, pitch_)                                      \
  if (plan.config.rows_per_thread == rows && plan.config.column_groups == groups &&         \
      plan.config.pitch == pitch_) {                                                        \
    return launch(column_kernel<rows, groups, pitch_>, grid, block, plan.shared_bytes, stream, \
                  arguments);                                                               \
  }
  PACKEDCONV_COLUMN_KERNELS(PACKEDCONV_LAUNCH_COLUMN)
#undef PACKEDCONV_LAUNCH_COLUMN
  return cudaErrorInvalidConfiguration;
}

}  // namespace packedconv

#endif
