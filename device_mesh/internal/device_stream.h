// Streams and events of a device, as far as the library orders them itself, and the one
// place that knows that the CPU has neither: there everything does nothing. Local.
//
//   const auto here = DeviceStream::current(device);
//   const auto side = DeviceStream::from_pool(device);
//   DeviceEvent event;
//   event.record(here);
//   side.wait(event);                  // for what `here` was given so far; the host goes on
//   const CurrentStream on_side(side);  // kernels run on it, and new memory belongs to it
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace fsdp::internal {

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
