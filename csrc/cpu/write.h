// From sums to the output.
//
// Included by kernel.cpp alone, once per instruction set, hence the unnamed namespace: no other
// object may come to share what was compiled for one of them.
#ifndef PACKEDCONV_CPU_WRITE_H
#define PACKEDCONV_CPU_WRITE_H

#include <cstdint>

#include "kernel.h"
#include "scaling.h"
#include "sums.h"
#include "vector.h"

namespace packedconv {
namespace {

// Copies floats between places equally far into a line.
__attribute__((noinline)) void copy_run(float* target, const float* source, std::int64_t floats,
                                        bool past_caches) {
  std::int64_t i = 0;
  const std::int64_t ahead =
      reinterpret_cast<std::uintptr_t>(target) % sizeof(Vector) / sizeof(float);
  if (ahead > 0) {
    const std::int64_t head = kLanes - ahead < floats ? kLanes - ahead : floats;
    store_lanes(load(source), target, 0, static_cast<int>(head));
    i = head;
  }
  for (; i + kLanes <= floats; i += kLanes) {
    if (past_caches)
      stream(load_aligned(source + i), target + i);
    else
      store(load_aligned(source + i), target + i);
  }
  if (i < floats)
    store_lanes(load_aligned(source + i), target + i, 0, static_cast<int>(floats - i));
}

// Writes the parts of `vectors` vectors at `sums`.
void write_parts(const TileWork& work, const float* sums, int vectors, std::int64_t channel) {
  float* const output = work.output + channel * work.channel_stride;
  std::int32_t i = 0;
  for (int v = 0; v < vectors; ++v, sums += kLanes) {
    for (; i < work.part_ends[v]; ++i) {
      const StorePart& part = work.parts[i];
      float* const target = output + part.target;
      if (work.column_stride == 1) {
        store_lanes(load_aligned(sums), target, part.begin, part.end);
      } else {
        for (std::int32_t lane = part.begin; lane < part.end; ++lane)
          target[lane * work.column_stride] = sums[lane];
      }
    }
  }
}

// Where `target` of a channel's run is put together: as far into a line.
inline float* stage_of(const TileWork& work, const float* target) {
  return work.stage + reinterpret_cast<std::uintptr_t>(target) % 64 / 4;
}

// Writes sums that are in memory already.
__attribute__((noinline)) void write_kept(const TileWork& work, float* sums, int rows,
                                          int vectors, std::int64_t channel) {
  if (work.scaled) {
    for (int i = 0; i < rows * vectors; ++i)
      store(unscale(load_aligned(sums + i * kLanes)), sums + i * kLanes);
  }
  if (work.run == nullptr && work.whole == nullptr) {
    write_parts(work, sums, rows * vectors, channel);
    return;
  }
  float* const target = (work.run ? work.run : work.whole) + channel * work.channel_stride;
  float* const rows_at = work.run ? stage_of(work, target) : target;
  const std::int64_t row_step = work.run ? work.run_row_step : work.whole_row_step;
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v, sums += kLanes) {
      if (work.stream && !work.run)
        stream(load_aligned(sums), rows_at + r * row_step + v * kLanes);
      else
        store(load_aligned(sums), rows_at + r * row_step + v * kLanes);
    }
  }
  if (work.run) copy_run(target, rows_at, work.run_floats, work.stream);
}

template <int Rows, int Vectors>
PACKEDCONV_INLINE inline void write(const TileWork& work, const Sums<Rows, Vectors>& sums,
                                    std::int64_t channel) {
  if (work.scaled || (work.run == nullptr && work.whole == nullptr)) {
    // By way of memory, so that only here are sums not in registers.
    alignas(sizeof(Vector)) float kept[Rows * Vectors * kLanes];
    sums.keep(kept);
    write_kept(work, kept, Rows, Vectors, channel);
    return;
  }
  if (work.run != nullptr) {
    float* const target = work.run + channel * work.channel_stride;
    float* const stage = stage_of(work, target);
    const std::int64_t row_step = work.run_row_step;
    // The last vector of a row may reach into the next row, which comes after it.
    sums.at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      store(sum, stage + i / Vectors * row_step + i % Vectors * kLanes);
    });
    copy_run(target, stage, work.run_floats, work.stream);
    return;
  }
  float* const target = work.whole + channel * work.channel_stride;
  const std::int64_t row_step = work.whole_row_step;
  if (work.stream) {
    sums.at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      stream(sum, target + i / Vectors * row_step + i % Vectors * kLanes);
    });
  } else {
    sums.at.each([=](const Vector& sum, int i) PACKEDCONV_INLINE {
      store(sum, target + i / Vectors * row_step + i % Vectors * kLanes);
    });
  }
}

}  // namespace
}  // namespace packedconv

#endif
