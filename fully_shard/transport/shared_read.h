// A read of all ranks' shards of one unit by this rank alone (shared_shards.h): where
// each rank has the version, until it has it, and whether what was read is of it. Local.
#pragma once

#include "device_mesh/collectives/gather.h"
#include "fully_shard/transport/shard_versions.h"
#include "fully_shard/transport/shared_shards.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

// Whole parameters that are read where all ranks have their shards. Nobody writes there
// as long as this rank does not, and other ranks' writes go elsewhere.
class ReadInPlace {
 public:
  explicit ReadInPlace(std::shared_ptr<SharedShards> shards) : shards_(std::move(shards)) {
    ++shards_->reads_in_place_;
  }
  ~ReadInPlace() { --shards_->reads_in_place_; }
  ReadInPlace(const ReadInPlace&) = delete;

  const at::Tensor& bytes() const { return shards_->places_.common(); }

 private:
  const std::shared_ptr<SharedShards> shards_;
};

class SharedRead final : public Gather {
 public:
  SharedRead(std::shared_ptr<SharedShards> shards, std::string what, SharedShards::ReadBy by)
      : shards_(std::move(shards)), what_(std::move(what)), by_(by) {}

  int64_t staging_bytes() const override { return 0; }
  // May be called again. Throws DistBackendError, which ends all collectives of the
  // dimension, where ranks have written otherwise, have gone, or wait for one another.
  GatheredRows wait() override;
  // Null: they have to be copied from the rows that wait() gave. REQUIRES: wait().
  std::unique_ptr<ReadInPlace> in_place() const;
  // Whether what was read since wait() is of its version; false: wait() again.
  bool was_right();
  // REQUIRES: was_right(). The tables of the ranks whose word differs from this one's, by
  // rank; empty for the others.
  const std::vector<std::vector<uint64_t>>& other_tables() const { return tables_; }

 private:
  // Where a rank's values are.
  struct Source {
    const char* values;
    const char* table;
    uint64_t said;
    bool is_in_common;
    const char* live_in = nullptr;  // the block whose line says whether they still are
  };

  Source find(SharedShards::Peer& peer) const;
  Source kept_at(int64_t rank, const char* head, uint64_t said) const;
  [[noreturn]] void report(const SharedShards::Peer& peer) const;
  std::string version_in_words() const;

  const std::shared_ptr<SharedShards> shards_;
  const std::string what_;
  const SharedShards::ReadBy by_;
  ShardVersion version_;
  std::vector<Source> sources_;  // by rank
  std::vector<std::vector<uint64_t>> tables_;
};

}  // namespace fsdp::internal
