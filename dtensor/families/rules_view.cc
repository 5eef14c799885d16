// Views that are no more than another tensor object, and those of which an argument that
// is no whole number decides.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/gathered_view.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/view_ways.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {
namespace {

// The same DTensor in a new tensor object, owner and all.
void alias_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  call.finish(make_dtensor_view(self, local_of(self), spec_of(self)));
}

template <bool keeps_last>
OperatorWays as_dtype() {
  return {.ways = [](const CallGeometry& call) { return view_dtype_ways(call, keeps_last); }};
}

// view(self, dtype)
void view_dtype_rule(OperatorCall& call) {
  static const WaysKernel of_one_size(as_dtype<true>(), call.handle());
  static const WaysKernel of_other_size(as_dtype<false>(), call.handle());
  const auto size = static_cast<int64_t>(c10::elementSize(call.argument(1).toScalarType()));
  const bool keeps_last = size == call.argument(0).toTensor().element_size();
  (keeps_last ? of_one_size : of_other_size).run(call);
}

void as_strided_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const bool same = call.argument(1).toIntVector() == spec_of(self).shape() &&
                    call.argument(2).toIntVector() == spec_of(self).stride() &&
                    (call.argument(3).isNone() || call.argument(3).toInt() == 0);
  if (!same && view_of_member(call, self)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(same, call.description(),
                              ": a DTensor has no memory to stride over. Use .to_local() or "
                              ".full_tensor() (collective).");
  alias_rule(call);
}

}  // namespace

void add_view_rules(RuleTable& table) {
  for (const char* name : {"detach", "alias"}) table[name] = alias_rule;
  table["view.dtype"] = view_dtype_rule;
  table["as_strided."] = as_strided_rule;
}

}  // namespace fsdp::internal
