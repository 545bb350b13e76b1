// Stresses the core without Python, for the sanitizers: threads on one handle, every backend with and without
// faults, sizes around the edges, handles destroyed with transfers in flight. Ends with 1 at the first lie.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "../../csrc/backend.h"
#include "../../csrc/io_handle.h"
#include "../../csrc/pinned_memory.h"

namespace {

using namespace offload;  // NOLINT: a program of one file
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<char>;

constexpr int kThreads = 4;
constexpr int64_t kRegion = 1'000'003;  // no multiple of a page, so that neighbours share one
constexpr std::array<int64_t, 9> kEdges = {0, 1, 511, 4095, 4096, 4097, 65535, 65537, 300'001};
constexpr size_t kMostPending = 24;

enum class Faults { kNone, kSoft, kHard };

void require(bool truth, const char* claim) {
  if (truth) return;
  std::fprintf(stderr, "stress: not true: %s\n", claim);
  std::_Exit(1);
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t limit) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit)); }
  int64_t size() {
    return below(3) == 0 ? below(200'000) : kEdges[static_cast<size_t>(below(int64_t{kEdges.size()}))];
  }
  void fill(char* start, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; ++i) start[i] = static_cast<char>(engine_());
  }

 private:
  std::mt19937_64 engine_;
};

std::shared_ptr<FaultPlan> plan_of(Faults faults, uint64_t seed) {
  if (faults == Faults::kNone) return nullptr;
  FaultPlan::Settings settings;
  settings.seed = seed;
  settings.delay_seconds = 0.0005;
  settings.rates = {{FaultKind::kShort, 0.2},  {FaultKind::kEagain, 0.05}, {FaultKind::kEintr, 0.05},
                    {FaultKind::kDelay, 0.05}, {FaultKind::kReorder, 0.3}, {FaultKind::kBusy, 0.05}};
  if (faults == Faults::kHard) settings.rates.insert({{FaultKind::kEio, 0.02}, {FaultKind::kEnospc, 0.02}});
  return std::make_shared<FaultPlan>(settings);
}

// One thread's part of the shared file: what it asked for, and what the file must hold by now.
class Client {
 public:
  Client(IoHandle& handle, std::string path, int index, Faults faults, uint64_t seed)
      : handle_(handle), path_(std::move(path)), start_(index * kRegion), faults_(faults), random_(seed) {
    model_.resize(kRegion);
    write(0, kRegion);
  }

  void step() {
    const int64_t offset = random_.below(kRegion);
    const int64_t nbytes = std::min(random_.size(), kRegion - offset);
    if (random_.below(2) == 0) {
      write(offset, nbytes);
    } else {
      read(offset, nbytes);
    }
    if (random_.below(8) == 0) pending_.front().transfer->wait_for(1e-4);
    const Transfer& oldest = *pending_.front().transfer;
    require(oldest.nbytes_moved() <= oldest.nbytes(), "progress can be read at any time");
    while (pending_.size() > static_cast<size_t>(random_.below(kMostPending))) settle();
  }

  void finish() {
    read(0, kRegion);
    while (!pending_.empty()) settle();
  }

 private:
  struct Pending {
    std::shared_ptr<Transfer> transfer;
    std::unique_ptr<PinnedBuffer> buffer;
    int64_t shift;
    Bytes wanted;  // of a read
  };

  void write(int64_t offset, int64_t nbytes) {
    submit(true, offset, nbytes, [&](char* memory) {
      random_.fill(memory, nbytes);
      std::memcpy(model_.data() + offset, memory, static_cast<size_t>(nbytes));
    });
  }
  void read(int64_t offset, int64_t nbytes) {
    submit(false, offset, nbytes, [](char*) {});
  }

  void submit(bool writing, int64_t offset, int64_t nbytes, const std::function<void(char*)>& fill) {
    const int64_t shift = random_.below(3) == 0 ? random_.below(600) : 0;
    auto buffer = std::make_unique<PinnedBuffer>(nbytes + shift + 1, Locking::kPreferred);
    char* memory = buffer->address() + shift;
    fill(memory);
    const int64_t cut = random_.below(nbytes + 1);  // two extents, one of them possibly empty
    std::vector<Extent> extents;
    for (const auto& [from, size] : {std::pair(int64_t{0}, cut), std::pair(cut, nbytes - cut)}) {
      const int64_t place = start_ + offset + from;
      extents.push_back(
          {memory + from, size, handle_.open(path_, writing), place, PinnedLease(memory + from, size)});
    }
    const Bytes wanted(model_.begin() + offset, model_.begin() + offset + (writing ? 0 : nbytes));
    pending_.push_back({handle_.submit(writing, std::move(extents)), std::move(buffer), shift, wanted});
  }

  void settle() {
    const Pending done = std::move(pending_.front());
    pending_.pop_front();
    done.transfer->wait_for(-1);
    const auto& failure = done.transfer->failure();
    if (failure) {
      require(faults_ == Faults::kHard, "only a hard fault fails a transfer");
      require(failure->code == EIO || failure->code == ENOSPC, "the error is the one that was injected");
      require(failure->nbytes_moved < failure->nbytes_wanted, "what failed has not moved whole");
      return;
    }
    require(done.transfer->nbytes_moved() == done.transfer->nbytes(), "success means all bytes");
    if (faults_ == Faults::kHard) return;  // an earlier write may be missing
    const char* found = done.buffer->address() + done.shift;
    require(std::equal(done.wanted.begin(), done.wanted.end(), found), "a read gives what was written");
  }

  IoHandle& handle_;
  const std::string path_;
  const int64_t start_;
  const Faults faults_;
  Random random_;
  Bytes model_;
  std::deque<Pending> pending_;
};

struct Round {
  std::string backend;
  Faults faults;
  uint64_t seed;
  std::string folder;
  double seconds;

  HandleSettings settings() const {
    constexpr std::array<int64_t, 3> kBlocks = {4096, 65536, 1 << 20};
    constexpr std::array<int64_t, 4> kDepths = {1, 3, 16, 64};
    return {backend, kBlocks[seed % 3], kDepths[seed % 4], 3, plan_of(faults, seed)};
  }
};

void share_a_handle(const Round& round) {
  IoHandle handle(round.settings());
  const std::string path = round.folder + "/shared";
  const auto end = Clock::now() + std::chrono::duration<double>(round.seconds);
  std::atomic<int> working{kThreads};
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      Client client(handle, path, index, round.faults, round.seed * kThreads + static_cast<uint64_t>(index));
      while (Clock::now() < end) client.step();
      client.finish();
      --working;
    });
  }
  while (working > 0) {
    handle.take_finished();
    handle.take_notices();
    require(handle.counters().bytes_read >= 0, "counters can be read at any time");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& thread : threads) thread.join();
  handle.close();
}

std::shared_ptr<Transfer> write_one(IoHandle& handle, const std::string& path, char* address, int64_t nbytes,
                                    int64_t offset) {
  std::vector<Extent> extents;
  extents.push_back({address, nbytes, handle.open(path, true), offset, PinnedLease(address, nbytes)});
  return handle.submit(true, std::move(extents));
}

void destroy_in_flight(const Round& round) {
  const std::string path = round.folder + "/dropped";
  PinnedBuffer buffer(3 << 20, Locking::kPreferred);
  std::vector<std::shared_ptr<Transfer>> transfers;
  {
    IoHandle handle(round.settings());
    for (int64_t at = 0; at < buffer.nbytes(); at += 70'001) {
      const int64_t nbytes = std::min<int64_t>(70'001, buffer.nbytes() - at);
      transfers.push_back(write_one(handle, path, buffer.address() + at, nbytes, at));
    }
  }
  for (const auto& transfer : transfers) require(transfer->done(), "a destroyed handle has drained");
}

void close_under_submitters(const Round& round) {
  IoHandle handle(round.settings());
  const std::string path = round.folder + "/closed";
  PinnedBuffer buffer(70'001, Locking::kPreferred);
  std::atomic<int> started{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      try {
        for (;;) {
          const std::string own = path + std::to_string(index);
          const auto transfer = write_one(handle, own, buffer.address(), buffer.nbytes(), 0);
          if (++started % 3 == 0) transfer->wait_for(-1);
        }
      } catch (const std::invalid_argument&) {  // it is closed
      }
    });
  }
  while (started < 20) std::this_thread::yield();
  handle.close();
  for (std::thread& thread : threads) thread.join();
}

void run(const Round& round) {
  share_a_handle(round);
  for (int again = 0; again < 3; ++again) destroy_in_flight(round);
  close_under_submitters(round);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: stress SECONDS FOLDER\n");
    return 2;
  }
  const auto end = Clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  const std::string folder = std::string(argv[2]) + "/stress-" + std::to_string(::getpid());
  std::filesystem::create_directories(folder);
  int nrounds = 0;
  for (uint64_t seed = 0; seed == 0 || Clock::now() < end; ++seed) {
    for (const BackendProbe& probe : probe_backends()) {
      if (!probe.usable) std::printf("%s: skipped, %s\n", probe.name.c_str(), probe.detail.c_str());
      for (const Faults faults : {Faults::kNone, Faults::kSoft, Faults::kHard}) {
        if (!probe.usable) continue;
        run({probe.name, faults, seed, folder, 0.4});
        ++nrounds;
      }
    }
  }
  std::filesystem::remove_all(folder);
  std::printf("stress: %d rounds, no lie\n", nrounds);
}
