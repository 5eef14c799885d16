// What a registry entry, the DTensor in a module's parameter list, knows of its unit: the
// group, and the member that stands for it in model code. It keeps the member alive: a
// ParameterList has no other handle of it.
#pragma once

#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "on_demand/gate_key.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace fsdp::internal {

class RegistryEntry final : public DTensorOwner {
 public:
  RegistryEntry(c10::intrusive_ptr<FSDPParamGroup> group, at::Tensor member, int64_t index)
      : group_(std::move(group)), member_(std::move(member)), index_(index) {}

  // Null unless `tensor` is a registry entry, or a view of one.
  static RegistryEntry* of(const at::Tensor& tensor);

  c10::DispatchKeySet extra_keys() const override { return c10::DispatchKeySet(kGateKey); }
  const std::string* parameter_name() const override { return &group_->parameter_name(index_); }
  std::string description() const override;
  std::string codec() const override;
  bool shows_all(const at::Tensor& dtensor) const override;
  void before_read(const at::Tensor&) override { group_->writes().before_read(index_); }
  void before_write(const at::Tensor&) override { group_->writes().before_write(index_); }
  bool hears_end_of_write() const override { return group_->shards().shared() != nullptr; }
  void after_write(const at::Tensor&) override { group_->writes().after_write(); }
  void local_given_out() override { group_->writes().shard_given_out(); }
  void before_factors(uint64_t hash) override { group_->writes().before_factors(index_, hash); }
  void after_overwrite(const at::Tensor& dtensor, const at::Tensor& source) override {
    if (shows_all(dtensor)) group_->writes().after_overwrite(index_, dtensor, source);
  }
  void before_set_data(const at::Tensor& dtensor, const at::Tensor& from) override;
  void before_whole_read(const at::Tensor& dtensor) override;
  void while_readable(const std::function<void()>& view) override;
  // Views of the entry have this owner too, and stand for themselves.
  at::Tensor substitute(const at::Tensor& dtensor) override {
    auto& param = group_->params()[static_cast<size_t>(index_)];
    if (!param.is_entry(dtensor.unsafeGetTensorImpl())) return {};
    param.synchronize_requires_grad();
    watch_.entry_was_used();
    return member_;
  }

  const c10::intrusive_ptr<FSDPParamGroup>& group() const { return group_; }
  const at::Tensor& member() const { return member_; }
  int64_t index() const { return index_; }
  void watch_member(MemberWatch watch) { watch_ = std::move(watch); }
  const MemberWatch& watch() const { return watch_; }

 private:
  c10::intrusive_ptr<FSDPParamGroup> group_;
  at::Tensor member_;
  int64_t index_;
  MemberWatch watch_;
};

// The group behind a member, a registry entry, or a view of either, and the parameter's
// place there; a null group for any other tensor.
struct ManagedTensor {
  c10::intrusive_ptr<FSDPParamGroup> group;
  int64_t index = 0;
};
ManagedTensor find_managed_tensor(const at::Tensor& tensor);

}  // namespace fsdp::internal
