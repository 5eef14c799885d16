// What the groups of one rank on one mesh dimension share: the transport, the order of
// what was issued, the schedule, the running backward, and the counters. Lives as long as
// a group does. Used by one thread at a time.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/counters.h"
#include "fully_shard/params/raw_writes.h"
#include "fully_shard/step/backward_pass.h"
#include "fully_shard/step/schedule.h"
#include "fully_shard/transport/exclusive_use.h"
#include "fully_shard/transport/stamp.h"
#include "fully_shard/transport/transport.h"

#include <exception>
#include <memory>
#include <string>

namespace fsdp::internal {

class CommContext {
 public:
  // The context of the mesh's group; created at the first call, which is collective over
  // the mesh.
  static std::shared_ptr<CommContext> of(const DeviceMesh& mesh);
  // Null when no group lives on the mesh. Local.
  static std::shared_ptr<CommContext> find(const DeviceMesh& mesh);

  explicit CommContext(const DeviceMesh& mesh);

  int64_t rank() const { return rank_; }
  int64_t world() const { return world_; }
  Transport& transport() { return *transport_; }
  Schedule& schedule() { return schedule_; }
  BackwardPass& backward() { return backward_; }
  Counters& counters() { return counters_; }
  User& user() { return user_; }
  RawWrites& raw_writes() { return raw_writes_; }

  // Runs `wait`, which waits for a collective. After one that failed the ranks no longer
  // agree on what was sent, and nothing more is issued.
  template <class Wait>
  void watch(const Wait& wait) {
    try {
      wait();
    } catch (const std::exception& error) {
      note_failure(error);
      throw;
    }
  }
  // The stamp of the collective that is being issued for `group`; keeps it for diagnosis.
  // Throws after a failure.
  Stamp stamp_next(const ParamGroup& group, CollectiveKind kind, int64_t bytes);
  uint32_t next_unit_number() { return unit_number_++; }
  // Adds to a byte counter and keeps the high-water mark.
  void account(int64_t Counters::*counter, int64_t bytes);
  // Throws, naming both units, unless every rank's stamp equals this rank's.
  void check_stamps(const Stamp& mine, const std::vector<Stamp>& all,
                    const std::string& unit) const;

 private:
  void note_failure(const std::exception& error);
  std::string describe(const Stamp& stamp) const;

  std::unique_ptr<Transport> transport_;
  int64_t rank_;
  int64_t world_;
  uint32_t unit_number_ = 0;
  IssueOrder issue_order_;
  std::string failure_;  // the first one
  Schedule schedule_;
  Counters counters_;
  User user_;
  BackwardPass backward_;
  RawWrites raw_writes_;
};

}  // namespace fsdp::internal
