// Tiny numbers, and their scaling by a power of two (kernel.h).
//
// Included by kernel.cpp alone, once per instruction set, hence the unnamed namespace: no other
// object may come to share what was compiled for one of them.
#ifndef PACKEDCONV_CPU_SCALING_H
#define PACKEDCONV_CPU_SCALING_H

#include <cstdint>

#include "kernel.h"
#include "vector.h"

namespace packedconv {
namespace {

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kExponentStep = static_cast<std::uint32_t>(kScaleExponent) << 23;

// A power of two; no operation in here meets a subnormal number.
inline Bits power_of_two(int exponent) {
  return Bits{} + (static_cast<std::uint32_t>(127 + exponent) << 23);
}

// value * 2^kScaleExponent, which must be finite.
inline Vector scale(Vector value) {
  const Bits bits = reinterpret_cast<Bits>(value);
  const Bits magnitude = bits & ~kSign;
  // A subnormal number is an integer in units of 2^-149.
  Vector counted;
  for (int lane = 0; lane < kLanes; ++lane)
    counted[lane] = static_cast<float>(static_cast<std::int32_t>(magnitude[lane]));
  counted *= reinterpret_cast<Vector>(power_of_two(kScaleExponent - 149));
  const Bits scaled = magnitude < (1u << 23) ? reinterpret_cast<Bits>(counted)
                                             : magnitude + kExponentStep;
  return reinterpret_cast<Vector>(scaled | (bits & kSign));
}

// value * 2^-kScaleExponent of a finite value, rounded to nearest.
inline Vector unscale(Vector value) {
  const Bits bits = reinterpret_cast<Bits>(value);
  const Bits magnitude = bits & ~kSign;
  const Bits least = power_of_two(kScaleExponent - 126);
  // In units of 2^-149 and rounded to an integer by adding 2^23, for those that get subnormal.
  const Vector round = reinterpret_cast<Vector>(power_of_two(23));
  const Bits kept = magnitude < least ? magnitude : Bits{};
  const Vector counted = reinterpret_cast<Vector>(kept) *
                             reinterpret_cast<Vector>(power_of_two(149 - kScaleExponent)) +
                         round;
  const Bits subnormal = reinterpret_cast<Bits>(counted) - reinterpret_cast<Bits>(round);
  const Bits unscaled = magnitude < least ? subnormal : magnitude - kExponentStep;
  return reinterpret_cast<Vector>(unscaled | (bits & kSign));
}

// Magnitudes less one, so that zero is the largest of all.
struct Seen {
  Bits least, most;
};

template <bool Scaled>
inline Seen look_at(Seen seen, Vector value) {
  const Bits below = (reinterpret_cast<Bits>(value) & ~kSign) - 1u;
  seen.least = below < seen.least ? below : seen.least;
  // Only what is to be scaled may be too large.
  if (Scaled) seen.most = below + 1u > seen.most + 1u ? below : seen.most;
  return seen;
}

inline void remember(const Seen& seen, Magnitudes* magnitudes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (seen.least[lane] < magnitudes->least - 1u) magnitudes->least = seen.least[lane] + 1u;
    if (seen.most[lane] + 1u > magnitudes->most) magnitudes->most = seen.most[lane] + 1u;
  }
}

}  // namespace
}  // namespace packedconv

#endif
