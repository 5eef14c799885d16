// The shape and dtypes of a parameter (PyTorch's TensorMeta), where it lies without its
// unit, and how many bytes its shards are. Local.
#pragma once

#include "dtensor/tensor/dtensor_spec.h"
#include "fully_shard/transport/packed_layout.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

class ParamMeta {
 public:
  // Of `tensor`, plain or tensor-parallel, which the unit cuts so; the dimension is not
  // negative. With `param_dtype` a floating member has that dtype, and the
  // registry entry keeps the tensor's.
  ParamMeta(const at::Tensor& tensor, const Shard& cut, std::optional<at::ScalarType> param_dtype);

  // What the member is without the unit: where it lies over its own mesh; null where it
  // is plain.
  const std::optional<DTensorSpec>& member_spec() const { return member_spec_; }
  // Of what the unit shards: the member, or this rank's part of a tensor-parallel one.
  const std::vector<int64_t>& shape() const { return shape_; }
  const Shard& cut() const { return cut_; }
  // Of a part that has so many indices of the sharded dimension.
  std::vector<int64_t> shape_with_rows(int64_t rows) const;

  at::ScalarType dtype() const { return dtype_; }  // of the entry and the shards
  at::ScalarType member_dtype() const;
  // Whether the member may have a dtype of its own.
  bool is_cast() const { return param_dtype_.has_value(); }
  void set_dtype(at::ScalarType dtype) { dtype_ = dtype; }
  void set_param_dtype(std::optional<at::ScalarType> dtype) { param_dtype_ = dtype; }

  // Of values of `dtype`.
  ShardExtent extent(at::ScalarType dtype) const;

 private:
  std::optional<DTensorSpec> member_spec_;
  std::vector<int64_t> shape_;
  Shard cut_;
  at::ScalarType dtype_;
  std::optional<at::ScalarType> param_dtype_;
};

}  // namespace fsdp::internal
