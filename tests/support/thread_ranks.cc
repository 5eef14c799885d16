#include "tests/support/thread_ranks.h"

#include "device_mesh/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/slowdown.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr std::chrono::milliseconds kCollectiveTimeout = std::chrono::seconds(20);

// What the rank threads tell the thread that waits for them.
class Outcome {
 public:
  explicit Outcome(int64_t world_size)
      : running_(static_cast<size_t>(world_size), true), left_(world_size) {}

  void fail(int64_t rank, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = "rank " + std::to_string(rank) + ": " + text;
  }

  void end(int64_t rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    running_[static_cast<size_t>(rank)] = false;
    if (--left_ == 0) all_ended_.notify_all();
  }

  void await(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (all_ended_.wait_for(lock, timeout, [this] { return left_ == 0; })) return;
    std::fprintf(stderr, "run_ranks: still running after %lld ms: ranks",
                 static_cast<long long>(timeout.count()));
    for (size_t rank = 0; rank < running_.size(); ++rank) {
      if (running_[rank]) std::fprintf(stderr, " %zu", rank);
    }
    std::fprintf(stderr, "; first failure: %s\n", failure_ ? failure_->c_str() : "none");
    std::abort();  // A thread cannot be ended from outside.
  }

  const std::optional<std::string>& failure() const { return failure_; }

 private:
  std::mutex mutex_;
  std::condition_variable all_ended_;
  std::vector<bool> running_;
  int64_t left_;
  std::optional<std::string> failure_;
};

void run_rank(int64_t rank, const ProcessGroupOptions& options,
              const std::function<void(int64_t)>& body, Outcome& outcome) {
  try {
    at::set_num_threads(1);
    init_process_group(options);
    body(rank);
  } catch (const std::exception& error) {
    outcome.fail(rank, text_of(error));
  }
  destroy_process_group();
  outcome.end(rank);
}

// c10d records collectives in one table per process, to which the first collective of
// each group adds an entry without a lock: ranks that are threads would race for it. Read
// once, at the process's first collective.
void switch_off_flight_recorder() { setenv("TORCH_FR_BUFFER_SIZE", "0", /*replace=*/1); }

// Where threads come to a process's first tanh at once, after a product, some of them get
// five correct digits: in one process of a hundred. Whatever LibTorch sets up then is set
// up by one call before.
void set_up_vector_functions() { [[maybe_unused]] static const auto done = at::ones({2}).tanh(); }

}  // namespace

void run_ranks(int64_t world_size, const std::function<void(int64_t rank)>& body,
               std::chrono::milliseconds timeout) {
  run_ranks_over("gloo", world_size, body, timeout);
}

void run_ranks_over(const std::string& backend, int64_t world_size,
                    const std::function<void(int64_t)>& body, std::chrono::milliseconds timeout) {
  switch_off_flight_recorder();
  set_up_vector_functions();
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(kCollectiveTimeout);
  Outcome outcome(world_size);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    ProcessGroupOptions options{.backend = backend,
                                .store = store,
                                .rank = rank,
                                .world_size = world_size,
                                .timeout = kCollectiveTimeout};
    threads.emplace_back(
        [rank, options, &body, &outcome] { run_rank(rank, options, body, outcome); });
  }
  outcome.await(kSlowdown * timeout);
  for (auto& thread : threads) thread.join();
  TORCH_CHECK(!outcome.failure(), *outcome.failure());
}

}  // namespace fsdp::testing
