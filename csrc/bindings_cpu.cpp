// CPU plans of the extension module.
#include <memory>
#include <stdexcept>
#include <string>

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

CpuSchedule make_schedule(const py::dict& values) {
  CpuSchedule schedule;
  const std::string path = values["path"].cast<std::string>();
  bool found = false;
  for (const PathName& known : kPathNames) {
    if (path != known.name) continue;
    schedule.path = known.path;
    found = true;
  }
  if (!found)
    throw std::invalid_argument("schedule: expected path naive, loose or aligned, got " + path);
  schedule.rows = values["rows"].cast<int>();
  schedule.vectors = values["vectors"].cast<int>();
  schedule.block_channels = values["block_channels"].cast<std::int64_t>();
  schedule.strip = values["strip"].cast<std::int64_t>();
  schedule.prefetch = values["prefetch"].cast<bool>();
  schedule.stream = values["stream"].cast<bool>();
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

py::list list_schedules(const Quad& input_shape, const Quad& output_shape, const Words& words,
                        const Words& offsets, const Pair& kernel, const Pair& stride,
                        const Pair& padding, const Pair& dilation, std::int64_t groups,
                        int threads) {
  py::list found;
  for (const CpuSchedule& schedule : cpu_schedules(
           make_shape(input_shape, output_shape, kernel, stride, padding, dilation, groups),
           make_view(words, offsets), threads))
    found.append(schedule_dict(schedule));
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
  module.def("cpu_schedules", &list_schedules, py::arg("input_shape"), py::arg("output_shape"),
             py::arg("words"), py::arg("offsets"), py::arg("kernel"), py::arg("stride"),
             py::arg("padding"), py::arg("dilation"), py::arg("groups"), py::arg("threads"));
}

}  // namespace packedconv
