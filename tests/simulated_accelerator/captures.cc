#include "tests/simulated_accelerator/captures.h"

#include <utility>

namespace fsdp::testing::simulated {

void Captures::begin(c10::DeviceIndex device, Position origin) {
  open_[device] = Capture{origin, {}, {}};
}

void Captures::note(c10::DeviceIndex device, const ItemName& item, const Clock& known) {
  const auto found = open_.find(device);
  if (found == open_.end()) return;
  auto& capture = found->second;
  if (item.position.queue == capture.origin.queue || known.contains(capture.origin)) {
    capture.last[item.position.queue] = item;
  } else {
    capture.outside.push_back(item.text() + " is on a stream that is not captured");
  }
}

std::vector<std::string> Captures::end(c10::DeviceIndex device, const Clock& known) {
  const auto capture = std::move(open_.at(device));
  open_.erase(device);
  auto faults = capture.outside;
  for (const auto& [queue, item] : capture.last) {
    if (!known.contains(item.position)) faults.push_back(item.text() + " was not waited for");
  }
  return faults;
}

}  // namespace fsdp::testing::simulated
