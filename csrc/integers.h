// Integer division that rounds up.
#ifndef PACKEDCONV_INTEGERS_H
#define PACKEDCONV_INTEGERS_H

#include <cstdint>

namespace packedconv {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

}  // namespace packedconv

#endif
