/* The shape of one convolution call, shared by the kernels of every device. Plain C. */
#ifndef PACKEDCONV_LAYER_SHAPE_H
#define PACKEDCONV_LAYER_SHAPE_H

#include <stdint.h>

/* Distances in elements between neighbours along each axis of an NCHW image batch. */
typedef struct {
  int64_t batch, channel, row, column;
} packedconv_strides;

/* Padding below and to the right is implied: whatever an output pixel reads past the
 * image is zero, so only the offset of the first pixel is needed. */
typedef struct {
  int64_t batch;
  int64_t in_channels, out_channels, groups;
  int64_t in_height, in_width;
  int64_t out_height, out_width;
  int64_t kernel_height, kernel_width;
  int64_t stride_height, stride_width;
  int64_t dilation_height, dilation_width;
  int64_t pad_top, pad_left;
} packedconv_layer_shape;

#endif
