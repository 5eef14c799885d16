// A value is the true one, the same on all ranks; collective over the mesh dimensions
// along which the tensor is cut or Partial.
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

void hand_out_item(OperatorCall& call, const StrategyKernel*) {
  const CommCauseScope cause(CommCause::kRequest);
  const at::Tensor self = call.argument(0).toTensor();
  TORCH_CHECK(self.numel() == 1, call.description(),
              ": only a tensor of one element has a value, got shape ", self.sizes());
  call.argument(0) = whole_value(self);
  auto results = call.run();
  call.finish(std::move(results));
}

at::Tensor placed_to_compare(const at::Tensor& other, const DTensorSpec& spec,
                             const OperatorCall& call) {
  if (!is_dtensor(other)) return local_part(other, spec);
  TORCH_CHECK_VALUE(spec_of(other).mesh() == spec.mesh(), call.description(),
                    ": the meshes differ; compare "
                    ".full_tensor() of both (rank ",
                    spec.mesh().rank(), ")");
  return moved_part(other, spec.placements());
}

// True where it is true on every rank.
bool agreed(bool own, const DTensorSpec& spec) {
  std::vector<Placement> votes;
  for (const auto& placement : spec.placements()) {
    votes.push_back(placement.is_shard() ? Placement(Partial{Partial::Op::kMin})
                                         : Placement(Replicate{}));
  }
  const DTensorSpec verdict(spec.mesh(), std::move(votes), /*shape=*/{});
  const at::Tensor vote =
      at::full({}, own ? 1 : 0, at::TensorOptions(at::kInt).device(spec.mesh().device_type()));
  return redistribute_local(vote, verdict, spec.replicated().placements()).item<int32_t>() == 1;
}

void hand_out_equal(OperatorCall& call, const StrategyKernel*) {
  const CommCauseScope cause(CommCause::kRequest);
  const at::Tensor a = call.argument(0).toTensor();
  const at::Tensor b = call.argument(1).toTensor();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return call.finish(false);
  const at::Tensor& model = is_dtensor(a) ? a : b;
  const at::Tensor whole = reduce_partials(model);
  const DTensorSpec& spec = spec_of(whole);
  const at::Tensor other = placed_to_compare(is_dtensor(a) ? b : a, spec, call);
  call.finish(agreed(at::equal(local_of(whole), other), spec));
}

}  // namespace

void add_host_values(OpTable& table) {
  table.add("_local_scalar_dense", {.handler = hand_out_item});
  table.add("equal", {.handler = hand_out_equal});
  for (const char* name :
       {"allclose", "__and__", "__or__", "__xor__", "__iand__", "__ior__", "__ixor__"}) {
    table.add(name,
              {.handler = [](OperatorCall& call, const StrategyKernel*) { call.decompose(); }});
  }
}

}  // namespace fsdp::internal
