// Measured ceilings of the processor: the two roofs of a roofline.
#ifndef PACKEDCONV_CPU_CEILINGS_H
#define PACKEDCONV_CPU_CEILINGS_H

#include <cstdint>

namespace packedconv {

// FP32 multiply-adds from registers on `threads` threads for about `seconds`; FLOP/s.
double fma_peak(int threads, double seconds);

// Best of `repeats` copies of `bytes` between two arrays, split among `threads`, by memcpy and
// past the caches; bytes/s, counting each byte once read and once written.
// Throws std::bad_alloc.
double copy_bandwidth(int threads, std::int64_t bytes, int repeats);

// Asks the C library to keep freed memory for reuse instead of returning it to the
// system, so that repeated large allocations cost no page faults. False if it cannot.
bool keep_freed_memory();

}  // namespace packedconv

#endif
