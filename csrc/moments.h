// Where one 8-bit moment lies; see eight_bit.h.
#pragma once

#include <cstdint>

namespace offload {

struct Moment {
  std::uintptr_t codes;
  std::uintptr_t scales;
};

struct Moments {
  Moment exp_avg;
  Moment exp_avg_sq;
};

}  // namespace offload
