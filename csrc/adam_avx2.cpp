#if defined(__x86_64__)

// Standard headers come before the pragma: a function of theirs compiled for this instruction set could be
// the copy that the linker keeps for everybody.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "adam_kernel.h"
#include "simd_avx2.h"

namespace offload {

AdamKernel adam_kernel_avx2(const AdamBuffers& buffers) { return find_kernel<Avx2>(buffers); }

}  // namespace offload

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
