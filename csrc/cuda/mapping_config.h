// How the paper's kernel maps an output tile to warps (section 5.2, Algorithm 1).
// C++14 and free of CUDA, so that drawings, tests and the kernel read one definition.
#ifndef PACKEDCONV_CUDA_MAPPING_CONFIG_H
#define PACKEDCONV_CUDA_MAPPING_CONFIG_H

namespace packedconv {

struct MappingConfig {
  int col_per_warp;     // output columns of a warp: COL_PER_WARP
  int rows_per_thread;  // accumulators of a thread: R
  int warps_per_block;  // side by side along the columns
  int slices;           // output channels of a group split along grid z

  static constexpr int kWarp = 32;

  // Threads of a warp that share an output column: the step over output channels.
  constexpr int channel_lanes() const { return kWarp / col_per_warp; }
  constexpr int column(int lane) const { return lane / channel_lanes(); }
  constexpr int channel_lane(int lane) const { return lane % channel_lanes(); }

  constexpr int columns() const { return col_per_warp * warps_per_block; }
  constexpr int threads() const { return kWarp * warps_per_block; }

  constexpr bool valid() const {
    return (col_per_warp == 4 || col_per_warp == 8 || col_per_warp == 16 || col_per_warp == 32) &&
           (rows_per_thread == 1 || rows_per_thread == 2 || rows_per_thread == 4 ||
            rows_per_thread == 8) &&
           warps_per_block >= 1 && warps_per_block <= 32 && slices >= 1;
  }

  // Whether the kernel is compiled for it; the number of slices is a run-time value.
  constexpr bool compiled() const {
    return valid() && (warps_per_block == 2 || warps_per_block == 4 || warps_per_block == 8);
  }
};

// The axes of the ablation. Every combination is compiled.
constexpr int kColPerWarp[] = {4, 8, 16, 32};
constexpr int kRowsPerThread[] = {1, 2, 4, 8};
constexpr int kWarpsPerBlock[] = {2, 4, 8};
constexpr int kCompiledMappings = 4 * 4 * 3;

// The i-th compiled mapping, 0 <= i < kCompiledMappings, with one slice.
constexpr MappingConfig compiled_mapping(int i) {
  return {kColPerWarp[i / 12], kRowsPerThread[i / 3 % 4], kWarpsPerBlock[i % 3], 1};
}

constexpr bool all_compiled(int count) {
  return count == 0 || (compiled_mapping(count - 1).compiled() && all_compiled(count - 1));
}
static_assert(all_compiled(kCompiledMappings), "the axes hold compiled values only");
static_assert(sizeof(kColPerWarp) / sizeof(int) == 4 && sizeof(kRowsPerThread) / sizeof(int) == 4 &&
                  sizeof(kWarpsPerBlock) / sizeof(int) == 3,
              "compiled_mapping counts through all values of the axes");

// The illustration of Fig. 3: 4 columns of 8 lanes, 2 rows. The paper measures with a
// configuration that it does not report.
constexpr MappingConfig kFigure3Mapping = {4, 2, 1, 1};
static_assert(kFigure3Mapping.valid() && kFigure3Mapping.channel_lanes() == 8,
              "Fig. 3 draws groups of eight threads");

// Used where no ablation has picked one. At 32 columns the lanes of a warp walk one list:
// weight loads are broadcasts, shared loads do not conflict, and no lane waits for a longer
// list, which gives the lowest bound. The tile costs such a warp 32 columns of shared memory
// though: 4 rows and 2 warps is the largest mapping at 32 columns that leaves an A100 three
// blocks per multiprocessor at the paper's 32 input channels (6 x 66 x 32 floats, 49.5 KiB).
constexpr MappingConfig kPaperDefaultMapping = {32, 4, 2, 1};
static_assert(kPaperDefaultMapping.compiled(), "the default has a kernel");

}  // namespace packedconv

#endif
