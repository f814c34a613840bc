// The copy of an image's rows into tiles.
//
// Included by kernel.cpp alone, once per instruction set, hence the unnamed namespace: no other
// object may come to share what was compiled for one of them.
#ifndef PACKEDCONV_CPU_FILL_H
#define PACKEDCONV_CPU_FILL_H

#include <cstdint>

#include "kernel.h"
#include "scaling.h"
#include "vector.h"

namespace packedconv {
namespace {

template <int Step>
PACKEDCONV_INLINE inline Vector load_part(const float* from, std::int64_t step, int begin,
                                          int end) {
  if (Step == 1) return load_lanes(from, begin, end);
  if (Step == 2) return load_second(from, begin, end);
  return gather(from, step, begin, end);
}

// What a part says is read once, and seen is handed on by value: a store could change all that is
// behind a pointer.
template <int Step, bool Scaled>
PACKEDCONV_INLINE inline Seen fill_row(const LanePart* parts, std::int64_t count,
                                       std::int64_t step, float* target, const float* source,
                                       Seen seen) {
  for (const LanePart* part = parts; part != parts + count; ++part) {
    float* const to = target + part->target;
    const std::int32_t whole = part->whole, begin = part->begin, end = part->end;
    const std::int32_t inside_begin = part->inside_begin, inside_end = part->inside_end;
    if (source == nullptr || inside_begin >= inside_end) {
      store_lanes(Vector{}, to, begin, end);
      for (std::int32_t v = 1; v < whole; ++v) store(Vector{}, to + v * kLanes);
      continue;
    }
    const float* const from = source + part->source;
    if (Step == 1 && whole > 0) {
      for (std::int32_t v = 0; v < whole; ++v) {
        const Vector value = load(from + v * kLanes);
        seen = look_at<Scaled>(seen, value);
        store(Scaled ? scale(value) : value, to + v * kLanes);
      }
    } else {
      const Vector value = load_part<Step>(from, step, inside_begin, inside_end);
      seen = look_at<Scaled>(seen, value);
      store_lanes(Scaled ? scale(value) : value, to, begin, end);
    }
  }
  return seen;
}

// The few pixels of a row one by one.
template <bool Scaled>
PACKEDCONV_INLINE inline Seen fill_edges(const EdgePart* parts, std::int64_t count,
                                         std::int64_t step, std::int64_t floats, float* target,
                                         const float* source, Seen seen) {
  for (std::int64_t i = 0; i < count; ++i) {
    const EdgePart part = parts[i];
    float* const to = target + part.target;
    if (source == nullptr || part.inside_begin >= part.inside_end) {
      for (std::int64_t j = 0; j < floats; ++j) to[j] = 0.0f;
      continue;
    }
    const float* const from = source + part.source;
    for (std::int64_t j = 0; j < floats; ++j) {
      if (j < part.inside_begin || j >= part.inside_end) {
        to[j] = 0.0f;
        continue;
      }
      const Vector value = broadcast(from[j * step]);
      seen = look_at<Scaled>(seen, value);
      to[j] = Scaled ? scale(value)[0] : from[j * step];
    }
  }
  return seen;
}

template <int Step, bool Scaled>
void fill_step(const FillWork& given) {
  // As what a part says, read once.
  const FillWork work = given;
  // Zero, less one.
  Seen seen{~Bits{}, ~Bits{}};
  for (std::int64_t channel = 0; channel < work.channels; ++channel) {
    const float* const plane = work.source + channel * work.channel_stride;
    for (std::int64_t row = 0; row < work.rows; ++row) {
      const std::int64_t place = channel * work.channel_rows + work.row_place[row];
      const std::int64_t y = work.row_source[row];
      const float* const source = y < 0 ? nullptr : plane + y * work.row_stride;
      seen = fill_row<Step, Scaled>(work.parts, work.part_count, work.step,
                                    work.tile + place * work.row_step, source, seen);
      if (work.edge_part_count > 0)
        seen = fill_edges<Scaled>(work.edge_parts, work.edge_part_count, work.step,
                                  work.edge_floats, work.edges + place * work.edge_floats, source,
                                  seen);
    }
  }
  remember(seen, work.magnitudes);
}

template <bool Scaled>
void fill_scaled(const FillWork& work) {
  if (work.step == 1)
    fill_step<1, Scaled>(work);
  else if (work.step == 2)
    fill_step<2, Scaled>(work);
  else
    fill_step<0, Scaled>(work);
}

void fill(const FillWork& work) {
  if (work.scaled)
    fill_scaled<true>(work);
  else
    fill_scaled<false>(work);
}

void scale_floats(float* target, const float* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    store_lanes(scale(load_lanes(source + i, 0, lanes)), target + i, 0, lanes);
  }
}

}  // namespace
}  // namespace packedconv

#endif
