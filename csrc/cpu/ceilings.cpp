#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "isa.h"
#include "parallel.h"

namespace packedconv {
namespace {

constexpr std::size_t kLine = 64;

char* line_start(char* memory) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(memory);
  return memory + (kLine - address % kLine) % kLine;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double fma_peak(int threads, double seconds) {
  threads = std::max(1, threads);
  // The processor's best, whatever PACKEDCONV_ISA says: other contenders use it too.
  const Isa& isa = *usable_isas().front();
  constexpr std::int64_t kIterations = 1 << 14;
  std::vector<double> flops(static_cast<std::size_t>(threads), 0.0);
  const auto start = std::chrono::steady_clock::now();
  parallel(threads, [&](int index) {
    double done = 0.0;
    while (seconds_since(start) < seconds) done += isa.fma_burst(kIterations);
    flops[static_cast<std::size_t>(index)] = done;
  });
  return std::accumulate(flops.begin(), flops.end(), 0.0) / seconds_since(start);
}

double copy_bandwidth(int threads, std::int64_t bytes, int repeats) {
  threads = std::max(1, threads);
  const Isa& isa = *usable_isas().front();
  const std::size_t count = static_cast<std::size_t>(bytes);
  const std::unique_ptr<char[]> source(new char[count + kLine]);
  const std::unique_ptr<char[]> target(new char[count + kLine]);
  char* const from = line_start(source.get());
  char* const to = line_start(target.get());
  const std::size_t share = (count / static_cast<std::size_t>(threads) + kLine) / kLine * kLine;
  double best = 0.0;
  // The first pass touches the pages and is not timed.
  for (int repeat = -1; repeat < repeats; ++repeat) {
    for (const bool past_caches : {false, true}) {
      std::atomic<std::size_t> next(0);
      const auto start = std::chrono::steady_clock::now();
      parallel(threads, [&](int) {
        for (std::size_t begin; (begin = next.fetch_add(share)) < count;) {
          const std::size_t length = std::min(count - begin, share);
          if (repeat < 0) std::memset(from + begin, 1, length);
          if (past_caches)
            isa.stream_copy(to + begin, from + begin, length);
          else
            std::memcpy(to + begin, from + begin, length);
        }
        isa.finish();
      });
      if (repeat >= 0)
        best = std::max(best, 2.0 * static_cast<double>(bytes) / seconds_since(start));
    }
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
