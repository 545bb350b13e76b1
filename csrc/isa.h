// Instruction sets, chosen when the program runs.
#pragma once

#include <vector>

namespace offload {

enum class Isa { kPortable, kAvx2, kAvx512 };

struct Kernels;

// What this CPU can run, slowest first.
std::vector<Isa> supported_isas();

// Throws std::invalid_argument for an instruction set that this CPU lacks.
const Kernels& kernels_for(Isa isa);

}  // namespace offload
