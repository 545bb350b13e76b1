#if defined(__x86_64__)

// Standard headers come before the pragma: a function of theirs compiled for this instruction set could be
// the copy that the linker keeps for everybody.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
// GCC's own headers start the unused lanes of a conversion from an uninitialised register.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "kernels_of.h"
#include "simd_avx512.h"

namespace offload {

const Kernels& kernels_avx512() { return kKernelsOf<Avx512>; }

}  // namespace offload

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
