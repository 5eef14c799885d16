#include "checkpoint/ranks/unmatched_names.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/format/strict_json.h"

#include <map>
#include <unordered_set>

namespace fsdp::internal::checkpoint {
namespace {

// Names may be any bytes, so they travel as binary JSON.
std::string packed(const UnmatchedNames& names) {
  const auto bytes =
      Json::to_cbor(Json{{"missing", names.missing}, {"unexpected", names.unexpected}});
  return std::string(bytes.begin(), bytes.end());
}

UnmatchedNames unpacked(const std::string& text) {
  const Json json = Json::from_cbor(text);
  return {json.at("missing").get<std::vector<std::string>>(),
          json.at("unexpected").get<std::vector<std::string>>()};
}

}  // namespace

std::string fingerprint_of(const UnmatchedNames& names) { return checksum_text(packed(names)); }

UnmatchedNames unmatched_by_all(const UnmatchedNames& mine, const World& world,
                                const std::string& what) {
  UnmatchedNames all;
  std::unordered_set<std::string> known;
  std::map<std::string, int64_t> unexpected_by;  // how many ranks
  for (const auto& text : exchange(world, packed(mine), what)) {
    const UnmatchedNames theirs = unpacked(text);
    for (const auto& name : theirs.missing) {
      if (known.insert(name).second) all.missing.push_back(name);
    }
    for (const auto& name : theirs.unexpected) unexpected_by[name] += 1;
  }
  for (const auto& [name, ranks] : unexpected_by) {
    if (ranks == world.size) all.unexpected.push_back(name);
  }
  return all;
}

}  // namespace fsdp::internal::checkpoint
