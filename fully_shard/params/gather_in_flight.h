// A gather from its issue until its rows are let go. The stream that issued it owns the
// memory of the rows and of what they are sent from, so it waits for whoever reads them
// elsewhere. What the gather stages is counted (Counters::staging_bytes) as long.
//
//   in_flight.issued(transport.gather(row, issue), stream);
//   auto rows = in_flight.wait();
//   ...the current stream copies out of the rows...
//   in_flight.rows_were_read(copied);  // an event of it
//   rows = {};
//   in_flight.release();
//
// Local.
#pragma once

#include "device_mesh/collectives/gather.h"
#include "device_mesh/internal/device_stream.h"
#include "fully_shard/params/group_accounts.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal {

class GatherInFlight {
 public:
  explicit GatherInFlight(GroupAccounts accounts) : accounts_(std::move(accounts)) {}
  ~GatherInFlight() { drop(); }
  GatherInFlight(const GatherInFlight&) = delete;

  // `issuer` was current. REQUIRES: there was none.
  void issued(std::unique_ptr<Gather> gather, const DeviceStream& issuer);
  bool exists() const { return gather_ != nullptr; }

  // The current stream waits for the rows. Throws what failed, and lets the gather go.
  GatheredRows wait();
  // The rows have been read at `read`, and the issuer waits for it.
  void rows_were_read(const DeviceEvent& read);
  void release();

  // Nobody reads the rows. The current stream waits for the gather, since what is called
  // next may write what it sends. No failure shows. Nothing where there is none.
  void drop() noexcept;
  // The same on all streams, and throws what failed when it is dropped.
  void await_and_drop();

 private:
  void wait_and_tell_issuer();

  GroupAccounts accounts_;
  std::unique_ptr<Gather> gather_;
  std::optional<DeviceStream> issuer_;
  int64_t staging_bytes_ = 0;
};

}  // namespace fsdp::internal
