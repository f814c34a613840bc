#include "tiles.h"

#include <algorithm>

#include "../integers.h"

namespace packedconv {
namespace {

// What a piece shows of its image.
struct Piece {
  std::int64_t image, row_block;
  std::int64_t first_row, first_column;  // of the output
  std::int64_t rows, columns;            // inside the output
};

Piece find_piece(const Geometry& g, std::int64_t index) {
  Piece piece;
  piece.first_column = index % g.column_blocks * g.piece_columns;
  index /= g.column_blocks;
  piece.row_block = index % g.row_blocks;
  piece.image = index / g.row_blocks;
  piece.first_row = piece.row_block * g.tile_rows;
  piece.rows = std::min(g.tile_rows, g.out_rows - piece.first_row);
  piece.columns = std::min(g.piece_columns, g.out_columns - piece.first_column);
  return piece;
}

// Pixels of an image in a row: all of them when it is flat and they follow each other.
struct Rows {
  std::int64_t width, row_step;
};

Rows flat_rows(std::int64_t height, std::int64_t width, const packedconv_strides& strides) {
  if (height == 1 || strides.row == width * strides.column) return {height * width, 0};
  return {width, strides.row};
}

// The lanes [begin, end), cut at multiples of a vector.
template <typename Each>
void for_vectors(int lanes, std::int64_t begin, std::int64_t end, Each each) {
  while (begin < end) {
    const std::int64_t vector = begin / lanes;
    const std::int64_t stop = std::min(end, (vector + 1) * lanes);
    each(vector, static_cast<std::int32_t>(begin - vector * lanes),
         static_cast<std::int32_t>(stop - vector * lanes));
    begin = stop;
  }
}

class Filler {
 public:
  Filler(const ThreadMemory& memory, const Geometry& geometry, const packedconv_layer_shape& shape,
         const packedconv_strides& strides)
      : memory_(memory), g_(geometry), s_(shape), strides_(strides) {
    const bool same = s_.stride_height == 1 && s_.stride_width == 1 && s_.pad_top == 0 &&
                      s_.pad_left == 0 && s_.out_height == s_.in_height &&
                      s_.out_width == s_.in_width;
    flat_width_ = same ? flat_rows(s_.in_height, s_.in_width, strides).width : s_.out_width;
    in_width_ = same && flat_width_ > s_.out_width ? flat_width_ : s_.in_width;
  }

  // Appends the lanes of a piece that start at `lane`, up to `end`, in the tile at `tile`
  // floats from the first.
  void add(const Piece& piece, std::int64_t tile, std::int64_t lane, std::int64_t end) {
    for (int p = 0; p < g_.column_axis.phases; ++p) {
      const std::int64_t phase = p * g_.row_axis.phases * g_.row_axis.length;
      const std::int64_t target = tile + phase * g_.row_step;
      if (g_.flat) {
        add_flat(piece, target, lane, end);
        continue;
      }
      const std::int64_t left =
          piece.first_column * s_.stride_width - s_.pad_left + g_.column_axis.phase[p];
      add_lanes(target, lane, end, left - lane * s_.stride_width, 0, s_.in_width, true);
      if (g_.edge_floats > 0 && piece.first_column + g_.piece_columns >= g_.out_columns) {
        EdgePart& edge = memory_.edge_parts[edges_++];
        const std::int64_t first = left + (g_.tile_lanes - lane) * s_.stride_width;
        edge.target = phase * g_.edge_floats;
        edge.source = first * strides_.column;
        edge.inside_begin = inside(first, 0, g_.edge_floats);
        edge.inside_end = inside(first, s_.in_width, g_.edge_floats);
      }
    }
  }

  // Copies the rows of what was added, which lies in the same row block of one image.
  void run(const Isa& isa, const Piece& piece, const float* input, ChannelRange channels,
           bool scaled, Magnitudes* magnitudes) {
    FillWork work{};
    work.tile = memory_.tiles;
    work.edges = memory_.edges;
    work.row_step = g_.row_step;
    work.edge_floats = g_.edge_floats;
    work.channels = channels.count;
    work.channel_rows = g_.channel_rows;
    work.source = input + piece.image * strides_.batch + channels.first * strides_.channel;
    work.channel_stride = strides_.channel;
    work.row_stride = strides_.row;
    work.step = s_.stride_width * strides_.column;
    work.row_place = memory_.row_place;
    work.row_source = memory_.row_source;
    for (int p = 0; p < g_.row_axis.phases; ++p) {
      for (std::int64_t i = 0; i < g_.row_axis.length; ++i) {
        const std::int64_t y = (piece.first_row + i) * s_.stride_height - s_.pad_top +
                               g_.row_axis.phase[p];
        memory_.row_place[work.rows] = static_cast<std::int32_t>(p * g_.row_axis.length + i);
        // The parts of a flat piece know their rows.
        memory_.row_source[work.rows++] = g_.flat ? 0 : y < s_.in_height && y >= 0 ? y : -1;
      }
    }
    work.parts = memory_.lane_parts;
    work.part_count = parts_;
    work.edge_parts = memory_.edge_parts;
    work.edge_part_count = edges_;
    work.scaled = scaled;
    work.magnitudes = magnitudes;
    isa.fill(work);
    parts_ = edges_ = 0;
  }

 private:
  // Of `count` lanes from input column `first` on, the first one not left of `column`.
  std::int32_t inside(std::int64_t first, std::int64_t column, std::int64_t count) const {
    if (first >= column) return 0;
    return static_cast<std::int32_t>(std::min(count, ceil_div(column - first, s_.stride_width)));
  }

  // Lane 0 of the tile would show input column `origin` of the row at `row`.
  void add_lanes(std::int64_t target, std::int64_t begin, std::int64_t end, std::int64_t origin,
                 std::int64_t row, std::int64_t width, bool row_inside) {
    for_vectors(g_.lanes, begin, end, [&](std::int64_t vector, std::int32_t from, std::int32_t to) {
      const std::int64_t first = origin + vector * g_.lanes * s_.stride_width;
      const std::int64_t source = row + first * strides_.column;
      const bool whole = row_inside && from == 0 && to == g_.lanes && s_.stride_width == 1 &&
                         strides_.column == 1 && first >= 0 && first + g_.lanes <= width;
      if (whole && vector > begin / g_.lanes && memory_.lane_parts[parts_ - 1].whole > 0) {
        ++memory_.lane_parts[parts_ - 1].whole;
        return;
      }
      LanePart& part = memory_.lane_parts[parts_++];
      part.whole = whole;
      part.target = target + vector * g_.lanes;
      part.source = source;
      part.begin = from;
      part.end = to;
      part.inside_begin = std::max(from, inside(first, 0, g_.lanes));
      part.inside_end = row_inside ? std::min(to, inside(first, width, g_.lanes)) : 0;
    });
  }

  void add_flat(const Piece& piece, std::int64_t target, std::int64_t lane, std::int64_t end) {
    std::int64_t pixel = piece.first_column;
    const std::int64_t last = std::min(end, lane + piece.columns);
    while (lane < last) {
      const std::int64_t row = pixel / flat_width_, column = pixel % flat_width_;
      const std::int64_t stop = std::min(last, lane + flat_width_ - column);
      const std::int64_t y = row * s_.stride_height - s_.pad_top;
      const std::int64_t left = column * s_.stride_width - s_.pad_left;
      add_lanes(target, lane, stop, left - lane * s_.stride_width, y * strides_.row, in_width_,
                y >= 0 && y < s_.in_height);
      pixel += stop - lane;
      lane = stop;
    }
    if (lane < end) add_lanes(target, lane, end, 0, 0, 0, false);
  }

  const ThreadMemory& memory_;
  const Geometry& g_;
  const packedconv_layer_shape& s_;
  const packedconv_strides& strides_;
  std::int64_t flat_width_, in_width_;
  std::int64_t parts_ = 0, edges_ = 0;
};

template <typename T>
T* cut(char* memory, std::size_t* used, std::int64_t count) {
  T* const part = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + *used);
  *used = static_cast<std::size_t>(
      round_up(static_cast<std::int64_t>(*used + sizeof(T) * static_cast<std::size_t>(count)), 64));
  return part;
}

}  // namespace

std::size_t cut_memory(char* memory, const Geometry& g, const MemoryCounts& counts,
                       ThreadMemory* parts) {
  std::size_t used = 0;
  const std::int64_t vectors = g.rows * g.vectors;
  parts->tiles = cut<float>(memory, &used, counts.tiles * g.tile_floats(counts.in_channels));
  parts->edges = cut<float>(memory, &used, g.edges_floats(counts.in_channels));
  parts->sums = cut<float>(memory, &used, counts.sums_floats);
  parts->carry = cut<float>(memory, &used, counts.carry_floats);
  parts->bias = cut<float>(memory, &used, counts.bias_floats);
  // A vector more for the line that the rows begin in, one for where the last one ends.
  parts->stage = cut<float>(memory, &used, (vectors + 2) * std::max(g.lanes, 16));
  // At worst every lane is a part of its own.
  parts->lane_parts =
      cut<LanePart>(memory, &used, counts.tiles * g.column_axis.phases * g.row_step);
  parts->edge_parts = cut<EdgePart>(memory, &used, g.column_axis.phases);
  parts->row_place = cut<std::int32_t>(memory, &used, g.row_axis.phases * g.row_axis.length);
  parts->row_source = cut<std::int64_t>(memory, &used, g.row_axis.phases * g.row_axis.length);
  parts->store_parts = cut<StorePart>(memory, &used, vectors * g.lanes);
  parts->part_ends = cut<std::int32_t>(memory, &used, vectors);
  parts->prefetch_rows = cut<const char*>(memory, &used, kPrefetchRows);
  return used;
}

Magnitudes fill_tiles(const ThreadMemory& memory, const Geometry& g, const Isa& isa,
                      const packedconv_layer_shape& shape, const float* input,
                      const packedconv_strides& strides, ChannelRange channels, bool scaled,
                      std::int64_t first_tile, std::int64_t count) {
  Magnitudes magnitudes{~0u, 0u};
  Filler filler(memory, g, shape, strides);
  Piece run{};
  bool open = false;
  for (std::int64_t t = 0; t < count; ++t) {
    const std::int64_t first = (first_tile + t) * g.pieces_per_tile;
    const std::int64_t pieces = std::min(g.pieces_per_tile, g.pieces - first);
    for (std::int64_t i = 0; i < pieces; ++i) {
      const Piece piece = find_piece(g, first + i);
      if (open && (piece.image != run.image || piece.row_block != run.row_block))
        filler.run(isa, run, input, channels, scaled, &magnitudes);
      run = piece;
      open = true;
      filler.add(piece, t * g.tile_floats(channels.count), i * g.pitch,
                 i + 1 < pieces ? (i + 1) * g.pitch : g.row_step);
    }
  }
  if (open) filler.run(isa, run, input, channels, scaled, &magnitudes);
  if (g.edge_floats > 0) {
    // A vector at the last row reads on into what no output uses, and which must not be slow to
    // compute with.
    float* const end = memory.edges + channels.count * g.channel_rows * g.edge_floats;
    std::fill(end, end + kEdgeFloats, 0.0f);
  }
  return magnitudes;
}

PrefetchWork next_rows(const ThreadMemory& memory, const Geometry& g,
                       const packedconv_layer_shape& s, const float* input,
                       const packedconv_strides& strides, ChannelRange channels,
                       std::int64_t first_tile, std::int64_t count) {
  PrefetchWork work{};
  work.rows = memory.prefetch_rows;
  if (strides.column != 1) return work;
  const Piece first = find_piece(g, first_tile * g.pieces_per_tile);
  if (g.flat) {
    // Of one image, by the input rows that its pixels are in.
    if (g.pieces_per_tile > 1 || channels.count > kPrefetchRows || s.pad_top > 0) return work;
    const std::int64_t pixels =
        std::min(count * g.tile_lanes, g.out_columns - first.first_column);
    const std::int64_t begin = first.first_column / s.out_width * s.stride_height;
    const std::int64_t end = (first.first_column + pixels - 1) / s.out_width * s.stride_height;
    work.lines = ceil_div(((end - begin) * strides.row + s.in_width) *
                              static_cast<std::int64_t>(sizeof(float)), 64);
    for (std::int64_t i = 0; i < channels.count; ++i)
      memory.prefetch_rows[work.count++] = reinterpret_cast<const char*>(
          input + first.image * strides.batch + (channels.first + i) * strides.channel +
          begin * strides.row);
    return work;
  }
  const Piece last =
      find_piece(g, std::min(g.pieces, (first_tile + count) * g.pieces_per_tile) - 1);
  std::int64_t left = 0, right = s.in_width;
  if (first.row_block == last.row_block && first.image == last.image) {
    left = std::max<std::int64_t>(0, first.first_column * s.stride_width - s.pad_left);
    right = std::min(s.in_width, (last.first_column + last.columns) * s.stride_width);
  }
  if (left >= right) return work;
  work.lines = ceil_div((right - left) * static_cast<std::int64_t>(sizeof(float)), 64);
  for (std::int64_t image = first.image; image <= last.image; ++image) {
    const std::int64_t begin = image == first.image ? first.first_row : 0;
    const std::int64_t end = image == last.image ? last.first_row + last.rows : g.out_rows;
    const std::int64_t reach = (s.kernel_height - 1) * s.dilation_height;
    // The rows above have been read for the row block before this one.
    const std::int64_t above = begin > 0 ? reach : 0;
    const std::int64_t top =
        std::max<std::int64_t>(0, begin * s.stride_height - s.pad_top + above);
    const std::int64_t bottom =
        std::min(s.in_height, (end - 1) * s.stride_height - s.pad_top + reach + 1);
    if (work.count + channels.count * std::max<std::int64_t>(0, bottom - top) > kPrefetchRows) {
      work.count = 0;
      return work;
    }
    for (std::int64_t i = 0; i < channels.count; ++i)
      for (std::int64_t y = top; y < bottom; ++y)
        memory.prefetch_rows[work.count++] = reinterpret_cast<const char*>(
            input + image * strides.batch + (channels.first + i) * strides.channel +
            y * strides.row + left);
  }
  return work;
}

void place_tile(TileWork* work, const ThreadMemory& memory, const Geometry& g,
                const packedconv_layer_shape& s, const packedconv_strides& strides, bool stream,
                std::int64_t tile) {
  const std::int64_t first = tile * g.pieces_per_tile;
  const std::int64_t pieces = std::min(g.pieces_per_tile, g.pieces - first);
  const Rows flat = g.flat ? flat_rows(s.out_height, s.out_width, strides)
                           : Rows{g.out_columns, strides.row};
  work->whole = work->run = nullptr;
  work->stream = stream;
  const bool contiguous = !g.flat || flat.width == g.out_columns;
  const Piece only = find_piece(g, first);
  if (pieces == 1 && strides.column == 1 && contiguous) {
    const Piece& piece = only;
    float* const origin = work->output + piece.image * strides.batch +
                          piece.first_row * strides.row + piece.first_column;
    const std::int64_t tile_row_step = g.flat ? g.vectors * g.lanes : strides.row;
    const bool whole = piece.rows == g.tile_rows && piece.columns == g.tile_lanes;
    const bool on_vectors =
        reinterpret_cast<std::uintptr_t>(origin) % (static_cast<std::size_t>(g.lanes) * 4) == 0 &&
        tile_row_step % g.lanes == 0 && strides.channel % g.lanes == 0;
    const bool rows_follow = g.flat || piece.rows == 1 ||
                             (piece.columns == g.out_columns && strides.row == g.out_columns);
    if (whole && (on_vectors || !rows_follow)) {
      work->whole = origin;
      work->whole_row_step = tile_row_step;
      work->stream = stream && on_vectors;
      return;
    }
    if (rows_follow) {
      // Streamed stores need whole vectors, which floats at odd addresses never fill.
      work->stream =
          stream && reinterpret_cast<std::uintptr_t>(origin) % sizeof(float) == 0;
      work->run = origin;
      work->stage = memory.stage;
      work->run_floats = piece.rows * piece.columns;
      work->run_row_step = g.flat ? tile_row_step : piece.columns;
      return;
    }
  }
  std::int32_t count = 0, vector_index = 0;
  for (std::int64_t row = 0; row < g.tile_rows; ++row) {
    for (std::int64_t lane = 0; lane < g.tile_lanes; lane += g.lanes) {
      for (std::int64_t i = lane / g.pitch; i < pieces && i * g.pitch < lane + g.lanes; ++i) {
        const Piece piece = find_piece(g, first + i);
        if (row >= piece.rows) continue;
        std::int64_t begin = std::max(lane, i * g.pitch);
        const std::int64_t end = std::min(lane + g.lanes, i * g.pitch + piece.columns);
        while (begin < end) {
          const std::int64_t pixel = piece.first_column + begin - i * g.pitch;
          const std::int64_t column = g.flat ? pixel % flat.width : pixel;
          const std::int64_t y = g.flat ? pixel / flat.width : piece.first_row + row;
          const std::int64_t stop = std::min(end, begin + flat.width - column);
          memory.store_parts[count++] = {
              piece.image * strides.batch + y * (g.flat ? flat.row_step : strides.row) +
                  (column - (begin - lane)) * strides.column,
              static_cast<std::int32_t>(begin - lane), static_cast<std::int32_t>(stop - lane)};
          begin = stop;
        }
      }
      memory.part_ends[vector_index++] = count;
    }
  }
  work->parts = memory.store_parts;
  work->part_ends = memory.part_ends;
}

}  // namespace packedconv
