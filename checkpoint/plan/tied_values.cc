#include "checkpoint/plan/tied_values.h"

#include "checkpoint/files/raise.h"
#include "checkpoint/ranks/tensor_values.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

at::Tensor as_bytes(const at::Tensor& plain) {
  return internal::tensor_bytes(plain.resolve_conj().resolve_neg().contiguous());
}

}  // namespace

bool have_same_values(const at::Tensor& a, const at::Tensor& b) {
  const c10::NoGradGuard no_grad;
  if (a.is_same(b)) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (is_dtensor(a) != is_dtensor(b)) return false;
  if (is_dtensor(a) && !(spec_of(a) == spec_of(b))) return false;
  const at::Tensor mine = local_value(a), other = local_value(b);
  return mine.numel() == 0 || at::equal(as_bytes(mine), as_bytes(other.to(mine.device())));
}

void check_tied_in_file(const Catalog& catalog, const std::vector<std::string>& stored_names,
                        const NamedTensor& named, ReadRules rules) {
  if (stored_names.size() < 2) return;
  TensorReader reader(catalog, std::move(rules));
  std::vector<at::Tensor> values;
  for (const auto& name : stored_names) {
    values.push_back(at::empty_like(named.tensor.detach()));
    raise_unless_ok(reader.plan(name, named.name, values.back()));
  }
  raise_unless_ok(reader.read());
  for (size_t i = 1; i < values.size(); ++i) {
    TORCH_CHECK_VALUE(have_same_values(values[0], values[i]), "'", stored_names[0], "' and '",
                      stored_names[i], "' are one tensor in the model, and the file has different ",
                      "values under these names. LoadOptions::name_in_file may give both names ",
                      "the one whose values are wanted");
  }
}

}  // namespace fsdp::internal::checkpoint
