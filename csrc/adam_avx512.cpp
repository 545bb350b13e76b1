#if defined(__x86_64__)

// Standard headers come before the pragma: a function of theirs compiled for this instruction set could be
// the copy that the linker keeps for everybody.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
// GCC's own headers start the unused lanes of a conversion from an uninitialised register.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "adam_kernel.h"
#include "simd_avx512.h"

namespace offload {

AdamKernel adam_kernel_avx512(const AdamBuffers& buffers) { return find_kernel<Avx512>(buffers); }

}  // namespace offload

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
