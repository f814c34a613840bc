#include "conv2d.h"

#include <stdexcept>
#include <string>

#include "column_kernel.cuh"
#include "general_kernel.cuh"
#include "paper_kernel.cuh"
#include "platform.h"

namespace packedconv {
namespace {

void require(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  // Said here; a later launch must not be blamed for it.
  cudaGetLastError();
  throw std::runtime_error("conv2d: " + what + ": CUDA says \"" + cudaGetErrorString(error) +
                           "\"");
}

std::string launch_failure(cudaError_t error) {
  const std::string failure = "the kernel was not launched";
  switch (error) {
    case cudaErrorInvalidResourceHandle:
      return failure + " (is the stream of another device?)";
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
      return failure + " (was the plan made for another device?)";
    default:
      return failure + " (the cause may be earlier work on this device)";
  }
}

// Makes `device` the current one for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    require(cudaGetDevice(&before_), "no CUDA device to run on (see what nvidia-smi says)");
    changed_ = before_ != device;
    if (changed_) require(cudaSetDevice(device), "no such device");
  }
  ~CurrentDevice() {
    if (changed_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace

void launch_conv2d(const CudaPlan& plan, int device, void* stream, const float* input,
                   const packedconv_strides& input_strides, const std::uint32_t* table,
                   const float* bias, bool relu, float* output,
                   const packedconv_strides& output_strides) {
  const packedconv_layer_shape& shape = plan.shape;
  if (shape.batch == 0 || shape.out_channels == 0 || shape.out_height == 0 ||
      shape.out_width == 0) {
    return;
  }
  const CurrentDevice current(device);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaErrorInvalidValue;
  switch (plan.kernel) {
    case CudaKernel::column:
      error = launch_column(plan.column, on, input, input_strides, table, bias, relu, output,
                            output_strides);
      break;
    case CudaKernel::paper:
      error = launch_paper(plan, on, input, input_strides, table, bias, relu, output,
                           output_strides);
      break;
    case CudaKernel::general:
      error = launch_general(plan, on, input, input_strides, table, bias, relu, output,
                             output_strides);
      break;
  }
  if (error != cudaSuccess) require(error, launch_failure(error));
}

}  // namespace packedconv
