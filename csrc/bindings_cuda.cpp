// The CUDA side of the extension module packedconv._core. Plans are made in every build;
// launching one needs a build with CUDA and a GPU, or the emulation.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "cuda/conv2d.h"
#include "cuda/gpus.h"

namespace packedconv {

namespace py = pybind11;

namespace {

using Config = std::vector<int>;

// Fields of a configuration, in the order of its tuple.
struct ColumnField {
  const char* name;
  int ColumnConfig::*field;
};
constexpr ColumnField kColumnFields[] = {
    {"rows_per_thread", &ColumnConfig::rows_per_thread},
    {"column_groups", &ColumnConfig::column_groups},
    {"pitch", &ColumnConfig::pitch},
    {"lane_columns", &ColumnConfig::lane_columns},
    {"warps", &ColumnConfig::warps},
    {"row_warps", &ColumnConfig::row_warps},
    {"buffers", &ColumnConfig::buffers},
    {"slices", &ColumnConfig::slices},
};
static_assert(sizeof(kColumnFields) / sizeof(kColumnFields[0]) ==
                  sizeof(ColumnConfig) / sizeof(int),
              "every field of ColumnConfig");

struct MappingField {
  const char* name;
  int MappingConfig::*field;
};
constexpr MappingField kMappingFields[] = {
    {"col_per_warp", &MappingConfig::col_per_warp},
    {"rows_per_thread", &MappingConfig::rows_per_thread},
    {"warps_per_block", &MappingConfig::warps_per_block},
    {"slices", &MappingConfig::slices},
};
static_assert(sizeof(kMappingFields) / sizeof(kMappingFields[0]) ==
                  sizeof(MappingConfig) / sizeof(int),
              "every field of MappingConfig");

// The configuration that a tuple of ints stands for.
template <typename Result, typename Field, std::size_t kFields>
Result make_config(const Config& values, const Field (&fields)[kFields],
                   const std::string& implementation) {
  if (values.size() != kFields) {
    std::string names;
    for (const Field& entry : fields) {
      names += (names.empty() ? "" : ", ") + std::string(entry.name);
    }
    throw std::invalid_argument("config: expected (" + names + ") for the " + implementation +
                                " kernel, got " + std::to_string(values.size()) + " values");
  }
  Result result{};
  for (std::size_t i = 0; i < kFields; ++i) result.*fields[i].field = values[i];
  return result;
}

// Adds the tuple and each of its fields by name.
template <typename Source, typename Field, std::size_t kFields>
void add_config(py::dict& facts, const Source& config, const Field (&fields)[kFields]) {
  py::tuple values(kFields);
  for (std::size_t i = 0; i < kFields; ++i) {
    const int value = config.*fields[i].field;
    values[i] = value;
    facts[fields[i].name] = value;
  }
  facts["config"] = values;
}

const char* kernel_name(CudaKernel kernel) {
  switch (kernel) {
    case CudaKernel::column: return "column";
    case CudaKernel::paper: return "paper";
    case CudaKernel::general: return "general";
  }
  throw std::logic_error("kernel: unknown value");
}

CudaPlan make_plan(const packedconv_layer_shape& shape, const PackedView& weight,
                   const DeviceLimits& limits, const std::string& implementation,
                   const Config* config) {
  if (implementation == "column" && config != nullptr) {
    return plan_column(shape, weight, limits,
                       make_config<ColumnConfig>(*config, kColumnFields, implementation));
  }
  if (implementation == "paper") {
    return plan_paper(shape, weight, limits,
                      config == nullptr
                          ? kPaperDefaultMapping
                          : make_config<MappingConfig>(*config, kMappingFields, implementation));
  }
  if (implementation != "auto" && implementation != "column" && implementation != "general") {
    throw std::invalid_argument(
        "implementation: expected \"auto\", \"column\", \"paper\" or \"general\", got \"" +
        implementation + "\"");
  }
  if (config != nullptr) {
    throw std::invalid_argument("config: expected None for implementation \"" + implementation +
                                "\", which has nothing to choose; name \"column\" or \"paper\"");
  }
  if (implementation == "general") return plan_general(shape, weight, limits);
  CudaPlan plan = plan_column(shape, weight, limits);
  if (implementation == "column" && plan.kernel != CudaKernel::column) {
    throw std::invalid_argument("implementation: no tile of the column kernel for this layer (" +
                                plan.why + "); use \"auto\" or \"general\"");
  }
  return plan;
}

CudaPlan cuda_plan(const Quad& input_shape, const Quad& output_shape, const Words& words,
                   const Words& offsets, const Pair& kernel, const Pair& stride,
                   const Pair& padding, const Pair& dilation, std::int64_t groups,
                   const Quad& limits, const std::string& implementation,
                   const py::object& config) {
  const packedconv_layer_shape shape =
      make_shape(input_shape, output_shape, kernel, stride, padding, dilation, groups);
  const PackedView weight = make_view(words, offsets);
  const DeviceLimits device = {static_cast<int>(limits[0]), static_cast<int>(limits[1]), limits[2],
                               limits[3]};
  Config values;
  if (!config.is_none()) {
    try {
      values = config.cast<Config>();
    } catch (const py::cast_error&) {
      throw py::type_error("config: expected None or a tuple of ints");
    }
  }
  const Config* const given = config.is_none() ? nullptr : &values;

  const py::gil_scoped_release release;
  return make_plan(shape, weight, device, implementation, given);
}

py::dict facts(const CudaPlan& plan) {
  py::dict values;
  switch (plan.kernel) {
    case CudaKernel::column: {
      const ColumnPlan& column = plan.column;
      add_config(values, column.config, kColumnFields);
      values["tile"] = py::make_tuple(column.config.tile_rows(), column.config.tile_columns());
      values["threads"] = column.config.warps * ColumnConfig::kWarp;
      values["grid"] = py::make_tuple(column.grid_blocks, column.grid_parts(), 1);
      values["shared_bytes"] = column.shared_bytes;
      values["in_channel_blocks"] = column.blocks;
      values["channels_per_block"] = column.block_channels;
      values["stored_rows"] = column.stored_rows;
      values["plane"] = column.plane;
      values["chunks"] = column.chunks;
      values["resident"] = column.resident;
      values["parts"] = column.parts;
      values["items"] = column.items;
      values["cycles"] = column.cycles;
      break;
    }
    case CudaKernel::paper:
      add_config(values, plan.paper.mapping, kMappingFields);
      values["tile"] =
          py::make_tuple(plan.paper.mapping.rows_per_thread, plan.paper.mapping.columns());
      values["threads"] = plan.paper.mapping.threads();
      values["grid"] = py::make_tuple(plan.paper.grid_x, plan.paper.grid_y, plan.paper.grid_z);
      values["shared_bytes"] = plan.paper.shared_bytes;
      values["in_channel_blocks"] = plan.paper.blocks;
      values["channels_per_block"] = plan.paper.channels_per_block;
      values["paper_shape"] = plan.paper.paper_shape;
      break;
    case CudaKernel::general:
      values["config"] = py::none();
      values["threads"] = kGeneralThreads;
      values["grid"] = py::make_tuple(plan.paper.grid_x, plan.paper.grid_y, plan.paper.grid_z);
      values["shared_bytes"] = 0;
      values["in_channel_blocks"] = plan.paper.blocks;
      values["channels_per_block"] = plan.paper.channels_per_block;
      break;
  }
  return values;
}

void cuda_conv2d(const CudaPlan& plan, int device, std::uintptr_t stream, std::uintptr_t input,
                 const Quad& input_strides, std::uintptr_t table, std::uintptr_t bias, bool relu,
                 std::uintptr_t output, const Quad& output_strides) {
  const py::gil_scoped_release release;
  launch_conv2d(plan, device, reinterpret_cast<void*>(stream),
                reinterpret_cast<const float*>(input), make_strides(input_strides),
                reinterpret_cast<const std::uint32_t*>(table),
                reinterpret_cast<const float*>(bias), relu, reinterpret_cast<float*>(output),
                make_strides(output_strides));
}

py::list gpu_list() {
  py::list found;
  for (const Gpu& gpu : gpus()) {
    py::dict values;
    values["index"] = gpu.index;
    values["name"] = gpu.name;
    values["compute_capability"] = py::make_tuple(gpu.compute_major, gpu.compute_minor);
    values["multiprocessors"] = gpu.multiprocessors;
    values["memory_bytes"] = gpu.memory_bytes;
    values["shared_per_block"] = gpu.shared_per_block;
    values["shared_per_multiprocessor"] = gpu.shared_per_multiprocessor;
    found.append(values);
  }
  return found;
}

// What is compiled in, for the ablation and the tests: the mappings of the paper's kernel with
// one slice, and what distinguishes the column kernels.
py::dict cuda_kernels() {
  py::list paper, column;
  for (int i = 0; i < kCompiledMappings; ++i) {
    const MappingConfig mapping = compiled_mapping(i);
    paper.append(py::make_tuple(mapping.col_per_warp, mapping.rows_per_thread,
                                mapping.warps_per_block, mapping.slices));
  }
  for (const ColumnKernel& kernel : kColumnKernels) {
    column.append(py::make_tuple(kernel.rows_per_thread, kernel.column_groups, kernel.pitch));
  }
  py::dict values;
  values["paper"] = paper;
  values["column"] = column;
  return values;
}

}  // namespace

void bind_cuda(py::module_& module) {
  // Local to this module, since an emulated one may be loaded beside it.
  py::class_<CudaPlan>(module, "CudaPlan", py::module_local())
      .def_property_readonly("kernel",
                             [](const CudaPlan& plan) { return kernel_name(plan.kernel); })
      .def_property_readonly("why", [](const CudaPlan& plan) { return plan.why; })
      .def_property_readonly("facts", &facts)
      .def_property_readonly("table", [](const CudaPlan& plan) {
        return py::array_t<std::uint32_t>(static_cast<py::ssize_t>(plan.table.size()),
                                          plan.table.data());
      });
  module.def("cuda_plan", &cuda_plan, py::arg("input_shape"), py::arg("output_shape"),
             py::arg("words"), py::arg("offsets"), py::arg("kernel"), py::arg("stride"),
             py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("limits"),
             py::arg("implementation") = "auto", py::arg("config") = py::none());
  module.def("cuda_conv2d", &cuda_conv2d, py::arg("plan"), py::arg("device"), py::arg("stream"),
             py::arg("input"), py::arg("input_strides"), py::arg("table"), py::arg("bias"),
             py::arg("relu"), py::arg("output"), py::arg("output_strides"));
  module.def("gpus", &gpu_list);
  module.def("cuda_driver_version", &cuda_driver_version);
  module.def("cuda_kernels", &cuda_kernels);
}

}  // namespace packedconv
