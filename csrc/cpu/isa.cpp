#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace packedconv {

#if defined(__x86_64__)
extern const Isa isa_x86_64_v2, isa_x86_64_v3, isa_x86_64_v4;

std::vector<const Isa*> usable_isas() {
  __builtin_cpu_init();
  std::vector<const Isa*> isas;
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) isas.push_back(&isa_x86_64_v4);
  if (v3) isas.push_back(&isa_x86_64_v3);
  isas.push_back(&isa_x86_64_v2);
  return isas;
}
#elif defined(__aarch64__)
// Advanced SIMD, which every such processor has.
extern const Isa isa_aarch64;

std::vector<const Isa*> usable_isas() { return {&isa_aarch64}; }
#else
extern const Isa isa_generic;

std::vector<const Isa*> usable_isas() { return {&isa_generic}; }
#endif

const Isa& selected_isa() {
  const std::vector<const Isa*> isas = usable_isas();
  const char* const wanted = std::getenv("PACKEDCONV_ISA");
  if (wanted == nullptr || *wanted == '\0') return *isas.front();
  std::string names;
  for (const Isa* isa : isas) {
    if (std::string(wanted) == isa->name) return *isa;
    names += std::string(names.empty() ? "" : ", ") + isa->name;
  }
  throw std::invalid_argument("PACKEDCONV_ISA: expected one of " + names +
                              ", which this processor and build have; got " + wanted);
}

}  // namespace packedconv
