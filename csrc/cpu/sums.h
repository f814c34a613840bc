// The sums of a tile, which stay in registers.
//
// Included by kernel.cpp alone, once per instruction set, hence the unnamed namespace: no other
// object may come to share what was compiled for one of them.
#ifndef PACKEDCONV_CPU_SUMS_H
#define PACKEDCONV_CPU_SUMS_H

#include <cstdint>

#include "kernel.h"
#include "vector.h"

namespace packedconv {
namespace {

// Vectors that compilers keep in registers: no array, since they find their way around an array
// in only some of the loops that visit one.
template <int Count>
struct Registers {
  Registers<Count - 1> before;
  Vector last;

  // Calls visit(vector, index) for each, and in the other direction.
  template <typename Visit>
  PACKEDCONV_INLINE void each(Visit visit) {
    before.each(visit);
    visit(last, Count - 1);
  }
  template <typename Visit>
  PACKEDCONV_INLINE void each(Visit visit) const {
    before.each(visit);
    visit(last, Count - 1);
  }
  template <typename Visit>
  PACKEDCONV_INLINE void each_backward(Visit& visit) {
    visit(last, Count - 1);
    before.each_backward(visit);
  }
  PACKEDCONV_INLINE void add(const Registers& other) {
    before.add(other.before);
    last += other.last;
  }
};
template <>
struct Registers<0> {
  template <typename Visit>
  PACKEDCONV_INLINE void each(Visit) const {}
  template <typename Visit>
  PACKEDCONV_INLINE void each_backward(Visit&) {}
  PACKEDCONV_INLINE void add(const Registers&) {}
};

// Of a tile, row after row.
template <int Rows, int Vectors>
struct Sums {
  Registers<Rows * Vectors> at;

  PACKEDCONV_INLINE void set(Vector value) {
    at.each([=](Vector& sum, int) PACKEDCONV_INLINE { sum = value; });
  }
  PACKEDCONV_INLINE void add(const float* source) {
    at.each([=](Vector& sum, int i) PACKEDCONV_INLINE {
      sum += load_aligned(source + i * kLanes);
    });
  }
  PACKEDCONV_INLINE void apply_relu() {
    at.each([](Vector& sum, int) PACKEDCONV_INLINE { sum = relu(sum); });
  }
  PACKEDCONV_INLINE void keep(float* target) const {
    at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      *reinterpret_cast<Vector*>(target + i * kLanes) = sum;
    });
  }
};

// Moves the rows of sums one pixel to the left. From the right comes `right[r * right_step]` into
// row r; what leaves goes to `left[r]` where it is kept.
template <int Vectors, bool Keeps>
struct Shift {
  const float* right;
  std::int64_t right_step;
  float* left;
  Vector next;

  PACKEDCONV_INLINE void operator()(Vector& sum, int i) {
    const int row = i / Vectors, vector = i % Vectors;
    if (vector == Vectors - 1) next = broadcast(right[row * right_step]);
    const Vector before = sum;
    sum = next_lanes(before, next);
    next = before;
    if (Keeps && vector == 0) left[row] = before[0];
  }
};

}  // namespace
}  // namespace packedconv

#endif
