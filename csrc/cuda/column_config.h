// How the column kernel maps an output tile to warps. C++14 and free of CUDA, as mapping_config.h.
#ifndef PACKEDCONV_CUDA_COLUMN_CONFIG_H
#define PACKEDCONV_CUDA_COLUMN_CONFIG_H

namespace packedconv {

struct ColumnConfig {
  int rows_per_thread;  // accumulators of a thread, one below the other
  int column_groups;    // accumulators of a thread, kWarp columns apart
  int pitch;            // floats between neighbouring rows of the tile in shared memory
  int lane_columns;     // lanes side by side; the others continue rows_per_thread rows below
  int warps;            // of a block
  int row_warps;        // warps one below the other; the rest of them split the output channels
  int buffers;          // tiles in shared memory: with 2 the next one is filled while computing
  int slices;           // output channels split over blocks, each of which fills its own tile

  static constexpr int kWarp = 32;
  static constexpr int kMaxWarps = 16;

  constexpr int tile_columns() const { return lane_columns * column_groups; }
  constexpr int lane_rows() const { return kWarp / lane_columns; }
  constexpr int tile_rows() const { return rows_per_thread * lane_rows() * row_warps; }
  constexpr int channel_warps() const { return warps / row_warps; }

  constexpr bool valid() const {
    return rows_per_thread >= 2 && column_groups >= 1 &&
           (lane_columns == 8 || lane_columns == 16 || lane_columns == kWarp) &&
           // The distance of column groups is compiled in.
           (column_groups == 1 || lane_columns == kWarp) && pitch >= tile_columns() &&
           warps >= 1 && warps <= kMaxWarps && row_warps >= 1 && warps % row_warps == 0 &&
           (buffers == 1 || buffers == 2) && slices >= 1;
  }
};

// What is compiled in: X(rows_per_thread, column_groups, pitch). The wide pitches are for wide
// kernels and strides. The narrow ones are for narrow images, where rows lie next to one
// another in a warp; rows_per_thread * pitch is 16 (16 lane columns), 8 or 24 (8) modulo 32
// banks, so that the lanes of a warp never meet in a bank.
#define PACKEDCONV_COLUMN_KERNELS(X) \
  X(8, 2, 72)                        \
  X(4, 2, 72)                        \
  X(2, 2, 72)                        \
  X(4, 2, 136)                       \
  X(8, 1, 40)                        \
  X(4, 1, 40)                        \
  X(2, 1, 40)                        \
  X(4, 1, 72)                        \
  X(2, 1, 72)                        \
  X(4, 1, 136)                       \
  X(2, 1, 136)                       \
  X(4, 1, 20)                        \
  X(2, 1, 24)                        \
  X(4, 1, 10)                        \
  X(2, 1, 20)                        \
  X(2, 1, 12)

struct ColumnKernel {
  int rows_per_thread, column_groups, pitch;
};

#define PACKEDCONV_COLUMN_ENTRY(rows, groups, pitch) {rows, groups, pitch},
constexpr ColumnKernel kColumnKernels[] = {PACKEDCONV_COLUMN_KERNELS(PACKEDCONV_COLUMN_ENTRY)};
#undef PACKEDCONV_COLUMN_ENTRY

constexpr bool is_compiled(const ColumnConfig& config) {
  for (const ColumnKernel& kernel : kColumnKernels) {
    if (kernel.rows_per_thread == config.rows_per_thread &&
        kernel.column_groups == config.column_groups && kernel.pitch == config.pitch) {
      return true;
    }
  }
  return false;
}

}  // namespace packedconv

#endif
