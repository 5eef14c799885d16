#include "tests/simulated_accelerator/run.h"

#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/device_guard.h"
#include "tests/simulated_accelerator/install.h"

namespace fsdp::testing::simulated {

Report run_in(const Settings& settings, const std::function<void()>& body) {
  install();
  Machine::instance().reset(settings);
  body();
  return Machine::instance().report();
}

c10::Stream current_stream(c10::Device device) { return device_guard()->getStream(device); }

c10::Stream open_stream(c10::Device device) { return device_guard()->getNewStream(device, 0); }

void begin_capture(c10::Device device) {
  Machine::instance().begin_capture(current_queue(device.index()));
}

std::vector<std::string> end_capture(c10::Device device) {
  return Machine::instance().end_capture(current_queue(device.index()));
}

Counters counters_now(c10::Device device) { return Machine::instance().counters(device.index()); }

}  // namespace fsdp::testing::simulated
