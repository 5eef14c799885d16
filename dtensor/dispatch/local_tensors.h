// Between the DTensors of a call and the local tensors that the operator runs on:
// operands are brought to where they are wanted, and what the operator gave becomes
// DTensors.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/operator_call.h"
#include "dtensor/strategy/op_schema.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/dtensor_spec.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace fsdp::internal {

// The mesh that the DTensors among the operands lie on. Throws ValueError for several
// meshes, and as compare_plain(). REQUIRES: a DTensor.
DeviceMesh common_mesh(const OperatorCall& call, at::TensorList operands);

TensorPlacements replicated_on(const DeviceMesh& mesh);

// Where the operands lie; plain and absent ones count as replicated.
CallPlacements placements_of(at::TensorList operands, const DeviceMesh& mesh);

std::vector<Operand> geometry_of(at::TensorList operands);

// This rank's parts once every operand lies as `targets` say; absent ones stay absent.
// Collective over the mesh dimensions along which one must move. REQUIRES: a DTensor.
Operands place_operands(at::TensorList operands, const std::vector<TensorPlacements>& targets);

// Replaces each tensor among the results of a finished `call`, those of lists one by one,
// by wrap(tensor, its number).
template <class Wrap>
void wrap_results(OperatorCall& call, const Wrap& wrap) {
  size_t number = 0;
  for (size_t i = 0; i < call.handle().schema().returns().size(); ++i) {
    c10::IValue& result = call.result(i);
    if (result.isTensor()) {
      const at::Tensor local = std::move(result).toTensor();
      result = local.defined() ? wrap(local, number) : local;
      ++number;
    } else if (result.isTensorList()) {
      auto tensors = std::move(result).toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = wrap(tensor, number++);
      result = std::move(tensors);
    }
  }
}

// A result that every rank has whole, as the operator laid it in memory.
at::Tensor replicated_result(const at::Tensor& local, const DeviceMesh& mesh);

// A result of which this rank has `local`: a copy of it where its dimensions lie in
// another order in memory than those of the whole, which must not depend on the rank.
// What every rank has whole lies as the operator laid it. What the kernels of a device
// leave out, an empty tensor of one dimension in the place of what others give, is so on
// every rank.
at::Tensor result_over(const at::Tensor& local, const DTensorSpec& spec);

}  // namespace fsdp::internal
