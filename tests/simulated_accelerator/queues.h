// Streams as queues of items, which run when somebody forces them: each in its order,
// after what it waits for. Every function is called with the machine's lock held; it is
// released only while a host waits for another rank.
#pragma once

#include "tests/simulated_accelerator/clock.h"
#include "tests/simulated_accelerator/rendezvous.h"

#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing::simulated {

using Lock = std::unique_lock<std::mutex>;

struct Item {
  std::string name;
  std::function<void()> run = {};
  std::optional<Position> waits_for = {};
  std::shared_ptr<Rendezvous> rendezvous = {};  // of a collective
};

struct Queue {
  c10::DeviceIndex device = 0;
  int stream = 0;  // its number on the device, as in Schedule
  uint64_t issued = 0;
  uint64_t finished = 0;
  Clock known = {};  // finished before the next item starts
  std::deque<Item> items = {};

  bool is_idle() const { return finished == issued; }
};

class Queues {
 public:
  // Whether a host waits for ranks that have not issued their part of a collective.
  enum class Patience { kWaits, kReturns };

  explicit Queues(c10::DeviceIndex devices);

  size_t open(c10::DeviceIndex device);
  Queue& at(size_t index) { return queues_.at(index); }
  size_t size() const { return queues_.size(); }

  void append(size_t index, Item item);
  bool is_finished(Position position) const;

  // Throws where no rank has moved for `patience` of set_patience(), or queues wait for
  // each other, with the state of all queues.
  void run_until(Lock& lock, Position position);

  // Runs the first item of a queue, or the first of those that it waits for. False where
  // that takes a rank that has not come yet.
  bool step(Lock& lock, size_t index, Patience patience) { return step(lock, index, patience, {}); }

  // The first error of an item of `device` since it was last asked for.
  std::exception_ptr take_failure(c10::DeviceIndex device);

  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

  // Drops what has not run, and counts streams from 1 again.
  void clear();

 private:
  using Path = std::vector<size_t>;  // queues that wait for each other, from the one forced

  bool step(Lock& lock, size_t index, Patience patience, Path path);
  bool step_collective(Lock& lock, size_t index, Patience patience, const Path& path);
  void run_first(Queue& queue);
  void keep_failure(c10::DeviceIndex device);
  void await_other_ranks(Lock& lock, const std::string& name);
  std::string state() const;

  std::deque<Queue> queues_;  // the first ones are the devices' default streams
  std::vector<int> streams_;  // by device: the number of the last one made
  std::vector<std::exception_ptr> failures_;
  std::condition_variable changed_;
  std::chrono::milliseconds patience_{};
};

}  // namespace fsdp::testing::simulated
