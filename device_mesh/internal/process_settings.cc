#include "device_mesh/internal/process_settings.h"

#include <c10/util/Logging.h>

#include <csignal>
#include <cstdlib>

namespace fsdp::internal {
namespace {

void survive_broken_pipes() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0) return;
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;  // the user's
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, &action, nullptr);
}

}  // namespace

void prepare_process() {
  static const bool done = [] {
    survive_broken_pipes();
    if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) c10::initLogging();
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace fsdp::internal
