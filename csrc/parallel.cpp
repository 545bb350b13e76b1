#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace offload {

void parallel_for(std::int64_t count, std::int64_t grain, int num_threads,
                  const std::function<void(std::int64_t begin, std::int64_t end)>& run) {
  const std::int64_t pieces = count / grain + (count % grain != 0);
  std::atomic<std::int64_t> next_piece{0};
  const auto work = [&] {
    for (auto piece = next_piece++; piece < pieces; piece = next_piece++) {
      const std::int64_t begin = piece * grain;
      run(begin, std::min(count - begin, grain) + begin);
    }
  };

  std::vector<std::thread> threads;
  const auto extra = std::min<std::int64_t>(num_threads, pieces) - 1;
  threads.reserve(static_cast<std::size_t>(std::max<std::int64_t>(extra, 0)));
  try {
    while (static_cast<std::int64_t>(threads.size()) < extra) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The process may start no more threads; those that run, and the caller, share the work.
  }
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace offload
