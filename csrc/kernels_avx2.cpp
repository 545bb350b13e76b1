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
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "kernels_of.h"
#include "simd_avx2.h"

namespace offload {

const Kernels& kernels_avx2() { return kKernelsOf<Avx2>; }

}  // namespace offload

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
