// Instruction sets that this build carries a kernel for.
#ifndef PACKEDCONV_CPU_ISA_H
#define PACKEDCONV_CPU_ISA_H

#include <string>
#include <vector>

#include "kernel.h"

namespace packedconv {

// Those that this processor runs, fastest first.
std::vector<const Isa*> usable_isas();

// The fastest, or the one that the environment variable PACKEDCONV_ISA names.
// Throws std::invalid_argument, naming those there are, when it names none of them.
const Isa& selected_isa();

}  // namespace packedconv

#endif
