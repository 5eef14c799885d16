#include "fully_shard/transport/streams.h"

#include <ATen/ops/empty.h>

#include <atomic>

namespace fsdp::internal {
namespace {

std::atomic<uint32_t> left_out{0};  // a bit for each wait

uint32_t bit_of(StreamWait wait) { return uint32_t{1} << static_cast<uint8_t>(wait); }

bool is_made(StreamWait wait) {
  return (left_out.load(std::memory_order_relaxed) & bit_of(wait)) == 0;
}

}  // namespace

void make_wait(StreamWait wait, const DeviceStream& waiter, const DeviceEvent& event) {
  if (!waiter.is_host() && is_made(wait)) waiter.wait(event);
}

void make_wait(StreamWait wait, const DeviceStream& waiter, const DeviceStream& other) {
  if (waiter == other || !is_made(wait)) return;
  DeviceEvent event;
  event.record(other);
  waiter.wait(event);
}

LeaveOut::LeaveOut(StreamWait wait) : wait_(wait) { left_out.fetch_or(bit_of(wait)); }
LeaveOut::~LeaveOut() { left_out.fetch_and(~bit_of(wait_)); }

CurrentStream ReduceStream::allocating() {
  readers_.add(DeviceStream::current(device_));
  readers_.are_awaited_by(stream_, StreamWait::kAllocateAfterReads);
  readers_.clear();
  return CurrentStream(stream_);
}

void ReduceStream::await_results() {
  const auto reader = DeviceStream::current(device_);
  make_wait(StreamWait::kPublishAfterReduction, reader, stream_);
  readers_.add(reader);
}

at::Tensor CopiesToHost::add(const at::Tensor& tensor, Memory memory) {
  if (memory == Memory::kPageable) return tensor.cpu();
  auto copy = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU).pinned_memory(true));
  copy.copy_(tensor, /*non_blocking=*/true);
  streams_.add(DeviceStream::current(tensor.device()));
  return copy;
}

void CopiesToHost::wait() {
  streams_.await_on_host();
  streams_.clear();
}

}  // namespace fsdp::internal
