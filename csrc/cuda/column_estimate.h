// How long a plan of the column kernel may take, to choose among plans.
#ifndef PACKEDCONV_CUDA_COLUMN_ESTIMATE_H
#define PACKEDCONV_CUDA_COLUMN_ESTIMATE_H

#include <cstdint>

#include "../layer_shape.h"
#include "column_plan.h"
#include "device_limits.h"

namespace packedconv {

// Blocks of the plan's size that share a multiprocessor.
int resident_blocks(const ColumnPlan& plan, const DeviceLimits& limits);

// Clocks of the call. An estimate from the plan alone: it only has to put plans in order.
double estimate_cycles(const packedconv_layer_shape& shape, const ColumnPlan& plan,
                       const DeviceLimits& limits, std::int64_t nonzeros);

}  // namespace packedconv

#endif
