#include "dtensor/dispatch/propagation_key.h"

#include "dtensor/tensor/dtensor_impl.h"

#include <bit>

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

}  // namespace

void append_propagation_key(const OperatorCall& call, const ArgumentKinds& kinds,
                            at::TensorList operands, const DeviceMesh& mesh, MemoKey& key) {
  append_numbers(mesh.coordinate(), key);
  for (const at::Tensor& operand : operands) append_operand(operand, key);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds.is_plain(i)) append_argument(call.argument(i), key);
  }
}

}  // namespace fsdp::internal
