// The kernel for every layer that no tile fits: one thread per output pixel, which reads the
// input from global memory and checks every position. No shared memory, no limit but memory.
#ifndef PACKEDCONV_CUDA_GENERAL_KERNEL_CUH
#define PACKEDCONV_CUDA_GENERAL_KERNEL_CUH

#include <cstdint>

#include "conv2d.h"
#include "platform.h"

namespace packedconv {

// What the kernel is told, by value.
struct GeneralArguments {
  packedconv_layer_shape shape;
  packedconv_strides input_strides, output_strides;
  std::int64_t blocks, bounds_step;
  bool relu;
};

__global__ void __launch_bounds__(kGeneralThreads, 1)
    general_kernel(const float* __restrict__ input, const std::uint32_t* __restrict__ words,
                   const std::uint32_t* __restrict__ begins,
                   const std::uint32_t* __restrict__ ends, const float* __restrict__ bias,
                   float* __restrict__ output, const GeneralArguments arguments) {
  const packedconv_layer_shape& shape = arguments.shape;
  const packedconv_strides& in = arguments.input_strides;
  const packedconv_strides& out = arguments.output_strides;
  const std::int64_t group_in_channels = shape.in_channels / shape.groups;
  const std::int64_t group_out_channels = shape.out_channels / shape.groups;
  const std::int64_t pixels = shape.out_height * shape.out_width;
  const std::int64_t pixel_step = static_cast<std::int64_t>(gridDim.x) * kGeneralThreads;

  for (std::int64_t image = blockIdx.z; image < shape.batch; image += gridDim.z) {
    for (std::int64_t oc = blockIdx.y; oc < shape.out_channels; oc += gridDim.y) {
      const std::int64_t first_channel = oc / group_out_channels * group_in_channels;
      const std::int64_t group_source = image * in.batch + first_channel * in.channel;
      for (std::int64_t pixel =
               static_cast<std::int64_t>(blockIdx.x) * kGeneralThreads + threadIdx.x;
           pixel < pixels; pixel += pixel_step) {
        const std::int64_t row = pixel / shape.out_width;
        const std::int64_t column = pixel % shape.out_width;
        const std::int64_t top = row * shape.stride_height - shape.pad_top;
        const std::int64_t left = column * shape.stride_width - shape.pad_left;

        float sum = 0.0f;
        for (std::int64_t block = 0; block < arguments.blocks; ++block) {
          const std::int64_t at = block * arguments.bounds_step + oc;
          const std::uint32_t end = __ldg(ends + at);
          for (std::uint32_t j = __ldg(begins + at); j < end; ++j) {
            const std::uint32_t word = __ldg(words + j);
            const std::int64_t y = top + packed_word_py(word) * shape.dilation_height;
            const std::int64_t x = left + packed_word_px(word) * shape.dilation_width;
            // A position outside counts as zero, which adds a product with zero.
            float value = 0.0f;
            if (y >= 0 && y < shape.in_height && x >= 0 && x < shape.in_width) {
              const std::int64_t channel =
                  block * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word);
              value = __ldg(input +
                            (group_source + channel * in.channel + y * in.row + x * in.column));
            }
            sum = fmaf(high_half_to_float(word), value, sum);
          }
        }
        if (bias != nullptr) sum += __ldg(bias + oc);
        if (arguments.relu && sum < 0.0f) sum = 0.0f;
        output[image * out.batch + oc * out.channel + row * out.row + column * out.column] = sum;
      }
    }
  }
}

// As launch_paper.
inline cudaError_t launch_general(const CudaPlan& plan, cudaStream_t stream, const float* input,
                                  const packedconv_strides& input_strides,
                                  const std::uint32_t* table, const float* bias, bool relu,
                                  float* output, const packedconv_strides& output_strides) {
  const PaperPlan& bounds = plan.paper;
  if (bounds.grid_x == 0 || bounds.grid_y == 0 || bounds.grid_z == 0) return cudaSuccess;
  const GeneralArguments arguments = {plan.shape,    input_strides,      output_strides,
                                      bounds.blocks, bounds.bounds_step, relu};
  // A grid that CUDA allows; the kernel's loops cover what lies beyond.
  const auto at_most = [](std::int64_t whole, std::int64_t most) {
    return static_cast<unsigned>(whole < most ? whole : most);
  };
  const dim3 grid(at_most(bounds.grid_x, 0x7fffffff), at_most(bounds.grid_y, 65535),
                  at_most(bounds.grid_z, 65535));
  return launch(general_kernel, grid, dim3(kGeneralThreads), 0, stream, input, table,
                table + bounds.begins_at, table + bounds.ends_at, bias, output, arguments);
}

}  // namespace packedconv

#endif
