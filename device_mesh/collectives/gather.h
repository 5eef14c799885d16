// An all-gather of one row of bytes per rank that is in flight (Collectives::start), and
// what it brings.
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/collectives/send_function.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

struct GatherOptions {
  at::Tensor row;  // uint8 [bytes], contiguous; the same size on every rank
  // The bytes at the beginning of each rank's row that are to be read; none: all of it.
  // What sends messages leaves out the rest. The same on every rank.
  std::vector<int64_t> lengths = {};
  std::string what;  // "all-gather of unit 'blocks.0'": in every rank's errors
  uint32_t unit = kNoUnit;
  NoticeWords words = {};  // travel with it, for the caller to compare
  // What sends the row in the backend's place, while the engine announces and compares as
  // ever; null: the backend. Outlives the call.
  const SendFunction* custom = nullptr;
};

// The rows of all ranks. A value; keeps them readable.
class GatheredRows {
 public:
  GatheredRows() = default;
  // `keep` holds the memory of the rows.
  GatheredRows(std::vector<const char*> rows, std::vector<NoticeWords> words,
               std::shared_ptr<const void> keep)
      : rows_(std::move(rows)), words_(std::move(words)), keep_(std::move(keep)) {}

  // The bytes that this rank of the group sent: GatherOptions::lengths, if there are.
  const char* row(int64_t rank) const { return rows_[static_cast<size_t>(rank)]; }
  // One per rank; empty where notices are not compared.
  const std::vector<NoticeWords>& words() const { return words_; }

 private:
  std::vector<const char*> rows_;
  std::vector<NoticeWords> words_;
  std::shared_ptr<const void> keep_;
};

// Destroying it waits and swallows errors.
class Gather {
 public:
  virtual ~Gather() = default;
  virtual int64_t staging_bytes() const = 0;  // held by it, and by the rows it returns
  // REQUIRES: called once. Throws what failed (DistBackendError naming operation and
  // ranks) or, where ranks issued different operations, an error that names both.
  virtual GatheredRows wait() = 0;
};

}  // namespace fsdp::internal
