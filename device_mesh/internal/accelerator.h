// Devices as LibTorch knows them (torch.accelerator): which types are accelerators, how
// many devices of one are here, and on which one the calling thread is. And streams and
// events of a device, as far as the library orders them itself: this is the one place
// that knows that the CPU has neither, and everything does nothing there. Local.
//
//   const auto here = DeviceStream::current(device);
//   const auto side = DeviceStream::from_pool(device);
//   DeviceEvent event;
//   event.record(here);
//   side.wait(event);                  // for what `here` was given so far; the host goes on
//   const CurrentStream on_side(side);  // kernels run on it, and new memory belongs to it
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Every type that LibTorch calls an accelerator, whether there are such devices or not.
std::vector<c10::DeviceType> accelerator_types();
// The dispatch keys of those types for Dense, or for AutogradFunctionality.
std::vector<c10::DispatchKey> accelerator_keys(c10::DispatchKey functionality);
// How many devices of this type the process sees; 0 too where the build lacks them.
int64_t visible_devices(c10::DeviceType type);
// What LibTorch takes for the accelerator of this process; none where it sees no device.
std::optional<c10::DeviceType> visible_accelerator();
// The calling thread's current device of this type. Without an index for the CPU, and
// where the process sees no device of the type.
c10::Device current_device(c10::DeviceType type);

class DeviceEvent;

class DeviceStream {
 public:
  // The calling thread's. Of the CPU: the host, which does everything in its order.
  static DeviceStream current(c10::Device device);
  // One of a pool of streams with high priority, which others may use too.
  static DeviceStream from_pool(c10::Device device);

  c10::Device device() const { return stream_.device(); }
  bool is_host() const { return stream_.device_type() == c10::kCPU; }
  bool operator==(const DeviceStream&) const = default;

  // What this stream is given from now on runs after the event. Nothing for one that was
  // not recorded.
  void wait(const DeviceEvent& event) const;
  // The same of a user's event, of any type of device.
  void wait(const c10::Event& event) const { event.block(stream_); }

 private:
  friend class CurrentStream;
  friend class DeviceEvent;
  explicit DeviceStream(c10::Stream stream) : stream_(stream) {}

  c10::Stream stream_;
};

// A point in a stream, which can be moved on: what waited for it before waits for the
// point that it was then.
class DeviceEvent {
 public:
  // After all that `stream` was given so far.
  void record(const DeviceStream& stream);
  // The host waits for it. Nothing where it was not recorded.
  void await_on_host() const;
  // Whether the device is there; true where it was not recorded.
  bool has_passed() const;

 private:
  friend class DeviceStream;
  std::optional<c10::Event> event_;  // made when it is first recorded; none of the host
};

// Makes a stream, and its device, the calling thread's current one while it lives.
class CurrentStream {
 public:
  explicit CurrentStream(const DeviceStream& stream) {
    if (!stream.is_host()) guard_.emplace(stream.stream_);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace fsdp::internal
