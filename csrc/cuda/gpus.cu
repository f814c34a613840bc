#include "gpus.h"

#include <cuda_runtime_api.h>

namespace packedconv {
namespace {

// False when the driver cannot say; `value` is 0 then.
bool read(int device, cudaDeviceAttr attribute, int& value) {
  value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
}

// From CUDA's number for it: 12040 is 12.4.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
  int count = 0;
  // Any error, a missing or an old driver among them, means that there is none to use.
  if (cudaGetDeviceCount(&count) == cudaSuccess) {
    for (int device = 0; device < count; ++device) {
      // Fields that every toolkit from 10.2 on has; the rest comes from attributes.
      cudaDeviceProp properties;
      int shared_per_block, shared_per_multiprocessor;
      if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
      // 0 for a GPU where no block may ask for more than the default, such as the Tegra X1.
      if (!read(device, cudaDevAttrMaxSharedMemoryPerBlockOptin, shared_per_block) ||
          shared_per_block == 0) {
        if (!read(device, cudaDevAttrMaxSharedMemoryPerBlock, shared_per_block)) continue;
      }
      if (!read(device, cudaDevAttrMaxSharedMemoryPerMultiprocessor, shared_per_multiprocessor)) {
        continue;
      }
      found.push_back({device, properties.name, properties.major, properties.minor,
                       properties.multiProcessorCount,
                       static_cast<std::int64_t>(properties.totalGlobalMem), shared_per_block,
                       shared_per_multiprocessor});
    }
  }
  // A failed question is answered here; a later launch must not be blamed for it.
  cudaGetLastError();
  return found;
}

std::string cuda_driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) cudaGetLastError();
  return version == 0 ? "" : version_text(version);
}

std::string cuda_version() { return version_text(CUDART_VERSION); }

}  // namespace packedconv
