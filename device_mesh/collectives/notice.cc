#include "device_mesh/collectives/notice.h"

#include <algorithm>
#include <cstring>

namespace fsdp::internal {
namespace {

constexpr uint64_t kMagic = 0x6673647053746d70ull;

struct Wire {
  uint64_t magic = kMagic;
  uint64_t check = 0;  // of everything behind it
  Stamp stamp = {};
  NoticeWords words = {};
  int64_t global_rank = 0;
  char operation[kNoticeBytes - 40 - sizeof(NoticeWords)] = {};
};
static_assert(sizeof(Wire) == kNoticeBytes);

// FNV-1a.
uint64_t check_of(const Wire& wire) {
  const auto* first = reinterpret_cast<const unsigned char*>(&wire.stamp);
  const auto* last = reinterpret_cast<const unsigned char*>(&wire + 1);
  uint64_t hash = 0xcbf29ce484222325ull;
  for (; first != last; ++first) hash = (hash ^ *first) * 0x100000001b3ull;
  return hash;
}

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

NoticeBytes write_notice(const Notice& notice) {
  Wire wire;
  wire.stamp = notice.stamp;
  wire.words = notice.words;
  wire.global_rank = notice.global_rank;
  const auto length = std::min(notice.operation.size(), sizeof wire.operation - 1);
  std::memcpy(wire.operation, notice.operation.data(), length);
  wire.check = check_of(wire);
  NoticeBytes bytes;
  std::memcpy(bytes.data(), &wire, sizeof wire);
  return bytes;
}

bool read_notice(const char* bytes, Notice& notice) {
  Wire wire;
  std::memcpy(&wire, bytes, sizeof wire);
  if (wire.magic != kMagic || wire.check != check_of(wire)) return false;
  notice.stamp = wire.stamp;
  notice.words = wire.words;
  notice.global_rank = wire.global_rank;
  wire.operation[sizeof wire.operation - 1] = '\0';
  notice.operation = wire.operation;
  return true;
}

}  // namespace fsdp::internal
