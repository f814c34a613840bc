// The inner kernels, compiled once per instruction set; isa.h picks one at run time.
//
// Only plain functions and PODs may cross this header: a template or inline function
// of the standard library instantiated in a translation unit built for AVX-512 could
// be the copy that the linker keeps for all of them.
#ifndef PACKEDCONV_CPU_KERNEL_H
#define PACKEDCONV_CPU_KERNEL_H

#include <cstddef>
#include <cstdint>

namespace packedconv {

// Room for the sums that are carried at a shift, one of each row of a tile; and for the pixels
// beside the rows of a tile, at most.
constexpr int kCarryFloats = 16;
constexpr int kEdgeFloats = 16;
// Of so few sums there are two sets, since each would wait for its own multiply-adds.
constexpr int kFewSums = 8;

// A nonzero weight, decoded for one layout of the tile.
struct Nonzero {
  float value;
  std::int32_t offset;  // floats from the tile's origin to what its first output pixel reads
};

// The same in half the room, for the aligned path: the value, of which no more than FP16's digits
// are there, and in the bits below them the offset in vectors.
typedef std::uint32_t NonzeroWord;
constexpr int kOffsetBits = 13;
constexpr NonzeroWord kOffsetMask = (1u << kOffsetBits) - 1u;

// Lanes of one vector in the rows of a tile, and what of an image they show.
struct LanePart {
  std::int64_t target;              // floats from the row in the first tile to lane 0
  std::int64_t source;              // elements from the image row to lane 0, maybe outside
  std::int32_t begin, end;          // lanes to fill
  std::int32_t inside_begin, inside_end;  // of those, the ones inside the image; others are zero
  std::int32_t whole;               // vectors from here on, all of them inside, or 0
};

// Pixels on the right of the rows of the last tile in a row.
struct EdgePart {
  std::int64_t target, source;      // as of a LanePart, in the edges
  std::int32_t inside_begin, inside_end;
};

// Magnitudes of floats, as the bits without the sign: the least but zero, and the most.
struct Magnitudes {
  std::uint32_t least, most;
};

// Processors are slow with subnormal numbers. Where there are tiny ones, all are multiplied by a
// power of two for as long as they are in tiles and sums. Without tiny ones, products and sums of
// them are multiples of 2^-127, so the same with and without (unless subnormal numbers are
// flushed to zero). Below the limit there is room for the largest weights, and a million of
// them: 2^40 * 2^48 * 2^16 * 2^20 = 2^124.
constexpr int kScaleExponent = 48;
constexpr std::uint32_t kTinyMagnitude = (127u - 80u) << 23;  // 2^-80
constexpr std::uint32_t kScaleLimit = (127u + 40u) << 23;     // 2^40

// The copy of an image's rows into tiles, zero where they are outside the image.
struct FillWork {
  float* tile;
  float* edges;
  std::int64_t row_step, edge_floats;  // floats of a row in the tile and in the edges
  std::int64_t channels;
  std::int64_t channel_rows;    // rows of a channel in the tile, of all phases
  const float* source;          // row 0 of the first channel
  std::int64_t channel_stride, row_stride;
  std::int64_t step;            // elements between the sources of neighbouring lanes
  // Of each row of a channel to fill: its place in the tile, and the image row it shows, or
  // -1 for one outside.
  const std::int32_t* row_place;
  const std::int64_t* row_source;
  std::int64_t rows;
  const LanePart* parts;
  std::int64_t part_count;
  const EdgePart* edge_parts;
  std::int64_t edge_part_count;
  bool scaled;              // by 2^kScaleExponent
  Magnitudes* magnitudes;   // to which those of what is copied are added, unscaled
};

// Lanes of one vector of sums and where they go.
struct StorePart {
  std::int64_t target;  // elements from the output to where lane 0 would be
  std::int32_t begin, end;
};

// Input to fetch while a tile is computed: rows of equal length.
struct PrefetchWork {
  const char* const* rows;
  std::int64_t lines;  // of 64 bytes in a row
  std::int64_t count;  // rows
  std::int64_t next_row, next_line;
  std::int64_t per_channel;  // lines to ask for with each output channel
};

// One tile for a block of input channels and a range of output channels.
struct TileWork {
  const float* tile;
  std::int64_t row_step;  // floats between what consecutive output rows read; for the loose path
  const Nonzero* nonzeros;   // for the loose path
  const NonzeroWord* words;  // for the aligned one
  // Of each output channel and group of nonzeros, the first of its nonzeros; one more ends
  // the last. Groups come with the shift falling from `shifts` to 0.
  const std::uint32_t* starts;
  int shifts;
  // Where tiles of a row come one after the other from the right: the sums in lane 0 of the
  // rows before each shift, [channel][shift][kCarryFloats]. Those of the tile to the right are
  // shifted into this one, unless it is the first, and replaced by this one's.
  float* carry;
  bool first_of_row;
  // Of the first one, the pixels beside it.
  const float* edges;
  std::int64_t edge_floats;
  std::int64_t channels;
  // Sums of earlier blocks of channels, and where those of this one go when more follow.
  const float* sums_before;
  float* sums_after;
  const float* bias;  // for the first block: one value a channel in the range, or null
  // What follows is for the last block.
  bool scaled;  // by 2^kScaleExponent, which the output is not
  bool relu;
  bool stream;  // write past the caches
  float* output;  // of the first channel of the range
  std::int64_t channel_stride, column_stride;
  // Where all of the tile is output: its rows, contiguous each, and else null.
  float* whole;
  std::int64_t whole_row_step;
  // Where what is output of the tile is contiguous in memory, and else null: its rows without
  // a gap, `run_floats` in all, put together at `stage` first.
  float* run;
  float* stage;
  std::int64_t run_floats, run_row_step;
  const StorePart* parts;         // of the vectors of row after row
  const std::int32_t* part_ends;  // of each vector
  PrefetchWork* prefetch;         // of every block
};

// Kernels of one tile size.
struct TileKernel {
  int rows, vectors;
  void (*loose)(const TileWork& work);
  // Null where the path is not compiled, as the two after it.
  void (*aligned)(const TileWork& work);
  // Aligned, for rows of more than one tile; the second for the first of them, where there are
  // pixels beside it.
  void (*carrying)(const TileWork& work);
  void (*edged)(const TileWork& work);
};

struct Isa {
  const char* name;
  int lanes;  // floats in a vector
  const TileKernel* kernels;
  int kernel_count;
  void (*fill)(const FillWork& work);
  // Makes this thread's streamed writes visible to others; due after its last tile.
  void (*finish)();
  // Multiplies by 2^kScaleExponent.
  void (*scale)(float* target, const float* source, std::int64_t count);
  // Copies bytes between arrays that begin at multiples of 64, written past the caches.
  void (*stream_copy)(char* target, const char* source, std::size_t bytes);
  // Runs `iterations` passes of independent FMAs in registers; returns the FLOP done.
  double (*fma_burst)(std::int64_t iterations);
};

}  // namespace packedconv

#endif
