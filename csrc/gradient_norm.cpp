#include "gradient_norm.h"

#include <cmath>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "require.h"

namespace offload {

std::pair<double, bool> gradient_norm(std::uintptr_t address, std::int64_t numel, Dtype dtype,
                                      int num_threads, Isa isa) {
  constexpr const char* kWho = "gradient norm";
  require(num_threads >= 1, kWho, "num_threads must be at least 1, got " + std::to_string(num_threads));
  require(numel >= 0, kWho, "numel must not be negative, got " + std::to_string(numel));
  require(address || numel == 0, kWho, "null address for " + std::to_string(numel) + " elements");
  const Kernels& kernels = kernels_for(isa);
  std::vector<double> sums(static_cast<std::size_t>(numel / kStepGrain + 1));
  parallel_for(numel, kStepGrain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const auto start = address + static_cast<std::uintptr_t>(begin * nbytes_of(dtype));
    double lanes[kSquareLanes];
    kernels.add_squares({start, dtype}, end - begin, lanes);
    for (double lane : lanes) sums[static_cast<std::size_t>(begin / kStepGrain)] += lane;
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return {std::sqrt(total), std::isfinite(total)};
}

}  // namespace offload
