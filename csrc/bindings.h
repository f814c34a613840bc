// What the parts of the extension module share: arguments as Python hands them over.
#ifndef PACKEDCONV_BINDINGS_H
#define PACKEDCONV_BINDINGS_H

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "layer_shape.h"
#include "packed_view.h"

namespace packedconv {

using Pair = std::array<std::int64_t, 2>;
using Quad = std::array<std::int64_t, 4>;
using Words = pybind11::array_t<std::uint32_t, pybind11::array::c_style>;

inline packedconv_strides make_strides(const Quad& values) {
  return {values[0], values[1], values[2], values[3]};
}

inline packedconv_layer_shape make_shape(const Quad& input_shape, const Quad& output_shape,
                                         const Pair& kernel, const Pair& stride,
                                         const Pair& padding, const Pair& dilation,
                                         std::int64_t groups) {
  packedconv_layer_shape shape;
  shape.batch = input_shape[0];
  shape.in_channels = input_shape[1];
  shape.in_height = input_shape[2];
  shape.in_width = input_shape[3];
  shape.out_channels = output_shape[1];
  shape.out_height = output_shape[2];
  shape.out_width = output_shape[3];
  shape.kernel_height = kernel[0];
  shape.kernel_width = kernel[1];
  shape.stride_height = stride[0];
  shape.stride_width = stride[1];
  shape.pad_top = padding[0];
  shape.pad_left = padding[1];
  shape.dilation_height = dilation[0];
  shape.dilation_width = dilation[1];
  shape.groups = groups;
  return shape;
}

// Valid as long as the arrays are.
inline PackedView make_view(const Words& words, const Words& offsets) {
  const std::int64_t blocks = offsets.ndim() == 0 ? 0 : offsets.shape(0);
  return {words.data(), offsets.data(), blocks, words.size(), offsets.size()};
}

// Adds the plans of the CPU kernels (bindings_cpu.cpp).
void bind_cpu(pybind11::module_& module);

// Adds the plans and launches of the CUDA kernels (bindings_cuda.cpp).
void bind_cuda(pybind11::module_& module);

}  // namespace packedconv

#endif
