/* The functions of packed_word.h, which are inline there, as symbols for the tests. */
#include "../layer_shape.h"
#include "../packed_word.h"

uint32_t encode(uint16_t fp16, uint32_t channel, uint32_t px, uint32_t py) {
  return packed_word_encode(fp16, channel, px, py);
}
uint16_t fp16(uint32_t word) { return packed_word_fp16(word); }
uint32_t channel(uint32_t word) { return packed_word_channel(word); }
uint32_t px(uint32_t word) { return packed_word_px(word); }
uint32_t py(uint32_t word) { return packed_word_py(word); }
float value(uint32_t word) { return packed_word_value(word); }
