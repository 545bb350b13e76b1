#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace offload {

constexpr std::int64_t kSumGrain = 1 << 15;

// `before` plus the sum of squares, in double: finite exactly if all elements are. The bits depend neither on
// the number of threads nor on the instruction set, nor on how the elements are cut into calls, as long as
// all but the last take a multiple of kSumGrain.
double sum_of_squares(std::uintptr_t address, std::int64_t numel, Dtype dtype, int num_threads, Isa isa,
                      double before);

}  // namespace offload
