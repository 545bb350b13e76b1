#include "isa.h"

#include <stdexcept>

#include "kernels.h"

namespace offload {
namespace {

bool supports(Isa isa) {
#if defined(__x86_64__)
  // Every CPU with AVX2 and FMA has F16C, which not every compiler can ask for by name.
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return isa == Isa::kPortable;
}

}  // namespace

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (supports(isa)) isas.push_back(isa);
  }
  return isas;
}

const Kernels& kernels_for(Isa isa) {
  if (!supports(isa)) {
    throw std::invalid_argument("this CPU lacks the instruction set asked for; see supported_isas()");
  }
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kernels_avx2();
  if (isa == Isa::kAvx512) return kernels_avx512();
#endif
  return kernels_portable();
}

}  // namespace offload
