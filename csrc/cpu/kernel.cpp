// The direct sparse convolution of one tile (paper equation 3).
//
// Output pixels stay in registers while the nonzeros of an output channel pass by:
// each is broadcast once and feeds rows * vectors FMAs, whose operands are contiguous
// in the tile. Built once per instruction set with PACKEDCONV_ISA and PACKEDCONV_LANES.
#include "kernel.h"

#include "fill.h"
#include "scaling.h"
#include "sums.h"
#include "vector.h"
#include "write.h"

#define PACKEDCONV_TEXT_(x) #x
#define PACKEDCONV_TEXT(x) PACKEDCONV_TEXT_(x)
#define PACKEDCONV_JOIN_(a, b) a##b
#define PACKEDCONV_JOIN(a, b) PACKEDCONV_JOIN_(a, b)

namespace packedconv {
namespace {

void finish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <int Rows, int Vectors>
PACKEDCONV_INLINE inline void end_channel(const TileWork& work, Sums<Rows, Vectors>& sums,
                                          std::int64_t channel) {
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

// What a nonzero is multiplied by: its value in all lanes, what the first pixel of the tile reads
// through it, and what the others read relative to that.
template <int Vectors>
struct LooseRows {
  typedef Nonzero Item;
  const float* tile;
  std::int64_t row_step;
  Vector value(const Nonzero* nonzero) const { return broadcast(nonzero->value); }
  const float* source(const Nonzero* nonzero) const { return tile + nonzero->offset; }
  Vector vector(const float* source, int row, int vector) const {
    return load(source + row * row_step + vector * kLanes);
  }
};
template <int Vectors>
struct AlignedRows {
  typedef NonzeroWord Item;
  const float* tile;
  Vector value(const NonzeroWord* word) const {
    return clear_bits(broadcast(float_at(word)), kOffsetMask);
  }
  const float* source(const NonzeroWord* word) const {
    // Read apart from the value: compilers would read both into a vector, and move one from there.
    asm("" : "+r"(word));
    return tile + static_cast<std::size_t>(*word & kOffsetMask) * kLanes;
  }
  Vector vector(const float* source, int row, int vector) const {
    return load_aligned(source + (row * Vectors + vector) * kLanes);
  }
};

template <int Rows, int Vectors, typename Reader>
PACKEDCONV_INLINE inline void multiply_add(Sums<Rows, Vectors>& sums, Reader reader,
                                           const typename Reader::Item* nonzero) {
  const Vector weight = reader.value(nonzero);
  const float* const source = reader.source(nonzero);
  sums.at.each([=](Vector& sum, int i) PACKEDCONV_INLINE {
    sum += weight * reader.vector(source, i / Vectors, i % Vectors);
  });
}

// Adds the products of the nonzeros from `nonzero` to `end`.
template <int Rows, int Vectors, typename Reader>
PACKEDCONV_INLINE inline void add_nonzeros(Sums<Rows, Vectors>& sums, Reader reader,
                                           const typename Reader::Item* nonzero,
                                           const typename Reader::Item* end) {
  // So few sums that each would wait for its last FMA: every second nonzero gets others.
  constexpr bool kSplit = Rows * Vectors <= kFewSums;
  if (kSplit && end - nonzero > 1) {
    Sums<Rows, Vectors> others;
    others.set(Vector{});
    for (; end - nonzero > 1; nonzero += 2) {
      multiply_add(sums, reader, nonzero);
      multiply_add(others, reader, nonzero + 1);
    }
    sums.at.add(others.at);
  }
  for (; nonzero != end; ++nonzero) multiply_add(sums, reader, nonzero);
}

template <int Rows, int Vectors>
void compute_loose(const TileWork& work) {
  constexpr std::int64_t kTile = Rows * Vectors * kLanes;
  const LooseRows<Vectors> reader{work.tile, work.row_step};
  for (std::int64_t channel = 0; channel < work.channels; ++channel) {
    Sums<Rows, Vectors> sums;
    sums.set(broadcast(work.bias ? work.bias[channel] : 0.0f));
    if (work.sums_before != nullptr) sums.add(work.sums_before + channel * kTile);
    add_nonzeros(sums, reader, work.nonzeros + work.starts[channel],
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
  const AlignedRows<Vectors> reader{work.tile};
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
    const NonzeroWord* word = work.words + *starts++;
    for (int shift = work.shifts; shift > 0; --shift) {
      const NonzeroWord* const end = work.words + *starts++;
      if (From == Right::edges) {
        for (const NonzeroWord* i = word; i != end; ++i) {
          const std::int64_t row = (*i & kOffsetMask) / Vectors;
          const float* const source = work.edges + row * edge_floats;
          const Vector weight = reader.value(i);
          edges.each([=](Vector& sum, int j) PACKEDCONV_INLINE {
            sum += weight * load(source + j * kLanes);
          });
        }
      }
      add_nonzeros(sums, reader, word, end);
      word = end;
      Shift<Vectors, From != Right::nothing> move{&first, 0, carry, Vector{}};
      if (From == Right::edges) {
        float* const kept = kept_edges;
        edges.each([=](Vector& sum, int i) PACKEDCONV_INLINE { store(sum, kept + i * kLanes); });
        edges.each([=](Vector& sum, int i) PACKEDCONV_INLINE {
          sum = load(kept + 1 + i * kLanes);
        });
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
    add_nonzeros(sums, reader, word, work.words + *starts);
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
