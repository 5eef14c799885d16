// New tensors made from a DTensor, which stay on its device, and eye.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/table.h"

#include <ATen/ops/eye.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr const char* kMadeFrom[] = {"empty_like.", "zeros_like.", "ones_like.",
                                     "full_like.",  "new_empty.",  "new_empty_strided.",
                                     "new_zeros.",  "new_ones.",   "new_full."};

void check_device(OperatorCall& call, const at::Tensor& self) {
  const c10::IValue* device = call.find_argument("device");
  if (device == nullptr || device->isNone()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(device->toDevice().type() == self.device().type(), call.description(),
                              ": a DTensor stays on its mesh's device type, ", self.device().type(),
                              ", got ", device->toDevice());
}

// zeros_like, new_zeros, ...
template <size_t kind>
void made_from_rule(OperatorCall& call) {
  static const WaysKernel by_ways(*find_ways(kMadeFrom[kind]), call.handle());
  check_device(call, call.argument(0).toTensor());
  by_ways.run(call);
}

template <size_t... kinds>
void add_made_from_rules(RuleTable& table, std::index_sequence<kinds...>) {
  ((table[kMadeFrom[kinds]] = made_from_rule<kinds>), ...);
}

// eye(n, m, out) into a DTensor of that shape (nn::init::eye_): this rank's part of it.
void eye_out_rule(OperatorCall& call) {
  const at::Tensor out = call.argument(call.argument_count() - 1).toTensor();
  const DTensorSpec& spec = spec_of(out);
  const int64_t rows = call.argument(0).toInt();
  const int64_t columns = call.argument_count() == 3 ? call.argument(1).toInt() : rows;
  TORCH_CHECK_VALUE(out.sizes() == at::IntArrayRef({rows, columns}), call.description(),
                    ": out: expected shape ", at::IntArrayRef({rows, columns}),
                    "; a DTensor keeps its shape (rank ", spec.mesh().rank(), ")");
  local_of(out).copy_(placed_whole(at::eye(rows, columns, local_of(out).options()), spec));
  call.finish(out);
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  add_made_from_rules(table, std::make_index_sequence<std::size(kMadeFrom)>());
  for (const char* name : {"eye.out", "eye.m_out"}) table[name] = eye_out_rule;
}

}  // namespace fsdp::internal
