// New tensors made from a DTensor: *_like and new_*. A Partial model gives a Replicate
// result.
#include "dtensor/families/rules.h"
#include "dtensor/internal/copy_layout.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/ops/eye.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

void check_device(OperatorCall& call, const at::Tensor& self) {
  const c10::IValue* device = call.find_argument("device");
  if (device == nullptr || device->isNone()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(device->toDevice().type() == self.device().type(), call.description(),
                              ": a DTensor stays on its mesh's device type, ", self.device().type(),
                              ", got ", device->toDevice());
}

// zeros_like, empty_like, full_like, ...: lies as its model.
void like_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  check_device(call, self);
  auto stride = strides_of_copy(self, call.find_argument("memory_format"));
  auto spec = spec_of(self).without_partials().with_geometry(self.sizes().vec(), std::move(stride));
  call.argument(0) = local_of(self);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), std::move(spec)));
}

// A new tensor of `size` lies as its model where that is cut along dimensions that both
// have, else it is replicated.
std::vector<Placement> placements_like(const DTensorSpec& model, const std::vector<int64_t>& size) {
  auto placements = without_partials(model.placements());
  for (auto& placement : placements) {
    if (!placement.is_shard()) continue;
    const auto dim = static_cast<size_t>(placement.shard_dim());
    if (size.size() != model.shape().size() || size[dim] != model.shape()[dim])
      placement = Replicate{};
  }
  return placements;
}

// new_zeros(size), new_empty_strided(size, stride), ...
void new_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  check_device(call, self);
  auto size = call.find_argument("size")->toIntVector();
  c10::IValue* const stride = call.find_argument("stride");
  const DTensorSpec spec(spec_of(self).mesh(), placements_like(spec_of(self), size), size,
                         stride != nullptr ? stride->toIntVector() : contiguous_strides(size));
  const auto local_shape = spec.local_shape();
  if (stride != nullptr)
    *stride =
        local_shape == spec.shape() ? spec.stride() : dense_strides(local_shape, spec.stride());
  *call.find_argument("size") = local_shape;
  call.argument(0) = local_of(self);
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), spec));
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
  TORCH_CHECK_NOT_IMPLEMENTED(!spec.has_partial(), call.description(),
                              ": out: a plain value cannot be written to a Partial tensor. Call "
                              ".redistribute({Replicate()}) on it first (collective).");
  local_of(out).copy_(local_part(at::eye(rows, columns, local_of(out).options()), spec));
  call.finish(out);
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  for (const char* name : {"empty_like", "zeros_like", "ones_like", "full_like"})
    table[name] = like_rule;
  for (const char* name : {"eye.out", "eye.m_out"}) table[name] = eye_out_rule;
  for (const char* name : {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}) {
    table[name] = new_rule;
  }
}

}  // namespace fsdp::internal
