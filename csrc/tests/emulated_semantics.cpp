// Small kernels that show what the emulation promises (emulation/cuda.h), one a call:
//
//   emulated_semantics NAME
//
// prints what the kernel wrote, CUDA's name of the error, or what was thrown.
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "../cuda/platform.h"

namespace {

using packedconv::commit_copies;
using packedconv::launch;
using packedconv::shared_memory;
using packedconv::start_copy;
using packedconv::wait_copies;

constexpr int kThreads = 64;
constexpr std::size_t kSharedBytes = kThreads * sizeof(float);

__global__ void write_indices(float* output) {
  const unsigned thread =
      (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  output[block * threads + thread] = 100.0f * block + thread;
}

// Every round each thread hands its number to the one opposite, with or without the barriers
// around the reading.
__global__ void exchange(float* output, bool barrier_before, bool barrier_behind) {
  float* const shared = shared_memory<float>();
  const unsigned opposite = blockDim.x - 1 - threadIdx.x;
  float sum = 0.0f;
  for (int round = 0; round < 4; ++round) {
    shared[threadIdx.x] = 1000.0f * round + threadIdx.x;
    if (barrier_before) __syncthreads();
    sum += shared[opposite];
    if (barrier_behind) __syncthreads();
  }
  output[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// What shared memory holds at first, although the block before wrote to it.
__global__ void read_first(float* output) {
  float* const shared = shared_memory<float>();
  output[blockIdx.x * blockDim.x + threadIdx.x] = shared[threadIdx.x];
  shared[threadIdx.x] = 1.0f;
}

// Three groups of copies and one uncommitted, looked at after each wait.
__global__ void copy_groups(const float* input, float* output) {
  float* const shared = shared_memory<float>();
  const auto look = [&] {
    for (int index = 0; index < 4; ++index) *output++ = shared[index];
  };
  for (int index = 0; index < 4; ++index) {
    shared[index] = -1.0f;
    start_copy<4>(shared + index, input + index, true);
    if (index < 3) commit_copies();
  }
  look();
  wait_copies<3>();
  look();
  wait_copies<1>();
  look();
  wait_copies<0>();
  look();
  commit_copies();
  wait_copies<0>();
  look();
}

__global__ void copy_zeros(float* output) {
  float* const shared = shared_memory<float>();
  start_copy<16>(shared, nullptr, false);
  commit_copies();
  wait_copies<0>();
  for (int index = 0; index < 4; ++index) output[index] = shared[index];
}

__global__ void copy_from(const float* input, int target, int source, int bytes) {
  char* const to = shared_memory<char>() + target;
  const char* const from = reinterpret_cast<const char*>(input) + source;
  if (bytes == 4) start_copy<4>(to, from, true);
  if (bytes == 16) start_copy<16>(to, from, true);
}

__global__ void return_early(unsigned stop) {
  __syncthreads();
  if (threadIdx.x == stop && blockIdx.x == 1) return;
  __syncthreads();
}

__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void touch(int index, bool write) {
  volatile float* const shared = shared_memory<float>();
  if (threadIdx.x != 0) return;
  if (write) {
    shared[index] = 1.0f;
  } else {
    static_cast<void>(shared[index]);
  }
}

__global__ void nothing() {}

struct Memory {
  int count;
  std::unique_ptr<float[]> values;
  explicit Memory(int count) : count(count), values(new float[count]) {
    for (int index = 0; index < count; ++index) values[index] = 10.0f + index;
  }
  float* get() const { return values.get(); }
};

void print(const Memory& memory) {
  for (int index = 0; index < memory.count; ++index) std::printf("%g ", memory.values[index]);
  std::printf("\n");
}

void print(cudaError_t error) { std::printf("%s\n", cudaGetErrorName(error)); }

void run_exchange(bool barrier_before, bool barrier_behind) {
  Memory output(2 * kThreads);
  launch(exchange, 2, kThreads, kSharedBytes, nullptr, output.get(), barrier_before,
         barrier_behind);
  print(output);
}

void run_copy(int target, int source, int bytes) {
  const Memory input(8);
  print(launch(copy_from, 1, 1, 32, nullptr, input.get(), target, source, bytes));
}

void run_touch(int index, bool write) {
  print(launch(touch, 1, kThreads, kSharedBytes - 2, nullptr, index, write));
}

void launch_nothing(dim3 grid, dim3 block, std::size_t shared_bytes = 0) {
  print(launch(nothing, grid, block, shared_bytes, nullptr));
}

const std::map<std::string, std::function<void()>> kCases = {
    {"indices",
     [] {
       Memory output(2 * 1 * 3 * 4 * 2 * 3);
       launch(write_indices, dim3(2, 1, 3), dim3(4, 2, 3), 0, nullptr, output.get());
       print(output);
     }},
    {"exchange", [] { run_exchange(true, true); }},
    {"exchange without barrier before", [] { run_exchange(false, true); }},
    {"exchange without barrier behind", [] { run_exchange(true, false); }},
    {"first values",
     [] {
       Memory output(2 * kThreads);
       launch(read_first, 2, kThreads, kSharedBytes, nullptr, output.get());
       print(output);
     }},
    {"copy groups",
     [] {
       const Memory input(4);
       Memory output(20);
       launch(copy_groups, 1, 1, 16, nullptr, input.get(), output.get());
       print(output);
     }},
    {"copy zeros",
     [] {
       Memory output(4);
       launch(copy_zeros, 1, 1, 16, nullptr, output.get());
       print(output);
     }},
    {"copy", [] { run_copy(16, 16, 16); }},
    {"copy to an odd word", [] { run_copy(2, 0, 4); }},
    {"copy from an odd word", [] { run_copy(0, 4, 16); }},
    {"copy past the target", [] { run_copy(32, 0, 4); }},
    {"copy past the source", [] { run_copy(0, 32, 16); }},
    {"return early", [] { launch(return_early, 3, kThreads, 0, nullptr, 5u); }},
    {"return early, first thread", [] { launch(return_early, 3, kThreads, 0, nullptr, 0u); }},
    {"two barriers", [] { launch(two_barriers, 1, kThreads, 0, nullptr); }},
    {"read", [] { run_touch(kThreads - 2, false); }},
    {"read past the end", [] { run_touch(kThreads - 1, false); }},
    {"write past the end", [] { run_touch(kThreads - 1, true); }},
    {"write before the beginning", [] { run_touch(-1, true); }},
    {"launch of 1024 threads", [] { launch_nothing(1, 1024); }},
    {"launch of 1025 threads", [] { launch_nothing(1, 1025); }},
    {"launch of 33 x 32 threads", [] { launch_nothing(1, dim3(33, 32)); }},
    {"launch of 65 layers of threads", [] { launch_nothing(1, dim3(1, 1, 65)); }},
    {"launch of no thread", [] { launch_nothing(1, 0); }},
    {"launch of no block", [] { launch_nothing(dim3(1, 0), 1); }},
    {"launch of 2^31 blocks", [] { launch_nothing(1u << 31, 1); }},
    {"launch of 65536 rows", [] { launch_nothing(dim3(1, 65536), 1); }},
    {"launch of 65536 layers", [] { launch_nothing(dim3(1, 1, 65536), 1); }},
    {"launch of 65535 layers", [] { launch_nothing(dim3(1, 1, 65535), 1); }},
    {"launch with all shared memory", [] { launch_nothing(1, 1, 232448); }},
    {"launch with too much shared memory", [] { launch_nothing(1, 1, 232449); }},
    {"launch on a smaller device",
     [] {
       packedconv::emulation::set_shared_per_block(49152);
       launch_nothing(1, 1, 49152);
       launch_nothing(1, 1, 49153);
     }},
    {"launch after a stopped block",
     [] {
       try {
         launch(return_early, 3, kThreads, 0, nullptr, 5u);
       } catch (const std::exception&) {
       }
       run_exchange(true, true);
     }},
};

}  // namespace

int main(int count, char** arguments) {
  const auto found = kCases.find(count == 2 ? arguments[1] : "");
  if (found == kCases.end()) return 2;
  try {
    found->second();
  } catch (const std::exception& error) {
    std::printf("thrown: %s\n", error.what());
  }
  return 0;
}
