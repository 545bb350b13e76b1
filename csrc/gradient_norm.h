#pragma once

#include <cstdint>
#include <utility>

#include "dtype.h"
#include "isa.h"

namespace offload {

// The square root of the sum of squares, added up in double, and whether all elements are finite. The bits
// depend neither on the number of threads nor on the instruction set.
std::pair<double, bool> gradient_norm(std::uintptr_t address, std::int64_t numel, Dtype dtype,
                                      int num_threads, Isa isa);

}  // namespace offload
