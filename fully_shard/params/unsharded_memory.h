// Where the unsharded parameters of a group lie, and the members' storages that show it:
// in a copy, or in place, which is the memory where all ranks have their shards
// (shared_read.h). In both, parameter i is contiguous, where the layout has it in memory
// of all ranks. Local.
//
//   memory.fill_copy(rows, device);           // or, where that can be:
//   memory.fill_in_place(read->in_place());   // nothing is written before leave_shards()
//   memory.show(layout, params);
//   ...
//   memory.empty(params);
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_accounts.h"
#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shared_read.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

class UnshardedMemory {
 public:
  explicit UnshardedMemory(GroupAccounts accounts) : accounts_(std::move(accounts)) {}
  ~UnshardedMemory();
  UnshardedMemory(const UnshardedMemory&) = delete;

  const at::Tensor& bytes() const { return bytes_; }  // uint8; undefined: empty
  bool is_in_place() const { return in_place_ != nullptr; }

  // `layout`, here and below: of all shards, in the members' dtypes.
  void fill_copy(const RowsOfRanks& rows, const PackedLayout& layout, c10::Device device);
  void fill_in_place(std::unique_ptr<ReadInPlace> read);
  // What was filled was not right: empty, before show().
  void discard();
  void show(const PackedLayout& layout, const std::vector<FSDPParam>& params);
  // What is shown in place is a copy from now on. REQUIRES: is_in_place().
  void leave_shards(const PackedLayout& layout, const std::vector<FSDPParam>& params);
  void empty(const std::vector<FSDPParam>& params);
  // Test mode: a copy's bytes read 0xff from now on, even through pointers that were
  // kept.
  void poison();

  char* data(const PackedLayout& layout, int64_t index) const;
  // The elements of parameter `index`, in the member's dtype: [n]. A view.
  at::Tensor elements(const PackedLayout& layout, int64_t index, const ParamMeta& meta) const;

 private:
  void count(int64_t sign) const;

  const GroupAccounts accounts_;
  std::unique_ptr<ReadInPlace> in_place_;
  at::Tensor bytes_;
  bool is_shown_ = false;
  at::Tensor poisoned_;  // what was emptied last in that mode
};

}  // namespace fsdp::internal
