// Stands in for gpus.cu in a build without CUDA.
#include "gpus.h"

namespace packedconv {

std::vector<Gpu> gpus() { return {}; }

std::string cuda_driver_version() { return ""; }

std::string cuda_version() { return ""; }

}  // namespace packedconv
