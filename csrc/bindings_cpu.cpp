// CPU plans of the extension module.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/plan.h"

namespace py = pybind11;

namespace packedconv {
namespace {

struct PathName {
  CpuPath path;
  const char* name;
};

constexpr PathName kPathNames[] = {
    {CpuPath::naive, "naive"}, {CpuPath::loose, "loose"}, {CpuPath::aligned, "aligned"}};

py::dict schedule_dict(const CpuSchedule& schedule) {
  py::dict values;
  for (const PathName& known : kPathNames)
    if (known.path == schedule.path) values["path"] = known.name;
  values["rows"] = schedule.rows;
  values["vectors"] = schedule.vectors;
  values["block_channels"] = schedule.block_channels;
  values["strip"] = schedule.strip;
  values["prefetch"] = schedule.prefetch;
  values["stream"] = schedule.stream;
  return values;
}

template <typename T>
T field(const py::dict& values, const char* name) {
  if (!values.contains(name))
    throw std::invalid_argument(std::string("schedule: expected a field ") + name + ", got none");
  try {
    return values[name].cast<T>();
  } catch (const py::cast_error&) {
    throw std::invalid_argument(std::string("schedule: expected another ") + name + ", got " +
                                py::repr(values[name]).cast<std::string>());
  }
}

CpuSchedule make_schedule(const py::dict& values) {
  CpuSchedule schedule;
  const std::string path = field<std::string>(values, "path");
  bool found = false;
  for (const PathName& known : kPathNames) {
    if (path != known.name) continue;
    schedule.path = known.path;
    found = true;
  }
  if (!found)
    throw std::invalid_argument("schedule: expected path naive, loose or aligned, got " + path);
  schedule.rows = field<int>(values, "rows");
  schedule.vectors = field<int>(values, "vectors");
  schedule.block_channels = field<std::int64_t>(values, "block_channels");
  schedule.strip = field<std::int64_t>(values, "strip");
  schedule.prefetch = field<bool>(values, "prefetch");
  schedule.stream = field<bool>(values, "stream");
  return schedule;
}

std::unique_ptr<CpuPlan> make_plan(const Quad& input_shape, const Quad& output_shape,
                                   const Words& words, const Words& offsets, const Pair& kernel,
                                   const Pair& stride, const Pair& padding, const Pair& dilation,
                                   std::int64_t groups, int threads, const py::object& schedule) {
  const packedconv_layer_shape shape =
      make_shape(input_shape, output_shape, kernel, stride, padding, dilation, groups);
  const PackedView weight = make_view(words, offsets);
  CpuSchedule given{};
  if (!schedule.is_none()) given = make_schedule(schedule.cast<py::dict>());
  const CpuSchedule* const wanted = schedule.is_none() ? nullptr : &given;

  const py::gil_scoped_release release;
  return std::make_unique<CpuPlan>(shape, weight, threads, wanted);
}

py::list schedule_dicts(const Quad& input_shape, const Quad& output_shape, const Words& words,
                        const Words& offsets, const Pair& kernel, const Pair& stride,
                        const Pair& padding, const Pair& dilation, std::int64_t groups,
                        int threads) {
  const packedconv_layer_shape shape =
      make_shape(input_shape, output_shape, kernel, stride, padding, dilation, groups);
  const PackedView weight = make_view(words, offsets);
  std::vector<CpuSchedule> schedules;
  {
    const py::gil_scoped_release release;
    schedules = cpu_schedules(shape, weight, threads);
  }
  py::list found;
  for (const CpuSchedule& schedule : schedules) found.append(schedule_dict(schedule));
  return found;
}

py::dict facts_dict(const CpuPlan& plan) {
  const CpuPlanFacts& facts = plan.facts();
  py::dict values;
  values["isa"] = facts.isa;
  values["lanes"] = facts.lanes;
  values["pieces_per_tile"] = facts.pieces_per_tile;
  values["lanes_used"] = facts.lanes_used;
  values["tile_bytes"] = facts.tile_bytes;
  values["items"] = facts.items;
  values["slices"] = facts.slices;
  values["plan_bytes"] = facts.plan_bytes;
  values["workspace_bytes"] = facts.workspace_bytes;
  values["flop"] = facts.flop;
  values["bytes"] = facts.bytes;
  return values;
}

void execute(const CpuPlan& plan, std::uintptr_t input, const Quad& input_strides,
             std::uintptr_t bias, bool relu, std::uintptr_t output, const Quad& output_strides,
             int threads) {
  plan.execute(reinterpret_cast<const float*>(input), make_strides(input_strides),
               reinterpret_cast<const float*>(bias), relu, reinterpret_cast<float*>(output),
               make_strides(output_strides), threads);
}

std::unique_ptr<CpuPartialExecution> make_partial(const CpuPlan& plan, int threads, bool fill,
                                                  bool stores) {
  return std::make_unique<CpuPartialExecution>(plan, threads, CpuOmissions{!fill, !stores});
}

void execute_partly(CpuPartialExecution& execution, std::uintptr_t input,
                    const Quad& input_strides, std::uintptr_t output,
                    const Quad& output_strides) {
  execution.execute(reinterpret_cast<const float*>(input), make_strides(input_strides),
                    reinterpret_cast<float*>(output), make_strides(output_strides));
}

}  // namespace

void bind_cpu(py::module_& module) {
  // Local, since a test may load another build of the module beside this one.
  py::class_<CpuPlan>(module, "CpuPlan", py::module_local(), "A layer prepared for the CPU.")
      .def(py::init(&make_plan), py::arg("input_shape"), py::arg("output_shape"),
           py::arg("words"), py::arg("offsets"), py::arg("kernel"), py::arg("stride"),
           py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("threads"),
           py::arg("schedule") = py::none())
      .def("execute", &execute, py::arg("input"), py::arg("input_strides"), py::arg("bias"),
           py::arg("relu"), py::arg("output"), py::arg("output_strides"), py::arg("threads"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("schedule",
                             [](const CpuPlan& plan) { return schedule_dict(plan.schedule()); })
      .def_property_readonly("facts", &facts_dict)
      .def_property_readonly("why", [](const CpuPlan& plan) { return plan.facts().why; });
  py::class_<CpuPartialExecution>(module, "CpuPartialExecution", py::module_local(),
                                  "Executions without part of their work, for measuring only: "
                                  "their output is wrong by design.")
      .def(py::init(&make_partial), py::arg("plan"), py::arg("threads"), py::kw_only(),
           py::arg("fill"), py::arg("stores"), py::keep_alive<1, 2>())
      .def("execute", &execute_partly, py::arg("input"), py::arg("input_strides"),
           py::arg("output"), py::arg("output_strides"),
           py::call_guard<py::gil_scoped_release>());
  module.def("cpu_schedules", &schedule_dicts, py::arg("input_shape"), py::arg("output_shape"),
             py::arg("words"), py::arg("offsets"), py::arg("kernel"), py::arg("stride"),
             py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("threads"));
}

}  // namespace packedconv
