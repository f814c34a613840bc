// What a kernel's launch has to fit. Free of CUDA, so that plans are made and tested anywhere.
#ifndef PACKEDCONV_CUDA_DEVICE_LIMITS_H
#define PACKEDCONV_CUDA_DEVICE_LIMITS_H

#include <cstdint>

namespace packedconv {

struct DeviceLimits {
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  std::int64_t shared_per_block;           // bytes, the most that a block may ask for
  std::int64_t shared_per_multiprocessor;  // bytes

  // Copies to shared memory that do not wait for their data (cp.async).
  constexpr bool asynchronous_copies() const { return compute_capability >= 80; }
};

}  // namespace packedconv

#endif
