#include "dtensor/dispatch/scalar_arguments.h"

#include "dtensor/dispatch/compare_plain.h"

#include <algorithm>
#include <cstring>

namespace fsdp::internal {
namespace {

// REQUIRES: on the CPU.
bool has_bytes(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() &&
         tensor.const_data_ptr() != nullptr;
}

void add_number(const c10::IValue& argument, ScalarArguments& met) {
  if (argument.isList()) {
    for (const c10::IValue& element : argument.toListRef()) add_number(element, met);
  } else if (argument.isScalar()) {
    met.add(argument.toScalar());
  }
}

// Hashing what is on a device would stall the host.
void add_copied(const at::Tensor& source, ScalarArguments& met) {
  if (source.is_cpu() && counts_as_replicated(source))
    met.add_values(static_cast<uint64_t>(hash_of_plain(source)));
}

}  // namespace

void ScalarArguments::add(const at::Tensor& plain) {
  if (plain.dim() != 0 || !plain.is_cpu() || !has_bytes(plain)) return;
  const void* const data = plain.const_data_ptr();
  if (plain.scalar_type() == at::kDouble) return add(*static_cast<const double*>(data));
  if (plain.scalar_type() == at::kFloat)
    return add(static_cast<double>(*static_cast<const float*>(data)));
  uint64_t bits = 0;
  std::memcpy(&bits, data, std::min(plain.itemsize(), sizeof bits));
  add(static_cast<int64_t>(bits));
}

ScalarHash scalar_hash_of(const OperatorTraits& traits, const TensorArguments& arguments) {
  ScalarArguments met;
  for (const size_t i : traits.numbers) add_number(arguments[i], met);
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    if (writes && traits.overwrites) return;
    const bool is_copied = traits.overwrites && tensor.dim() > 0 && find_meta(tensor) == nullptr;
    if (is_copied) return add_copied(tensor, met);
    met.meet(tensor);
  });
  return met.of(arguments.schema().name().c_str());
}

}  // namespace fsdp::internal
