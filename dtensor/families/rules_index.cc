// Indexing by tensors of indices. What is read is gathered along the indexed dimensions;
// what is written must be whole there. The indices are the same on all ranks: plain
// tensors or DTensors, which are gathered. Masks select from the whole.
#include "dtensor/dtensor.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/block_views.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/internal/whole_dims.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// Collective for a DTensor that is not replicated.
at::Tensor plain_indices(const at::Tensor& indices) {
  if (!is_dtensor(indices)) return indices;
  const DTensorSpec& spec = spec_of(indices);
  return redistribute_local(local_of(indices), spec, spec.replicated().placements());
}

at::Tensor without_memory(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

// What is indexed, with `dims` whole. Collective where one is cut.
at::Tensor indexed(const OperatorCall& call, const std::vector<int64_t>& dims) {
  const at::Tensor& self = call.argument(0).toTensor();
  TORCH_CHECK_VALUE(is_dtensor(self), call.description(),
                    ": a plain tensor indexed by a DTensor; index with its ",
                    ".full_tensor() (collective)");
  return whole_along(call, 0, self, dims);
}

void index_select_rule(OperatorCall& call) {
  const int64_t dim =
      c10::maybe_wrap_dim(call.argument(1).toInt(), call.argument(0).toTensor().dim());
  const at::Tensor self = indexed(call, {dim});
  const at::Tensor indices = plain_indices(call.argument(2).toTensor());
  auto shape = self.sizes().vec();
  if (self.dim() > 0) shape[static_cast<size_t>(dim)] = indices.numel();
  DTensorSpec spec = spec_of(self).with_shape(std::move(shape));
  call.argument(0) = local_of(self);
  call.argument(2) = indices;
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), std::move(spec)));
}

// index.Tensor(self, Tensor?[] indices): dimension i is indexed by indices[i].
struct Indexing {
  c10::List<std::optional<at::Tensor>> plain;
  c10::List<std::optional<at::Tensor>> meta;
  std::vector<int64_t> dims;  // the dimensions indexed
  int64_t index_ndim = 0;     // of all indices broadcast together

  // Where another dimension goes: the dimensions of the indices stand where the indexed
  // ones stood side by side, else come first.
  int64_t dim_after(int64_t dim) const {
    const auto before =
        std::count_if(dims.begin(), dims.end(), [dim](int64_t d) { return d < dim; });
    const bool adjacent = dims.back() - dims.front() + 1 == static_cast<int64_t>(dims.size());
    return dim - before + (adjacent && dim < dims.front() ? 0 : index_ndim);
  }
};

Indexing indexing_of(const OperatorCall& call) {
  Indexing indexing;
  int64_t dim = 0;
  for (const c10::IValue& element : call.argument(1).toListRef()) {
    const bool given = element.isTensor() && element.toTensor().defined();
    std::optional<at::Tensor> plain;
    if (given) {
      const at::Tensor& indices = element.toTensor();
      TORCH_CHECK_NOT_IMPLEMENTED(
          indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt,
          call.description(),
          ": how many elements a mask selects differs from rank to rank. "
          "Use at::where or masked_fill, or .full_tensor() (collective).");
      plain = plain_indices(indices);
      indexing.dims.push_back(dim);
      indexing.index_ndim = std::max(indexing.index_ndim, plain->dim());
    }
    indexing.meta.push_back(given ? std::optional(without_memory(*plain)) : std::nullopt);
    indexing.plain.push_back(std::move(plain));
    ++dim;
  }
  TORCH_CHECK_VALUE(!indexing.dims.empty(), call.description(), ": indices: none given");
  return indexing;
}

bool has_mask(const OperatorCall& call) {
  const auto indices = call.argument(1).toListRef();
  return std::any_of(indices.begin(), indices.end(), [](const c10::IValue& element) {
    return element.isTensor() && element.toTensor().defined() &&
           (element.toTensor().scalar_type() == at::kBool ||
            element.toTensor().scalar_type() == at::kByte);
  });
}

void index_rule(OperatorCall& call) {
  if (has_mask(call)) return run_replicated(call);
  const Indexing indexing = indexing_of(call);
  const at::Tensor self = indexed(call, indexing.dims);
  torch::jit::Stack stack{without_memory(self), indexing.meta};
  call.handle().callBoxed(&stack);
  auto placements = spec_of(self).placements();
  for (auto& placement : placements) {
    if (!placement.is_shard()) continue;
    const bool is_indexed =
        std::count(indexing.dims.begin(), indexing.dims.end(), placement.shard_dim()) > 0;
    placement = is_indexed ? Placement(Replicate{})
                           : placement.along(indexing.dim_after(placement.shard_dim()));
  }
  const DTensorSpec spec(spec_of(self).mesh(), std::move(placements),
                         stack[0].toTensor().sizes().vec());
  call.argument(0) = local_of(self);
  call.argument(1) = indexing.plain;
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), spec));
}

// index_fill_(dim, index, value), index_add_(dim, index, source, alpha), index_copy_(dim,
// index, source).
void write_at_indices_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  TORCH_CHECK_VALUE(is_dtensor(self), call.description(),
                    " writes a plain tensor from DTensors; use .full_tensor() "
                    "(collective)");
  const DTensorSpec& spec = spec_of(self);
  check_whole_dims(call, spec, {c10::maybe_wrap_dim(call.argument(1).toInt(), self.dim())});
  TORCH_CHECK_NOT_IMPLEMENTED(!spec.has_partial(), call.description(),
                              ": a Partial tensor cannot be written at "
                              "indices. Call .redistribute({Replicate()}) first (collective).");
  call.argument(2) = plain_indices(call.argument(2).toTensor());
  if (call.argument(3).isTensor() && call.argument(3).toTensor().dim() == self.dim() &&
      self.dim() > 0) {
    const at::Tensor source = call.argument(3).toTensor();
    TORCH_CHECK_VALUE(is_dtensor(source) && spec_of(source).mesh() == spec.mesh(),
                      call.description(), ": source: ", "expected a DTensor on ", spec.mesh(),
                      " (rank ", spec.mesh().rank(), ")");
    call.argument(3) = redistribute_local(local_of(source), spec_of(source), spec.placements());
  } else if (call.argument(3).isTensor()) {
    call.argument(3) = plain_indices(call.argument(3).toTensor());
  }
  call.argument(0) = local_of(self);
  call.run();
  call.finish(self);
}

// index_put_(indices, values, accumulate), and what index's gradient is, along any
// dimension: on the whole value, of which every rank keeps its part. Collective over the
// mesh dimensions that cut `self`.
void index_put_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  TORCH_CHECK_VALUE(is_dtensor(self), call.description(),
                    " writes a plain tensor from DTensors; use .full_tensor() (collective)");
  const DTensorSpec& spec = spec_of(self);
  TORCH_CHECK_NOT_IMPLEMENTED(!spec.has_partial(), call.description(),
                              ": a Partial tensor cannot be written at indices. Call "
                              ".redistribute({Replicate()}) first (collective).");
  const at::Tensor whole = redistribute_local(local_of(self), spec, spec.replicated().placements());
  call.argument(1) = indexing_of(call).plain;
  call.argument(2) = plain_indices(call.argument(2).toTensor());
  call.argument(0) = whole;
  call.run();
  local_of(self).copy_(local_part(whole, spec));
  call.finish(self);
}

// slice_backward(grad, sizes, dim, start, end, step) where whole blocks of a cut
// dimension were sliced. True when it was.
bool slice_backward_of_blocks(OperatorCall& call) {
  const at::Tensor grad = call.argument(0).toTensor();
  const auto shape = call.argument(1).toIntVector();
  const int64_t dim = c10::maybe_wrap_dim(call.argument(2).toInt(), grad.dim());
  const int64_t size = shape[static_cast<size_t>(dim)];
  const DTensorSpec& part = spec_of(grad);
  if (!part.is_cut(dim) || part.has_partial() || call.argument(5).toInt() != 1) return false;
  const int64_t start = call.argument(3).toInt();
  const DimRange range{
      .dim = dim, .start = start < 0 ? start + size : start, .length = grad.size(dim)};
  auto placements = placements_around(part, size, range);
  if (!placements.has_value()) return false;
  const DTensorSpec spec(part.mesh(), std::move(*placements), shape);
  const DimRange own = local_range(spec, range);
  const at::Tensor local = local_of(grad).new_zeros(spec.local_shape());
  local.narrow(dim, own.start, own.length).copy_(local_of(grad));
  call.finish(make_dtensor(local, spec));
  return true;
}

// The gradient of select and slice: zeros of the whole shape, laid as the gradient, with
// it in the middle.
template <bool is_select>
void backward_rule(OperatorCall& call) {
  if (!is_select && slice_backward_of_blocks(call)) return;
  const auto shape = call.argument(1).toIntVector();
  const int64_t dim =
      c10::maybe_wrap_dim(call.argument(2).toInt(), static_cast<int64_t>(shape.size()));
  at::Tensor grad = reduce_partials(call.argument(0).toTensor());
  if (!is_select) grad = whole_along(call, 0, grad, {dim});
  auto placements = spec_of(grad).placements();
  for (auto& placement : placements) {
    if (is_select && placement.is_shard() && placement.shard_dim() >= dim)
      placement = placement.along(placement.shard_dim() + 1);
  }
  const DTensorSpec spec(spec_of(grad).mesh(), std::move(placements), shape);
  call.argument(0) = local_of(grad);
  call.argument(1) = spec.local_shape();
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(), spec));
}

}  // namespace

void add_index_rules(RuleTable& table) {
  table["index_select."] = index_select_rule;
  table["index.Tensor"] = index_rule;
  for (const char* name :
       {"index_fill_.int_Scalar", "index_fill_.int_Tensor", "index_add_", "index_copy_"}) {
    table[name] = write_at_indices_rule;
  }
  for (const char* name : {"index_put_.", "_index_put_impl_."}) table[name] = index_put_rule;
  table["select_backward."] = backward_rule<true>;
  table["slice_backward."] = backward_rule<false>;
}

}  // namespace fsdp::internal
