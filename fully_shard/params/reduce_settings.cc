#include "fully_shard/params/reduce_settings.h"

#include <algorithm>

namespace fsdp::internal {
namespace {

bool is_replicated(const FSDPParam& param) {
  const auto& member = param.meta().member_spec();
  return member && member->placements()[0].is_replicate() && member->mesh().size() > 1;
}

}  // namespace

ReduceSettings::ReduceSettings(const GroupInfo& info, const std::vector<FSDPParam>& params)
    : info_(info),
      has_replicated_members_(std::any_of(params.begin(), params.end(), is_replicated)) {}

at::ScalarType ReduceSettings::dtype_of(const FSDPParam& param) const {
  const auto own = param.meta().member_dtype();
  return at::isFloatingType(own) ? dtype_.value_or(own) : own;
}

void ReduceSettings::run_hook(const ReduceScatterInput& input, const at::Tensor& row) const {
  if (hook_) hook_(input.elements(row));
}

double ReduceSettings::divisor() const {
  const auto copies = info_.replicas() == nullptr ? 1 : info_.replicas()->shard_count();
  const auto ranks = static_cast<double>(info_.comm_context().shard_count() * copies);
  return info_.unit().policy.gradient_divide_factor.value_or(ranks);
}

bool ReduceSettings::synchronizes() const { return info_.unit().policy.synchronize_gradients; }

bool ReduceSettings::reduces_over_replicas() const {
  return info_.replicas() != nullptr && info_.unit().policy.all_reduce_gradients;
}

bool ReduceSettings::stays_here() const {
  return info_.is_alone() && !hook_ && !has_replicated_members_;
}

bool ReduceSettings::publishes_unused() const {
  return hook_ || info_.unit().policy.reduce_unused_params;
}

}  // namespace fsdp::internal
