#include "fully_shard/forward.h"

#include "fully_shard/units/unit.h"
#include "fully_shard/units/unit_table.h"

#include <torch/nn/module.h>

namespace fsdp::internal {

BoundaryCasts boundary_casts_of(const torch::nn::Module& module) {
  const auto unit = find_unit(module);
  if (!unit || unit->policy.full_precision) return {};
  const auto& precision = unit->precision;
  return {precision.cast_forward_inputs ? precision.param_dtype : std::nullopt,
          precision.output_dtype};
}

at::Tensor cast_floating(const at::Tensor& tensor, CastTo dtype) {
  if (!dtype || !tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return tensor;
  return tensor.to(*dtype);
}

}  // namespace fsdp::internal
