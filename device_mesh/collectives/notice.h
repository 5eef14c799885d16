// What a rank tells the others about a collective it issues: a fixed number of bytes, so
// that notices meet whatever the sizes of the collectives behind them. Pure bytes.
#pragma once

#include "device_mesh/collectives/stamp.h"

#include <array>
#include <cstdint>
#include <string>

namespace fsdp::internal {

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
