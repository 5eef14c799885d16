#include "fully_shard/params/shard_writes.h"

#include <algorithm>
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
  dirty_.assign(dirty_.size(), false);
  copy_.reset();
}

std::vector<size_t> ShardWrites::write_back() {
  std::vector<size_t> written;
  for (size_t param = 0; param < dirty_.size(); ++param) {
    if (dirty_[param]) written.push_back(param);
  }
  dirty_.assign(dirty_.size(), false);
  ++generation_;
  return written;
}

bool ShardWrites::is_dirty() const {
  return std::find(dirty_.begin(), dirty_.end(), true) != dirty_.end();
}

}  // namespace fsdp::internal
