// Whether the ranks that save wrote their shards alike: one that skipped the optimizer
// step before the save would put parts of another model into the checkpoint, and the next
// gather, which would notice it (fully_shard/params/shard_writes.h), comes too late.
//
//   const UnitWrites mine(items);
//   ...                            // every rank's mine.fingerprint(); where these differ
//   UnitWrites::check(exchange(world, mine.text(), what), what);
//
// Words of ranks may differ, as some have nothing to write, so that texts are compared by
// what they mean; equal fingerprints of all ranks mean that there is nothing to see.
// Local, all of it.
#pragma once

#include "checkpoint/plan/save_plan.h"

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class UnitWrites {
 public:
  // Of the units whose parameters are among `items`.
  explicit UnitWrites(const std::vector<SaveItem>& items);

  std::string fingerprint() const;
  std::string text() const { return units_.dump(); }
  // Throws ValueError where a rank that holds a part of what others of its unit wrote
  // since that was gathered wrote nothing, or one replica wrote since the last sum of
  // gradients and another did not. texts: by rank of the world. The same on every rank.
  static void check(const std::vector<std::string>& texts, const std::string& what);

 private:
  Json units_ = Json::array();
};

}  // namespace fsdp::internal::checkpoint
