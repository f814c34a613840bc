// The extension module packedconv._core. Arguments are checked in Python; memory of
// tensors is handed over by address, so that no version of torch is compiled in.
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/ceilings.h"
#include "cpu/parallel.h"
#include "cpu/isa.h"
#include "cuda/gpus.h"
#include "cuda/mapping_config.h"

namespace py = pybind11;

namespace {

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const packedconv::Isa* isa : packedconv::usable_isas()) names.push_back(isa->name);
  return names;
}

// Compute capabilities compiled for, major * 10 + minor; empty without CUDA.
std::vector<int> cuda_architectures() {
  std::vector<int> found;
#if defined(PACKEDCONV_CUDA_ARCHITECTURES)
  std::istringstream names(PACKEDCONV_CUDA_ARCHITECTURES);
  for (int architecture; names >> architecture;) found.push_back(architecture);
#endif
  return found;
}

py::dict build_info() {
  py::dict info;
  info["version"] = PACKEDCONV_VERSION;
  info["compiler"] = PACKEDCONV_COMPILER;
  info["flags"] = PACKEDCONV_FLAGS;
  info["cplusplus"] = static_cast<long>(__cplusplus);
  const std::string cuda = packedconv::cuda_version();
  info["cuda"] = cuda.empty() ? py::object(py::none()) : py::object(py::str(cuda));
  info["cuda_architectures"] = cuda_architectures();
  return info;
}

py::dict mapping_config() {
  const packedconv::MappingConfig& config = packedconv::kFigure3Mapping;
  py::dict values;
  values["col_per_warp"] = config.col_per_warp;
  values["rows_per_thread"] = config.rows_per_thread;
  values["warps_per_block"] = config.warps_per_block;
  values["slices"] = config.slices;
  py::list columns, channel_lanes;
  for (int lane = 0; lane < packedconv::MappingConfig::kWarp; ++lane) {
    columns.append(config.column(lane));
    channel_lanes.append(config.channel_lane(lane));
  }
  values["column_of_lane"] = columns;
  values["channel_lane_of_lane"] = channel_lanes;
  return values;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled kernels of packedconv.";
  module.def("fma_peak", &packedconv::fma_peak, py::arg("threads"), py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>());
  module.def("copy_bandwidth", &packedconv::copy_bandwidth, py::arg("threads"), py::arg("bytes"),
             py::arg("repeats"), py::call_guard<py::gil_scoped_release>());
  module.def("keep_freed_memory", &packedconv::keep_freed_memory);
  module.def("isa", [] { return std::string(packedconv::selected_isa().name); });
  module.def("isas", &isas);
  module.def("parallel_library", [] { return std::string(packedconv::parallel_library()); });
  module.def("build_info", &build_info);
  module.def("mapping_config", &mapping_config);
  packedconv::bind_cpu(module);
  packedconv::bind_cuda(module);
}
