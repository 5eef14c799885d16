#include "device_mesh/collectives/wait_watch.h"

#include "device_mesh/collectives/watched_rank.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Leaked: it outlives static destruction.
class WaitWatch {
 public:
  static WaitWatch& get() {
    static auto& instance = *new WaitWatch();
    return instance;
  }

  void add(const std::shared_ptr<WatchedRank>& rank) {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranks_, [](const auto& each) { return each.expired(); });
    ranks_.push_back(rank);
    if (!std::exchange(running_, true)) std::thread([this] { run(); }).detach();
  }
  void set(std::chrono::milliseconds patience, std::chrono::milliseconds interval) {
    const std::lock_guard lock(mutex_);
    patience_ = patience;
    interval_ = interval;
    changed_.notify_all();
  }

 private:
  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait_for(lock, interval_);
      const auto patience = patience_;
      std::vector<std::shared_ptr<WatchedRank>> ranks;
      for (const auto& weak : ranks_) {
        if (auto rank = weak.lock()) ranks.push_back(std::move(rank));
      }
      lock.unlock();
      for (const auto& rank : ranks) look(*rank, patience);
      ranks.clear();
      lock.lock();
    }
  }

  static void look(WatchedRank& rank, std::chrono::milliseconds patience) {
    try {
      rank.look(patience);
    } catch (const std::exception&) {
      // The store is gone, or goes: waits end in their time-outs then.
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<WatchedRank>> ranks_;
  std::chrono::milliseconds patience_{400}, interval_{100};
  bool running_ = false;
};

}  // namespace

void watch_waits_of(const std::shared_ptr<WatchedRank>& rank) { WaitWatch::get().add(rank); }

c10::intrusive_ptr<c10d::Store> connection_to(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

void set_wait_patience(std::chrono::milliseconds patience, std::chrono::milliseconds interval) {
  WaitWatch::get().set(patience, interval);
}

}  // namespace fsdp::internal
