// Every kernel that conv2d.cu launches, instantiated without its host code, for compilers that
// know device code only (python/packedconv/evidence/nvrtc.py).
#include "../cuda/column_kernel.cuh"
#include "../cuda/general_kernel.cuh"
#include "../cuda/paper_kernel.cuh"

namespace packedconv {

#define PACKEDCONV_COLUMN(rows, groups, pitch) \
  template __global__ void column_kernel<rows, groups, pitch>(ColumnArguments);
PACKEDCONV_COLUMN_KERNELS(PACKEDCONV_COLUMN)

#define PACKEDCONV_PAPER_ARGUMENTS                                                            \
  const float* __restrict__, const std::uint32_t* __restrict__,                               \
      const std::uint32_t* __restrict__, const std::uint32_t* __restrict__,                   \
      const float* __restrict__, float* __restrict__, PaperArguments
#define PACKEDCONV_PAPER(columns, rows)                                                       \
  template __global__ void paper_kernel<columns, rows, 2>(PACKEDCONV_PAPER_ARGUMENTS);        \
  template __global__ void paper_kernel<columns, rows, 4>(PACKEDCONV_PAPER_ARGUMENTS);        \
  template __global__ void paper_kernel<columns, rows, 8>(PACKEDCONV_PAPER_ARGUMENTS);        \
  template __global__ void paper_kernel_any_shape<columns, rows>(PACKEDCONV_PAPER_ARGUMENTS);
#define PACKEDCONV_PAPER_ROWS(columns) \
  PACKEDCONV_PAPER(columns, 1)         \
  PACKEDCONV_PAPER(columns, 2)         \
  PACKEDCONV_PAPER(columns, 4)         \
  PACKEDCONV_PAPER(columns, 8)
PACKEDCONV_PAPER_ROWS(4)
PACKEDCONV_PAPER_ROWS(8)
PACKEDCONV_PAPER_ROWS(16)
PACKEDCONV_PAPER_ROWS(32)

}  // namespace packedconv
