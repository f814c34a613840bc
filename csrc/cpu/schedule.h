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

// Bytes of the caches of one core; common values where the system does not tell.
struct CacheSizes {
  std::int64_t l1, l2;
};
CacheSizes cache_sizes();

// Tiles of a strip whose input is copied at once: all, where tiles do not have to follow each
// other, or as many as half of the second cache holds.
std::int64_t tiles_at_once(const Geometry& geometry, const CpuSchedule& schedule);

// Null where the instruction set has none of this size.
const TileKernel* find_kernel(const Isa& isa, int rows, int vectors);

// Throws std::invalid_argument for a schedule that the instruction set or layer does not have.
void check_schedule(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape);

// Cycles that the layer takes on as many cores, as far as the schedule decides it.
double estimate_cycles(const CpuSchedule& schedule, const Isa& isa,
                       const packedconv_layer_shape& shape, double nonzeros, int threads);

// All that the layer may use, the fastest by estimate first.
std::vector<CpuSchedule> list_schedules(const Isa& isa, const packedconv_layer_shape& shape,
                                        double nonzeros, int threads);

// Why the first of them is first, in words.
std::string explain(const CpuSchedule& schedule, const Isa& isa,
                    const packedconv_layer_shape& shape, const Geometry& geometry);

}  // namespace packedconv

#endif
