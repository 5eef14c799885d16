// Reductions of parts: a mean divides by the size of the whole, and the extremum of
// nothing, of which LibTorch knows none, is the neutral element.
#include "dtensor/families/parts.h"
#include "dtensor/ways/along_ways.h"
#include "dtensor/ways/table.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// None: all.
std::vector<int64_t> dims_at(const OperatorCall& call, std::optional<size_t> place, int64_t ndim) {
  return given_dims(place ? plain_argument(call.argument(*place)) : PlainArgument{}, ndim);
}

bool is_one_cut(const DTensorSpec& spec, const std::vector<int64_t>& dims) {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t dim) { return spec.is_cut(dim); });
}

int64_t count_along(at::IntArrayRef shape, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= shape[static_cast<size_t>(dim)];
  return count;
}

// mean(self, dtype), mean(self, dim, keepdim, dtype)
template <bool has_dims>
std::vector<c10::IValue> mean_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec self = placed.operand(0);
  const at::Tensor local = call.argument(0).toTensor();
  const auto dims = dims_at(call, has_dims ? std::optional<size_t>(1) : std::nullopt, local.dim());
  if (!is_one_cut(self, dims)) return call.run();
  const bool keepdim = has_dims && call.argument(2).toBool();
  const c10::IValue& dtype = call.argument(has_dims ? 3 : 1);
  const auto type = dtype.isNone() ? local.scalar_type() : dtype.toScalarType();
  TORCH_CHECK(c10::isFloatingType(type), call.name(), ": mean needs a floating-point dtype, got ",
              type);
  return {at::sum(local, dims, keepdim, type).div_(count_along(self.shape(), dims))};
}

c10::Scalar lowest(c10::ScalarType type) {
  if (type == c10::ScalarType::Bool) return false;
  if (c10::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(
      type, "amax", [] { return c10::Scalar(std::numeric_limits<scalar_t>::lowest()); });
}

c10::Scalar highest(c10::ScalarType type) {
  if (type == c10::ScalarType::Bool) return true;
  if (c10::isFloatingType(type)) return std::numeric_limits<double>::infinity();
  return AT_DISPATCH_INTEGRAL_TYPES(
      type, "amin", [] { return c10::Scalar(std::numeric_limits<scalar_t>::max()); });
}

// What lowers nothing, or raises nothing.
at::Tensor neutral(const at::Tensor& local, const std::vector<int64_t>& shape, bool is_greatest) {
  const auto type = local.scalar_type();
  return at::full(shape, is_greatest ? lowest(type) : highest(type), local.options());
}

// The extrema of a part of which a reduced dimension is empty, though the whole's is not.
template <std::optional<size_t> (*place)(), bool... is_greatest>
std::vector<c10::IValue> extrema_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const at::Tensor local = call.argument(0).toTensor();
  const DTensorSpec self = placed.operand(0);
  const auto dims = dims_at(call, place(), local.dim());
  if (count_along(local.sizes(), dims) > 0 || count_along(self.shape(), dims) == 0)
    return call.run();
  const auto shape = placed.result(0).local_shape(placed.mesh().coordinate());
  return {neutral(local, shape, is_greatest)...};
}

std::optional<size_t> no_dims() { return std::nullopt; }
std::optional<size_t> first_argument() { return 1; }

}  // namespace

void add_reduction_parts(PartsTable& table) {
  const auto add = [&table](const char* name, RunOnParts run) {
    table[name] = {ways_table().at(name), run};
  };
  add("mean.", mean_of_part<false>);
  add("mean.dim", mean_of_part<true>);
  add("max.", extrema_of_part<no_dims, true>);
  add("min.", extrema_of_part<no_dims, false>);
  add("amax.", extrema_of_part<first_argument, true>);
  add("amin.", extrema_of_part<first_argument, false>);
  add("aminmax.", extrema_of_part<first_argument, false, true>);
}

}  // namespace fsdp::internal
