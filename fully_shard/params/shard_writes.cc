#include "fully_shard/params/shard_writes.h"

#include <stdexcept>

namespace fsdp::internal {

void ShardWrites::shard_written() {
  if (is_dirty())
    throw std::logic_error("a shard is written before the dirty copy was written back");
  ++generation_;
}

void ShardWrites::copy_filled() {
  if (is_dirty()) throw std::logic_error("a dirty copy is filled");
  copy_ = generation_;
}

void ShardWrites::copy_emptied() {
  if (is_dirty()) throw std::logic_error("a dirty copy is emptied");
  copy_.reset();
}

void ShardWrites::copy_discarded() {
  dirty_.clear();
  copy_.reset();
}

std::vector<size_t> ShardWrites::write_back() {
  const std::vector<size_t> written(dirty_.begin(), dirty_.end());
  dirty_.clear();
  ++generation_;
  return written;
}

}  // namespace fsdp::internal
