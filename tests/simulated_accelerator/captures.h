// Graphs that are being captured, at most one of each device: what is given to the stream
// where it began, and to those that wait for that one. Held by the machine's lock.
#pragma once

#include "tests/simulated_accelerator/access_history.h"
#include "tests/simulated_accelerator/clock.h"

#include <c10/core/Device.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing::simulated {

class Captures {
 public:
  // `origin`: the last item before the graph, of the stream where it begins.
  void begin(c10::DeviceIndex device, Position origin);
  bool is_open(c10::DeviceIndex device) const { return open_.count(device) != 0; }
  // `item` of the device starts after all that `known` has. Nothing where none is open.
  void note(c10::DeviceIndex device, const ItemName& item, const Clock& known);
  // `known` by the stream where it began. What the graph lacks, or would not be allowed
  // to end with: items of streams that did not wait for that one, and streams that it
  // does not wait for.
  std::vector<std::string> end(c10::DeviceIndex device, const Clock& known);
  void clear() { open_.clear(); }

 private:
  struct Capture {
    Position origin;
    std::vector<std::string> outside;
    std::map<size_t, ItemName> last;  // by queue
  };

  std::map<c10::DeviceIndex, Capture> open_;
};

}  // namespace fsdp::testing::simulated
