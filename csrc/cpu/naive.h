// Algorithm 1 of the paper as it stands, for comparison.
#ifndef PACKEDCONV_CPU_NAIVE_H
#define PACKEDCONV_CPU_NAIVE_H

#include <cstdint>

#include "../layer_shape.h"
#include "../packed_view.h"

namespace packedconv {

// Output channel `channel` of image `image`: every word is decoded for every output pixel.
void naive_channel(const packedconv_layer_shape& shape, const float* input,
                   const packedconv_strides& input_strides, const PackedView& weight,
                   const float* bias, bool relu, float* output,
                   const packedconv_strides& output_strides, std::int64_t image,
                   std::int64_t channel);

}  // namespace packedconv

#endif
