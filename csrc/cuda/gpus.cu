#include "gpus.h"

#include <cuda_runtime_api.h>

namespace packedconv {

std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
  int count = 0;
  // Any error, a missing or an old driver among them, means that there is none to use.
  if (cudaGetDeviceCount(&count) != cudaSuccess) return found;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    found.push_back({properties.name, properties.major, properties.minor,
                     properties.multiProcessorCount,
                     static_cast<std::int64_t>(properties.totalGlobalMem)});
  }
  return found;
}

std::string cuda_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace packedconv
