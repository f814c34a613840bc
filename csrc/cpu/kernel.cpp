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

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kExponentStep = static_cast<std::uint32_t>(kScaleExponent) << 23;

// A power of two; no operation in here meets a subnormal number.
inline Bits power_of_two(int exponent) {
  return Bits{} + (static_cast<std::uint32_t>(127 + exponent) << 23);
}

// value * 2^kScaleExponent, which must be finite.
inline Vector scale(Vector value) {
  const Bits bits = reinterpret_cast<Bits>(value);
  const Bits magnitude = bits & ~kSign;
  // A subnormal number is an integer in units of 2^-149.
  Vector counted;
  for (int lane = 0; lane < kLanes; ++lane)
    counted[lane] = static_cast<float>(static_cast<std::int32_t>(magnitude[lane]));
  counted *= reinterpret_cast<Vector>(power_of_two(kScaleExponent - 149));
  const Bits scaled = magnitude < (1u << 23) ? reinterpret_cast<Bits>(counted)
                                             : magnitude + kExponentStep;
  return reinterpret_cast<Vector>(scaled | (bits & kSign));
}

// value * 2^-kScaleExponent of a finite value, rounded to nearest.
inline Vector unscale(Vector value) {
  const Bits bits = reinterpret_cast<Bits>(value);
  const Bits magnitude = bits & ~kSign;
  const Bits least = power_of_two(kScaleExponent - 126);
  // In units of 2^-149 and rounded to an integer by adding 2^23, for those that get subnormal.
  const Vector round = reinterpret_cast<Vector>(power_of_two(23));
  const Bits kept = magnitude < least ? magnitude : Bits{};
  const Vector counted = reinterpret_cast<Vector>(kept) *
                             reinterpret_cast<Vector>(power_of_two(149 - kScaleExponent)) +
                         round;
  const Bits subnormal = reinterpret_cast<Bits>(counted) - reinterpret_cast<Bits>(round);
  const Bits unscaled = magnitude < least ? subnormal : magnitude - kExponentStep;
  return reinterpret_cast<Vector>(unscaled | (bits & kSign));
}

// Magnitudes less one, so that zero is the largest of all.
struct Seen {
  Bits least, most;
};

template <bool Scaled>
inline Seen look_at(Seen seen, Vector value) {
  const Bits below = (reinterpret_cast<Bits>(value) & ~kSign) - 1u;
  seen.least = below < seen.least ? below : seen.least;
  // Only what is to be scaled may be too large.
  if (Scaled) seen.most = below + 1u > seen.most + 1u ? below : seen.most;
  return seen;
}

inline void remember(const Seen& seen, Magnitudes* magnitudes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (seen.least[lane] < magnitudes->least - 1u) magnitudes->least = seen.least[lane] + 1u;
    if (seen.most[lane] + 1u > magnitudes->most) magnitudes->most = seen.most[lane] + 1u;
  }
}

template <int Step>
PACKEDCONV_INLINE inline Vector load_part(const float* from, std::int64_t step, int begin,
                                          int end) {
  if (Step == 1) return load_lanes(from, begin, end);
  if (Step == 2) return load_second(from, begin, end);
  return gather(from, step, begin, end);
}

// What a part says is read once, and seen is handed on by value: a store could change all that is
// behind a pointer.
template <int Step, bool Scaled>
PACKEDCONV_INLINE inline Seen fill_row(const LanePart* parts, std::int64_t count,
                                       std::int64_t step, float* target, const float* source,
                                       Seen seen) {
  for (const LanePart* part = parts; part != parts + count; ++part) {
    float* const to = target + part->target;
    const std::int32_t whole = part->whole, begin = part->begin, end = part->end;
    const std::int32_t inside_begin = part->inside_begin, inside_end = part->inside_end;
    if (source == nullptr || inside_begin >= inside_end) {
      store_lanes(Vector{}, to, begin, end);
      for (std::int32_t v = 1; v < whole; ++v) store(Vector{}, to + v * kLanes);
      continue;
    }
    const float* const from = source + part->source;
    if (Step == 1 && whole > 0) {
      for (std::int32_t v = 0; v < whole; ++v) {
        const Vector value = load(from + v * kLanes);
        seen = look_at<Scaled>(seen, value);
        store(Scaled ? scale(value) : value, to + v * kLanes);
      }
    } else {
      const Vector value = load_part<Step>(from, step, inside_begin, inside_end);
      seen = look_at<Scaled>(seen, value);
      store_lanes(Scaled ? scale(value) : value, to, begin, end);
    }
  }
  return seen;
}

// The few pixels of a row one by one.
template <bool Scaled>
PACKEDCONV_INLINE inline Seen fill_edges(const EdgePart* parts, std::int64_t count,
                                         std::int64_t step, std::int64_t floats, float* target,
                                         const float* source, Seen seen) {
  for (std::int64_t i = 0; i < count; ++i) {
    const EdgePart part = parts[i];
    float* const to = target + part.target;
    if (source == nullptr || part.inside_begin >= part.inside_end) {
      for (std::int64_t j = 0; j < floats; ++j) to[j] = 0.0f;
      continue;
    }
    const float* const from = source + part.source;
    for (std::int64_t j = 0; j < floats; ++j) {
      if (j < part.inside_begin || j >= part.inside_end) {
        to[j] = 0.0f;
        continue;
      }
      const Vector value = broadcast(from[j * step]);
      seen = look_at<Scaled>(seen, value);
      to[j] = Scaled ? scale(value)[0] : from[j * step];
    }
  }
  return seen;
}

template <int Step, bool Scaled>
void fill_step(const FillWork& given) {
  // As what a part says, read once.
  const FillWork work = given;
  // Zero, less one.
  Seen seen{~Bits{}, ~Bits{}};
  for (std::int64_t channel = 0; channel < work.channels; ++channel) {
    const float* const plane = work.source + channel * work.channel_stride;
    for (std::int64_t row = 0; row < work.rows; ++row) {
      const std::int64_t place = channel * work.channel_rows + work.row_place[row];
      const std::int64_t y = work.row_source[row];
      const float* const source = y < 0 ? nullptr : plane + y * work.row_stride;
      seen = fill_row<Step, Scaled>(work.parts, work.part_count, work.step,
                                    work.tile + place * work.row_step, source, seen);
      if (work.edge_part_count > 0)
        seen = fill_edges<Scaled>(work.edge_parts, work.edge_part_count, work.step,
                                  work.edge_floats, work.edges + place * work.edge_floats, source,
                                  seen);
    }
  }
  remember(seen, work.magnitudes);
}

template <bool Scaled>
void fill_scaled(const FillWork& work) {
  if (work.step == 1)
    fill_step<1, Scaled>(work);
  else if (work.step == 2)
    fill_step<2, Scaled>(work);
  else
    fill_step<0, Scaled>(work);
}

void fill(const FillWork& work) {
  if (work.scaled)
    fill_scaled<true>(work);
  else
    fill_scaled<false>(work);
}

void scale_floats(float* target, const float* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    store_lanes(scale(load_lanes(source + i, 0, lanes)), target + i, 0, lanes);
  }
}

void finish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Vectors that compilers keep in registers: no array, since they find their way around an array
// in only some of the loops that visit one.
template <int Count>
struct Registers {
  Registers<Count - 1> before;
  Vector last;

  // Calls visit(vector, index) for each, and in the other direction.
  template <typename Visit>
  PACKEDCONV_INLINE void each(Visit visit) {
    before.each(visit);
    visit(last, Count - 1);
  }
  template <typename Visit>
  PACKEDCONV_INLINE void each(Visit visit) const {
    before.each(visit);
    visit(last, Count - 1);
  }
  template <typename Visit>
  PACKEDCONV_INLINE void each_backward(Visit& visit) {
    visit(last, Count - 1);
    before.each_backward(visit);
  }
  PACKEDCONV_INLINE void add(const Registers& other) {
    before.add(other.before);
    last += other.last;
  }
};
template <>
struct Registers<0> {
  template <typename Visit>
  PACKEDCONV_INLINE void each(Visit) const {}
  template <typename Visit>
  PACKEDCONV_INLINE void each_backward(Visit&) {}
  PACKEDCONV_INLINE void add(const Registers&) {}
};

// Of a tile, row after row.
template <int Rows, int Vectors>
struct Sums {
  Registers<Rows * Vectors> at;

  PACKEDCONV_INLINE void set(Vector value) {
    at.each([=](Vector& sum, int) PACKEDCONV_INLINE { sum = value; });
  }
  PACKEDCONV_INLINE void add(const float* source) {
    at.each([=](Vector& sum, int i) PACKEDCONV_INLINE { sum += load_aligned(source + i * kLanes); });
  }
  PACKEDCONV_INLINE void apply_relu() {
    at.each([](Vector& sum, int) PACKEDCONV_INLINE { sum = relu(sum); });
  }
  PACKEDCONV_INLINE void keep(float* target) const {
    at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      *reinterpret_cast<Vector*>(target + i * kLanes) = sum;
    });
  }
};

// Moves the rows of sums one pixel to the left. From the right comes `right[r * right_step]` into
// row r; what leaves goes to `left[r]` where it is kept.
template <int Vectors, bool Keeps>
struct Shift {
  const float* right;
  std::int64_t right_step;
  float* left;
  Vector next;

  PACKEDCONV_INLINE void operator()(Vector& sum, int i) {
    const int row = i / Vectors, vector = i % Vectors;
    if (vector == Vectors - 1) next = broadcast(right[row * right_step]);
    const Vector before = sum;
    sum = next_lanes(before, next);
    next = before;
    if (Keeps && vector == 0) left[row] = before[0];
  }
};

// Copies floats between places equally far into a line.
__attribute__((noinline)) void copy_run(float* target, const float* source, std::int64_t floats,
                                        bool past_caches) {
  std::int64_t i = 0;
  const std::int64_t ahead =
      reinterpret_cast<std::uintptr_t>(target) % sizeof(Vector) / sizeof(float);
  if (ahead > 0) {
    const std::int64_t head = kLanes - ahead < floats ? kLanes - ahead : floats;
    store_lanes(load(source), target, 0, static_cast<int>(head));
    i = head;
  }
  for (; i + kLanes <= floats; i += kLanes) {
    if (past_caches)
      stream(load_aligned(source + i), target + i);
    else
      store(load_aligned(source + i), target + i);
  }
  if (i < floats)
    store_lanes(load_aligned(source + i), target + i, 0, static_cast<int>(floats - i));
}

// Writes the parts of `vectors` vectors at `sums`.
void write_parts(const TileWork& work, const float* sums, int vectors, std::int64_t channel) {
  float* const output = work.output + channel * work.channel_stride;
  std::int32_t i = 0;
  for (int v = 0; v < vectors; ++v, sums += kLanes) {
    for (; i < work.part_ends[v]; ++i) {
      const StorePart& part = work.parts[i];
      float* const target = output + part.target;
      if (work.column_stride == 1) {
        store_lanes(load_aligned(sums), target, part.begin, part.end);
      } else {
        for (std::int32_t lane = part.begin; lane < part.end; ++lane)
          target[lane * work.column_stride] = sums[lane];
      }
    }
  }
}

// Where `target` of a channel's run is put together: as far into a line.
inline float* stage_of(const TileWork& work, const float* target) {
  return work.stage + reinterpret_cast<std::uintptr_t>(target) % 64 / 4;
}

// Writes sums that are in memory already.
__attribute__((noinline)) void write_kept(const TileWork& work, float* sums, int rows,
                                          int vectors, std::int64_t channel) {
  if (work.scaled) {
    for (int i = 0; i < rows * vectors; ++i)
      store(unscale(load_aligned(sums + i * kLanes)), sums + i * kLanes);
  }
  if (work.run == nullptr && work.whole == nullptr) {
    write_parts(work, sums, rows * vectors, channel);
    return;
  }
  float* const target = (work.run ? work.run : work.whole) + channel * work.channel_stride;
  float* const rows_at = work.run ? stage_of(work, target) : target;
  const std::int64_t row_step = work.run ? work.run_row_step : work.whole_row_step;
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v, sums += kLanes) {
      if (work.stream && !work.run)
        stream(load_aligned(sums), rows_at + r * row_step + v * kLanes);
      else
        store(load_aligned(sums), rows_at + r * row_step + v * kLanes);
    }
  }
  if (work.run) copy_run(target, rows_at, work.run_floats, work.stream);
}

template <int Rows, int Vectors>
PACKEDCONV_INLINE inline void write(const TileWork& work, const Sums<Rows, Vectors>& sums, std::int64_t channel) {
  if (work.scaled || (work.run == nullptr && work.whole == nullptr)) {
    // By way of memory, so that only here are sums not in registers.
    alignas(sizeof(Vector)) float kept[Rows * Vectors * kLanes];
    sums.keep(kept);
    write_kept(work, kept, Rows, Vectors, channel);
    return;
  }
  if (work.run != nullptr) {
    float* const target = work.run + channel * work.channel_stride;
    float* const stage = stage_of(work, target);
    const std::int64_t row_step = work.run_row_step;
    // The last vector of a row may reach into the next row, which comes after it.
    sums.at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      store(sum, stage + i / Vectors * row_step + i % Vectors * kLanes);
    });
    copy_run(target, stage, work.run_floats, work.stream);
    return;
  }
  float* const target = work.whole + channel * work.channel_stride;
  const std::int64_t row_step = work.whole_row_step;
  if (work.stream) {
    sums.at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      stream(sum, target + i / Vectors * row_step + i % Vectors * kLanes);
    });
  } else {
    sums.at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      store(sum, target + i / Vectors * row_step + i % Vectors * kLanes);
    });
  }
}

template <int Rows, int Vectors>
PACKEDCONV_INLINE inline void end_channel(const TileWork& work, Sums<Rows, Vectors>& sums, std::int64_t channel) {
  constexpr std::int64_t kTile = Rows * Vectors * kLanes;
  if (work.sums_after != nullptr) {
    sums.keep(work.sums_after + channel * kTile);
  } else {
    if (work.relu) sums.apply_relu();
    write(work, sums, channel);
  }
  PrefetchWork& next = *work.prefetch;
  for (std::int64_t i = 0; i < next.per_channel && next.next_row < next.count; ++i) {
    prefetch(next.rows[next.next_row] + 64 * next.next_line);
    if (++next.next_line == next.lines) {
      next.next_line = 0;
      ++next.next_row;
    }
  }
}

// What the vectors of a tile are read by, relative to what a nonzero's first pixel reads.
template <int Vectors>
struct LooseRows {
  std::int64_t row_step;
  Vector vector(const float* source, int row, int vector) const {
    return load(source + row * row_step + vector * kLanes);
  }
};
template <int Vectors>
struct AlignedRows {
  Vector vector(const float* source, int row, int vector) const {
    return load_aligned(source + (row * Vectors + vector) * kLanes);
  }
};

template <int Rows, int Vectors, typename Reader>
PACKEDCONV_INLINE inline void multiply_add(Sums<Rows, Vectors>& sums, Reader reader, const float* source,
                         float value) {
  const Vector weight = broadcast(value);
  sums.at.each([=](Vector& sum, int i) PACKEDCONV_INLINE {
    sum += weight * reader.vector(source, i / Vectors, i % Vectors);
  });
}

// Adds the products of the nonzeros from `nonzero` to `end`.
template <int Rows, int Vectors, typename Reader>
PACKEDCONV_INLINE inline void add_nonzeros(Sums<Rows, Vectors>& sums, Reader reader, const float* tile,
                         const Nonzero* nonzero, const Nonzero* end) {
  // So few sums that each would wait for its last FMA: every second nonzero gets others.
  constexpr bool kSplit = Rows * Vectors <= kFewSums;
  if (kSplit && end - nonzero > 1) {
    Sums<Rows, Vectors> others;
    others.set(Vector{});
    for (; end - nonzero > 1; nonzero += 2) {
      multiply_add(sums, reader, tile + nonzero[0].offset, nonzero[0].value);
      multiply_add(others, reader, tile + nonzero[1].offset, nonzero[1].value);
    }
    sums.at.add(others.at);
  }
  for (; nonzero != end; ++nonzero)
    multiply_add(sums, reader, tile + nonzero->offset, nonzero->value);
}

template <int Rows, int Vectors>
void compute_loose(const TileWork& work) {
  constexpr std::int64_t kTile = Rows * Vectors * kLanes;
  const LooseRows<Vectors> reader{work.row_step};
  for (std::int64_t channel = 0; channel < work.channels; ++channel) {
    Sums<Rows, Vectors> sums;
    sums.set(broadcast(work.bias ? work.bias[channel] : 0.0f));
    if (work.sums_before != nullptr) sums.add(work.sums_before + channel * kTile);
    add_nonzeros(sums, reader, work.tile, work.nonzeros + work.starts[channel],
                 work.nonzeros + work.starts[channel + 1]);
    end_channel(work, sums, channel);
  }
}

// Where the sums that are shifted in on the right of a tile come from.
enum class Right { nothing, tile, edges };

// Sums of one kernel column after the other, from the right: what a column's nonzeros read
// lies one pixel to the left of what the column before it read, so with the sums shifted by
// one in between, all of them read the same aligned vectors. What comes in on the right are the
// sums of the tile beside it, or of the pixels beside the last tile of a row, or of zeros.
template <int Rows, int Vectors, Right From>
void compute_aligned(const TileWork& work) {
  constexpr std::int64_t kTile = Rows * Vectors * kLanes;
  constexpr std::int64_t kRow = Vectors * kLanes;
  const AlignedRows<Vectors> reader{};
  const std::int64_t edge_floats = work.edge_floats;
  const std::uint32_t* starts = work.starts;
  float* carry = work.carry;
  for (std::int64_t channel = 0; channel < work.channels; ++channel) {
    const float first = work.bias ? work.bias[channel] : 0.0f;
    Sums<Rows, Vectors> sums;
    sums.set(broadcast(first));
    // Of the pixels beside the tile, row after row.
    Registers<kEdgeFloats / kLanes> edges;
    edges.each([=](Vector& sum, int) PACKEDCONV_INLINE { sum = broadcast(first); });
    float kept_edges[kEdgeFloats + 1];
    kept_edges[kEdgeFloats] = 0.0f;
    const Nonzero* nonzero = work.nonzeros + *starts++;
    for (int shift = work.shifts; shift > 0; --shift) {
      const Nonzero* const end = work.nonzeros + *starts++;
      if (From == Right::edges) {
        for (const Nonzero* i = nonzero; i != end; ++i) {
          const std::int64_t row = static_cast<std::uint32_t>(i->offset) / kRow;
          const float* const source = work.edges + row * edge_floats;
          const Vector weight = broadcast(i->value);
          edges.each([=](Vector& sum, int j) PACKEDCONV_INLINE {
            sum += weight * load(source + j * kLanes);
          });
        }
      }
      add_nonzeros(sums, reader, work.tile, nonzero, end);
      nonzero = end;
      Shift<Vectors, From != Right::nothing> move{&first, 0, carry, Vector{}};
      if (From == Right::edges) {
        float* const kept = kept_edges;
        edges.each([=](Vector& sum, int i) PACKEDCONV_INLINE { store(sum, kept + i * kLanes); });
        edges.each([=](Vector& sum, int i) PACKEDCONV_INLINE { sum = load(kept + 1 + i * kLanes); });
        move.right = kept_edges;
        move.right_step = edge_floats;
      }
      if (From == Right::tile && !work.first_of_row) {
        move.right = carry;
        move.right_step = 1;
      }
      sums.at.each_backward(move);
      carry += kCarryFloats;
    }
    add_nonzeros(sums, reader, work.tile, nonzero, work.nonzeros + *starts);
    if (work.sums_before != nullptr) sums.add(work.sums_before + channel * kTile);
    end_channel(work, sums, channel);
  }
}

// Loads that cross a cache line cost twice as much. Of long vectors, too many do.
constexpr bool kAligned = kLanes * sizeof(float) >= 32;

template <int Rows, int Vectors>
constexpr TileKernel tile_kernel() {
  static_assert(Rows <= kCarryFloats, "every row has a carried sum");
  static_assert(kEdgeFloats % kLanes == 0, "edges are whole vectors");
  return {Rows, Vectors, compute_loose<Rows, Vectors>,
          kAligned ? compute_aligned<Rows, Vectors, Right::nothing> : nullptr,
          kAligned ? compute_aligned<Rows, Vectors, Right::tile> : nullptr,
          kAligned ? compute_aligned<Rows, Vectors, Right::edges> : nullptr};
}

// No more sums than there are registers, beside one for the weight.
constexpr TileKernel kKernels[] = {
    tile_kernel<6, 2>(),  tile_kernel<3, 4>(), tile_kernel<12, 1>(), tile_kernel<7, 2>(),
    tile_kernel<14, 1>(), tile_kernel<7, 1>(), tile_kernel<4, 1>(),  tile_kernel<4, 2>(),
    tile_kernel<1, 1>(),
#if defined(__AVX512F__) || defined(__aarch64__)
    tile_kernel<4, 4>(),  tile_kernel<8, 2>(), tile_kernel<13, 1>(),
#endif
};

void stream_copy(char* target, const char* source, std::size_t bytes) {
  constexpr std::size_t kVector = sizeof(Vector);
  std::size_t i = 0;
  for (; i + kVector <= bytes; i += kVector)
    stream(load_aligned(reinterpret_cast<const float*>(source + i)),
           reinterpret_cast<float*>(target + i));
  for (; i < bytes; ++i) target[i] = source[i];
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
const Isa PACKEDCONV_JOIN(isa_, PACKEDCONV_ISA) = {
    PACKEDCONV_TEXT(PACKEDCONV_ISA), kLanes, kKernels,
    static_cast<int>(sizeof kKernels / sizeof kKernels[0]), fill, finish,
    scale_floats, stream_copy, fma_burst};

}  // namespace packedconv
