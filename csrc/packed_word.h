/* The packed word: one nonzero weight with its indices in 32 bits (paper section 5.3).
 *
 *   bits 31:16  FP16 value
 *   bits 15:8   input channel, relative to its block of 256 channels
 *   bits  7:4   kernel column px
 *   bits  3:0   kernel row py
 *
 * Plain C, so that the CPU kernels, the CUDA kernels and other projects read the
 * same definition. FORMAT.md specifies the arrays and the file around it.
 */
#ifndef PACKEDCONV_PACKED_WORD_H
#define PACKEDCONV_PACKED_WORD_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define PACKEDCONV_INLINE static __host__ __device__ __forceinline__
#else
#define PACKEDCONV_INLINE static inline
#endif

enum {
  PACKEDCONV_BLOCK_CHANNELS = 256, /* input channels that 8 bits can tell apart */
  PACKEDCONV_MAX_KERNEL = 16       /* kernel rows or columns that 4 bits can tell apart */
};

PACKEDCONV_INLINE uint32_t packed_word_encode(uint16_t fp16, uint32_t channel, uint32_t px,
                                              uint32_t py) {
  return ((uint32_t)fp16 << 16) | (channel << 8) | (px << 4) | py;
}

PACKEDCONV_INLINE uint16_t packed_word_fp16(uint32_t word) { return (uint16_t)(word >> 16); }
PACKEDCONV_INLINE uint32_t packed_word_channel(uint32_t word) { return (word >> 8) & 0xffu; }
PACKEDCONV_INLINE uint32_t packed_word_px(uint32_t word) { return (word >> 4) & 0xfu; }
PACKEDCONV_INLINE uint32_t packed_word_py(uint32_t word) { return word & 0xfu; }

/* Exact FP16 to FP32 conversion of a finite value, subnormals included. */
PACKEDCONV_INLINE float packed_word_value(uint32_t word) {
  const uint32_t sign = word & 0x80000000u;
  const uint32_t magnitude = (word >> 16) & 0x7fffu;
  uint32_t bits;
  float value;
  if (magnitude >= 0x0400u) { /* normal: rebias the exponent from 15 to 127 */
    bits = sign | ((magnitude << 13) + ((127u - 15u) << 23));
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  value = (float)magnitude * (1.0f / 16777216.0f); /* subnormal: units of 2^-24 */
  return sign ? -value : value;
}

#endif
