#include "weight_check.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "packed_word.h"

namespace packedconv {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("weight: " + what +
                              "; it was changed after packing, so pack it again");
}

void expect_equal(const std::string& what, std::int64_t expected, std::int64_t got) {
  if (expected != got)
    fail("expected " + what + " " + std::to_string(expected) + ", got " + std::to_string(got));
}

void check_offsets(std::int64_t row_length, const PackedView& weight) {
  std::uint32_t before = 0;
  for (std::int64_t i = 0; i < weight.offset_count; ++i) {
    const std::uint32_t offset = weight.offsets[i];
    if (i == 0)
      expect_equal("offset 0 to be", 0, offset);
    else if (i % row_length == 0)
      expect_equal("the next block to begin with the last offset", before, offset);
    else if (offset < before)
      fail("expected offsets that never fall, got " + std::to_string(offset) + " after " +
           std::to_string(before) + " at offset " + std::to_string(i));
    before = offset;
  }
  expect_equal("the last offset to be the number of words,", weight.word_count, before);
}

// What the planners divide by, and the kernel sizes that their tables hold.
void check_shape(const packedconv_layer_shape& shape) {
  const auto require = [](bool holds, const std::string& expected) {
    if (!holds) throw std::invalid_argument("shape: expected " + expected);
  };
  const auto fits = [](std::int64_t size) { return size >= 1 && size <= PACKEDCONV_MAX_KERNEL; };
  require(fits(shape.kernel_height) && fits(shape.kernel_width), "a kernel of 1 to 16 x 1 to 16");
  require(shape.groups >= 1 && shape.in_channels >= 1 && shape.out_channels >= 1 &&
              shape.in_channels % shape.groups == 0 && shape.out_channels % shape.groups == 0,
          "groups that divide the channels");
  require(shape.stride_height >= 1 && shape.stride_width >= 1 && shape.dilation_height >= 1 &&
              shape.dilation_width >= 1,
          "strides and dilations of at least 1");
  require(shape.batch >= 0 && shape.in_height >= 1 && shape.in_width >= 1 &&
              shape.out_height >= 1 && shape.out_width >= 1,
          "images and outputs of at least one pixel");
  require(shape.pad_top >= 0 && shape.pad_left >= 0, "padding of at least 0");
}

}  // namespace

void check_weight(const packedconv_layer_shape& shape, const PackedView& weight) {
  check_shape(shape);
  const std::int64_t channels = shape.in_channels / shape.groups;
  const std::int64_t row_length = shape.out_channels + 1;
  const std::int64_t blocks =
      (channels + PACKEDCONV_BLOCK_CHANNELS - 1) / PACKEDCONV_BLOCK_CHANNELS;
  expect_equal("blocks of 256 input channels:", blocks, weight.blocks);
  expect_equal("offsets, (output channels + 1) per block:", blocks * row_length,
               weight.offset_count);
  check_offsets(row_length, weight);

  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t block_channels = std::min<std::int64_t>(
        PACKEDCONV_BLOCK_CHANNELS, channels - block * PACKEDCONV_BLOCK_CHANNELS);
    const std::uint32_t* const offsets = weight.offsets + block * row_length;
    for (std::int64_t oc = 0; oc < shape.out_channels; ++oc) {
      for (std::uint32_t j = offsets[oc]; j < offsets[oc + 1]; ++j) {
        const std::uint32_t word = weight.words[j];
        const auto outside = [&](const char* field, std::uint32_t value, std::int64_t limit) {
          fail("expected word " + std::to_string(j) + " with " + field + " below " +
               std::to_string(limit) + ", got " + std::to_string(value));
        };
        if (packed_word_channel(word) >= block_channels)
          outside("an input channel", packed_word_channel(word), block_channels);
        if (packed_word_px(word) >= shape.kernel_width)
          outside("a kernel column px", packed_word_px(word), shape.kernel_width);
        if (packed_word_py(word) >= shape.kernel_height)
          outside("a kernel row py", packed_word_py(word), shape.kernel_height);
        const std::uint32_t magnitude = packed_word_fp16(word) & 0x7fffu;
        if (magnitude == 0 || magnitude >= 0x7c00u)
          fail("expected word " + std::to_string(j) + " with a finite value other than zero");
        // Channel, py, px from high to low bits, as words are ordered.
        const auto position = [](std::uint32_t w) {
          return packed_word_channel(w) << 8 | packed_word_py(w) << 4 | packed_word_px(w);
        };
        if (j > offsets[oc] && position(weight.words[j - 1]) >= position(word))
          fail("expected words in the order of input channel, py, px, got word " +
               std::to_string(j) + " out of it");
      }
    }
  }
}

}  // namespace packedconv
