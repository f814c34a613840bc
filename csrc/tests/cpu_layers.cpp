// Runs layers through CPU plans: a program of its own, so that sanitizers see all of it and
// other processors need no Python. All arrays have memory of their exact size.
//
//   cpu_layers CASES RESULTS
//   cpu_layers --isas          prints the instruction sets that this processor runs
//
// python/tests/cpu_program.py writes CASES and reads RESULTS. Both are sequences of records of
// 64-bit integers and arrays of 32-bit values, in the order in which they are read here.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/isa.h"
#include "../cpu/plan.h"

namespace {

using packedconv::CpuPath;
using packedconv::CpuPlan;
using packedconv::CpuSchedule;
using packedconv::PackedView;

// Where an array lies. Sanitizers watch the heap, but not what vector intrinsics read and write;
// beside a page without access, every instruction is watched, on one side of the array.
enum class Place { heap, before_fence, behind_fence };

template <typename T>
struct Array {
  std::int64_t count;
  Place place;
  std::unique_ptr<T[], std::function<void(T*)>> values;

  Array(std::int64_t count, Place place) : count(count), place(place) {
    if (place == Place::heap) {
      values = {new T[count], [](T* array) { delete[] array; }};
      return;
    }
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t inside = (bytes() + page - 1) / page * page, mapped = inside + 2 * page;
    void* const memory =
        mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    char* const begin = static_cast<char*>(memory) + page;
    if (inside > 0 && mprotect(begin, inside, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    char* const first = place == Place::before_fence ? begin + inside - bytes() : begin;
    values = {reinterpret_cast<T*>(first), [=](T*) { munmap(memory, mapped); }};
  }
  Array(std::istream& stream, std::int64_t count, Place place) : Array(count, place) {
    stream.read(reinterpret_cast<char*>(values.get()), static_cast<std::streamsize>(bytes()));
  }
  Array(const Array& other) : Array(other.count, other.place) {
    std::copy_n(other.values.get(), count, values.get());
  }
  Array(Array&&) = default;

  std::size_t bytes() const { return static_cast<std::size_t>(count) * sizeof(T); }
  bool same(const Array& other) const {
    return std::memcmp(values.get(), other.values.get(), bytes()) == 0;
  }
};

std::vector<std::int64_t> read_numbers(std::istream& stream, std::size_t count) {
  std::vector<std::int64_t> numbers(count);
  stream.read(reinterpret_cast<char*>(numbers.data()), count * sizeof(std::int64_t));
  if (!stream) throw std::runtime_error("the file of cases ends early");
  return numbers;
}

std::int64_t read_number(std::istream& stream) { return read_numbers(stream, 1)[0]; }

void write_number(std::ostream& stream, std::int64_t number) {
  stream.write(reinterpret_cast<const char*>(&number), sizeof number);
}

packedconv_layer_shape read_shape(std::istream& stream) {
  const std::vector<std::int64_t> n = read_numbers(stream, 16);
  return {n[0], n[1], n[2],  n[3],  n[4],  n[5],  n[6],  n[7],
          n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15]};
}

packedconv_strides read_strides(std::istream& stream) {
  const std::vector<std::int64_t> n = read_numbers(stream, 4);
  return {n[0], n[1], n[2], n[3]};
}

// One layer with its arguments, as a caller holds them.
struct Layer {
  packedconv_layer_shape shape;
  packedconv_strides input_strides, output_strides;
  // Elements before the first one in the memory of input and output: how it is aligned.
  std::int64_t input_before, output_before;
  bool relu;
  Array<float> input, bias, output;
  Array<std::uint32_t> words, offsets;
  std::int64_t blocks;

  PackedView weight() const {
    return {words.values.get(), offsets.values.get(), blocks, words.count, offsets.count};
  }

  void execute(const CpuPlan& plan, int threads, Array<float>& output) const {
    plan.execute(input.values.get() + input_before, input_strides,
                 bias.count > 0 ? bias.values.get() : nullptr, relu,
                 output.values.get() + output_before, output_strides, threads);
  }
};

Layer read_layer(std::istream& cases) {
  const packedconv_layer_shape shape = read_shape(cases);
  const packedconv_strides input_strides = read_strides(cases);
  const packedconv_strides output_strides = read_strides(cases);
  const std::vector<std::int64_t> before = read_numbers(cases, 2);
  const bool relu = read_number(cases) != 0;
  const Place place = static_cast<Place>(read_number(cases));
  const std::vector<std::int64_t> counts = read_numbers(cases, 6);
  // In a braced list the arrays are read from left to right.
  Layer layer{shape,
              input_strides,
              output_strides,
              before[0],
              before[1],
              relu,
              {cases, counts[0], place},
              {cases, counts[1], place},
              {cases, counts[2], place},
              {cases, counts[3], place},
              {cases, counts[4], place},
              counts[5]};
  if (!cases) throw std::runtime_error("the file of cases ends early");
  return layer;
}

enum Which { default_schedule = -1, every_schedule = -2 };

// How the layer is run.
struct Run {
  std::int64_t which;         // an index of cpu_schedules, or one of Which
  int plan_threads, threads;  // that the plan is made for, that execute it
  int callers;                // threads that execute the plan at the same time
  bool vary;                  // also with single fields of the schedules changed
};

Run read_run(std::istream& cases) {
  const std::vector<std::int64_t> n = read_numbers(cases, 5);
  return {n[0], static_cast<int>(n[1]), static_cast<int>(n[2]), static_cast<int>(n[3]),
          n[4] != 0};
}

std::string text(const CpuSchedule& schedule) {
  static const char* const kPaths[] = {"naive", "loose", "aligned"};
  return std::string(kPaths[static_cast<int>(schedule.path)]) + " rows " +
         std::to_string(schedule.rows) + " vectors " + std::to_string(schedule.vectors) +
         " block_channels " + std::to_string(schedule.block_channels) + " strip " +
         std::to_string(schedule.strip) + (schedule.prefetch ? " prefetch" : "") +
         (schedule.stream ? " stream" : "");
}

// The schedule with each field changed in turn, other than the tile.
std::vector<CpuSchedule> variants(const CpuSchedule& schedule, std::int64_t channels) {
  std::vector<CpuSchedule> found;
  const auto add = [&](const std::function<void(CpuSchedule&)>& change) {
    found.push_back(schedule);
    change(found.back());
  };
  add([](CpuSchedule& other) { other.path = CpuPath::naive; });
  for (const std::int64_t block : {std::int64_t{1}, std::int64_t{3}, channels})
    add([=](CpuSchedule& other) { other.block_channels = block; });
  for (const std::int64_t strip : {1, 2, 5})
    add([=](CpuSchedule& other) { other.strip = strip; });
  add([](CpuSchedule& other) { other.prefetch = !other.prefetch; });
  add([](CpuSchedule& other) { other.stream = !other.stream; });
  add([](CpuSchedule& other) {
    other.block_channels = 2;
    other.strip = 3;
    other.prefetch = other.stream = true;
  });
  return found;
}

struct Result {
  std::string schedule;
  std::string error;  // what went wrong, or empty
  Array<float> output;
};

// Executes a plan on one thread and on as many as asked, by one caller and by as many as
// asked, each time into another array; all must come out the same.
Result execute(const Layer& layer, const Run& run, const CpuPlan& plan) {
  Result result{text(plan.schedule()), "", layer.output};
  layer.execute(plan, 1, result.output);
  std::vector<Array<float>> outputs(run.callers, layer.output);
  std::vector<std::string> errors(run.callers);
  const auto call = [&](int caller) {
    try {
      layer.execute(plan, run.threads, outputs[caller]);
      if (!result.output.same(outputs[caller]))
        errors[caller] = "another output on " + std::to_string(run.threads) + " threads";
    } catch (const std::exception& error) {
      errors[caller] = error.what();
    }
  };
  std::vector<std::thread> others;
  for (int caller = 1; caller < run.callers; ++caller) others.emplace_back(call, caller);
  call(0);
  for (std::thread& other : others) other.join();
  for (const std::string& error : errors)
    if (!error.empty()) result.error = error;
  return result;
}

std::vector<Result> run_layer(const Layer& layer, const Run& run) {
  std::vector<Result> results;
  if (run.which == default_schedule) {
    results.push_back(execute(
        layer, run, CpuPlan(layer.shape, layer.weight(), run.plan_threads, nullptr)));
    return results;
  }
  const std::vector<CpuSchedule> listed =
      packedconv::cpu_schedules(layer.shape, layer.weight(), run.plan_threads);
  for (std::size_t index = 0; index < listed.size(); ++index) {
    if (run.which != every_schedule && run.which != static_cast<std::int64_t>(index)) continue;
    results.push_back(execute(
        layer, run, CpuPlan(layer.shape, layer.weight(), run.plan_threads, &listed[index])));
    if (!run.vary) continue;
    for (const CpuSchedule& schedule :
         variants(listed[index], layer.shape.in_channels / layer.shape.groups)) {
      std::unique_ptr<CpuPlan> plan;
      try {
        plan.reset(new CpuPlan(layer.shape, layer.weight(), run.plan_threads, &schedule));
      } catch (const std::invalid_argument&) {
        continue;  // a schedule that the path does not have
      }
      results.push_back(execute(layer, run, *plan));
    }
  }
  return results;
}

void write_text(std::ostream& stream, const std::string& text) {
  write_number(stream, static_cast<std::int64_t>(text.size()));
  stream << text;
}

void run_case(std::istream& cases, std::ostream& file) {
  const Run run = read_run(cases);
  const Layer layer = read_layer(cases);
  std::vector<Result> results;
  try {
    results = run_layer(layer, run);
  } catch (const std::exception& error) {
    results.clear();
    results.push_back({"none", error.what(), layer.output});
  }
  write_number(file, static_cast<std::int64_t>(results.size()));
  for (const Result& result : results) {
    write_text(file, result.schedule);
    write_text(file, result.error);
    write_number(file, result.output.count);
    file.write(reinterpret_cast<const char*>(result.output.values.get()), result.output.bytes());
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::string(arguments[1]) == "--isas") {
    for (const packedconv::Isa* isa : packedconv::usable_isas()) std::puts(isa->name);
    return 0;
  }
  if (count != 3) {
    std::fprintf(stderr, "usage: %s CASES RESULTS | --isas\n", arguments[0]);
    return 2;
  }
  std::ifstream cases(arguments[1], std::ios::binary);
  std::ofstream results(arguments[2], std::ios::binary);
  while (cases.peek() != std::ifstream::traits_type::eof()) run_case(cases, results);
  return results.flush() ? 0 : 1;
}
