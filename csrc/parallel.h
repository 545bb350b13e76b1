#pragma once

#include <cstdint>
#include <functional>

namespace offload {

// Calls run(begin, end) over [0, count) in pieces of `grain`, on at most `num_threads` threads, the caller's
// among them. The threads end with the call, so nothing is left for a fork to lose. `run` must not throw.
void parallel_for(std::int64_t count, std::int64_t grain, int num_threads,
                  const std::function<void(std::int64_t begin, std::int64_t end)>& run);

}  // namespace offload
