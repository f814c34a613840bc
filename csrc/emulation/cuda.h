// CUDA on the CPU: what the kernels' unchanged source needs, for tests without a GPU.
//
// A block's threads run as fibers, or as real threads (-DPACKEDCONV_EMULATION_THREADS, for
// ThreadSanitizer); blocks run one after another. It is stricter than a GPU:
// - A block's shared memory is a heap block of its exact size filled with NaN, so that
//   AddressSanitizer finds what lies outside and NaN shows what nobody wrote.
// - An asynchronous copy lands at its wait and not before; until then its target is NaN.
// - Every thread of a block must reach the same __syncthreads(), or all must return.
// What a GPU leaves undefined is thrown as std::runtime_error by launch.
#ifndef PACKEDCONV_EMULATION_CUDA_H
#define PACKEDCONV_EMULATION_CUDA_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "../packed_word.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

#if defined(PACKEDCONV_EMULATION_THREADS)
#define PACKEDCONV_EACH_THREAD thread_local
#else
#define PACKEDCONV_EACH_THREAD
#endif
extern PACKEDCONV_EACH_THREAD uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim, gridDim;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
};
typedef struct CUstream_st* cudaStream_t;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // nothing outlives its call
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);

// The line tells two barriers of a kernel apart, however the compiler copies its code.
void __syncthreads(int line = __builtin_LINE());

template <typename T>
T __ldg(const T* address) {
  return *address;
}

namespace packedconv {
namespace emulation {

void* shared_memory();
void start_copy(void* target, const void* source, std::size_t bytes, bool inside);
void wait_copies(std::size_t pending);
cudaError_t launch(const std::function<void()>& thread, dim3 grid, dim3 block,
                   std::size_t shared_bytes);

// Bytes of shared memory that a block may ask for from now on; at first 232448 (an H200's).
void set_shared_per_block(std::size_t bytes);

// Whether copies to shared memory land only at their wait, as from sm_80 on and at first here,
// or at once.
void set_asynchronous_copies(bool asynchronous);
bool asynchronous_copies();

}  // namespace emulation

// The same names as in cuda/platform.h, where they are explained.

template <typename T>
T* shared_memory() {
  return static_cast<T*>(emulation::shared_memory());
}

inline float high_half_to_float(unsigned word) { return packed_word_value(word); }

inline float bits_to_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline bool asynchronous_copies() { return emulation::asynchronous_copies(); }

template <int kBytes>
void start_copy(void* target, const void* source, bool inside) {
  static_assert(kBytes == 4 || kBytes == 16, "a word or four");
  emulation::start_copy(target, source, kBytes, inside);
}

void commit_copies();

template <int kPending>
void wait_copies() {
  emulation::wait_copies(kPending);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t, const Arguments&... arguments) {
  return emulation::launch([&] { kernel(arguments...); }, grid, block, shared_bytes);
}

}  // namespace packedconv

#endif
