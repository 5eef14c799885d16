#include "device_mesh/rendezvous/process_settings.h"

#include <c10/util/Logging.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace fsdp::internal {
namespace {

// Whether the process writes what it prints to a pipe that nobody reads any more. Calls
// only what a signal handler may call.
bool readers_are_gone() {
  pollfd outputs[] = {{STDOUT_FILENO, 0, 0}, {STDERR_FILENO, 0, 0}};
  if (poll(outputs, 2, 0) <= 0) return false;
  return ((outputs[0].revents | outputs[1].revents) & POLLERR) != 0;
}

void on_broken_pipe(int signal) {
  const int error = errno;
  if (readers_are_gone()) {
    std::signal(signal, SIG_DFL);
    raise(signal);  // is held back until this handler returns, and then ends the process
  }
  errno = error;
}

void survive_broken_pipes() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0) return;
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;  // the user's
  action.sa_handler = on_broken_pipe;
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
