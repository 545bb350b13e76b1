#include "sum_of_squares.h"

#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "require.h"

namespace offload {

double sum_of_squares(std::uintptr_t address, std::int64_t numel, Dtype dtype, int num_threads, Isa isa,
                      double before) {
  constexpr const char* kWho = "sum of squares";
  require(num_threads >= 1, kWho, "num_threads must be at least 1, got " + std::to_string(num_threads));
  require(numel >= 0, kWho, "numel must not be negative, got " + std::to_string(numel));
  require(address || numel == 0, kWho, "null address for " + std::to_string(numel) + " elements");
  const Kernels& kernels = kernels_for(isa);
  std::vector<double> sums(static_cast<std::size_t>(numel / kSumGrain + 1));
  parallel_for(numel, kSumGrain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const auto start = address + static_cast<std::uintptr_t>(begin * nbytes_of(dtype));
    double lanes[kSquareLanes];
    kernels.add_squares({start, dtype}, end - begin, lanes);
    for (double lane : lanes) sums[static_cast<std::size_t>(begin / kSumGrain)] += lane;
  });
  double total = before;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace offload
