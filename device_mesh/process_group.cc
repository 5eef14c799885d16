#include "device_mesh/process_group.h"

#include "device_mesh/internal/accelerator.h"
#include "device_mesh/process_groups/backend_table.h"
#include "device_mesh/process_groups/dimension_groups.h"
#include "device_mesh/process_groups/process_group_factory.h"
#include "device_mesh/rendezvous/rendezvous.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Logging.h>
#include <poll.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace fsdp {
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

// Of use once. Where SIGPIPE has its default action, gives it one that ends the process
// only where the reader of its standard output or error is gone: a peer that is gone is
// then an error of the write, with a text, and no silent death, and `program | head` ends
// as ever. (Programs that this one starts have the default again.) And heeds
// TORCH_CPP_LOG_LEVEL, which LibTorch reads only when asked to.
void prepare_process() {
  static const bool done = [] {
    survive_broken_pipes();
    if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) c10::initLogging();
    return true;
  }();
  static_cast<void>(done);
}

using internal::DimensionGroups;

std::mutex process_default_mutex;

// Leaked: at exit, backends must not be torn down after the libraries they use.
std::shared_ptr<DimensionGroups>& process_default() {
  static auto* slot = new std::shared_ptr<DimensionGroups>();
  return *slot;
}

thread_local std::shared_ptr<DimensionGroups> thread_default;

// Where this rank is, from the options first and the environment second.
LaunchEnvironment locate(const ProcessGroupOptions& options) {
  const bool given = options.rank >= 0 || options.world_size >= 0;
  TORCH_CHECK_VALUE(given || !options.store,
                    "ProcessGroupOptions: rank and world_size are required with a store");
  LaunchEnvironment here = given && options.store ? LaunchEnvironment{} : launch_environment();
  if (!given) return here;
  TORCH_CHECK_VALUE(options.world_size >= 1, "ProcessGroupOptions: world_size=", options.world_size,
                    ": expected at least 1 (rank=", options.rank, ")");
  TORCH_CHECK_VALUE(options.rank >= 0 && options.rank < options.world_size,
                    "ProcessGroupOptions: rank=", options.rank, ": expected 0 to ",
                    options.world_size - 1, " (world_size=", options.world_size, ")");
  here.rank = options.rank;
  here.world_size = options.world_size;
  return here;
}

// One device for each local rank, of the type that the backend is for.
void select_device(const std::string& backend, int64_t local_rank) {
  const auto* const entry = internal::find_backend(backend);
  if (entry == nullptr || !entry->is_for_devices()) return;
  for (const auto type : entry->device_types) {
    const int64_t count = internal::visible_devices(type);
    if (count == 0) continue;
    const auto index = static_cast<c10::DeviceIndex>(local_rank % count);
    c10::impl::getDeviceGuardImpl(type)->setDevice(c10::Device(type, index));
    return;
  }
  TORCH_CHECK_VALUE(false, "backend '", backend, "': no ",
                    c10::DeviceTypeName(entry->device_types.front()),
                    " device is visible to local rank ", local_rank);
}

std::shared_ptr<DimensionGroups> current_default() {
  if (thread_default) return thread_default;
  const std::lock_guard<std::mutex> lock(process_default_mutex);
  return process_default();
}

std::shared_ptr<DimensionGroups> make_default(const ProcessGroupOptions& options) {
  const LaunchEnvironment here = locate(options);
  internal::GroupRequest request;
  request.backend = options.backend.empty() ? internal::preferred_backend() : options.backend;
  request.rank = here.rank;
  request.world_size = here.world_size;
  request.timeout = options.timeout;
  request.deadline = std::chrono::steady_clock::now() + options.timeout;
  if (options.store) {
    request.store = options.store.get();
    request.advice = c10::str(
        ". Look whether those ranks run (their own output tells why one ended), and whether all "
        "were "
        "given the same store and world_size=",
        here.world_size);
  } else if (request.backend == "fake") {
    request.store = c10::make_intrusive<c10d::HashStore>();
  } else {
    request.store = internal::connect_rendezvous_store(here, options.timeout);
    request.advice = c10::str(
        ". Look whether those ranks were started and run (their own output tells why one ended), "
        "and "
        "whether all have MASTER_ADDR=",
        here.master_addr, ", MASTER_PORT=", here.master_port, " and WORLD_SIZE=", here.world_size);
  }
  if (!options.store) select_device(request.backend, here.local_rank);
  return std::make_shared<DimensionGroups>(internal::make_world_group(request));
}

}  // namespace

StoreHandle::StoreHandle() = default;
StoreHandle::StoreHandle(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
StoreHandle::StoreHandle(const StoreHandle&) = default;
StoreHandle& StoreHandle::operator=(const StoreHandle&) = default;
StoreHandle::~StoreHandle() = default;
StoreHandle::operator bool() const { return store_.defined(); }
const c10::intrusive_ptr<c10d::Store>& StoreHandle::get() const { return store_; }

void init_process_group(ProcessGroupOptions options) {
  prepare_process();
  if (options.store) {
    TORCH_CHECK_VALUE(!thread_default,
                      "init_process_group: this thread has a default group already (rank ",
                      thread_default->group()->getRank(), "); call destroy_process_group() first");
    thread_default = make_default(options);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(process_default_mutex);
    TORCH_CHECK_VALUE(
        !process_default(), "init_process_group: this process has a default group already (rank ",
        process_default()->group()->getRank(), "); call destroy_process_group() first");
  }
  auto made = make_default(options);
  const std::lock_guard<std::mutex> lock(process_default_mutex);
  process_default() = std::move(made);
}

bool is_process_group_initialized() { return current_default() != nullptr; }

const c10::intrusive_ptr<c10d::ProcessGroup>& default_process_group() {
  auto current = current_default();
  TORCH_CHECK_VALUE(current,
                    "there is no default process group; call fsdp::init_process_group() first");
  return current->group();
}

void destroy_process_group() {
  std::shared_ptr<DimensionGroups> leaving = std::move(thread_default);
  thread_default = nullptr;
  if (!leaving) {
    const std::lock_guard<std::mutex> lock(process_default_mutex);
    leaving = std::move(process_default());
    process_default() = nullptr;
  }
  if (leaving) leaving->shut_down();
}

std::shared_ptr<DimensionGroups> internal::default_dimension() { return current_default(); }

}  // namespace fsdp
