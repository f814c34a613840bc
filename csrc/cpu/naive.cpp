#include "naive.h"

#include "../packed_word.h"

namespace packedconv {

void naive_channel(const packedconv_layer_shape& s, const float* input,
                   const packedconv_strides& input_strides, const PackedView& weight,
                   const float* bias, bool relu, float* output,
                   const packedconv_strides& output_strides, std::int64_t image,
                   std::int64_t channel) {
  const std::int64_t group_channels = s.in_channels / s.groups;
  const std::int64_t group = channel / (s.out_channels / s.groups);
  input += image * input_strides.batch + group * group_channels * input_strides.channel;
  output += image * output_strides.batch + channel * output_strides.channel;
  for (std::int64_t row = 0; row < s.out_height; ++row) {
    for (std::int64_t column = 0; column < s.out_width; ++column) {
      float sum = bias == nullptr ? 0.0f : bias[channel];
      for (std::int64_t block = 0; block < weight.blocks; ++block) {
        const std::uint32_t* const offsets = weight.offsets + block * (s.out_channels + 1);
        for (std::uint32_t j = offsets[channel]; j < offsets[channel + 1]; ++j) {
          const std::uint32_t word = weight.words[j];
          const std::int64_t y =
              row * s.stride_height - s.pad_top + packed_word_py(word) * s.dilation_height;
          const std::int64_t x =
              column * s.stride_width - s.pad_left + packed_word_px(word) * s.dilation_width;
          if (y < 0 || y >= s.in_height || x < 0 || x >= s.in_width) continue;
          const std::int64_t ic = block * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word);
          sum += packed_word_value(word) * input[ic * input_strides.channel +
                                                 y * input_strides.row + x * input_strides.column];
        }
      }
      if (relu && sum < 0.0f) sum = 0.0f;
      output[row * output_strides.row + column * output_strides.column] = sum;
    }
  }
}

}  // namespace packedconv
