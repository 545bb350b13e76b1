#pragma once

#include <stdexcept>
#include <string>

namespace offload {

inline void require(bool holds, const char* who, const std::string& what) {
  if (!holds) throw std::invalid_argument(std::string(who) + ": " + what);
}

}  // namespace offload
