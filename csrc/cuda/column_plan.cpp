#include "column_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

#include "conv2d.h"
#include "weight_check.h"

namespace packedconv {
namespace {

constexpr std::int64_t kInt = std::numeric_limits<std::int32_t>::max();
constexpr int kUnitWords = 4;  // of the table: 16 bytes, one copy

// The estimate's view of a multiprocessor. Rough, and the same for all devices: it only has to
// put configurations in order.
constexpr double kIssueSlots = 4;           // instructions a clock
constexpr double kFillBytes = 32;           // a clock from the L2 cache
constexpr double kMemoryBytes = 12;         // a clock to and from memory
constexpr double kHiddenFill = 0.3;         // of a fill's time that is felt though it overlaps
constexpr double kHiddenWork = 0.2;         // and of the shorter of computing and storing
constexpr double kRecordInstructions = 24;  // of an output channel, beside its nonzeros and stores
constexpr double kLoadsWanted = 96;         // shared loads under way that keep the unit busy
constexpr double kLoadsOfWarp = 8;          // that a warp has under way at most
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kRegisters = 65536, kRegistersPerThread = 64;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

ColumnAxis make_axis(std::int64_t stride, std::int64_t dilation, std::int64_t kernel,
                     std::int64_t outputs) {
  ColumnAxis axis = {};
  axis.stride = static_cast<int>(stride);
  std::int64_t most = 0;
  for (std::int64_t tap = 0; tap < kernel; ++tap) {
    const int residue = static_cast<int>(tap * dilation % stride);
    int* const end = axis.residue + axis.residues;
    if (std::find(axis.residue, end, residue) == end) axis.residue[axis.residues++] = residue;
    most = std::max(most, tap * dilation / stride);
  }
  axis.per_residue = static_cast<int>(outputs + most);
  return axis;
}

// Where the tap of output 0 is stored.
int stored_index(const ColumnAxis& axis, std::int64_t dilation, std::int64_t tap) {
  const int residue = static_cast<int>(tap * dilation % axis.stride);
  const int* const found = std::find(axis.residue, axis.residue + axis.residues, residue);
  return static_cast<int>(found - axis.residue) * axis.per_residue +
         static_cast<int>(tap * dilation / axis.stride);
}

// Nonzeros of every (block of input channels, output channel), in the order of their words.
struct Lists {
  std::vector<std::uint32_t> words;        // with the channel replaced by that in the block
  std::vector<std::int64_t> begins;        // blocks * out_channels + 1
  std::int64_t out_channels;

  std::int64_t count(std::int64_t block, std::int64_t channel) const {
    const std::int64_t list = block * out_channels + channel;
    return begins[list + 1] - begins[list];
  }
};

Lists make_lists(const packedconv_layer_shape& shape, const PackedView& weight,
                 std::int64_t block_channels) {
  const std::int64_t channels = shape.in_channels / shape.groups;
  const std::int64_t blocks = divide_up(channels, block_channels);
  Lists lists;
  lists.out_channels = shape.out_channels;
  lists.begins.assign(blocks * shape.out_channels + 1, 0);
  const auto each = [&](const auto& use) {
    for (std::int64_t packed = 0; packed < weight.blocks; ++packed) {
      const std::uint32_t* const offsets = weight.offsets + packed * (shape.out_channels + 1);
      for (std::int64_t out = 0; out < shape.out_channels; ++out) {
        for (std::uint32_t index = offsets[out]; index < offsets[out + 1]; ++index) {
          const std::uint32_t word = weight.words[index];
          const std::int64_t channel =
              packed * PACKEDCONV_BLOCK_CHANNELS + packed_word_channel(word);
          const std::int64_t block = channel / block_channels;
          use(block * shape.out_channels + out, word, channel - block * block_channels);
        }
      }
    }
  };
  each([&](std::int64_t list, std::uint32_t, std::int64_t) { ++lists.begins[list + 1]; });
  std::partial_sum(lists.begins.begin(), lists.begins.end(), lists.begins.begin());
  std::vector<std::int64_t> next(lists.begins.begin(), lists.begins.end() - 1);
  lists.words.resize(lists.begins.back());
  each([&](std::int64_t list, std::uint32_t word, std::int64_t channel) {
    lists.words[next[list]++] =
        packed_word_encode(packed_word_fp16(word), static_cast<std::uint32_t>(channel),
                           packed_word_px(word), packed_word_py(word));
  });
  return lists;
}

// The output channels of a part: one slice of one group.
struct Range {
  std::int64_t begin, end;
};

Range part_channels(const packedconv_layer_shape& shape, const ColumnConfig& config, int part) {
  const std::int64_t channels = shape.out_channels / shape.groups;
  const std::int64_t group = part / config.slices, slice = part % config.slices;
  const std::int64_t per_slice = divide_up(channels, config.slices);
  const std::int64_t begin = std::min(channels, slice * per_slice);
  return {group * channels + begin,
          group * channels + std::min(channels, begin + per_slice)};
}

// The channels of chunk `chunk` of a part's.
Range chunk_channels(const Range& part, int chunks, int chunk) {
  const std::int64_t per_chunk = divide_up(part.end - part.begin, chunks);
  const std::int64_t begin = std::min(part.end, part.begin + chunk * per_chunk);
  return {begin, std::min(part.end, begin + per_chunk)};
}

std::int64_t head_words(const ColumnConfig& config) {
  return round_up(config.channel_warps() + 1, kUnitWords);
}

// Words of the segment of these channels: every list begins on a whole unit.
std::int64_t segment_words(const ColumnConfig& config, const Lists& lists, std::int64_t block,
                           const Range& channels) {
  std::int64_t words = head_words(config) + (channels.end - channels.begin) * kUnitWords;
  for (std::int64_t channel = channels.begin; channel < channels.end; ++channel) {
    words += round_up(2 * lists.count(block, channel), kUnitWords);
  }
  return words;
}

// What the many configurations that a choice goes through ask about the weight, computed once.
class Weight {
 public:
  Weight(const packedconv_layer_shape& shape, const PackedView& packed)
      : shape_(shape), packed_(packed) {
    for (std::int64_t block = 0; block < packed.blocks; ++block) {
      const std::uint32_t* const offsets = packed.offsets + block * (shape.out_channels + 1);
      nonzeros_ += offsets[shape.out_channels] - offsets[0];
    }
  }

  std::int64_t nonzeros() const { return nonzeros_; }

  const Lists& lists(std::int64_t block_channels) {
    const auto found = lists_.find(block_channels);
    if (found != lists_.end()) return found->second;
    return lists_.emplace(block_channels, make_lists(shape_, packed_, block_channels))
        .first->second;
  }

  // Words of the largest part, all its segments together.
  std::int64_t largest_part(const ColumnConfig& config, std::int64_t block_channels) {
    return largest(config, block_channels, 0);
  }

  // Words of the largest segment when the output channels of a part make `chunks`.
  std::int64_t largest_segment(const ColumnConfig& config, std::int64_t block_channels,
                               int chunks) {
    return largest(config, block_channels, chunks);
  }

 private:
  std::int64_t largest(const ColumnConfig& config, std::int64_t block_channels, int chunks) {
    const auto key =
        std::make_tuple(block_channels, config.channel_warps(), config.slices, chunks);
    const auto found = sizes_.find(key);
    if (found != sizes_.end()) return found->second;
    const Lists& lists = this->lists(block_channels);
    const std::int64_t blocks =
        divide_up(shape_.in_channels / shape_.groups, block_channels);
    std::int64_t most = 0;
    for (int part = 0; part < shape_.groups * config.slices; ++part) {
      const Range channels = part_channels(shape_, config, part);
      std::int64_t whole = 0;
      for (int chunk = 0; chunk < std::max(chunks, 1); ++chunk) {
        const Range some = chunk_channels(channels, std::max(chunks, 1), chunk);
        for (std::int64_t block = 0; block < blocks; ++block) {
          const std::int64_t words = segment_words(config, lists, block, some);
          whole += words;
          most = std::max(most, chunks == 0 ? whole : words);
        }
      }
    }
    sizes_.emplace(key, most);
    return most;
  }

  const packedconv_layer_shape& shape_;
  const PackedView& packed_;
  std::int64_t nonzeros_ = 0;
  std::map<std::int64_t, Lists> lists_;
  std::map<std::tuple<std::int64_t, int, int, int>, std::int64_t> sizes_;
};

// The geometry of the tile; block_channels and what follows from it are still open.
bool set_tile(const packedconv_layer_shape& shape, const ColumnConfig& config, ColumnPlan* plan) {
  plan->config = config;
  plan->tile_rows = config.tile_rows();
  plan->tile_columns = config.tile_columns();
  plan->lane_rows = config.lane_rows();
  plan->channel_warps = config.channel_warps();
  // Positions in the tile and in the padded image are 32-bit numbers. Summed as doubles, which do
  // not wrap.
  const auto reach = [](std::int64_t outputs, int tile, std::int64_t stride, std::int64_t kernel,
                        std::int64_t dilation, std::int64_t padding) {
    return (static_cast<double>(outputs) + tile) * static_cast<double>(stride) +
           static_cast<double>(kernel) * static_cast<double>(dilation) +
           static_cast<double>(padding) + kUnitWords;
  };
  if (reach(shape.out_height, plan->tile_rows, shape.stride_height, shape.kernel_height,
            shape.dilation_height, shape.pad_top) > kInt ||
      reach(shape.out_width, plan->tile_columns, shape.stride_width, shape.kernel_width,
            shape.dilation_width, shape.pad_left) > kInt) {
    return false;
  }
  plan->rows = make_axis(shape.stride_height, shape.dilation_height, shape.kernel_height,
                         config.tile_rows());
  plan->columns = make_axis(shape.stride_width, shape.dilation_width, shape.kernel_width,
                            config.tile_columns());
  const std::int64_t width = std::int64_t{plan->columns.residues} * plan->columns.per_residue;
  if (width > config.pitch) return false;
  // Copies of four columns want the first stored one to be a multiple of four.
  const int left = static_cast<int>((4 - shape.pad_left % 4) % 4);
  const bool align = shape.stride_width == 1 && shape.in_width % 4 == 0 &&
                     config.pitch % 4 == 0 && left + width <= config.pitch;
  plan->left = align ? left : 0;
  const std::int64_t stored = std::int64_t{plan->rows.residues} * plan->rows.per_residue;
  if (stored * config.pitch > kInt / 4) return false;
  plan->stored_rows = static_cast<int>(stored);
  plan->row_divisor =
      static_cast<std::uint32_t>(divide_up(std::int64_t{1} << 32, plan->stored_rows));
  plan->plane = plan->stored_rows * config.pitch;

  plan->group_channels = static_cast<int>(shape.in_channels / shape.groups);
  plan->in_height = static_cast<int>(shape.in_height);
  plan->in_width = static_cast<int>(shape.in_width);
  plan->out_height = static_cast<int>(shape.out_height);
  plan->out_width = static_cast<int>(shape.out_width);
  plan->pad_top = static_cast<int>(shape.pad_top);
  plan->pad_left = static_cast<int>(shape.pad_left);
  plan->row_tiles = static_cast<int>(divide_up(shape.out_height, config.tile_rows()));
  plan->column_tiles = static_cast<int>(divide_up(shape.out_width, config.tile_columns()));
  const std::int64_t parts = shape.groups * config.slices;
  const std::int64_t per_image = std::int64_t{plan->row_tiles} * plan->column_tiles;
  if (parts > kInt || shape.batch > kInt || per_image > kInt ||
      per_image * std::max<std::int64_t>(shape.batch, 1) > kInt / 2) {
    return false;
  }
  plan->parts = static_cast<int>(parts);
  plan->items = static_cast<int>(per_image * shape.batch);
  return true;
}

std::int64_t tile_words(const ColumnPlan& plan, std::int64_t channels) {
  return round_up(channels * plan.plane, kUnitWords);
}

// Blocks of a size that share a multiprocessor.
int resident_blocks(const ColumnPlan& plan, const DeviceLimits& limits) {
  constexpr std::int64_t kReserved = 1024;  // bytes of a block that the system takes, from sm_80
  const int threads = plan.config.warps * ColumnConfig::kWarp;
  const std::int64_t by_memory =
      limits.shared_per_multiprocessor / (plan.shared_bytes + kReserved);
  const std::int64_t by_threads =
      std::min(kThreadsPerMultiprocessor, kRegisters / kRegistersPerThread) / threads;
  return static_cast<int>(std::max<std::int64_t>(1, std::min(by_memory, by_threads)));
}

// Lanes of a warp that read another word of the same bank, at most: clocks of one shared load.
int bank_conflicts(const ColumnConfig& config) {
  constexpr int kBanks = 32;
  int lanes[kBanks] = {};
  for (int lane = 0; lane < ColumnConfig::kWarp; ++lane) {
    const int row = lane / config.lane_columns, column = lane % config.lane_columns;
    ++lanes[(row * config.rows_per_thread * config.pitch + column) % kBanks];
  }
  return *std::max_element(lanes, lanes + kBanks);
}

// Clocks of the call: of the items that a block computes, each what takes longest of shared
// loads (one warp a clock), instructions and the output's way to memory, and the tile's fill.
double estimate(const packedconv_layer_shape& shape, const ColumnPlan& plan,
                const DeviceLimits& limits, std::int64_t nonzeros) {
  const ColumnConfig& config = plan.config;
  const std::int64_t grid = std::int64_t{plan.grid_blocks} * plan.parts;
  // Blocks that a multiprocessor runs at once, and how often.
  const std::int64_t fitting = resident_blocks(plan, limits);
  const std::int64_t resident =
      std::min(fitting, divide_up(grid, std::int64_t{limits.multiprocessors}));
  const std::int64_t waves = divide_up(grid, limits.multiprocessors * fitting);
  const double pixels = config.rows_per_thread * config.column_groups;
  const double per_part = static_cast<double>(nonzeros) / plan.parts;
  const double channels = static_cast<double>(shape.out_channels) / plan.parts;
  // Output channels that do not divide among the warps leave some of them idle.
  const double share = channels / plan.channel_warps;
  const double imbalance = std::ceil(share) / share;
  const double loads =
      per_part * config.row_warps * (pixels * bank_conflicts(config) + 0.5) * imbalance;
  const double instructions =
      config.row_warps * imbalance *
      (per_part * (2 * pixels + 2) + channels * plan.blocks * (kRecordInstructions + 2 * pixels));
  const double under_way =
      static_cast<double>(resident * config.warps) * std::min(pixels, kLoadsOfWarp);
  const double compute = std::max(loads, instructions / kIssueSlots) *
                         std::max(1.0, kLoadsWanted / under_way);

  // Each block of input channels but the first reads the sums so far, and all write them.
  const double output = 4.0 * plan.tile_rows * plan.tile_columns * channels;
  // Runs of a row shorter than a line of 128 bytes leave more of them incomplete.
  const double runs = config.lane_columns == ColumnConfig::kWarp ? 1 : 1.2;
  const double memory = runs * output * (2 * plan.blocks - 1) / kMemoryBytes;

  // A copy for each column takes four times the instructions of a copy of four.
  const bool by_four = plan.columns.stride == 1 && plan.in_width % 4 == 0;
  double fill = 4.0 * plan.group_channels * plan.stored_rows *
                (plan.left + plan.columns.stored()) / kFillBytes * (by_four ? 1 : 2);
  if (!plan.resident) fill += 8 * per_part / kFillBytes;
  const bool hidden = resident > 1 || (config.buffers == 2 && limits.asynchronous_copies());

  const double item = std::max(compute, memory) + kHiddenWork * std::min(compute, memory) +
                      (hidden ? kHiddenFill : 1) * fill;
  // Blocks that share a multiprocessor share its clocks.
  return static_cast<double>(waves * divide_up(plan.items, plan.grid_blocks) * resident) * item;
}

// Divides input and output channels so that tile and nonzeros fit; false when they do not.
bool set_blocks(const packedconv_layer_shape& shape, const DeviceLimits& limits, Weight* weight,
                ColumnPlan* plan) {
  const ColumnConfig& config = plan->config;
  const std::int64_t words = limits.shared_per_block / 4;
  const std::int64_t part_channels = divide_up(shape.out_channels / shape.groups, config.slices);
  // A word tells no more channels apart than it does when packed.
  const int most_channels = std::min<int>(plan->group_channels, PACKEDCONV_BLOCK_CHANNELS);
  for (std::int64_t channels = most_channels; channels > 0;
       channels = channels > 1 ? divide_up(channels, 2) : 0) {
    const std::int64_t tiles = config.buffers * tile_words(*plan, channels);
    if (tiles >= words) continue;
    int chunks = 1;
    std::int64_t staged = weight->largest_part(config, channels);
    const bool resident = tiles + staged <= words;
    if (!resident) {
      staged = weight->largest_segment(config, channels, chunks);
      while (tiles + staged > words && chunks < part_channels) {
        chunks *= 2;
        staged = weight->largest_segment(config, channels, chunks);
      }
      if (tiles + staged > words) continue;
    }
    plan->block_channels = static_cast<int>(channels);
    plan->blocks = static_cast<int>(divide_up(plan->group_channels, channels));
    plan->chunks = chunks;
    plan->resident = resident;
    plan->tile_words = static_cast<int>(tile_words(*plan, channels));
    plan->weight_words = static_cast<int>(staged);
    plan->shared_bytes = 4 * (tiles + staged);
    if (std::int64_t{plan->parts} * plan->blocks * chunks > kInt / kUnitWords) return false;
    // As many blocks as the device runs at once, all parts together. One more would start when the
    // others have finished, and then take as long as they did.
    const std::int64_t wave = std::int64_t{limits.multiprocessors} * resident_blocks(*plan, limits);
    plan->grid_blocks = static_cast<int>(
        std::max<std::int64_t>(1, std::min<std::int64_t>(plan->items, wave / plan->parts)));
    plan->cycles = estimate(shape, *plan, limits, weight->nonzeros());
    return true;
  }
  return false;
}

std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Deals the channels to the warps: the longest list first, each to the warp with the least.
std::vector<std::vector<std::int64_t>> deal_channels(const ColumnConfig& config,
                                                     const Lists& lists, std::int64_t block,
                                                     const Range& channels) {
  std::vector<std::int64_t> order(channels.end - channels.begin);
  std::iota(order.begin(), order.end(), channels.begin);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return lists.count(block, a) > lists.count(block, b);
  });
  std::vector<std::vector<std::int64_t>> warps(config.channel_warps());
  std::vector<std::int64_t> load(warps.size(), 0);
  for (const std::int64_t channel : order) {
    const std::size_t warp = std::min_element(load.begin(), load.end()) - load.begin();
    warps[warp].push_back(channel);
    // An empty list costs its stores.
    load[warp] += lists.count(block, channel) + 2;
  }
  return warps;
}

void append_segment(const packedconv_layer_shape& shape, const ColumnPlan& plan,
                    const Lists& lists, std::int64_t block, const Range& channels,
                    std::vector<std::uint32_t>* table, std::uint32_t* directory) {
  const std::size_t begin = table->size();
  const std::int64_t records = head_words(plan.config);
  const std::int64_t nonzeros = records + (channels.end - channels.begin) * kUnitWords;
  table->resize(begin + segment_words(plan.config, lists, block, channels), 0);
  std::uint32_t* const segment = table->data() + begin;
  std::uint32_t record = 0, pair = 0;
  std::size_t warp = 0;
  for (const auto& dealt : deal_channels(plan.config, lists, block, channels)) {
    segment[warp++] = record;
    for (const std::int64_t channel : dealt) {
      const std::int64_t list = block * lists.out_channels + channel;
      const std::int64_t count = lists.count(block, channel);
      std::uint32_t* const entry = segment + records + record++ * kUnitWords;
      entry[0] = static_cast<std::uint32_t>(channel);
      entry[1] = pair;
      entry[2] = static_cast<std::uint32_t>(count);
      std::uint32_t* nonzero = segment + nonzeros + pair * kUnitWords;
      for (std::int64_t index = lists.begins[list]; index < lists.begins[list + 1]; ++index) {
        const std::uint32_t word = lists.words[index];
        *nonzero++ = float_bits(packed_word_value(word));
        *nonzero++ = static_cast<std::uint32_t>(
            sizeof(float) *
            (packed_word_channel(word) * plan.plane +
             stored_index(plan.rows, shape.dilation_height, packed_word_py(word)) *
                 plan.config.pitch +
             plan.left +
             stored_index(plan.columns, shape.dilation_width, packed_word_px(word))));
      }
      pair += static_cast<std::uint32_t>(divide_up(count, 2));
    }
  }
  segment[warp] = record;
  directory[0] = static_cast<std::uint32_t>(begin / kUnitWords);
  directory[1] = static_cast<std::uint32_t>(table->size() / kUnitWords);
  directory[2] = static_cast<std::uint32_t>(nonzeros / kUnitWords);
}

std::vector<std::uint32_t> make_table(const packedconv_layer_shape& shape, const ColumnPlan& plan,
                                      const Lists& lists) {
  std::vector<std::uint32_t> table(std::size_t{kUnitWords} * plan.segments(), 0);
  std::size_t segment = 0;
  for (int part = 0; part < plan.parts; ++part) {
    const Range channels = part_channels(shape, plan.config, part);
    for (int block = 0; block < plan.blocks; ++block) {
      for (int chunk = 0; chunk < plan.chunks; ++chunk, ++segment) {
        std::uint32_t entry[kUnitWords] = {};
        append_segment(shape, plan, lists, block, chunk_channels(channels, plan.chunks, chunk),
                       &table, entry);
        std::copy(entry, entry + kUnitWords, table.begin() + segment * kUnitWords);
        if (table.size() > static_cast<std::size_t>(kInt)) {
          throw std::length_error("weight: expected nonzeros that 32-bit indices reach");
        }
      }
    }
  }
  return table;
}

std::string describe(const ColumnConfig& config) {
  return std::to_string(config.rows_per_thread) + " rows and " +
         std::to_string(config.column_groups) + " column group(s) a thread, pitch " +
         std::to_string(config.pitch) + ", " + std::to_string(config.lane_columns) +
         " lane columns, " + std::to_string(config.warps) + " warps (" +
         std::to_string(config.row_warps) + " below one another), " +
         std::to_string(config.buffers) + " tile buffer(s), " + std::to_string(config.slices) +
         " slice(s)";
}

CudaPlan finish(const packedconv_layer_shape& shape, const DeviceLimits& limits, Weight* weight,
                const ColumnPlan& column, const std::string& why) {
  CudaPlan plan = {};
  plan.kernel = CudaKernel::column;
  plan.shape = shape;
  plan.limits = limits;
  plan.column = column;
  plan.why = why;
  plan.table = make_table(shape, column, weight->lists(column.block_channels));
  return plan;
}

}  // namespace

CudaPlan plan_column(const packedconv_layer_shape& shape, const PackedView& packed,
                     const DeviceLimits& limits, const ColumnConfig& config) {
  check_weight(shape, packed);
  Weight weight(shape, packed);
  if (!config.valid() || !is_compiled(config)) {
    throw std::invalid_argument("config: expected one that is compiled in (column_config.h), got " +
                                describe(config));
  }
  const std::int64_t channels = shape.out_channels / shape.groups;
  if (config.slices > channels) {
    throw std::invalid_argument("config: expected at most a slice for each of the " +
                                std::to_string(channels) + " output channels of a group, got " +
                                std::to_string(config.slices));
  }
  ColumnPlan plan = {};
  if (!set_tile(shape, config, &plan)) {
    throw std::invalid_argument("config: this layer's tile rows do not fit a pitch of " +
                                std::to_string(config.pitch) +
                                " floats, or its size 32-bit positions; take another "
                                "configuration, or leave the choice to the plan");
  }
  if (!set_blocks(shape, limits, &weight, &plan)) {
    throw std::invalid_argument(
        "config: a tile of one input channel (" + std::to_string(4 * plan.plane) +
        " bytes) and the nonzeros of one output channel do not fit the " +
        std::to_string(limits.shared_per_block) +
        " bytes of shared memory; take a smaller tile, or leave the choice to the plan");
  }
  return finish(shape, limits, &weight, plan, "as given: " + describe(config));
}

CudaPlan plan_column(const packedconv_layer_shape& shape, const PackedView& packed,
                     const DeviceLimits& limits) {
  check_weight(shape, packed);
  Weight weight(shape, packed);
  const std::int64_t group_out_channels = shape.out_channels / shape.groups;
  ColumnPlan best = {};
  bool found = false;
  for (const ColumnKernel& kernel : kColumnKernels) {
    for (const int lane_columns : {32, 16, 8}) {
      for (const int warps : {4, 8, 16}) {
        for (const int row_warps : {1, 2, 4}) {
          for (const int buffers : {1, 2}) {
            for (int slices = 1; slices <= 64 && slices <= group_out_channels; slices *= 2) {
              const ColumnConfig config = {kernel.rows_per_thread, kernel.column_groups,
                                           kernel.pitch,           lane_columns,
                                           warps,                  row_warps,
                                           buffers,                slices};
              ColumnPlan plan = {};
              if (!config.valid() || (buffers == 2 && !limits.asynchronous_copies()) ||
                  !set_tile(shape, config, &plan) ||
                  !set_blocks(shape, limits, &weight, &plan)) {
                continue;
              }
              if (!found || plan.cycles < best.cycles) best = plan;
              found = true;
            }
          }
        }
      }
    }
  }
  if (!found) {
    CudaPlan plan = plan_general(shape, packed, limits);
    plan.why = "no tile of the column kernel fits this layer on this device (" +
               std::to_string(limits.shared_per_block) + " bytes of shared memory a block)";
    return plan;
  }
  return finish(shape, limits, &weight, best,
                "least estimated time of all configurations that fit: " + describe(best.config));
}

}  // namespace packedconv
