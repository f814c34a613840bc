// The inner kernel, compiled once per instruction set; isa.h picks one at run time.
//
// Only plain functions and PODs may cross this header: a template or inline function
// of the standard library instantiated in a translation unit built for AVX-512 could
// be the copy that the linker keeps for all of them.
#ifndef PACKEDCONV_CPU_KERNEL_H
#define PACKEDCONV_CPU_KERNEL_H

#include <cstddef>
#include <cstdint>

namespace packedconv {

// A nonzero weight, decoded for one tile layout.
struct Nonzero {
  float value;
  std::int32_t offset;  // floats from the tile's origin to the input of output pixel (0, 0)
};

// Output pixels computed at once per output channel, all held in registers.
struct TileSize {
  int rows;
  int vectors;  // along a row, each of Isa::lanes pixels
};

// One tile of one image for a range of output channels.
struct TileWork {
  TileSize size;
  const float* tile;         // zero-padded copy of the input, all channels of the group
  std::ptrdiff_t row_step;   // floats between the tile rows of consecutive output rows
  const Nonzero* nonzeros;   // of all output channels
  const std::uint32_t* starts;  // first nonzero of each channel in the range, and one more
  std::int64_t channels;
  const float* bias;  // one value a channel in the range, or null
  bool relu;
  bool stream;  // write past the caches, for outputs that they would not keep anyway
  float* output;  // pixel (0, 0) of the tile in the first channel of the range
  std::int64_t channel_stride, row_stride, column_stride;
  std::int64_t rows, columns;  // of the tile that lie inside the output
};

struct Isa {
  const char* name;
  int lanes;  // floats in a vector
  void (*compute)(const TileWork& work);
  // Copies `rows` rows of `columns` >= lanes floats between arrays that do not overlap.
  void (*copy_rows)(float* target, std::ptrdiff_t target_step, const float* source,
                    std::ptrdiff_t source_step, std::int64_t rows, std::int64_t columns);
  // Makes this thread's streamed writes visible to others; due after its compute.
  void (*finish)();
  // Runs `iterations` passes of independent FMAs in registers; returns the FLOP done.
  double (*fma_burst)(std::int64_t iterations);
};

}  // namespace packedconv

#endif
