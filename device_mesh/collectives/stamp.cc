#include "device_mesh/collectives/stamp.h"

namespace fsdp::internal {
namespace {

// splitmix64's finaliser (Steele, Lea, Flood 2014): every input bit reaches every output
// bit.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

}  // namespace

Stamp IssueOrder::next(uint32_t unit, CollectiveKind kind, int64_t bytes) {
  const uint32_t tag = static_cast<uint32_t>(kind) << 24;
  sequence_ = (sequence_ + 1) & 0xffffffu;
  history_ = mix(history_ ^ mix((static_cast<uint64_t>(unit) << 32) | tag) ^
                 mix(static_cast<uint64_t>(bytes)));
  return {unit, tag | sequence_, history_};
}

}  // namespace fsdp::internal
