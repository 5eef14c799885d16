// As matmul squeezes its result and RNNs transpose theirs: the tensor becomes what the
// operator that makes a view gives.
#include "dtensor/dispatch/gathered_view.h"
#include "dtensor/ops/families.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace fsdp::internal {
namespace {

// By the operator that makes a view. Collective where the view can not keep a cut
// (gathered_view.h).
OpHandler becomes_view(const char* name, const char* overload) {
  const auto view = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  return [view](OperatorCall& call, const StrategyKernel*) {
    const at::Tensor self = call.argument(0).toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(owner_of(self) == nullptr || is_gathered_view(self),
                                call.description(),
                                " changes the shape of a sharded parameter in place (rank ",
                                spec_of(self).mesh().rank(), ")");
    auto arguments = call.arguments();
    view.callBoxed(arguments);
    become_view(self, arguments[0].toTensor());
    call.finish(self);
  };
}

}  // namespace

void add_view_in_place(OpTable& table) {
  table.add("squeeze_.", {.handler = becomes_view("aten::squeeze", "")});
  table.add("squeeze_.dim", {.handler = becomes_view("aten::squeeze", "dim")});
  table.add("squeeze_.dims", {.handler = becomes_view("aten::squeeze", "dims")});
  table.add("unsqueeze_.", {.handler = becomes_view("aten::unsqueeze", "")});
  table.add("t_.", {.handler = becomes_view("aten::t", "")});
  table.add("transpose_.", {.handler = becomes_view("aten::transpose", "int")});
}

}  // namespace fsdp::internal
