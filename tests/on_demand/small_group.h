// Parameters on demand without fully_shard: a group in this process that holds its
// members' values, hands them out when touched, and counts.
//
//   const auto group = SmallGroup::take({weight, bias});   // both are members from now on
//   at::linear(x, weight, bias);
//   EXPECT_EQ(group->touches(), 1);
//   group->empty();                                        // gone until the next touch
#pragma once

#include "on_demand/on_demand_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

class SmallGroup final : public internal::OnDemandGroup {
 public:
  // Changes `tensors`, contiguous leaves, in place into members. Their handles stay.
  static c10::intrusive_ptr<SmallGroup> take(const std::vector<at::Tensor>& tensors);

  void touch() override;
  void synchronize_metadata(int64_t index, c10::TensorImpl* impl) override;
  void member_written(int64_t index) override { written_.push_back(index); }
  void evict_and_poison() override;
  void storage_destroyed(int64_t index, const internal::OnDemandStorage*) noexcept override {
    storages_[static_cast<size_t>(index)] = nullptr;
  }
  at::Tensor gradient_share(int64_t, const at::Tensor& gradient) const override { return gradient; }
  const std::string& parameter_name(int64_t) const override { return name_; }
  bool is_member(int64_t index, const c10::TensorImpl* impl) const override {
    return members_[static_cast<size_t>(index)] == impl;
  }

  // Lets go of the bytes: reading a member without a touch throws from now on.
  void empty();
  // The tensors that say whether the members require grad.
  const std::vector<at::Tensor>& entries() const { return entries_; }
  // The storages ask no more than they must (OnDemandStorage::watch_requires_grad).
  void watch_requires_grad(const std::vector<at::Tensor>& members);

  int64_t touches() const { return touches_; }
  int64_t evictions() const { return evictions_; }
  int64_t synchronizations() const { return synchronizations_; }
  const std::vector<int64_t>& written() const { return written_; }
  void reset_counts() { touches_ = evictions_ = synchronizations_ = 0; }

  std::function<void()> when_touched;  // for what a test wants to see at that moment
  bool is_ready_after_touch = false;   // a touch makes the group ready for the running pass

 private:
  void adopt(const at::Tensor& tensor, int64_t index);

  std::string name_ = "small";
  std::vector<at::Tensor> values_;  // each in bytes of its own
  std::vector<at::Tensor> entries_;
  std::vector<c10::TensorImpl*> members_;
  std::vector<internal::OnDemandStorage*> storages_;
  std::vector<int64_t> written_;
  int64_t touches_ = 0, evictions_ = 0, synchronizations_ = 0;
};

}  // namespace fsdp::testing
