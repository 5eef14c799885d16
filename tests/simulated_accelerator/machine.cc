#include "tests/simulated_accelerator/machine.h"

#include "tests/support/errors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::testing::simulated {
namespace {

// All bits set: no number for floating point, and no index of anything.
constexpr int kPoison = 0xff;

std::string text_of_failure(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return text_of(error);
  }
}

}  // namespace

Machine& Machine::instance() {
  static auto& machine = *new Machine;  // memory of the devices may outlive main()
  return machine;
}

Machine::Machine() : queues_(kDevices), host_(kDevices) {
  seen_.devices.resize(kDevices);
  queues_.set_patience(settings_.patience);
}

Counters& Machine::counters_of(c10::DeviceIndex device) {
  return seen_.devices.at(static_cast<size_t>(device));
}

CallSite Machine::place() const {
  return settings_.places == Settings::Places::kRecorded ? call_site_of_library() : CallSite();
}

size_t Machine::open_stream(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  return queues_.open(device);
}

Mark Machine::mark(size_t queue) {
  const Lock lock(mutex_);
  auto& marked = queues_.at(queue);
  marked.known.join(host_[static_cast<size_t>(marked.device)]);
  return {{queue, marked.issued}, marked.known};
}

void Machine::make_wait(size_t queue, const Mark& mark) {
  Lock lock(mutex_);
  queues_.at(queue).known.join(mark.known);
  if (mark.last.queue == queue) return;
  append(lock, queue, {.name = "wait", .waits_for = mark.last}, {});
}

bool Machine::has_finished(const Mark& mark) {
  Lock lock(mutex_);
  const auto device = queues_.at(mark.last.queue).device;
  check_is_not_captured(device, "a query");
  counters_of(device).queries.add("query", place());
  if (!queues_.is_finished(mark.last)) {
    queues_.step(lock, mark.last.queue, Queues::Patience::kReturns);
  }
  return queues_.is_finished(mark.last);
}

void Machine::wait(Lock& lock, const Mark& mark, const std::string& reason) {
  const auto device = queues_.at(mark.last.queue).device;
  check_is_not_captured(device, reason);
  counters_of(device).host_syncs.add(reason, place());
  queues_.run_until(lock, mark.last);
  host_[static_cast<size_t>(device)].join(mark.known);
  if (const auto failure = queues_.take_failure(device)) std::rethrow_exception(failure);
}

void Machine::host_waits_for(const Mark& mark, const std::string& reason) {
  Lock lock(mutex_);
  wait(lock, mark, reason);
}

void Machine::host_waits_for_stream(size_t queue, const std::string& reason) {
  host_waits_for(mark(queue), reason);
}

void Machine::host_waits_for_device(c10::DeviceIndex device) {
  Lock lock(mutex_);
  Mark everything;
  for (size_t index = 0; index < queues_.size(); ++index) {
    const auto& queue = queues_.at(index);
    if (queue.device != device) continue;
    queues_.run_until(lock, {index, queue.issued});
    everything.known.join(queue.known);
    everything.last = {index, queue.issued};
  }
  wait(lock, everything, "synchronizeDevice");
}

void Machine::launch(size_t queue, Kernel kernel) {
  Lock lock(mutex_);
  auto& counters = counters_of(queues_.at(queue).device);
  counters.launches.add(kernel.name, place());
  counters.launching_threads.insert(std::this_thread::get_id());
  append(lock, queue, {.name = std::move(kernel.name), .run = std::move(kernel.run)},
         kernel.accesses);
}

void Machine::take_part(size_t queue, Part part) {
  Lock lock(mutex_);
  counters_of(queues_.at(queue).device).collectives.add(part.kind, place());
  append(lock, queue,
         {.name = part.group + " " + part.kind, .rendezvous = std::move(part.rendezvous)},
         part.accesses);
}

void Machine::count_run_on_true_values(c10::DeviceIndex device, const std::string& name) {
  const Lock lock(mutex_);
  counters_of(device).run_on_true_values.add(name, place());
}

void Machine::append(Lock& lock, size_t index, Item item, const std::vector<Access>& accesses) {
  auto& queue = queues_.at(index);
  queue.known.join(host_[static_cast<size_t>(queue.device)]);
  const Position position{index, queue.issued + 1};
  for (const auto& access : accesses) note(queue, {position, item.name, queue.stream}, access);
  if (settings_.items == Settings::Items::kRecorded) {
    seen_.items.push_back({queue.device, {position, item.name, queue.stream}, queue.known});
  }
  captures_.note(queue.device, {position, item.name, queue.stream}, queue.known);
  queue.known.add(position);
  queues_.append(index, std::move(item));
  if (settings_.schedule.runs_at_once(queue.stream)) queues_.run_until(lock, position);
}

void Machine::begin_capture(size_t queue) {
  Lock lock(mutex_);
  append(lock, queue, {.name = "begin of a graph"}, {});
  captures_.begin(queues_.at(queue).device, {queue, queues_.at(queue).issued});
}

std::vector<std::string> Machine::end_capture(size_t queue) {
  const Lock lock(mutex_);
  return captures_.end(queues_.at(queue).device, queues_.at(queue).known);
}

void Machine::check_is_not_captured(c10::DeviceIndex device, const std::string& what) const {
  TORCH_CHECK(!captures_.is_open(device), what,
              " can not be part of a graph, which is being captured on device ", int{device});
}

void Machine::refuse_in_capture(c10::DeviceIndex device, const std::string& what) {
  const Lock lock(mutex_);
  check_is_not_captured(device, what);
}

void Machine::note(const Queue& queue, const ItemName& item, const Access& access) {
  auto* const block = memory_.block_at(access.first);
  if (block == nullptr || access.first == access.end) return;
  for (auto& pair : block->accesses.note(access, item, queue.known)) {
    seen_.unordered.insert(std::move(pair));
  }
}

void Machine::poison(Lock& lock, Block& block, const char* reason) {
  auto* const data = block.data;
  const auto bytes = block.bytes;
  append(lock, block.queue,
         {.name = reason, .run = [data, bytes] { std::memset(data, kPoison, bytes); }},
         {{data, data + bytes, true}});
}

Block* Machine::allocate(size_t bytes, size_t queue, c10::DeviceIndex device) {
  Lock lock(mutex_);
  const auto [block, is_new] = memory_.hand_out(bytes, queue, device);
  const auto size = static_cast<int64_t>(block->bytes);
  auto& counters = counters_of(device);
  ++counters.allocations;
  counters.reused_blocks += is_new ? 0 : 1;
  counters.reserved_bytes += is_new ? size : 0;
  counters.allocated_bytes += size;
  counters.peak_allocated_bytes = std::max(counters.peak_allocated_bytes, counters.allocated_bytes);
  block->requested = bytes;
  counters.requested_bytes += static_cast<int64_t>(bytes);
  counters.peak_requested_bytes = std::max(counters.peak_requested_bytes, counters.requested_bytes);
  poison(lock, *block, "allocate");
  return block;
}

void Machine::free(Block* block) {
  Lock lock(mutex_);
  auto& counters = counters_of(block->device);
  counters.allocated_bytes -= static_cast<int64_t>(block->bytes);
  counters.requested_bytes -= static_cast<int64_t>(block->requested);
  if (settings_.poison == Settings::Poison::kWhenFreed) poison(lock, *block, "free");
  memory_.take_back(block);
}

void Machine::record_stream(Block* block) {
  const Lock lock(mutex_);
  ++counters_of(block->device).record_streams;
  block->reuse = Block::Reuse::kNever;
}

c10::DeviceIndex Machine::device_at(const void* address, c10::DeviceIndex otherwise) {
  const Lock lock(mutex_);
  const auto* const block = memory_.block_at(address);
  return block == nullptr ? otherwise : block->device;
}

Counters Machine::counters(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  return counters_of(device);
}

void Machine::forget_peak(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  auto& counters = counters_of(device);
  counters.peak_allocated_bytes = counters.allocated_bytes;
  counters.peak_requested_bytes = counters.requested_bytes;
}

void Machine::finish(Lock& lock) {
  try {
    for (size_t index = 0; index < queues_.size(); ++index) {
      queues_.run_until(lock, {index, queues_.at(index).issued});
    }
  } catch (const c10::Error& error) {  // what is left waits for ranks that are gone
    seen_.failures.push_back(text_of(error));
  }
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    const auto failure = queues_.take_failure(device);
    if (failure) seen_.failures.push_back(text_of_failure(failure));
  }
}

void Machine::restart_counters() {
  for (auto& counters : seen_.devices) {
    const auto allocated = counters.allocated_bytes, reserved = counters.reserved_bytes;
    const auto requested = counters.requested_bytes;
    counters = {};
    counters.allocated_bytes = counters.peak_allocated_bytes = allocated;
    counters.requested_bytes = counters.peak_requested_bytes = requested;
    counters.reserved_bytes = reserved;
  }
}

void Machine::reset(const Settings& settings) {
  Lock lock(mutex_);
  queues_.set_patience({});
  finish(lock);
  queues_.clear();
  memory_.forget_accesses();
  captures_.clear();
  restart_counters();
  seen_.unordered.clear();
  seen_.items.clear();
  seen_.failures.clear();
  settings_ = settings;
  queues_.set_patience(settings.patience);
}

Report Machine::report() {
  Lock lock(mutex_);
  finish(lock);
  return seen_;
}

}  // namespace fsdp::testing::simulated
