#include "device_mesh/collectives/last_issued.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

namespace fsdp::internal {
namespace {

struct LastIssued {
  std::mutex mutex;
  std::string what;
  uint32_t sequence = 0;
  int64_t rank = 0;
  std::terminate_handler previous = nullptr;
};

LastIssued& last_issued() {
  static auto& instance = *new LastIssued();  // leaked: read while the process ends
  return instance;
}

[[noreturn]] void print_and_terminate() {
  auto& last = last_issued();
  if (last.mutex.try_lock()) {
    std::fprintf(stderr, "fsdp: the process is ending; rank %lld issued last: %s (sequence %u)\n",
                 static_cast<long long>(last.rank), last.what.c_str(), last.sequence);
    std::fflush(stderr);
  }
  if (last.previous != nullptr) last.previous();
  std::abort();
}

}  // namespace

void record_issued(const std::string& what, uint32_t sequence, int64_t global_rank) {
  auto& last = last_issued();
  const std::lock_guard lock(last.mutex);
  static const bool installed = (last.previous = std::set_terminate(&print_and_terminate), true);
  static_cast<void>(installed);
  last.what = what;
  last.sequence = sequence;
  last.rank = global_rank;
}

}  // namespace fsdp::internal
