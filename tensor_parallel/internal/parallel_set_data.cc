#include "tensor_parallel/internal/parallel_set_data.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/gate_arguments.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parallel_member.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {
namespace {

// set_data(self, from) where `self` is a member.
void check_takes(const at::Tensor& self, const at::Tensor& from) {
  const DTensorSpec& own = spec_of(self);
  const std::string& path = style_of(self)->path;
  if (owner_of(self) != nullptr) owner_of(self)->before_set_data(self, from);
  TORCH_CHECK_VALUE(is_dtensor(from), "set_data on tensor-parallel parameter '", path, "' of ",
                    to_string(own), " with a plain tensor of shape ", from.sizes(),
                    ": write a plain tensor of the global shape with copy_(), which takes this "
                    "rank's part (rank ",
                    own.mesh().rank(), ")");
  const DTensorSpec& other = spec_of(from);
  const bool lies_alike = other.mesh() == own.mesh() && other.shape() == own.shape() &&
                          other.placements() == own.placements();
  const bool meets_styles = from.unsafeGetTensorImpl()->key_set().has(kParallelKey);
  TORCH_CHECK_VALUE(lies_alike && meets_styles, "set_data on tensor-parallel parameter '", path,
                    "' of ", to_string(own), " with a DTensor of ", to_string(other),
                    ": it must lie alike, and be computed from parameters; write it with copy_() "
                    "(rank ",
                    own.mesh().rank(), ")");
}

bool compatible_at_parallel_gate(c10::DispatchKeySet keys, const at::Tensor& self,
                                 const at::Tensor& from) {
  using Compatible = bool(const at::Tensor&, const at::Tensor&);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::_has_compatible_shallow_copy_type", "")
                             .typed<Compatible>();
  TORCH_CHECK_VALUE(is_dtensor(self) || !is_dtensor(from), "set_data on a plain tensor of shape ",
                    self.sizes(),
                    " from a tensor-parallel one (Module::clone?): it would be a DTensor without "
                    "a style. Build a new module, apply parallelize_module to it and copy the "
                    "parameters");
  if (style_of(self) != nullptr && !meets_gate(self) && !self.is_same(from)) {
    check_takes(self, from);
    set_style(from, meta_of(self).style);
  }
  return op.redispatch(keys_below(kParallelKey, keys), self, from);
}

}  // namespace

void register_parallel_set_data(std::vector<c10::RegistrationHandleRAII>& handles) {
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      {"aten::_has_compatible_shallow_copy_type", ""}, kParallelKey,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&compatible_at_parallel_gate),
      std::nullopt, nullptr, "fsdp tensor parallel"));
}

}  // namespace fsdp::internal
