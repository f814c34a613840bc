// What the kernels need beyond C++: on a GPU from CUDA, on a CPU from the emulation. Only
// this header knows which; the kernels' source is the same for both.
#ifndef PACKEDCONV_CUDA_PLATFORM_H
#define PACKEDCONV_CUDA_PLATFORM_H

#if defined(PACKEDCONV_EMULATION)

#include "../emulation/cuda.h"

#else

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace packedconv {

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ float4 packedconv_shared_memory[];
  return reinterpret_cast<T*>(packedconv_shared_memory);
}

// Exact FP16 to FP32 conversion of bits 31:16 of a packed word, in one instruction.
__device__ __forceinline__ float high_half_to_float(unsigned word) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

__device__ __forceinline__ float bits_to_float(unsigned bits) { return __uint_as_float(bits); }

// Whether start_copy returns before its data are there: from sm_80 on.
__device__ __forceinline__ constexpr bool asynchronous_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return true;
#else
  return false;
#endif
}

// Starts a copy of `kBytes` (4 or 16) from global to shared memory, or of zeros when
// not `inside`; the source is not read then. Both addresses are multiples of kBytes. It has
// landed for this thread after wait_copies, for the block after a barrier behind that.
// Without asynchronous copies it lands at once.
template <int kBytes>
__device__ __forceinline__ void start_copy(void* target, const void* source, bool inside) {
  static_assert(kBytes == 4 || kBytes == 16, "a word or four");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
  const int bytes = inside ? kBytes : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(address), "l"(source),
               "n"(kBytes), "r"(bytes)
               : "memory");
#else
  if (kBytes == 16) {
    const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    *static_cast<float4*>(target) = inside ? __ldg(static_cast<const float4*>(source)) : zero;
  } else {
    *static_cast<float*>(target) = inside ? __ldg(static_cast<const float*>(source)) : 0.0f;
  }
#endif
}

// Closes the group of copies that this thread started since the last call.
__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most the `kPending` youngest groups of this thread may still be on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
#endif
}

#if defined(__CUDACC_RTC__)

// A compiler of device code alone launches nothing, and reads on.
template <typename... Arguments>
cudaError_t launch(Arguments...);

#else

// Launches a kernel; returns what CUDA says about the launch.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  // Above 48 KiB a kernel has to ask. It asks for all that the device allows, since what it is
  // granted holds for every thread of the process that launches it.
  if (shared_bytes > 48 * 1024) {
    int device = 0, most = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
    if (error != cudaSuccess) {
      cudaGetLastError();
      return error;
    }
  }
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

#endif

}  // namespace packedconv

#endif

#endif
