// Gathers the kernels of one vector type; included by the files that compile them.
#pragma once

#include "kernels.h"
#include "squares_kernel.h"
#include "step_kernel.h"
#include "update_rules.h"

namespace offload {
namespace {

template <class V>
constexpr Kernels kKernelsOf = {
    update_all<V, AdamRule>,
    add_squares<V>,
};

}  // namespace
}  // namespace offload
