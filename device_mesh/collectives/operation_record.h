// The last collectives that one rank issued on one mesh dimension, and where the records
// of several ranks part. Pure.
//
//   OperationRecord record;
//   record.add({.lane = 0, .sequence = 17, .what = "all-gather of unit 'l0'", .bytes = 352});
//
// A lane is one order of issue: a mesh dimension has one for its process group and one
// for each group beside it, numbered alike on all ranks. Sequence numbers count in a
// lane.
#pragma once

#include "device_mesh/collectives/notice.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal {

struct RecordedOperation {
  uint32_t lane = 0;
  uint32_t sequence = 0;
  std::string what = {};
  int64_t bytes = 0;
  CollectiveKind kind = CollectiveKind::kAllGather;

  bool operator==(const RecordedOperation&) const = default;
};

class OperationRecord {
 public:
  static constexpr size_t kCapacity = 1024;

  // Drops the oldest where there are kCapacity already.
  void add(RecordedOperation operation);
  // Oldest first.
  std::vector<RecordedOperation> operations() const;

 private:
  std::vector<RecordedOperation> ring_;
  size_t next_ = 0;  // in ring_, once that is full
};

// A line per operation. parse(to_text(operations)) == operations; parse() takes nothing
// from lines of another form.
std::string to_text(const std::vector<RecordedOperation>& operations);
std::vector<RecordedOperation> parse_operations(const std::string& text);

// Per lane, the first operation that not all ranks issued alike, with what each issued,
// as far back as every record of that lane reaches. Empty: none.
std::string first_difference(
    const std::map<int64_t, std::vector<RecordedOperation>>& operations_by_rank);

}  // namespace fsdp::internal
