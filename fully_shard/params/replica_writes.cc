#include "fully_shard/params/replica_writes.h"

#include <algorithm>

namespace fsdp::internal {
namespace {

bool has(const std::vector<uint64_t>& words, uint64_t word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

bool ReplicaWrites::agree(const std::vector<uint64_t>& all) {
  return !has(all, kWrote) || !has(all, kDidNot);
}

void ReplicaWrites::compared(const std::vector<uint64_t>& all) {
  if (has(all, kUnknown)) return;
  wrote_ = used_ = false;
}

}  // namespace fsdp::internal
