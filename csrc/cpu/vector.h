// Vectors of PACKEDCONV_LANES floats, in portable code but for a few instructions.
//
// Included by kernel.cpp alone, once per instruction set, hence the unnamed namespace: no other
// object may come to share what was compiled for one of them.
#ifndef PACKEDCONV_CPU_VECTOR_H
#define PACKEDCONV_CPU_VECTOR_H

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PACKEDCONV_INLINE __attribute__((always_inline))

namespace packedconv {
namespace {

constexpr int kLanes = PACKEDCONV_LANES;
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::int32_t Index __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::uint32_t Bits __attribute__((vector_size(kLanes * sizeof(float))));
// The same at any address.
typedef float LooseVector
    __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* source) {
  return *reinterpret_cast<const LooseVector*>(source);
}

inline Vector load_aligned(const float* source) {
  return *reinterpret_cast<const Vector*>(source);
}

inline void store(Vector value, float* target) {
  *reinterpret_cast<LooseVector*>(target) = value;
}

inline Vector broadcast(float value) { return value - Vector{}; }

// The float that has these bits.
inline float float_at(const std::uint32_t* bits) {
  typedef float Float __attribute__((may_alias));
  return *reinterpret_cast<const Float*>(bits);
}

// Each lane less the bits of the mask.
inline Vector clear_bits(Vector value, std::uint32_t mask) {
  return reinterpret_cast<Vector>(reinterpret_cast<Bits>(value) & ~mask);
}

// Keeps NaN, as torch.relu does: the maximum of x86 is its second operand where one is NaN.
inline Vector relu(Vector x) {
  const Vector zero{};
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, zero, x);
#elif defined(__AVX__)
  return _mm256_max_ps(zero, x);
#elif defined(__SSE__)
  return _mm_max_ps(zero, x);
#else
  return x < zero ? zero : x;
#endif
}

// Writes past the caches where the instruction set can; `target` is aligned to a vector.
inline void stream(Vector value, float* target) {
#if defined(__AVX512F__)
  _mm512_stream_ps(target, value);
#elif defined(__AVX__)
  _mm256_stream_ps(target, value);
#elif defined(__SSE__)
  _mm_stream_ps(target, value);
#else
  *reinterpret_cast<Vector*>(target) = value;
#endif
}

inline void prefetch(const char* address) { __builtin_prefetch(address, 0, 2); }

#if defined(__AVX512F__)
inline __mmask16 lane_mask(int begin, int end) {
  return static_cast<__mmask16>((1u << end) - (1u << begin));
}
#elif defined(__AVX__)
inline __m256i lane_mask(int begin, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i from_begin = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1));
  return _mm256_and_si256(from_begin, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
}
#endif

// Lanes [begin, end) of the vector at `source`, zero in the others, which are not read.
inline Vector load_lanes(const float* source, int begin, int end) {
  if (begin == 0 && end == kLanes) return load(source);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(lane_mask(begin, end), source);
#elif defined(__AVX__)
  return _mm256_maskload_ps(source, lane_mask(begin, end));
#else
  Vector value{};
  for (int lane = begin; lane < end; ++lane) value[lane] = source[lane];
  return value;
#endif
}

// Writes lanes [begin, end) of the vector at `target` and leaves the others alone.
inline void store_lanes(Vector value, float* target, int begin, int end) {
  if (begin == 0 && end == kLanes) {
    store(value, target);
    return;
  }
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(target, lane_mask(begin, end), value);
#elif defined(__AVX__)
  _mm256_maskstore_ps(target, lane_mask(begin, end), value);
#else
  for (int lane = begin; lane < end; ++lane) target[lane] = value[lane];
#endif
}

// Lane l of the result is lane index[l] of the two vectors one after the other.
inline Vector select(Vector low, Vector high, Index index) {
#if defined(__clang__)
  Vector result;
  for (int lane = 0; lane < kLanes; ++lane)
    result[lane] = index[lane] < kLanes ? low[index[lane]] : high[index[lane] - kLanes];
  return result;
#else
  return __builtin_shuffle(low, high, index);
#endif
}

// first, first + step, first + 2 * step, ...
inline Index counting(int first, int step) {
  Index index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = first + step * lane;
  return index;
}

// Lanes 1, 2, ... of `low`, and behind them lane 0 of `high`.
inline Vector next_lanes(Vector low, Vector high) {
#if defined(__AVX512F__)
  // Needs no register for an index; with a mask, since without one GCC 12 warns of its own header.
  return _mm512_castsi512_ps(_mm512_maskz_alignr_epi32(0xffff, _mm512_castps_si512(high),
                                                       _mm512_castps_si512(low), 1));
#else
  return select(low, high, counting(1, 1));
#endif
}

// Every second float from `source`, whose lanes outside [begin, end) are zero and not read.
inline Vector load_second(const float* source, int begin, int end) {
  const int first = 2 * begin, last = 2 * end - 1;
  const Vector low = load_lanes(source, first < kLanes ? first : kLanes,
                                last < kLanes ? last : kLanes);
  const Vector high = load_lanes(source + kLanes, first > kLanes ? first - kLanes : 0,
                                 last > kLanes ? last - kLanes : 0);
  return select(low, high, counting(0, 2));
}

inline Vector gather(const float* source, std::int64_t step, int begin, int end) {
  Vector value{};
  for (int lane = begin; lane < end; ++lane) value[lane] = source[lane * step];
  return value;
}

}  // namespace
}  // namespace packedconv

#endif
