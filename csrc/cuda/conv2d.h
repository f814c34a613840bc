// Direct sparse convolution on an NVIDIA GPU. Without CUDA types, so that any compiler reads it.
//
// A plan holds all that depends on the layer, the weight and the device. It is made on the
// CPU, its table is copied to the device once by whoever owns that memory, and every launch
// after that touches no host memory and allocates nothing.
#ifndef PACKEDCONV_CUDA_CONV2D_H
#define PACKEDCONV_CUDA_CONV2D_H

#include <cstdint>
#include <string>
#include <vector>

#include "../layer_shape.h"
#include "../packed_view.h"
#include "column_plan.h"
#include "device_limits.h"
#include "paper_plan.h"

namespace packedconv {

enum class CudaKernel {
  column,   // lane = output column, weights staged in shared memory
  paper,    // Algorithm 1
  general,  // any layer, input read from global memory
};

struct CudaPlan {
  CudaKernel kernel;
  packedconv_layer_shape shape;
  DeviceLimits limits;
  ColumnPlan column;  // of the column kernel
  PaperPlan paper;    // of the paper and the general kernel
  std::string why;    // one sentence: why this kernel and this tile
  // What the kernel reads of the weight, to be copied to the device, 16-byte aligned.
  std::vector<std::uint32_t> table;
};

// All of these check shape, words and offsets against one another. They throw
// std::invalid_argument when they do not fit (a weight that was changed after packing), and
// std::length_error for a layer that the kernels' 32-bit numbers do not reach.

// The column kernel where a tile of it fits the device, otherwise the general one.
CudaPlan plan_column(const packedconv_layer_shape& shape, const PackedView& weight,
                     const DeviceLimits& limits);
// As above, with the configuration given. Throws std::invalid_argument when its tile does not fit.
CudaPlan plan_column(const packedconv_layer_shape& shape, const PackedView& weight,
                     const DeviceLimits& limits, const ColumnConfig& config);
// The paper's kernel with a mapping. Throws std::invalid_argument when no block of its tile
// fits the device.
CudaPlan plan_paper(const packedconv_layer_shape& shape, const PackedView& weight,
                    const DeviceLimits& limits, const MappingConfig& mapping);
CudaPlan plan_general(const packedconv_layer_shape& shape, const PackedView& weight,
                      const DeviceLimits& limits);

// Launches on `device` and `stream` (a cudaStream_t) and returns without waiting. All
// pointers are device memory; output overlaps nothing. Throws std::runtime_error with what
// CUDA said about the launch.
void launch_conv2d(const CudaPlan& plan, int device, void* stream, const float* input,
                   const packedconv_strides& input_strides, const std::uint32_t* table,
                   const float* bias, bool relu, float* output,
                   const packedconv_strides& output_strides);

}  // namespace packedconv

#endif
