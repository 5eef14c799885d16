// How parameters come to have values: at once, or, where fully_shard met them on the meta
// device, when they are materialised.
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/params/runtime_mode.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <memory>
#include <utility>

namespace fsdp::internal {

void ParamGroup::check_has_values() const {
  if (has_values()) return;
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  TORCH_CHECK_VALUE(false, "the parameters of unit '", name(),
                    "' have no values yet, since fully_shard met them on the meta device: '",
                    c10::Join("', '", names),
                    "'. Call fsdp::materialize(model) first, and load files after it (rank ",
                    dim_->global_rank(), ")");
}

void ParamGroup::take_start_value(int64_t index, const at::Tensor& whole) {
  const auto place = static_cast<size_t>(index);
  if (!is_alone())
    agreed_.note_start(place, params_[place].name(), whole, params_[place].sharded_dim());
  shards_->take_part(index, whole.to(shards_->device()).const_data_ptr());
}

// A new storage for the member: empty, or the shard itself where nothing is ever sent.
void ParamGroup::make_member(int64_t index) {
  auto& made = param(index);
  made.make_member(c10::intrusive_ptr<OnDemandGroup>::reclaim_copy(this), index,
                   dim_->shard_count() * member_layout().chunk(index).capacity_bytes(), device());
  if (residency().is_borrowed() && has_values()) made.storage()->fill(shards_->data(index));
}

void ParamGroup::materialize(c10::Device device,
                             const std::function<at::Tensor(const at::Tensor&)>& value_of) {
  if (has_values()) return;
  auto without_values = std::move(shards_);
  open_shards(device);
  try {
    for (size_t i = 0; i < params_.size(); ++i) {
      const auto whole = value_of(params_[i].without_values());
      if (whole.defined()) take_start_value(static_cast<int64_t>(i), whole);
    }
  } catch (...) {
    shards_ = std::move(without_values);
    throw;
  }
  const RuntimeMode runtime_mode;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto entry = params_[i].entry();
    if (entry.defined()) {
      auto owner = c10::intrusive_ptr<DTensorOwner>::reclaim_copy(owner_of(entry));
      const auto becomes =
          make_dtensor(shards_->local_view(index, params_[i]), params_[i].spec(), std::move(owner));
      entry.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
    }
    if (params_[i].storage() != nullptr) make_member(index);
    params_[i].set_without_values({});
  }
}

}  // namespace fsdp::internal
