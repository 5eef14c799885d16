// The simulated accelerator itself: devices in host memory, whose streams are queues that
// a schedule drives. One per process, under one lock. LibTorch reaches it through the
// guard, hooks, allocator and kernels of install.h; tests through run.h.
#pragma once

#include "tests/simulated_accelerator/captures.h"
#include "tests/simulated_accelerator/clock.h"
#include "tests/simulated_accelerator/counters.h"
#include "tests/simulated_accelerator/memory.h"
#include "tests/simulated_accelerator/queues.h"
#include "tests/simulated_accelerator/schedule.h"
#include "tests/support/slowdown.h"

#include <c10/core/DeviceType.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing::simulated {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;  // ranks that are threads have one each

struct Settings {
  Schedule schedule = {};

  // When memory is poisoned: by the first item of its next use, as its next owner's first
  // write would be; or when it is freed already, so that it must be free of every stream
  // by then.
  enum class Poison { kWhenHandedOut, kWhenFreed };
  Poison poison = Poison::kWhenHandedOut;

  enum class Places { kNotRecorded, kRecorded };
  Places places = Places::kNotRecorded;  // of launches and host syncs

  enum class Items { kNotRecorded, kRecorded };
  Items items = Items::kNotRecorded;  // for Report::items

  // How long a host waits for ranks that have not issued a collective, when nothing
  // moves.
  std::chrono::milliseconds patience = kSlowdown * std::chrono::seconds(20);
};

// An item of a stream, with what had to be finished before it.
struct RecordedItem {
  c10::DeviceIndex device;
  ItemName name;
  Clock known;

  // Whether nothing orders the two, so that a device may run them at the same time.
  bool may_overlap(const RecordedItem& other) const {
    return !known.contains(other.name.position) && !other.known.contains(name.position);
  }
};

// What happened in a run.
struct Report {
  std::set<std::string> unordered;    // pairs of accesses that nothing orders
  std::vector<Counters> devices;      // by index
  std::vector<RecordedItem> items;    // in the order of issue; empty unless they are recorded
  std::vector<std::string> failures;  // that no host was told of, and what cannot run any more
};

// What an event stands for: the last item of a queue when it was recorded, and all that
// was known to be finished before the next one.
struct Mark {
  Position last;
  Clock known;
};

struct Kernel {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;
};

// A rank's part of a collective.
struct Part {
  std::string kind;  // "all-gather"
  std::string group;
  std::vector<Access> accesses;
  std::shared_ptr<Rendezvous> rendezvous;
};

class Machine {
 public:
  static Machine& instance();

  size_t open_stream(c10::DeviceIndex device);
  Mark mark(size_t queue);
  void make_wait(size_t queue, const Mark& mark);

  // A query runs one item, or a loop of them would never end.
  bool has_finished(const Mark& mark);

  // Throws the first error that an item of that device has thrown.
  void host_waits_for(const Mark& mark, const std::string& reason);
  void host_waits_for_stream(size_t queue, const std::string& reason);
  void host_waits_for_device(c10::DeviceIndex device);

  void launch(size_t queue, Kernel kernel);
  void take_part(size_t queue, Part part);
  void count_run_on_true_values(c10::DeviceIndex device, const std::string& name);

  Block* allocate(size_t bytes, size_t queue, c10::DeviceIndex device);
  void free(Block* block);
  void record_stream(Block* block);
  c10::DeviceIndex device_at(const void* address, c10::DeviceIndex otherwise);

  // A graph of what `queue` is given from now on.
  void begin_capture(size_t queue);
  std::vector<std::string> end_capture(size_t queue);
  // Throws where a graph of `device` is being captured: `what` can not be part of one.
  void refuse_in_capture(c10::DeviceIndex device, const std::string& what);

  Counters counters(c10::DeviceIndex device);
  void forget_peak(c10::DeviceIndex device);

  // A run starts with reset(), which lets what is left of the one before run, and drops
  // what cannot; report() lets everything run before it tells.
  void reset(const Settings& settings);
  Report report();

 private:
  Machine();

  Counters& counters_of(c10::DeviceIndex device);
  void append(Lock& lock, size_t queue, Item item, const std::vector<Access>& accesses);
  void check_is_not_captured(c10::DeviceIndex device, const std::string& what) const;
  void note(const Queue& queue, const ItemName& item, const Access& access);
  void wait(Lock& lock, const Mark& mark, const std::string& reason);
  void poison(Lock& lock, Block& block, const char* reason);
  void finish(Lock& lock);
  void restart_counters();
  CallSite place() const;

  std::mutex mutex_;
  Settings settings_;
  Queues queues_;
  Memory memory_;
  Captures captures_;
  std::vector<Clock> host_;  // by device: what its host threads have waited for
  Report seen_;
};

}  // namespace fsdp::testing::simulated
