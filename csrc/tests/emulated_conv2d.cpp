// Runs layers through plan and launch on the emulation: a program of its own, so that
// sanitizers see all of it. All arrays are heap blocks of their exact size.
//
//   emulated_conv2d CASES RESULTS
//
// python/tests/emulation.py writes CASES and reads RESULTS. Both are sequences of records of
// 64-bit integers and arrays of 32-bit values, in the order in which they are read here.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda/conv2d.h"
#include "../emulation/cuda.h"

namespace {

using packedconv::CudaKernel;
using packedconv::CudaPlan;

template <typename T>
struct Array {
  std::int64_t count;
  std::unique_ptr<T[]> values;

  Array(std::istream& stream, std::int64_t count) : count(count), values(new T[count]) {
    stream.read(reinterpret_cast<char*>(values.get()), count * sizeof(T));
  }
};

std::vector<std::int64_t> read_numbers(std::istream& stream, std::size_t count) {
  std::vector<std::int64_t> numbers(count);
  stream.read(reinterpret_cast<char*>(numbers.data()), count * sizeof(std::int64_t));
  return numbers;
}

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

CudaPlan make_plan(const std::string& implementation, const std::vector<std::int64_t>& config,
                   const packedconv_layer_shape& shape, const packedconv::PackedView& weight,
                   const packedconv::DeviceLimits& limits) {
  const auto field = [&](int index) { return static_cast<int>(config[index]); };
  if (implementation == "general") return packedconv::plan_general(shape, weight, limits);
  if (implementation == "paper") {
    return packedconv::plan_paper(shape, weight, limits, {field(0), field(1), field(2), field(3)});
  }
  if (implementation == "column" && !config.empty()) {
    return packedconv::plan_column(shape, weight, limits,
                                   {field(0), field(1), field(2), field(3), field(4), field(5),
                                    field(6), field(7)});
  }
  return packedconv::plan_column(shape, weight, limits);
}

const char* name(CudaKernel kernel) {
  if (kernel == CudaKernel::column) return "column";
  return kernel == CudaKernel::paper ? "paper" : "general";
}

// Reads one case, runs it and writes the kernel's name or "error", a sentence, and the output.
void run_case(std::istream& cases, std::ostream& results) {
  static const char* const kImplementations[] = {"auto", "column", "paper", "general"};
  const std::string implementation = kImplementations[read_numbers(cases, 1)[0]];
  const std::vector<std::int64_t> config = read_numbers(cases, read_numbers(cases, 1)[0]);
  const std::vector<std::int64_t> limit = read_numbers(cases, 4);
  const packedconv::DeviceLimits limits = {static_cast<int>(limit[0]), static_cast<int>(limit[1]),
                                           limit[2], limit[3]};
  const packedconv_layer_shape shape = read_shape(cases);
  const packedconv_strides input_strides = read_strides(cases);
  const packedconv_strides output_strides = read_strides(cases);
  // Elements before the first one in the memory of input and output: how it is aligned.
  const std::vector<std::int64_t> before = read_numbers(cases, 2);
  const bool relu = read_numbers(cases, 1)[0] != 0;
  const std::vector<std::int64_t> counts = read_numbers(cases, 6);
  const Array<float> input(cases, counts[0]), bias(cases, counts[1]), output(cases, counts[2]);
  const Array<std::uint32_t> words(cases, counts[3]), offsets(cases, counts[4]);
  if (!cases) throw std::runtime_error("the file of cases ends early");

  std::string kernel, sentence;
  try {
    const CudaPlan plan = make_plan(
        implementation, config, shape,
        {words.values.get(), offsets.values.get(), counts[5], words.count, offsets.count}, limits);
    packedconv::emulation::set_shared_per_block(limits.shared_per_block);
    packedconv::emulation::set_asynchronous_copies(limits.asynchronous_copies());
    const std::unique_ptr<std::uint32_t[]> table(new std::uint32_t[plan.table.size()]);
    std::copy(plan.table.begin(), plan.table.end(), table.get());
    packedconv::launch_conv2d(plan, 0, nullptr, input.values.get() + before[0], input_strides,
                              table.get(), bias.count > 0 ? bias.values.get() : nullptr, relu,
                              output.values.get() + before[1], output_strides);
    kernel = name(plan.kernel);
    sentence = plan.why;
  } catch (const std::exception& error) {
    kernel = "error";
    sentence = error.what();
  }
  for (const std::string& text : {kernel, sentence}) {
    write_number(results, text.size());
    results << text;
  }
  write_number(results, output.count);
  results.write(reinterpret_cast<const char*>(output.values.get()), output.count * sizeof(float));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s CASES RESULTS\n", arguments[0]);
    return 2;
  }
  std::ifstream cases(arguments[1], std::ios::binary);
  std::ofstream results(arguments[2], std::ios::binary);
  while (cases.peek() != std::ifstream::traits_type::eof()) run_case(cases, results);
  return results.flush() ? 0 : 1;
}
