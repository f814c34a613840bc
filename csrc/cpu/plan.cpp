#include "plan.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "../integers.h"
#include "../weight_check.h"
#include "decoded_weight.h"
#include "geometry.h"
#include "isa.h"
#include "naive.h"
#include "parallel.h"
#include "schedule.h"
#include "tiles.h"
#include "workspace.h"

namespace packedconv {
namespace {

// Items that one thread begins with; others take from it when theirs are done.
struct alignas(64) Share {
  std::atomic<std::int64_t> next;
  std::int64_t end;
};

// Whether tiles are scaled (kernel.h): as long as nothing tiny is met, not; as long as nothing
// too large is met, all; or not, whatever is met.
enum class Scaling { until_tiny, all, never };

// What a thread knows from one item to the next.
struct ThreadState {
  std::int64_t filled = -1;  // the strip whose input is in memory
  Scaling scaling = Scaling::until_tiny;
  bool tiny = false;  // whether that strip has tiny numbers
  char* filled_once = nullptr;  // where tiles are filled once: whether they have been
};

bool is_tiny(const Magnitudes& magnitudes) { return magnitudes.least < kTinyMagnitude; }

Magnitudes magnitudes_of(const float* values, std::int64_t count) {
  Magnitudes found{~0u, 0u};
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffffu;
    if (bits > 0) found.least = std::min(found.least, bits);
    found.most = std::max(found.most, bits);
  }
  return found;
}

double byte_count(std::int64_t floats) { return 4.0 * static_cast<double>(floats); }

}  // namespace

struct CpuPlan::State {
  // What a call is about.
  struct Call {
    const float* input;
    packedconv_strides input_strides;
    const float* bias;
    bool relu;
    float* output;
    packedconv_strides output_strides;
    Magnitudes bias_magnitudes;
    CpuOmissions omitted;
    char* filled_once;  // of each thread, where the fill is omitted
  };
  // An item is a slice of the output channels of a group, for a strip of tiles.
  struct Item {
    std::int64_t group, strip_index, first_tile, tiles, first_channel, channels;
    bool last_slice;
  };

  packedconv_layer_shape shape;
  const Isa* isa;
  CpuSchedule schedule;
  CpuPlanFacts facts;
  Geometry geometry;
  // For the naive path, which decodes where it computes.
  std::vector<std::uint32_t> words, offsets;
  PackedView view;
  DecodedWeight weight;
  std::int64_t strips = 0, slices = 0;
  std::vector<std::vector<std::int64_t>> slice_begins;  // of each group
  void (*compute)(const TileWork&) = nullptr;
  void (*compute_first)(const TileWork&) = nullptr;  // the tile of a row that comes first
  MemoryCounts counts{};
  std::size_t thread_bytes = 0;

  bool naive() const { return schedule.path == CpuPath::naive; }
  bool fills_blocks() const { return copies_blocks(geometry, schedule, slices); }
  std::int64_t items() const {
    return naive() ? shape.batch * shape.out_channels : shape.groups * strips * slices;
  }

  int workers(int threads) const {
    return static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(threads, items())));
  }
  std::size_t workspace_bytes(int workers) const {
    return (sizeof(Share) + thread_bytes) * static_cast<std::size_t>(workers);
  }

  void set_naive(const PackedView& packed);
  void set_tiles(const PackedView& packed, int threads);
  Item find_item(std::int64_t index) const;
  ChannelRange block(std::int64_t index) const;
  // The first channel of the item's group.
  const float* group_input(const Item& item, const Call& call) const {
    return call.input + item.group * geometry.channels * call.input_strides.channel;
  }
  void fetch(PrefetchWork* prefetch, const ThreadMemory& memory, const Call& call,
             const Item& item, ChannelRange channels, std::int64_t tile,
             std::int64_t steps) const;
  bool fill(const Item& item, ChannelRange channels, std::int64_t tile, std::int64_t count,
            const ThreadMemory& memory, ThreadState* thread, const Call& call) const;
  bool compute_tile(TileWork* work, const Item& item, std::int64_t tile, std::int64_t place,
                    const ThreadMemory& memory, ThreadState* thread, const Call& call) const;
  bool try_item(const Item& item, const ThreadMemory& memory, ThreadState* thread,
                const Call& call) const;
  void compute_item(std::int64_t index, const ThreadMemory& memory, ThreadState* thread,
                    const Call& call) const;
  void run(const Call& call, int workers, char* memory) const;
};

void CpuPlan::State::set_naive(const PackedView& packed) {
  words.assign(packed.words, packed.words + packed.word_count);
  offsets.assign(packed.offsets, packed.offsets + packed.offset_count);
  view = packed;
  view.words = words.data();
  view.offsets = offsets.data();
  facts.pieces_per_tile = facts.slices = 1;
  facts.lanes_used = 1.0;
  facts.plan_bytes = 4 * (packed.word_count + packed.offset_count);
}

void CpuPlan::State::set_tiles(const PackedView& packed, int threads) {
  const bool aligned = schedule.path == CpuPath::aligned;
  geometry = make_geometry(shape, isa->lanes, schedule.rows, schedule.vectors, aligned);
  schedule.block_channels = std::min(schedule.block_channels, geometry.most_block());
  schedule.strip = geometry.carries
                       ? geometry.column_blocks
                       : std::min(schedule.strip, std::max<std::int64_t>(1, geometry.tiles));
  strips = ceil_div(geometry.tiles, schedule.strip);
  const TileKernel& kernel = *find_kernel(*isa, schedule.rows, schedule.vectors);
  compute = !aligned           ? kernel.loose
            : geometry.carries ? kernel.carrying
                               : kernel.aligned;
  compute_first = geometry.edge_floats > 0 ? kernel.edged : compute;
  weight = decode_weight(packed, shape, geometry, schedule.block_channels);

  const std::int64_t channels = shape.out_channels / shape.groups;
  const std::int64_t unsliced = std::max<std::int64_t>(1, shape.groups * strips);
  slices = std::min(channels, ceil_div(wanted_items(threads), unsliced));
  std::int64_t most = 0;
  for (std::int64_t group = 0; group < shape.groups; ++group) {
    slice_begins.push_back(cut_slices(weight, group * channels, channels, slices));
    for (std::int64_t k = 0; k < slices; ++k)
      most = std::max(most, slice_begins.back()[k + 1] - slice_begins.back()[k]);
  }
  counts.tiles = fills_blocks() ? 1 : tiles_at_once(geometry, schedule);
  counts.in_channels = fills_blocks() ? schedule.block_channels : geometry.channels;
  counts.sums_floats =
      weight.blocks > 1 ? most * schedule.rows * schedule.vectors * isa->lanes : 0;
  counts.carry_floats =
      geometry.carries ? weight.blocks * most * geometry.shifts() * kCarryFloats : 0;
  counts.bias_floats = most;
  ThreadMemory counted;
  thread_bytes = cut_memory(nullptr, geometry, counts, &counted);

  facts.pieces_per_tile = geometry.pieces_per_tile;
  facts.lanes_used = geometry.lanes_used();
  facts.tile_bytes = 4 * schedule.block_channels * geometry.channel_rows *
                     geometry.row_step;
  facts.slices = slices;
  facts.plan_bytes = weight.bytes();
  facts.workspace_bytes = static_cast<std::int64_t>(thread_bytes);
}

CpuPlan::State::Item CpuPlan::State::find_item(std::int64_t index) const {
  Item item;
  const std::int64_t slice = index % slices;
  item.strip_index = index / slices;
  item.group = item.strip_index / strips;
  item.first_tile = item.strip_index % strips * schedule.strip;
  item.tiles = std::min(schedule.strip, geometry.tiles - item.first_tile);
  const std::vector<std::int64_t>& begins = slice_begins[static_cast<std::size_t>(item.group)];
  item.first_channel = begins[static_cast<std::size_t>(slice)];
  item.channels = begins[static_cast<std::size_t>(slice) + 1] - item.first_channel;
  item.last_slice = slice + 1 == slices;
  return item;
}

ChannelRange CpuPlan::State::block(std::int64_t index) const {
  const std::int64_t first = index * schedule.block_channels;
  return {first, std::min(schedule.block_channels, geometry.channels - first)};
}

// Asks for the input of the tiles from `tile` on, as many as are copied at once, during the
// next `steps` output channels.
void CpuPlan::State::fetch(PrefetchWork* prefetch, const ThreadMemory& memory, const Call& call,
                           const Item& item, ChannelRange channels, std::int64_t tile,
                           std::int64_t steps) const {
  *prefetch = PrefetchWork{};
  if (!schedule.prefetch || call.omitted.fill || tile >= geometry.tiles) return;
  *prefetch = next_rows(memory, geometry, shape, group_input(item, call), call.input_strides,
                        channels, tile, std::min(counts.tiles, geometry.tiles - tile));
  prefetch->per_channel = ceil_div(prefetch->count * prefetch->lines, steps);
}

// Copies `count` tiles from `tile` on. False when what it met does not go with the scaling.
bool CpuPlan::State::fill(const Item& item, ChannelRange channels, std::int64_t tile,
                          std::int64_t count, const ThreadMemory& memory, ThreadState* thread,
                          const Call& call) const {
  if (thread->filled_once != nullptr) {
    if (*thread->filled_once) return true;
    *thread->filled_once = 1;
  }
  const bool scaled = thread->scaling == Scaling::all;
  const Magnitudes found = fill_tiles(memory, geometry, *isa, shape, group_input(item, call),
                                      call.input_strides, channels, scaled, tile, count);
  thread->tiny = thread->tiny || is_tiny(found);
  if (scaled) return found.most < kScaleLimit;
  return !(thread->scaling == Scaling::until_tiny && is_tiny(found));
}

// Tile `tile` of the strip, whose copy is that at `place` in memory. False as `fill`.
bool CpuPlan::State::compute_tile(TileWork* work, const Item& item, std::int64_t tile,
                                  std::int64_t place, const ThreadMemory& memory,
                                  ThreadState* thread, const Call& call) const {
  const std::int64_t index = item.first_tile + tile;
  const bool scaled = thread->scaling == Scaling::all;
  const float* bias = call.bias == nullptr ? nullptr : call.bias + item.first_channel;
  if (scaled && bias != nullptr) {
    isa->scale(memory.bias, bias, item.channels);
    bias = memory.bias;
  }
  place_tile(work, memory, geometry, shape, call.output_strides, schedule.stream, index);
  if (call.omitted.stores) {
    work->whole = memory.stage;
    work->whole_row_step = geometry.vectors * geometry.lanes;
    work->run = nullptr;
    work->channel_stride = 0;
    work->stream = false;
  }
  work->scaled = scaled;
  work->first_of_row = tile + 1 == item.tiles;
  for (std::int64_t b = 0; b < weight.blocks; ++b) {
    const ChannelRange channels = block(b);
    work->tile = memory.tiles + place * geometry.tile_floats(counts.in_channels);
    work->edges = memory.edges;
    if (fills_blocks()) {
      if (!fill(item, channels, index, 1, memory, thread, call)) return false;
      const bool last = b + 1 == weight.blocks;
      fetch(work->prefetch, memory, call, item, block(last ? 0 : b + 1),
            !last ? index : tile > 0 ? index - 1 : item.first_tile + 2 * item.tiles - 1,
            item.channels);
    } else {
      work->tile += channels.first * geometry.channel_floats();
      work->edges += channels.first * geometry.channel_rows * geometry.edge_floats;
    }
    work->starts = weight.channel_starts(b, item.first_channel);
    work->carry = memory.carry + b * item.channels * geometry.shifts() * kCarryFloats;
    work->sums_before = b == 0 ? nullptr : memory.sums;
    work->sums_after = b + 1 == weight.blocks ? nullptr : memory.sums;
    work->bias = b == 0 ? bias : nullptr;
    (work->first_of_row ? compute_first : compute)(*work);
  }
  return true;
}

// With the thread's scaling; false as `fill`, and then part of the output is not right yet.
bool CpuPlan::State::try_item(const Item& item, const ThreadMemory& memory, ThreadState* thread,
                              const Call& call) const {
  PrefetchWork prefetch{};
  TileWork work{};
  work.row_step = geometry.flat ? geometry.vectors * geometry.lanes : geometry.row_step;
  work.nonzeros = weight.nonzeros.data();
  work.words = weight.words.data();
  work.shifts = geometry.shifts();
  work.edge_floats = geometry.edge_floats;
  work.channels = item.channels;
  work.relu = call.relu;
  work.output = call.output + item.first_channel * call.output_strides.channel;
  work.channel_stride = call.output_strides.channel;
  work.column_stride = call.output_strides.column;
  work.prefetch = &prefetch;
  // From the right, since a tile may need the sums of the one beside it.
  for (std::int64_t end = item.tiles; end > 0; end -= counts.tiles) {
    const std::int64_t begin = std::max<std::int64_t>(0, end - counts.tiles);
    const bool all = end - begin == item.tiles;
    if (!fills_blocks() && !(all && thread->filled == item.strip_index)) {
      thread->filled = -1;
      if (!fill(item, {0, geometry.channels}, item.first_tile + begin, end - begin, memory,
                thread, call))
        return false;
      if (all) thread->filled = item.strip_index;
    }
    if (!fills_blocks() && all && item.last_slice)
      fetch(&prefetch, memory, call, item, {0, geometry.channels},
            item.first_tile + schedule.strip, item.tiles * weight.blocks * item.channels);
    for (std::int64_t tile = end - 1; tile >= begin; --tile)
      if (!compute_tile(&work, item, tile, fills_blocks() ? 0 : tile - begin, memory, thread,
                        call))
        return false;
  }
  return true;
}

void CpuPlan::State::compute_item(std::int64_t index, const ThreadMemory& memory,
                                  ThreadState* thread, const Call& call) const {
  const Item item = find_item(index);
  if (item.channels == 0) return;
  if (thread->filled != item.strip_index) {
    // What the strip before it needed, this one is likely to need.
    const bool scale = is_tiny(call.bias_magnitudes) || thread->tiny;
    thread->scaling = call.bias_magnitudes.most >= kScaleLimit ? Scaling::never
                      : scale                                  ? Scaling::all
                                                               : Scaling::until_tiny;
    thread->tiny = false;
  }
  while (!try_item(item, memory, thread, call)) {
    thread->scaling = thread->scaling == Scaling::until_tiny ? Scaling::all : Scaling::never;
    thread->filled = -1;
  }
}

CpuPlan::CpuPlan(const packedconv_layer_shape& shape, const PackedView& weight, int threads,
                 const CpuSchedule* schedule) {
  check_weight(shape, weight);
  auto state = std::make_unique<State>();
  State& s = *state;
  s.shape = shape;
  s.isa = &selected_isa();
  threads = std::max(1, threads);
  if (schedule != nullptr) {
    check_schedule(*schedule, *s.isa, shape);
    s.schedule = schedule->path == CpuPath::naive ? naive_schedule(shape) : *schedule;
  } else {
    s.schedule =
        list_schedules(*s.isa, shape, static_cast<double>(weight.word_count), threads).front();
  }
  s.facts.isa = s.isa->name;
  s.facts.lanes = s.isa->lanes;
  const std::int64_t pixels = shape.batch * shape.out_height * shape.out_width;
  s.facts.flop = 2.0 * static_cast<double>(weight.word_count) * static_cast<double>(pixels);
  s.facts.bytes =
      byte_count(shape.batch * shape.in_channels * shape.in_height * shape.in_width) +
      byte_count(shape.out_channels * pixels) + byte_count(weight.word_count + weight.offset_count);
  if (s.naive())
    s.set_naive(weight);
  else
    s.set_tiles(weight, threads);
  s.facts.items = s.items();
  s.facts.why = explain(s.schedule, *s.isa, shape, s.geometry, s.counts.tiles);
  state_ = std::move(state);
}

CpuPlan::~CpuPlan() = default;

// In memory of workspace_bytes(workers).
void CpuPlan::State::run(const Call& call, int workers, char* memory) const {
  const std::int64_t count = items();
  Share* const shares = reinterpret_cast<Share*>(memory);
  for (int i = 0; i < workers; ++i)
    new (&shares[i]) Share{{count * i / workers}, count * (i + 1) / workers};
  char* const threads_memory = memory + sizeof(Share) * static_cast<std::size_t>(workers);

  parallel(workers, [&](int index) {
    ThreadMemory parts{};
    if (!naive())
      cut_memory(threads_memory + thread_bytes * static_cast<std::size_t>(index), geometry, counts,
                 &parts);
    ThreadState thread;
    if (call.omitted.fill) thread.filled_once = call.filled_once + index;
    for (int i = 0; i < workers; ++i) {
      Share& share = shares[(index + i) % workers];
      for (;;) {
        const std::int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= share.end) break;
        if (naive())
          naive_channel(shape, call.input, call.input_strides, view, call.bias, call.relu,
                        call.output, call.output_strides, item / shape.out_channels,
                        item % shape.out_channels);
        else
          compute_item(item, parts, &thread, call);
      }
    }
    isa->finish();
  });
}

void CpuPlan::execute(const float* input, const packedconv_strides& input_strides,
                      const float* bias, bool relu, float* output,
                      const packedconv_strides& output_strides, int threads) const {
  const State& s = *state_;
  if (s.items() == 0) return;
  const int workers = s.workers(threads);
  const Workspace workspace(s.workspace_bytes(workers));
  s.run({input, input_strides, bias, relu, output, output_strides,
         magnitudes_of(bias, bias == nullptr ? 0 : s.shape.out_channels),
         CpuOmissions{false, false}, nullptr},
        workers, workspace.data());
}

const CpuSchedule& CpuPlan::schedule() const { return state_->schedule; }
const CpuPlanFacts& CpuPlan::facts() const { return state_->facts; }

struct CpuPartialExecution::Memory {
  Memory(int worker_count, std::size_t bytes)
      : workers(worker_count),
        workspace(bytes),
        filled_once(static_cast<std::size_t>(worker_count), 0) {
    // What no fill ever reaches must not be slow to compute with.
    std::memset(workspace.data(), 0, bytes);
  }

  int workers;
  Workspace workspace;
  std::vector<char> filled_once;
};

CpuPartialExecution::CpuPartialExecution(const CpuPlan& plan, int threads,
                                         const CpuOmissions& omitted)
    : plan_(plan), omitted_(omitted) {
  const CpuPlan::State& s = *plan.state_;
  if (s.naive())
    throw std::invalid_argument("plan: expected one with tiles, got path naive; give a schedule");
  const int workers = s.workers(threads);
  memory_ = std::make_unique<Memory>(workers, s.workspace_bytes(workers));
}

CpuPartialExecution::~CpuPartialExecution() = default;

void CpuPartialExecution::execute(const float* input, const packedconv_strides& input_strides,
                                  float* output, const packedconv_strides& output_strides) {
  const CpuPlan::State& s = *plan_.state_;
  if (s.items() == 0) return;
  s.run({input, input_strides, nullptr, false, output, output_strides, magnitudes_of(nullptr, 0),
         omitted_, memory_->filled_once.data()},
        memory_->workers, memory_->workspace.data());
}

std::vector<CpuSchedule> cpu_schedules(const packedconv_layer_shape& shape,
                                       const PackedView& weight, int threads) {
  check_weight(shape, weight);
  return list_schedules(selected_isa(), shape, static_cast<double>(weight.word_count),
                        std::max(1, threads));
}

}  // namespace packedconv
