// Direct sparse convolution of a batch of images on the CPU.
#ifndef PACKEDCONV_CPU_CONV2D_H
#define PACKEDCONV_CPU_CONV2D_H

#include <cstdint>

#include "../layer_shape.h"
#include "../packed_view.h"

namespace packedconv {

// output = convolution of input with the packed weight, plus bias (one value per output
// channel, or null), then ReLU if asked. Every output element is summed in the order of
// its channel's words whatever `threads` is. The arguments must fit one another; input and
// output must not overlap. Throws std::bad_alloc, std::length_error (a tile too large to
// index) and std::invalid_argument (PACKEDCONV_ISA).
void conv2d(const packedconv_layer_shape& shape, const float* input,
            const packedconv_strides& input_strides, const PackedView& weight, const float* bias,
            bool relu, float* output, const packedconv_strides& output_strides, int threads);

}  // namespace packedconv

#endif
