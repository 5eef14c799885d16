#include "fully_shard/transport/stream_wait.h"

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

}  // namespace fsdp::internal
