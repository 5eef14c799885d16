#include "dtensor/dispatch/implicit_replication.h"

#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dispatch/scalar_arguments.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace fsdp::internal {
namespace {

bool is_number(const at::Tensor& plain) { return plain.unsafeGetTensorImpl()->is_wrapped_number(); }

// Optimizer steps look after their operands themselves.
bool may_differ_in_writes(std::string_view name) {
  return name.starts_with("aten::_fused_") || name.starts_with("aten::_amp_") ||
         !reads_values_of_all(name);
}

// Of tensors that meet each other in an operator.
class Company {
 public:
  void add(const at::Tensor& tensor, bool writes) {
    const DTensorMeta* const meta = find_meta(tensor);
    if (meta == nullptr) {
      if (!is_number(tensor)) plain_.push_back(&tensor);
      return;
    }
    writes_dtensor_ |= writes;
    if (!meta->from_parameter) return others_.push_back(&meta->spec);
    from_parameter_ = &meta->spec;
    if (!writes) return;
    written_ = meta;
    written_tensor_ = &tensor;
  }

  bool needs_whole_values() const {
    if (from_parameter_ == nullptr || writes_dtensor_) return false;
    return !plain_.empty() || std::any_of(others_.begin(), others_.end(), [this](const auto* spec) {
      return spec->mesh() != from_parameter_->mesh();
    });
  }

  // Collective where there is something.
  void check_written_alike(const OperatorCall& call) const {
    if (written_ == nullptr) return;
    if (call.traits().overwrites && is_compared_later()) return;
    const bool is_cut = written_->spec.has_shard();
    std::vector<at::Tensor> compared;
    ScalarArguments factors;
    for (const at::Tensor* plain : plain_) {
      if (plain->dim() > 0 || !is_cut) {
        compared.push_back(*plain);
      } else {
        factors.add(*plain);
      }
    }
    if (!compared.empty()) check_alike(what_writes(call), compared, written_->spec.mesh());
    if (factors.hash() != 0 && written_->is_of_parameter())
      written_->owner->before_factors(factors.hash());
  }

 private:
  // What is copied: at the next gather of a parameter, of which it is the whole value
  // (DTensorOwner::after_overwrite); with what else went into the value of anything else
  // (scalar_hash.h).
  bool is_compared_later() const {
    return !written_->is_of_parameter() || written_->owner->shows_all(*written_tensor_);
  }

  std::string what_writes(const OperatorCall& call) const {
    const auto* const name = written_->owner ? written_->owner->parameter_name() : nullptr;
    return c10::str(
        call.description(), ", which writes ",
        name == nullptr ? "what comes from a sharded parameter" : "parameter '" + *name + "'",
        " and keeps this rank's part of what stands beside it (out of place the "
        "result is this rank's own)");
  }

  const DTensorSpec* from_parameter_ = nullptr;
  const DTensorMeta* written_ = nullptr;  // of one from a parameter
  const at::Tensor* written_tensor_ = nullptr;
  bool writes_dtensor_ = false;
  c10::SmallVector<const at::Tensor*, 4> plain_;
  c10::SmallVector<const DTensorSpec*, 4> others_;
};

using Companies = c10::SmallVector<Company, 4>;

// Element i of every list of a _foreach_ operator meets element i of the others, and what
// is in no list.
Companies companies_of_lists(const TensorArguments& arguments) {
  Companies companies;
  for (size_t a = 0; a < arguments.size(); ++a) {
    if (!TensorArguments::is_list(arguments[a])) continue;
    const auto elements = arguments[a].toListRef();
    if (companies.size() < elements.size()) companies.resize(elements.size());
    for (size_t i = 0; i < elements.size(); ++i) {
      if (elements[i].isTensor() && elements[i].toTensor().defined())
        companies[i].add(elements[i].toTensor(), arguments.writes(a));
    }
  }
  for (size_t a = 0; a < arguments.size(); ++a) {
    const bool is_single = arguments[a].isTensor() && arguments[a].toTensor().defined();
    if (!is_single || arguments.schema().arguments()[a].name() == "scalars") continue;
    for (Company& company : companies) company.add(arguments[a].toTensor(), arguments.writes(a));
  }
  return companies;
}

Companies companies_of(const TensorArguments& arguments) {
  if (std::string_view(arguments.schema().name()).starts_with("aten::_foreach_"))
    return companies_of_lists(arguments);
  Companies one(1);
  arguments.for_each(
      [&](const at::Tensor& tensor, bool writes) { one.front().add(tensor, writes); });
  return one;
}

}  // namespace

bool reads_values_of_all(std::string_view name) {
  for (const std::string_view other :
       {"aten::to", "aten::type_as", "aten::expand_as", "aten::view_as", "aten::reshape_as",
        "aten::is_same_size", "aten::result_type", "aten::_has_compatible_shallow_copy_type",
        "aten::set_", "aten::resize_as_"}) {
    if (name == other) return false;
  }
  return true;
}

TensorsMet::TensorsMet(const TensorArguments& arguments) {
  const DeviceMesh* mesh = nullptr;
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    const DTensorMeta* const meta = find_meta(tensor);
    if (meta == nullptr) {
      plain |= !is_number(tensor);
      return;
    }
    from_parameter |= meta->from_parameter;
    if (mesh != nullptr) several_meshes |= meta->spec.mesh() != *mesh;
    mesh = &meta->spec.mesh();
  });
}

bool needs_whole_values(const TensorArguments& arguments) {
  const Companies companies = companies_of(arguments);
  return std::any_of(companies.begin(), companies.end(),
                     [](const Company& company) { return company.needs_whole_values(); }) &&
         reads_values_of_all(arguments.schema().name());
}

void make_whole(TensorArguments& arguments, WholeValue whole) {
  c10::SmallVector<DeviceMesh, 2> meshes;
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    const DTensorMeta* const meta = find_meta(tensor);
    if (meta != nullptr && meta->from_parameter) meshes.push_back(meta->spec.mesh());
  });
  arguments.replace_each([&](const at::Tensor& tensor) {
    const DTensorMeta* const meta = find_meta(tensor);
    const bool lies_there = meta != nullptr && std::find(meshes.begin(), meshes.end(),
                                                         meta->spec.mesh()) != meshes.end();
    return lies_there ? whole(tensor) : at::Tensor();
  });
}

at::Tensor gathered_value(const at::Tensor& dtensor) {
  TORCH_CHECK_VALUE(
      !(at::GradMode::is_enabled() && dtensor.requires_grad()), "A DTensor of ",
      to_string(spec_of(dtensor)),
      " that requires grad comes from a sharded parameter, or stands beside one, and meets a "
      "plain tensor, which is this rank's own: so would be its gradient. Make it a parameter of "
      "a module that fully_shard shards (rank ",
      spec_of(dtensor).mesh().rank(), ")");
  const CommCauseScope cause(CommCause::kRequest);
  tell_read(dtensor);
  return whole_value(dtensor);
}

void check_written_alike(const OperatorCall& call, const TensorArguments& arguments) {
  if (may_differ_in_writes(call.handle().schema().name())) return;
  for (const Company& company : companies_of(arguments)) company.check_written_alike(call);
}

}  // namespace fsdp::internal
