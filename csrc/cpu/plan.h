// A layer prepared for the CPU: the packed weight in the order that a kernel reads it, and
// the schedule that says how the kernel goes through the layer.
#ifndef PACKEDCONV_CPU_PLAN_H
#define PACKEDCONV_CPU_PLAN_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../layer_shape.h"
#include "../packed_view.h"

namespace packedconv {

enum class CpuPath {
  // Algorithm 1 of the paper as it stands: words decoded where they are used.
  naive,
  // Vectors loaded at any address.
  loose,
  // Vectors loaded at multiples of their size only; the sums are shifted by one pixel
  // between the kernel columns.
  aligned,
};

// How a plan computes: one that cpu_schedules lists, perhaps with single fields changed, or
// naive. All give the right output; they differ in time, and in the order of sums.
struct CpuSchedule {
  CpuPath path;
  int rows, vectors;            // output pixels held in registers: rows x vectors x lanes
  std::int64_t block_channels;  // input channels of a group summed at a time
  std::int64_t strip;           // tiles that a thread computes one after the other
  bool prefetch;                // fetch input of what comes next meanwhile
  bool stream;                  // write past the caches
};

struct CpuPlanFacts {
  std::string isa;
  int lanes;
  std::int64_t pieces_per_tile;  // images or row blocks side by side in a tile
  double lanes_used;             // computed pixels that are part of the output, 0 to 1
  std::int64_t tile_bytes;       // input that a block of channels reads of a tile
  std::int64_t items;            // of work, which threads draw
  std::int64_t slices;           // of the output channels of a group, among items
  std::int64_t plan_bytes;       // memory that the plan keeps
  std::int64_t workspace_bytes;  // of each thread, shared by all plans
  double flop;   // of the layer: 2 for each nonzero and output pixel
  double bytes;  // input, output and packed weight, once each
  std::string why;
};

class CpuPlan {
 public:
  // For `threads` threads; any number may execute it. A null schedule takes the one that
  // cpu_schedules lists first. Checks every word. Throws std::invalid_argument
  // (PACKEDCONV_ISA, a schedule or a weight that does not fit), std::length_error (a schedule
  // with tiles too large to index) and std::bad_alloc.
  CpuPlan(const packedconv_layer_shape& shape, const PackedView& weight, int threads,
          const CpuSchedule* schedule);
  ~CpuPlan();

  // output = convolution of input with the weight, plus bias (one value per output channel,
  // or null), then ReLU if asked. The same plan sums an output element in the same order
  // whatever `threads` is. Input and output must not overlap. Allocates nothing once a call with as
  // many threads has returned. Several threads may call it at once.
  // Throws std::bad_alloc.
  void execute(const float* input, const packedconv_strides& input_strides, const float* bias,
               bool relu, float* output, const packedconv_strides& output_strides,
               int threads) const;

  const CpuSchedule& schedule() const;
  const CpuPlanFacts& facts() const;

 private:
  friend class CpuPartialExecution;
  struct State;
  std::unique_ptr<const State> state_;
};

// Work that executions leave out.
struct CpuOmissions {
  // The copy of the input into tiles, and fetching it ahead. Each thread copies the first tiles
  // that it computes, once, and computes all with these.
  bool fill;
  // Writing the output. Each thread writes all its sums to one tile of its own.
  bool stores;
};

// Executions of a plan without part of their work, to measure what it takes. For nothing else:
// without `fill` the output is wrong, without `stores` it is not written.
class CpuPartialExecution {
 public:
  // On up to `threads` threads. The plan must outlive it. Throws std::invalid_argument (a naive
  // plan, which has no tiles) and std::bad_alloc.
  CpuPartialExecution(const CpuPlan& plan, int threads, const CpuOmissions& omitted);
  ~CpuPartialExecution();

  // As CpuPlan::execute, without bias and ReLU; one call at a time. Allocates nothing.
  void execute(const float* input, const packedconv_strides& input_strides, float* output,
               const packedconv_strides& output_strides);

 private:
  struct Memory;
  const CpuPlan& plan_;
  CpuOmissions omitted_;
  std::unique_ptr<Memory> memory_;
};

// What a plan of the layer may use, the fastest by estimate first.
std::vector<CpuSchedule> cpu_schedules(const packedconv_layer_shape& shape,
                                       const PackedView& weight, int threads);

}  // namespace packedconv

#endif
