#pragma once

#include <cstdint>

namespace offload {

enum class Dtype { kFloat32, kBfloat16, kFloat16, kInt16 };

constexpr std::int64_t nbytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace offload
