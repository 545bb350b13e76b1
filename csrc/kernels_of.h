// Gathers the kernels of one vector type; included by the files that compile them.
#pragma once

#include "eight_bit_kernel.h"
#include "kernels.h"
#include "split_kernel.h"
#include "squares_kernel.h"
#include "step_kernel.h"
#include "update_rules.h"

namespace offload {
namespace {

template <class V>
constexpr Kernels kKernelsOf = {
    update_all<V, AdamRule>,
    update_all<V, LionRule>,
    update_all<V, AdagradRule>,
    update_all<V, SgdRule>,
    split_encode<V>,
    split_decode<V>,
    adam_8bit<V>,
    encode_moment<V, SignedCode>,
    encode_moment<V, UnsignedCode>,
    decode_moment<V, SignedCode>,
    decode_moment<V, UnsignedCode>,
    add_squares<V>,
};

}  // namespace
}  // namespace offload
