// How the paper's kernel maps an output tile to warps (section 5.2, Algorithm 1).
// C++14 and free of CUDA, so that drawings, tests and the kernel read one definition.
#ifndef PACKEDCONV_CUDA_MAPPING_CONFIG_H
#define PACKEDCONV_CUDA_MAPPING_CONFIG_H

namespace packedconv {

struct MappingConfig {
  int col_per_warp;     // output columns of a warp: COL_PER_WARP
  int rows_per_thread;  // accumulators of a thread: R
  int warps_per_block;
  int slices;  // output channels split along grid z

  static constexpr int kWarp = 32;

  // Threads of a warp that share an output column: the step over output channels.
  constexpr int channel_lanes() const { return kWarp / col_per_warp; }
  constexpr int column(int lane) const { return lane / channel_lanes(); }
  constexpr int channel_lane(int lane) const { return lane % channel_lanes(); }

  constexpr bool valid() const {
    return (col_per_warp == 4 || col_per_warp == 8 || col_per_warp == 16 || col_per_warp == 32) &&
           (rows_per_thread == 1 || rows_per_thread == 2 || rows_per_thread == 4 ||
            rows_per_thread == 8) &&
           warps_per_block >= 1 && warps_per_block <= 32 && slices >= 1;
  }
};

// The illustration of Fig. 3: 4 columns of 8 lanes, 2 rows. The paper measures with a
// configuration that it does not report.
constexpr MappingConfig kFigure3Mapping = {4, 2, 1, 1};
static_assert(kFigure3Mapping.valid() && kFigure3Mapping.channel_lanes() == 8,
              "Fig. 3 draws groups of eight threads");

}  // namespace packedconv

#endif
