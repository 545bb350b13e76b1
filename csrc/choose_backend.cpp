#include <algorithm>
#include <fstream>
#include <stdexcept>

#include "backend.h"
#include "error.h"

namespace offload {
namespace {

// Threads beyond this add switching and no bandwidth: measured on NVMe, 1 MiB blocks.
constexpr int kMostPosixThreads = 16;
constexpr int kMostRequests = 1 << 20;

std::string first_line(const char* path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line.empty() ? "unknown" : line;
}

std::string limit_of(const std::string& name) {
  if (name == "libaio") return "fs.aio-max-nr is " + first_line("/proc/sys/fs/aio-max-nr");
  return "io_uring takes 32768 entries, and RLIMIT_MEMLOCK may allow fewer";
}

std::unique_ptr<Backend> make(const std::string& name, int queue_depth, int thread_count) {
  if (name == "uring") return make_uring_backend(queue_depth);
  if (name == "libaio") return make_libaio_backend(queue_depth);
  if (name != "posix") {
    throw std::invalid_argument("backend '" + name + "': choose auto, uring, libaio or posix");
  }
  const int wanted = std::max(thread_count, std::min(queue_depth, kMostPosixThreads));
  return make_posix_backend(std::min(queue_depth, kMostRequests), wanted);
}

bool is_limit(int code) { return code == EAGAIN || code == ENOMEM || code == EINVAL; }

// What a refusal means, with the command that lifts it.
std::string explain(const std::string& name, const IoError& error) {
  std::string text = name + " refused: " + error.what();
  if (name == "uring" && (error.code() == EPERM || error.code() == EACCES)) {
    text += " (a seccomp profile, or kernel.io_uring_disabled = " +
            first_line("/proc/sys/kernel/io_uring_disabled") + ")";
  }
  if (name == "libaio" && error.code() == EAGAIN) {
    text += " (" + limit_of(name) + ", all in use: sysctl fs.aio-max-nr=1048576)";
  }
  return text;
}

// A depth beyond the kernel's limit is lowered until it is taken; any other refusal passes through.
std::unique_ptr<Backend> make_within_limits(const std::string& name, const BackendSettings& settings) {
  int queue_depth = settings.queue_depth;
  for (;;) {
    try {
      return make(name, queue_depth, settings.thread_count);
    } catch (const IoError& error) {
      if (!is_limit(error.code()) || queue_depth == 1) throw;
      queue_depth = std::max(1, queue_depth / 2);
    }
  }
}

void note_depth(const BackendSettings& settings, BackendChoice& choice) {
  const int got = choice.backend->queue_depth();
  if (got >= settings.queue_depth) return;
  const std::string name = choice.backend->name();
  choice.notices.push_back("queue_depth " + std::to_string(settings.queue_depth) + " lowered to " +
                           std::to_string(got) + ": " + limit_of(name));
}

}  // namespace

BackendChoice choose_backend(const BackendSettings& settings) {
  BackendChoice choice;
  if (settings.name != "auto") {
    try {
      choice.backend = make_within_limits(settings.name, settings);
    } catch (const IoError& error) {
      throw IoError(error.code(), explain(settings.name, error));
    }
    choice.reason = "asked for";
    note_depth(settings, choice);
    return choice;
  }
  for (const char* name : {"uring", "libaio", "posix"}) {
    try {
      choice.backend = make_within_limits(name, settings);
      break;
    } catch (const IoError& error) {
      choice.reason += explain(name, error) + "; ";
    }
  }
  if (choice.backend == nullptr) throw IoError(EAGAIN, "no backend: " + choice.reason);
  choice.reason += std::string(choice.backend->name()) + " is the first that works";
  note_depth(settings, choice);
  return choice;
}

std::vector<BackendProbe> probe_backends() {
  std::vector<BackendProbe> probes;
  for (const char* name : {"uring", "libaio", "posix"}) {
    try {
      make(name, 1, 1)->attach();
      probes.push_back({name, true, "works"});
    } catch (const IoError& error) {
      probes.push_back({name, false, explain(name, error)});
    }
  }
  return probes;
}

}  // namespace offload
