// What a rank tells the others about a collective it issues: a fixed number of bytes, so
// that notices meet whatever the sizes of the collectives behind them. Pure bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>

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

// Of operations that belong to no unit.
inline constexpr uint32_t kNoUnit = 0xffffffffu;

// Words of the caller that travel with a notice. The caller compares them
// (Announcement::wait) and throws an error of its own where they differ. Whoever has
// another word to send adds a member here.
struct NoticeWords {
  uint64_t agreement = 0;  // of values that must be alike
  // Of gathers, who holds a part of what was written here (shard_writes.h); of
  // all-reduces over replicas, whether this one wrote (ReplicaWrites::Word).
  uint64_t writing = 0;

  bool operator==(const NoticeWords&) const = default;
};

struct Notice {
  Stamp stamp = {};
  NoticeWords words = {};
  int64_t global_rank = -1;    // the sender
  std::string operation = {};  // "all-gather of unit 'blocks.0'"; the end of a long one is cut off
};

inline constexpr size_t kNoticeBytes = 192;
using NoticeBytes = std::array<char, kNoticeBytes>;

NoticeBytes write_notice(const Notice& notice);
// False when the bytes are no notice: nothing of them may be quoted.
bool read_notice(const char* bytes, Notice& notice);

}  // namespace fsdp::internal
