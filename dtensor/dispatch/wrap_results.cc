#include "dtensor/dispatch/wrap_results.h"

#include "dtensor/dispatch/place_operands.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <vector>

namespace fsdp::internal {
namespace {

bool lies_as(const at::Tensor& local, const std::vector<int64_t>& stride) {
  for (int64_t d = 0; d < local.dim(); ++d) {
    if (local.size(d) != 1 && local.stride(d) != stride[static_cast<size_t>(d)]) return false;
  }
  return true;
}

bool is_contiguous(const TensorLayout& layout) {
  int64_t stride = 1;
  for (size_t d = layout.shape().size(); d-- > 0;
       stride *= std::max<int64_t>(layout.shape()[d], 1)) {
    if (layout.stride()[d] != stride) return false;
  }
  return true;
}

// `local` with its dimensions in memory in the order of the whole, which must not depend
// on the rank.
at::Tensor in_order_of(const at::Tensor& local, const TensorLayout& whole) {
  if (local.is_contiguous() && is_contiguous(whole)) return local;
  const auto wanted = dense_strides(local.sizes().vec(), whole.stride());
  if (lies_as(local, wanted)) return local;
  return at::empty_strided(local.sizes(), wanted, local.options()).copy_(local);
}

bool is_left_out(const at::Tensor& local, const DTensorSpec& spec) {
  return local.dim() == 1 && local.numel() == 0 &&
         local.sizes() != at::IntArrayRef(spec.local_shape());
}

bool is_replicated(const DTensorSpec& spec) {
  return std::all_of(spec.placements().begin(), spec.placements().end(),
                     [](const auto& placement) { return placement.is_replicate(); });
}

}  // namespace

at::Tensor replicated_result(const at::Tensor& local, const DeviceMesh& mesh) {
  return make_dtensor(
      local, DTensorSpec(mesh, replicated_on(mesh), local.sizes().vec(), local.strides().vec()));
}

at::Tensor result_over(const at::Tensor& local, const DTensorSpec& spec) {
  if (is_left_out(local, spec)) return replicated_result(local, spec.mesh());
  if (is_replicated(spec) && !lies_as(local, spec.stride()))
    return replicated_result(local, spec.mesh());
  return make_dtensor(in_order_of(local, spec.layout()), spec);
}

}  // namespace fsdp::internal
