// NVIDIA GPUs that the driver shows. Without CUDA types, so that any compiler reads it.
#ifndef PACKEDCONV_CUDA_GPUS_H
#define PACKEDCONV_CUDA_GPUS_H

#include <cstdint>
#include <string>
#include <vector>

namespace packedconv {

struct Gpu {
  int index;  // by which CUDA knows it
  std::string name;
  int compute_major, compute_minor;
  int multiprocessors;
  std::int64_t memory_bytes;
  // Bytes of shared memory: the most that one block may ask for, and of a multiprocessor.
  std::int64_t shared_per_block;
  std::int64_t shared_per_multiprocessor;
};

// Empty without a GPU, without a driver, and in a build without CUDA; never throws for these.
std::vector<Gpu> gpus();

// Newest CUDA that the driver supports, such as "12.4"; empty without a driver, and in a build
// without CUDA.
std::string cuda_driver_version();

// Version of the CUDA toolkit compiled with, such as "13.0"; empty in a build without.
std::string cuda_version();

}  // namespace packedconv

#endif
