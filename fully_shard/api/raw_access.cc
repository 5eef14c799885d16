#include "fully_shard/raw_access.h"

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/registry_entry.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp {
namespace {

internal::ManagedTensor require_managed(const at::Tensor& tensor, const char* what) {
  auto managed = internal::find_managed_tensor(tensor);
  if (!tensor.defined()) TORCH_CHECK_VALUE(false, what, ": the tensor is undefined");
  TORCH_CHECK_VALUE(managed.group, what, ": the tensor of shape ", tensor.sizes(),
                    " is no parameter of a module that fully_shard was applied to");
  return managed;
}

}  // namespace

struct Unsharded::State {
  internal::ManagedTensor managed;
};

Unsharded::Unsharded(const at::Tensor& parameter)
    : state_(std::make_unique<State>(State{require_managed(parameter, "Unsharded")})) {
  internal::hold(*state_->managed.group);
}

Unsharded::~Unsharded() { internal::release_own_parts(*state_->managed.group); }

void Unsharded::mark_written() {
  auto& [group, index] = state_->managed;
  TORCH_CHECK_VALUE(group->info().unit().summoned != internal::Summoned::kDropsWrites,
                    "Unsharded::mark_written: parameter '", group->parameter_name(index),
                    "' is shown by a SummonFullParams with writeback = false, which drops what is "
                    "written meanwhile. Write after that scope, or let it write back (rank ",
                    group->info().rank(), ")");
  group->await_failed_backward();
  group->before_member_write(index);
  group->member_written(index);
}

void mark_shard_written(const at::Tensor& parameter) {
  const auto managed = require_managed(parameter, "mark_shard_written");
  managed.group->writes().before_write(managed.index);
  managed.group->writes().after_write();
}

}  // namespace fsdp
