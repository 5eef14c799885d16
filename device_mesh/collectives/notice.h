// What a rank tells the others about a collective it issues: a fixed number of bytes, so
// that notices meet whatever the sizes of the collectives behind them. Pure bytes.
#pragma once

#include "device_mesh/collectives/stamp.h"

#include <array>
#include <cstdint>
#include <string>

namespace fsdp::internal {

struct Notice {
  Stamp stamp = {};
  uint64_t agreement = 0;      // a word of the caller
  int64_t global_rank = -1;    // the sender
  std::string operation = {};  // "all-gather of unit 'blocks.0'"; the end of a long one is cut off
};

inline constexpr size_t kNoticeBytes = 192;
using NoticeBytes = std::array<char, kNoticeBytes>;

NoticeBytes write_notice(const Notice& notice);
// False when the bytes are no notice: nothing of them may be quoted.
bool read_notice(const char* bytes, Notice& notice);

}  // namespace fsdp::internal
