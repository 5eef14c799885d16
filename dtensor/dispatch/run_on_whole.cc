#include "dtensor/dispatch/run_on_whole.h"

#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/place_operands.h"
#include "dtensor/dispatch/wrap_results.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Which operands the operator writes in place that are DTensors.
std::vector<size_t> written_dtensors(const OperatorCall& call, const ArgumentKinds& kinds,
                                     const Operands& operands) {
  const auto& arguments = call.traits().written;
  const auto argument_of = kinds.arguments_of_operands(call);
  std::vector<size_t> written;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (is_dtensor(operands[i]) &&
        std::count(arguments.begin(), arguments.end(), argument_of[i]) > 0)
      written.push_back(i);
  }
  return written;
}

void check_keeps_its_shape(const OperatorCall& call, const DTensorSpec& spec) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.handle().hasTag(at::Tag::inplace_view), call.description(),
      " changes the shape of a DTensor in place; make a new tensor instead (rank ",
      spec.mesh().rank(), ")");
}

void keep_part(const OperatorCall& call, const at::Tensor& dtensor, const at::Tensor& whole) {
  const DTensorSpec& spec = spec_of(dtensor);
  TORCH_CHECK_NOT_IMPLEMENTED(whole.sizes() == dtensor.sizes(), call.name(), ": a DTensor of ",
                              to_string(spec), " would become one of shape ", whole.sizes(),
                              ", but keeps its shape (rank ", spec.mesh().rank(), ")");
  local_of(dtensor).copy_(placed_whole(whole, spec));
}

// What was written is handed back as it was given.
void hand_back(OperatorCall& call, const torch::jit::Stack& given, const DeviceMesh& mesh) {
  wrap_results(call,
               [&](const at::Tensor& local, size_t) { return replicated_result(local, mesh); });
  const auto& returned = call.traits().returned_argument;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (returned[i].has_value()) call.result(i) = given[*returned[i]];
  }
}

}  // namespace

void run_on_whole(OperatorCall& call) {
  const CommCauseScope cause(CommCause::kWhole);
  const ArgumentKinds kinds(call.handle().schema());
  const torch::jit::Stack given = call.arguments();
  const auto operands = kinds.operands_of(call);
  const DeviceMesh mesh = common_mesh(call, operands);
  const auto written = written_dtensors(call, kinds, operands);
  for (const size_t i : written) check_keeps_its_shape(call, spec_of(operands[i]));
  const std::vector<TensorPlacements> targets(operands.size(), replicated_on(mesh));
  auto wholes = place_operands(operands, targets);
  for (const size_t i : written) {
    if (wholes[i].is_same(local_of(operands[i]))) wholes[i] = wholes[i].clone();
  }
  kinds.replace_operands(call, wholes);
  call.run_in_place();
  for (const size_t i : written) keep_part(call, operands[i], wholes[i]);
  hand_back(call, given, mesh);
}

}  // namespace fsdp::internal
