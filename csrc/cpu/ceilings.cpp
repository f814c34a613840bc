#include "ceilings.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "isa.h"

namespace packedconv {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double fma_peak(int threads, double seconds) {
  // The processor's best, whatever PACKEDCONV_ISA says: other contenders use it too.
  const Isa& isa = *usable_isas().front();
  constexpr std::int64_t kIterations = 1 << 14;
  double flops = 0.0;
  std::chrono::steady_clock::time_point start;
#pragma omp parallel num_threads(threads) reduction(+ : flops)
  {
#pragma omp barrier
#pragma omp master
    start = std::chrono::steady_clock::now();
#pragma omp barrier
    while (seconds_since(start) < seconds) flops += isa.fma_burst(kIterations);
  }
  return flops / seconds_since(start);
}

double copy_bandwidth(int threads, std::int64_t bytes, int repeats) {
  const std::size_t count = static_cast<std::size_t>(bytes);
  const std::unique_ptr<char[]> source(new char[count]);
  const std::unique_ptr<char[]> target(new char[count]);
  double best = 0.0;
  // The first pass touches the pages on the threads that use them and is not timed.
  for (int repeat = -1; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
    {
      const std::size_t share = (count + omp_get_num_threads() - 1) / omp_get_num_threads();
      const std::size_t begin = std::min(count, share * omp_get_thread_num());
      const std::size_t length = std::min(count - begin, share);
      if (repeat < 0) std::memset(source.get() + begin, 1, length);
      std::memcpy(target.get() + begin, source.get() + begin, length);
    }
    if (repeat >= 0) best = std::max(best, 2.0 * static_cast<double>(bytes) / seconds_since(start));
  }
  return best;
}

bool keep_freed_memory() {
#if defined(__GLIBC__)
  // mmap is switched off altogether, since its threshold cannot be set above 32 MiB.
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

}  // namespace packedconv
