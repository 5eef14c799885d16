// Views in place, as matmul squeezes its result and RNNs transpose theirs: the tensor
// becomes what the operator that makes a view gives.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/gathered_view.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <utility>

namespace fsdp::internal {
namespace {

struct ViewInPlace {
  const char* name;  // as the table has it
  const char* view;  // the operator that makes a view
  const char* overload;
};
constexpr ViewInPlace kViewsInPlace[] = {{"squeeze_.", "aten::squeeze", ""},
                                         {"squeeze_.dim", "aten::squeeze", "dim"},
                                         {"squeeze_.dims", "aten::squeeze", "dims"},
                                         {"unsqueeze_.", "aten::unsqueeze", ""},
                                         {"t_.", "aten::t", ""},
                                         {"transpose_.", "aten::transpose", "int"}};

// Collective where the view can not keep a cut (gathered_view.h).
template <size_t kind>
void view_in_place_rule(OperatorCall& call) {
  static const auto view = c10::Dispatcher::singleton().findSchemaOrThrow(
      kViewsInPlace[kind].view, kViewsInPlace[kind].overload);
  const at::Tensor self = call.argument(0).toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(owner_of(self) == nullptr || is_gathered_view(self),
                              call.description(),
                              " changes the shape of a sharded parameter in place (rank ",
                              spec_of(self).mesh().rank(), ")");
  auto arguments = call.arguments();
  view.callBoxed(arguments);
  become_view(self, arguments[0].toTensor());
  call.finish(self);
}

template <size_t... kinds>
void add_views_in_place(RuleTable& table, std::index_sequence<kinds...>) {
  ((table[kViewsInPlace[kinds].name] = view_in_place_rule<kinds>), ...);
}

}  // namespace

void add_view_in_place_rules(RuleTable& table) {
  add_views_in_place(table, std::make_index_sequence<std::size(kViewsInPlace)>());
}

}  // namespace fsdp::internal
