#include "on_demand/written_members.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

void WrittenMembers::add(const OnDemandStorage& storage, c10::TensorImpl* impl) {
  const auto* const group = storage.writable_group();
  if (group == nullptr || !group->is_member(storage.index(), impl)) return;
  members_.push_back({&storage, impl, impl->sizes().vec(), impl->strides().vec()});
}

void WrittenMembers::check_shapes(const c10::OperatorHandle& op) const {
  for (const auto& member : members_) {
    if (member.impl->sizes() == at::IntArrayRef(member.sizes) &&
        member.impl->strides() == at::IntArrayRef(member.strides)) {
      continue;
    }
    const auto changed = member.impl->sizes().vec();
    member.impl->set_sizes_and_strides(member.sizes, member.strides);
    TORCH_CHECK_VALUE(false, op.schema().name(), " would change the shape of parameter '",
                      member.storage->parameter_name(), "' from ", at::IntArrayRef(member.sizes),
                      " to ", at::IntArrayRef(changed),
                      ": a sharded parameter keeps its shape; change it before fully_shard, or "
                      "write to a view");
  }
}

}  // namespace fsdp::internal
