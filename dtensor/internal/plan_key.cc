#include "dtensor/internal/plan_key.h"

#include "dtensor/internal/dtensor_impl.h"

namespace fsdp::internal {
namespace {

constexpr int64_t kReplicated = -1, kAbsent = -1;

void append_placement(const Placement& placement, MemoKey& key) {
  if (placement.is_shard()) {
    const auto [dim, outer, unit] = placement.shard();
    key.insert(key.end(), {dim, outer, unit});
  } else {
    key.push_back(placement.is_replicate() ? kReplicated
                                           : -2 - static_cast<int64_t>(placement.partial_op()));
  }
}

void append_numbers(at::IntArrayRef numbers, MemoKey& key) {
  key.push_back(static_cast<int64_t>(numbers.size()));
  key.insert(key.end(), numbers.begin(), numbers.end());
}

void append_operand(const at::Tensor& operand, const DeviceMesh& mesh, MemoKey& key) {
  if (!operand.defined()) return key.push_back(kAbsent);
  append_numbers(operand.sizes(), key);
  key.insert(key.end(), operand.strides().begin(), operand.strides().end());
  key.push_back(operand.element_size());
  if (const auto* const meta = find_meta(operand)) {
    for (const Placement& placement : meta->spec.placements()) append_placement(placement, key);
  } else {
    key.insert(key.end(), static_cast<size_t>(mesh.ndim()), kReplicated);
  }
}

void append_plain(const PlainArgument& plain, MemoKey& key) {
  if (const auto* const numbers = std::get_if<std::vector<int64_t>>(&plain)) {
    append_numbers(*numbers, key);
  } else if (const auto* const number = std::get_if<int64_t>(&plain)) {
    key.push_back(*number);
  }
}

}  // namespace

MemoKey plan_key(const DeviceMesh& mesh, const std::vector<at::Tensor>& operands,
                 const std::vector<PlainArgument>& plain) {
  MemoKey key;
  key.reserve(64);
  append_numbers(mesh.shape(), key);
  for (const at::Tensor& operand : operands) append_operand(operand, mesh, key);
  for (const PlainArgument& argument : plain) {
    key.push_back(static_cast<int64_t>(argument.index()));
    append_plain(argument, key);
  }
  return key;
}

}  // namespace fsdp::internal
