// The 16 bytes that every collective is announced with, so that collectives issued in
// different orders on two ranks are found out instead of exchanging each other's data.
// Pure integers. See docs/design/collectives.md, "Announcements".
#pragma once

#include <cstdint>

namespace fsdp::internal {

enum class CollectiveKind : uint8_t {
  kAllGather = 1,
  kReduceScatter = 2,
  kAllReduce = 3,
  kAllToAll = 4,
  kBroadcast = 5,
};

struct Stamp {
  uint32_t unit = 0;               // number of the unit; 0xffffffff: of no unit
  uint32_t kind_and_sequence = 0;  // kind in the high 8 bits, sequence number (modulo 2^24) below
  uint64_t history = 0;            // rolling hash of everything issued before, and this

  bool operator==(const Stamp&) const = default;
  CollectiveKind kind() const { return static_cast<CollectiveKind>(kind_and_sequence >> 24); }
  uint32_t sequence() const { return kind_and_sequence & 0xffffffu; }
};
static_assert(sizeof(Stamp) == 16);

// What this rank has issued, in order.
class IssueOrder {
 public:
  Stamp next(uint32_t unit, CollectiveKind kind, int64_t bytes);

 private:
  uint32_t sequence_ = 0;
  uint64_t history_ = 0;
};

}  // namespace fsdp::internal
