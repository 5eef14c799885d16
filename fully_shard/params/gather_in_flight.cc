#include "fully_shard/params/gather_in_flight.h"

#include "fully_shard/transport/stream_wait.h"

#include <exception>
#include <utility>

namespace fsdp::internal {

void GatherInFlight::issued(std::unique_ptr<Gather> gather, const DeviceStream& issuer) {
  gather_ = std::move(gather);
  issuer_ = issuer;
  staging_bytes_ = gather_->staging_bytes();
  accounts_.add(&Counters::staging_bytes, staging_bytes_);
}

GatheredRows GatherInFlight::wait() {
  try {
    const WaitClock clock(accounts_);
    return gather_->wait();
  } catch (...) {
    drop();
    throw;
  }
}

void GatherInFlight::rows_were_read(const DeviceEvent& read) {
  if (*issuer_ != DeviceStream::current(issuer_->device()))
    make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, read);
}

// Destroying a gather that was not waited for makes the current stream wait for it, which
// is its issuer's here.
void GatherInFlight::release() {
  const CurrentStream on_issuer(*issuer_);
  gather_.reset();
  accounts_.add(&Counters::staging_bytes, -std::exchange(staging_bytes_, 0));
}

void GatherInFlight::wait_and_tell_issuer() {
  gather_->wait();
  make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, DeviceStream::current(issuer_->device()));
}

// What may throw below is a broken invariant, which ends the process here.
// NOLINTNEXTLINE(bugprone-exception-escape)
void GatherInFlight::drop() noexcept {
  if (!exists()) return;
  try {
    if (*issuer_ != DeviceStream::current(issuer_->device())) wait_and_tell_issuer();
  } catch (const std::exception&) {
    // What it brought no longer matters.
  }
  release();
}

void GatherInFlight::await_and_drop() {
  try {
    const WaitClock clock(accounts_);
    wait_and_tell_issuer();
  } catch (...) {
    drop();
    throw;
  }
  release();
}

}  // namespace fsdp::internal
