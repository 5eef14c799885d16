#include "dtensor/dispatch/sharding_propagator.h"

#include "dtensor/dispatch/local_tensors.h"
#include "dtensor/dtensor.h"
#include "dtensor/strategy/propagate.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

namespace fsdp::internal {
namespace {

// What a part of a key is, before it: keys of other lengths or kinds never look alike.
enum class Part : int64_t { kAbsent, kPlain, kDTensor, kNothing, kNumber, kNumbers, kReal };

void append(Part part, MemoKey& key) { key.push_back(static_cast<int64_t>(part)); }

// In one number with the dtype: a key is made and hashed for each call.
void append(Part part, at::ScalarType dtype, MemoKey& key) {
  constexpr int64_t kParts = 16;
  key.push_back(static_cast<int64_t>(part) + kParts * static_cast<int64_t>(dtype));
}

void append_numbers(at::IntArrayRef numbers, MemoKey& key) {
  key.push_back(static_cast<int64_t>(numbers.size()));
  key.insert(key.end(), numbers.begin(), numbers.end());
}

void append_operand(const at::Tensor& operand, MemoKey& key) {
  if (!operand.defined()) return append(Part::kAbsent, key);
  if (const auto* const meta = find_meta(operand)) {
    append(Part::kDTensor, operand.scalar_type(), key);
    key.push_back(reinterpret_cast<int64_t>(meta->spec.layout().id()));
  } else {
    append(Part::kPlain, operand.scalar_type(), key);
    append_numbers(operand.sizes(), key);
    key.insert(key.end(), operand.strides().begin(), operand.strides().end());
  }
}

// REQUIRES: of whole numbers or truth values.
void append_list(const c10::IValue& list, MemoKey& key) {
  append(Part::kNumbers, key);
  const auto elements = list.toListRef();
  key.push_back(static_cast<int64_t>(elements.size()));
  for (const c10::IValue& each : elements)
    key.push_back(each.isBool() ? static_cast<int64_t>(each.toBool()) : each.toInt());
}

void append_argument(const c10::IValue& value, MemoKey& key) {
  if (value.isInt() || value.isBool()) {
    append(Part::kNumber, key);
    key.push_back(value.isInt() ? value.toInt() : static_cast<int64_t>(value.toBool()));
  } else if (value.isIntList() || value.isBoolList()) {
    append_list(value, key);
  } else if (value.isDouble()) {
    append(Part::kReal, key);
    key.push_back(std::bit_cast<int64_t>(value.toDouble()));
  } else {
    append(Part::kNothing, key);
  }
}

// The key of the cache: all that a call's output sharding depends on, as numbers. This
// rank's coordinate, the layouts of the operands that are DTensors, by their
// address, the geometry of others, and the plain arguments that matter. REQUIRES:
// DTensors among the operands lie on `mesh`.
void append_propagation_key(const OperatorCall& call, const ArgumentKinds& kinds,
                            at::TensorList operands, const DeviceMesh& mesh, MemoKey& key) {
  append_numbers(mesh.coordinate(), key);
  for (const at::Tensor& operand : operands) append_operand(operand, key);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds.is_plain(i)) append_argument(call.argument(i), key);
  }
}

constexpr size_t kPlansPerOperator = 1024;

bool all_replicated(const std::vector<TensorPlacements>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& placements) {
    return std::all_of(placements.begin(), placements.end(),
                       [](const auto& placement) { return placement.is_replicate(); });
  });
}

bool is_list(const c10::Argument& result) {
  return result.type()->kind() == c10::TypeKind::ListType;
}

std::optional<size_t> written_operand(const OperatorTraits& traits, const ArgumentKinds& kinds) {
  if (traits.written.empty()) return std::nullopt;
  return kinds.operand_at(traits.written[0]);
}

bool aliases_its_operand(const c10::FunctionSchema& schema) {
  const auto* const alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  return alias != nullptr && !alias->isWrite();
}

bool has_cut(const TensorPlacements& placements) {
  return std::any_of(placements.begin(), placements.end(),
                     [](const auto& placement) { return placement.is_shard(); });
}

// A strategy may name any placement for an absent tensor.
std::vector<TensorLayout> layouts_on(const DeviceMesh& mesh,
                                     const std::vector<TensorPlacements>& placements,
                                     const std::vector<ResultGeometry>& geometry) {
  std::vector<TensorLayout> layouts;
  for (size_t i = 0; i < geometry.size(); ++i) {
    const auto& [shape, stride] = geometry[i];
    const bool is_absent = shape.empty() && has_cut(placements[i]);
    layouts.push_back(
        DTensorSpec(mesh, is_absent ? replicated_on(mesh) : placements[i], shape, stride).layout());
  }
  return layouts;
}

std::vector<ResultGeometry> geometry_of_each(const OpSchema& call) {
  std::vector<ResultGeometry> geometry;
  for (const Operand& operand : call.operands) geometry.push_back({operand.shape, operand.stride});
  return geometry;
}

std::vector<TensorLayout> layouts_of(at::TensorList operands) {
  std::vector<TensorLayout> layouts;
  for (const at::Tensor& operand : operands)
    if (is_dtensor(operand)) layouts.push_back(spec_of(operand).layout());
  return layouts;
}

void check_fits(const OperatorCall& call, const ResultGeometry& result, const at::Tensor& written) {
  TORCH_CHECK_VALUE(at::IntArrayRef(result.shape) == written.sizes(), call.description(),
                    ": the result's shape ", at::IntArrayRef(result.shape),
                    " does not fit the tensor it is written to");
}

}  // namespace

std::vector<ResultGeometry> meta_results(const OperatorCall& call, const ArgumentKinds& kinds) {
  torch::jit::Stack stack = call.arguments();
  OperatorCall on_meta(call.handle(), call.traits(), {}, &stack);
  auto operands = kinds.operands_of(on_meta);
  for (at::Tensor& operand : operands) {
    if (!operand.defined()) continue;
    operand =
        at::empty_strided(operand.sizes(), operand.strides(), operand.options().device(c10::kMeta));
  }
  kinds.replace_operands(on_meta, operands);
  std::vector<ResultGeometry> results;
  const auto add = [&results](const at::Tensor& result) {
    results.push_back({.shape = result.sizes().vec(), .stride = result.strides().vec()});
  };
  for (const c10::IValue& result : on_meta.run()) {
    if (result.isTensor()) {
      add(result.toTensor());
    } else {
      for (const at::Tensor& element : result.toTensorVector()) add(element);
    }
  }
  return results;
}

PlannedOperator::PlannedOperator(OpStrategy of, const c10::OperatorHandle& op)
    : strategy(std::move(of)),
      kinds(op.schema(), strategy.reals),
      written(written_operand(OperatorTraits(op), kinds)),
      results(op.schema().returns().size()),
      returns_a_list(results == 1 && is_list(op.schema().returns()[0])),
      is_view(aliases_its_operand(op.schema())) {}

PlannedOperator::PlannedOperator(OpStrategy of, std::optional<size_t> in_place)
    : strategy(std::move(of)), written(in_place) {}

ShardingPropagator::ShardingPropagator(PlannedOperator op)
    : op_(std::move(op)), memo_(kPlansPerOperator) {}

std::shared_ptr<const OutputSharding> ShardingPropagator::sharding_of(
    const OperatorCall& call, at::TensorList operands, const DeviceMesh& mesh) const {
  thread_local MemoKey key;  // its memory stays
  key.clear();
  append_propagation_key(call, op_.kinds, operands, mesh, key);
  if (auto known = memo_.find(key)) return known;
  try {
    return memo_.remember(key, make(call, operands, mesh));
  } catch (const std::out_of_range& error) {
    TORCH_CHECK_INDEX(false, call.description(), ": ", error.what(), " (rank ", mesh.rank(), ")");
  }
}

std::vector<ResultGeometry> ShardingPropagator::results_of(const OperatorCall& call,
                                                           const OpSchema& geometry) const {
  return op_.strategy.results ? op_.strategy.results(geometry) : meta_results(call, op_.kinds);
}

Propagation ShardingPropagator::propagation_of(const OpSchema& geometry, at::TensorList operands,
                                               const DeviceMesh& mesh, size_t results) const {
  CallPlacements placements = placements_of(operands, mesh);
  placements.written = op_.written;
  return op_.strategy.propagation
             ? op_.strategy.propagation(geometry, placements)
             : propagate(op_.strategy.strategies, geometry, placements, results);
}

OutputSharding ShardingPropagator::make(const OperatorCall& call, at::TensorList operands,
                                        const DeviceMesh& mesh) const {
  const OpSchema geometry{.operands = geometry_of(operands), .plain = op_.kinds.plain_of(call)};
  std::vector<ResultGeometry> results;
  if (op_.returns_a_list || op_.is_view) results = results_of(call, geometry);
  const size_t count = op_.returns_a_list ? results.size() : op_.results;
  const auto propagation = propagation_of(geometry, operands, mesh, count);
  OutputSharding sharding{
      .targets = propagation.operands,
      .moves = propagation.operands != placements_of(operands, mesh).operands,
      .placed = layouts_on(mesh, propagation.operands, geometry_of_each(geometry)),
      .arrived = layouts_of(operands)};
  if (op_.written.has_value()) {
    if (op_.strategy.results)
      check_fits(call, results_of(call, geometry)[0], operands[*op_.written]);
    return sharding;
  }
  const bool is_known = op_.strategy.results || op_.is_view;
  if (all_replicated(sharding.targets) && !is_known) return sharding;
  if (results.empty()) results = results_of(call, geometry);
  sharding.results = layouts_on(mesh, propagation.results, results);
  if (!op_.strategy.part_arguments) return sharding;
  sharding.part_arguments = op_.strategy.part_arguments(
      geometry,
      {.operands = sharding.placed, .results = sharding.results, .coordinate = mesh.coordinate()});
  return sharding;
}

}  // namespace fsdp::internal
