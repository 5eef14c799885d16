#include "fully_shard/params/param_meta.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

namespace fsdp::internal {

ParamMeta::ParamMeta(const at::Tensor& tensor, const Shard& cut,
                     std::optional<at::ScalarType> param_dtype)
    : member_spec_(is_dtensor(tensor) ? std::optional(spec_of(tensor)) : std::nullopt),
      shape_(held_part(tensor).sizes().vec()),
      cut_(cut),
      dtype_(tensor.scalar_type()),
      param_dtype_(param_dtype) {}

std::vector<int64_t> ParamMeta::shape_with_rows(int64_t rows) const {
  auto shape = shape_;
  shape[static_cast<size_t>(cut_.dim)] = rows;
  return shape;
}

at::ScalarType ParamMeta::member_dtype() const {
  return at::isFloatingType(dtype_) ? param_dtype_.value_or(dtype_) : dtype_;
}

ShardExtent ParamMeta::extent(at::ScalarType dtype) const {
  const auto cut = static_cast<size_t>(cut_.dim);
  ShardExtent extent{
      .rows = shape_[cut], .row_bytes = static_cast<int64_t>(c10::elementSize(dtype)), .cut = cut_};
  for (size_t dim = 0; dim < cut; ++dim) extent.blocks *= shape_[dim];
  for (size_t dim = cut + 1; dim < shape_.size(); ++dim) extent.row_bytes *= shape_[dim];
  return extent;
}

}  // namespace fsdp::internal
