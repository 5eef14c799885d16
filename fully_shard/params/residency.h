// Where a group's full parameters are: one state machine with checked transitions. Pure.
//
//   state      event               next
//   sharded    gather_issued()     gathering
//   gathering  filled()            resident
//   gathering  gather_dropped()    sharded     (discarded, or failed)
//   resident   emptied()           sharded     REQUIRES no hold
//   borrowed   -                   borrowed    (a group of one rank: the members use the shards' memory)
//
// A hold keeps a resident or borrowed group as it is, for raw access; holds nest.
// Anything else throws std::logic_error.
#pragma once

#include <cstdint>

namespace fsdp::internal {

enum class Residence : uint8_t { kBorrowed, kSharded, kGathering, kResident };

const char* to_string(Residence residence);

class Residency {
 public:
  explicit Residency(Residence start = Residence::kSharded) : state_(start) {}

  void gather_issued() { move(Residence::kSharded, Residence::kGathering); }
  void filled() { move(Residence::kGathering, Residence::kResident); }
  void gather_dropped() { move(Residence::kGathering, Residence::kSharded); }
  void emptied();
  void hold();
  void release();

  Residence state() const { return state_; }
  bool is_sharded() const { return state_ == Residence::kSharded; }
  bool is_gathering() const { return state_ == Residence::kGathering; }
  bool is_resident() const { return state_ == Residence::kResident; }
  bool is_borrowed() const { return state_ == Residence::kBorrowed; }
  bool is_held() const { return holds_ > 0; }

 private:
  void move(Residence from, Residence to);

  Residence state_;
  int64_t holds_ = 0;
};

}  // namespace fsdp::internal
