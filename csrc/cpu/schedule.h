// The choice of a schedule: what a layer may use, and what is likely to be fast.
#ifndef PACKEDCONV_CPU_SCHEDULE_H
#define PACKEDCONV_CPU_SCHEDULE_H

#include <cstdint>
#include <string>
#include <vector>

#include "geometry.h"
#include "isa.h"
#include "plan.h"

namespace packedconv {

// Items that are to be there for so many threads, so that one that is held up does not hold up
// all.
std::int64_t wanted_items(int threads);

// Whether each block of input channels is copied right before it is computed, so that the copy
// stays in the first cache; not where another slice or tile wants it again.
bool copies_blocks(const Geometry& geometry, const CpuSchedule& schedule, std::int64_t slices);

// Tiles of a strip whose input is copied at once: all, where tiles do not have to follow each
// other, or as many as half of the second cache holds.
std::int64_t tiles_at_once(const Geometry& geometry, const CpuSchedule& schedule);

// Null where the instruction set has none of this size.
const TileKernel* find_kernel(const Isa& isa, int rows, int vectors);

// Throws std::invalid_argument for a schedule that the instruction set or layer does not have,
// and std::length_error for one with tiles too large to index.
void check_schedule(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape);

// Algorithm 1 as it stands.
CpuSchedule naive_schedule(const packedconv_layer_shape& shape);

// The paths with tiles that the layer may use, the fastest by estimate first; only the naive one
// where tiles would take too much memory.
std::vector<CpuSchedule> list_schedules(const Isa& isa, const packedconv_layer_shape& shape,
                                        double nonzeros, int threads);

// What the schedule means for the layer, in words. `copied`: tiles whose input is copied at once.
std::string explain(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape, const Geometry& geometry,
                    std::int64_t copied);

}  // namespace packedconv

#endif
