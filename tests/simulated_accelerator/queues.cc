#include "tests/simulated_accelerator/queues.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace fsdp::testing::simulated {

Queues::Queues(c10::DeviceIndex devices)
    : streams_(static_cast<size_t>(devices)), failures_(static_cast<size_t>(devices)) {
  for (c10::DeviceIndex device = 0; device < devices; ++device) queues_.push_back({device});
}

size_t Queues::open(c10::DeviceIndex device) {
  queues_.push_back({device, ++streams_.at(static_cast<size_t>(device))});
  return queues_.size() - 1;
}

void Queues::append(size_t index, Item item) {
  auto& queue = queues_.at(index);
  ++queue.issued;
  if (item.rendezvous) {
    item.rendezvous->arrive({index, queue.issued});
    changed_.notify_all();
  }
  queue.items.push_back(std::move(item));
}

bool Queues::is_finished(Position position) const {
  return queues_.at(position.queue).finished >= position.number;
}

void Queues::run_until(Lock& lock, Position position) {
  while (!is_finished(position)) step(lock, position.queue, Patience::kWaits);
}

bool Queues::step(Lock& lock, size_t index, Patience patience, Path path) {
  auto& queue = queues_.at(index);
  if (queue.items.empty()) return false;
  const bool waits_for_itself = std::find(path.begin(), path.end(), index) != path.end();
  TORCH_CHECK(!waits_for_itself, "simulated accelerator: queues wait for each other, since ranks ",
              "issued their collectives in different orders:", state());
  path.push_back(index);
  const auto& item = queue.items.front();
  if (item.waits_for && !is_finished(*item.waits_for)) {
    return step(lock, item.waits_for->queue, patience, std::move(path));
  }
  if (item.rendezvous && !item.rendezvous->is_done()) {
    return step_collective(lock, index, patience, path);
  }
  run_first(queue);
  return true;
}

bool Queues::step_collective(Lock& lock, size_t index, Patience patience, const Path& path) {
  const auto& item = queues_.at(index).items.front();
  const auto rendezvous = item.rendezvous;
  if (!rendezvous->is_complete()) {
    if (patience == Patience::kWaits) await_other_ranks(lock, item.name);
    return false;
  }
  for (const auto& part : rendezvous->parts()) {
    const bool is_first = queues_.at(part.queue).finished + 1 == part.number;
    if (!is_first) return step(lock, part.queue, patience, path);
  }
  try {
    rendezvous->run();
  } catch (...) {
    keep_failure(queues_.at(index).device);
  }
  changed_.notify_all();
  return true;
}

// An error is the device's own, as that of a kernel is: the next host that waits gets it.
void Queues::run_first(Queue& queue) {
  const Item item = std::move(queue.items.front());
  queue.items.pop_front();
  try {
    if (item.run) item.run();
  } catch (...) {
    keep_failure(queue.device);
  }
  ++queue.finished;
}

void Queues::keep_failure(c10::DeviceIndex device) {
  auto& failure = failures_.at(static_cast<size_t>(device));
  if (!failure) failure = std::current_exception();
}

std::exception_ptr Queues::take_failure(c10::DeviceIndex device) {
  return std::exchange(failures_.at(static_cast<size_t>(device)), nullptr);
}

void Queues::await_other_ranks(Lock& lock, const std::string& name) {
  const auto what = name;  // its item may be gone after waiting
  const bool moved = changed_.wait_for(lock, patience_) == std::cv_status::no_timeout;
  TORCH_CHECK(moved, "simulated accelerator: waited for '", what, "', of which not every rank ",
              "issued its part:", state());
}

std::string Queues::state() const {
  std::ostringstream text;
  for (size_t index = 0; index < queues_.size(); ++index) {
    const auto& queue = queues_[index];
    if (queue.items.empty()) continue;
    const auto& first = queue.items.front();
    text << "\n  device " << static_cast<int>(queue.device) << ", stream " << queue.stream
         << " (queue " << index << "): " << queue.finished << " of " << queue.issued
         << " items have run; next is '" << first.name << "'";
    if (first.waits_for) {
      text << " for item " << first.waits_for->number << " of queue " << first.waits_for->queue;
    }
    if (first.rendezvous) {
      text << ", issued by " << first.rendezvous->parts().size() << " of "
           << first.rendezvous->expected() << " ranks";
    }
  }
  return text.str();
}

void Queues::clear() {
  for (auto& queue : queues_) {
    queue.items.clear();
    queue.finished = queue.issued;
  }
  std::fill(streams_.begin(), streams_.end(), 0);
  std::fill(failures_.begin(), failures_.end(), nullptr);
}

}  // namespace fsdp::testing::simulated
