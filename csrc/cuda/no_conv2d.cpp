// Stands in for conv2d.cu in a build without CUDA.
#include <stdexcept>

#include "conv2d.h"

namespace packedconv {

void launch_conv2d(const CudaPlan&, int, void*, const float*, const packedconv_strides&,
                   const std::uint32_t*, const float*, bool, float*, const packedconv_strides&) {
  throw std::runtime_error(
      "conv2d: this build has no CUDA kernels; build it where a CUDA compiler is found");
}

}  // namespace packedconv
