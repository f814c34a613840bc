// The direct sparse convolution of one tile (paper equation 3).
//
// Output pixels stay in registers while the nonzeros of an output channel pass by:
// each is broadcast once and feeds rows * vectors FMAs, whose operands are contiguous
// in the tile. Built once per instruction set with PACKEDCONV_ISA and PACKEDCONV_LANES.
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PACKEDCONV_TEXT_(x) #x
#define PACKEDCONV_TEXT(x) PACKEDCONV_TEXT_(x)
#define PACKEDCONV_JOIN_(a, b) a##b
#define PACKEDCONV_JOIN(a, b) PACKEDCONV_JOIN_(a, b)

namespace packedconv {
namespace {

constexpr int kLanes = PACKEDCONV_LANES;
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
// The same at any address: two of three kernel columns are misaligned.
typedef float LooseVector
    __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* source) {
  return *reinterpret_cast<const LooseVector*>(source);
}

inline Vector broadcast(float value) { return value - Vector{}; }

// Keeps NaN, as torch.relu does.
inline Vector relu(Vector x) {
  const Vector zero{};
  return x < zero ? zero : x;
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

void copy_rows(float* target, std::ptrdiff_t target_step, const float* source,
               std::ptrdiff_t source_step, std::int64_t rows, std::int64_t columns) {
  const std::int64_t last = columns - kLanes;
  for (std::int64_t row = 0; row < rows; ++row, target += target_step, source += source_step) {
    for (std::int64_t i = 0; i < last; i += kLanes)
      *reinterpret_cast<LooseVector*>(target + i) = load(source + i);
    // The last vector overlaps the one before it, which is cheaper than a remainder.
    *reinterpret_cast<LooseVector*>(target + last) = load(source + last);
  }
}

void finish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline void store(Vector value, float* target, std::int64_t columns, std::int64_t stride,
                  bool streamed) {
  if (columns >= kLanes && stride == 1) {
    if (streamed && reinterpret_cast<std::uintptr_t>(target) % sizeof(Vector) == 0)
      stream(value, target);
    else
      *reinterpret_cast<LooseVector*>(target) = value;
    return;
  }
  for (int lane = 0; lane < kLanes && lane < columns; ++lane) target[lane * stride] = value[lane];
}

template <int Rows, int Vectors>
void compute_tile(const TileWork& work) {
  for (std::int64_t channel = 0; channel < work.channels; ++channel) {
    Vector sum[Rows][Vectors];
    const Vector first = broadcast(work.bias ? work.bias[channel] : 0.0f);
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) sum[r][v] = first;

    const Nonzero* const end = work.nonzeros + work.starts[channel + 1];
    for (const Nonzero* nonzero = work.nonzeros + work.starts[channel]; nonzero != end; ++nonzero) {
      const Vector weight = broadcast(nonzero->value);
      const float* const source = work.tile + nonzero->offset;
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v)
          sum[r][v] += weight * load(source + r * work.row_step + v * kLanes);
    }

    float* const output = work.output + channel * work.channel_stride;
    for (int r = 0; r < Rows && r < work.rows; ++r)
      for (int v = 0; v < Vectors; ++v)
        store(work.relu ? relu(sum[r][v]) : sum[r][v],
              output + r * work.row_stride + v * kLanes * work.column_stride,
              work.columns - v * kLanes, work.column_stride, work.stream);
  }
}

void compute(const TileWork& work) {
  if (work.size.vectors == 4) return compute_tile<3, 4>(work);
  if (work.size.vectors == 2) return compute_tile<6, 2>(work);
  return compute_tile<12, 1>(work);
}

// Enough independent chains to cover FMA latency times the units, as registers allow; no
// more than compilers unroll completely, or the chains would live in memory.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kChains = 16;
#else
constexpr int kChains = 12;
#endif

double fma_burst(std::int64_t iterations) {
  // Read through volatile, so that nothing is known at compile time.
  volatile float factor_source = 0.999f, addend_source = 1e-3f;
  const Vector factor = broadcast(factor_source), addend = broadcast(addend_source);
  Vector chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = broadcast(static_cast<float>(i));
  for (std::int64_t pass = 0; pass < iterations; ++pass)
    for (int i = 0; i < kChains; ++i) chain[i] = chain[i] * factor + addend;
  Vector total{};
  for (int i = 0; i < kChains; ++i) total += chain[i];
  volatile float sink = total[0];
  (void)sink;
  return 2.0 * kChains * kLanes * static_cast<double>(iterations);
}

}  // namespace

extern const Isa PACKEDCONV_JOIN(isa_, PACKEDCONV_ISA);
const Isa PACKEDCONV_JOIN(isa_, PACKEDCONV_ISA) = {PACKEDCONV_TEXT(PACKEDCONV_ISA), kLanes,
                                                   compute, copy_rows, finish, fma_burst};

}  // namespace packedconv
