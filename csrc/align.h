// Arithmetic of aligned sizes and addresses; every alignment here is a power of two.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace offload {

constexpr int64_t kDefaultAlignment = 4096;

constexpr int64_t round_down(int64_t value, int64_t alignment) { return value & ~(alignment - 1); }
constexpr int64_t round_up(int64_t value, int64_t alignment) {
  return round_down(value + alignment - 1, alignment);
}
constexpr bool is_aligned(int64_t value, int64_t alignment) { return (value & (alignment - 1)) == 0; }

inline bool is_aligned(const void* address, int64_t alignment) {
  return (reinterpret_cast<uintptr_t>(address) & static_cast<uintptr_t>(alignment - 1)) == 0;
}

inline int64_t page_size() {
  static const int64_t size = ::sysconf(_SC_PAGESIZE);
  return size;
}

}  // namespace offload
