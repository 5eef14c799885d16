#include "dtensor/families/rules.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

const RuleTable& table() {
  static const auto* const rules = [] {
    auto* const table = new RuleTable;
    add_pointwise_rules(*table);
    add_foreach_rules(*table);
    add_copy_rules(*table);
    add_factory_rules(*table);
    add_random_rules(*table);
    add_reduction_rules(*table);
    add_norm_rules(*table);
    add_view_rules(*table);
    add_value_rules(*table);
    add_reshape_rules(*table);
    add_along_rules(*table);
    add_variance_rules(*table);
    add_product_rules(*table);
    add_cat_rules(*table);
    add_index_rules(*table);
    add_scatter_rules(*table);
    add_fused_rules(*table);
    return table;
  }();
  return *rules;
}

Rule find(const std::string& name) {
  const auto it = table().find(name);
  return it == table().end() ? nullptr : it->second;
}

// A replicated stand-in: a DTensor without dimensions can be reduced for next to nothing,
// others stay as they are.
at::Tensor settled(const at::Tensor& tensor) {
  if (!is_dtensor(tensor) || tensor.dim() > 0) return tensor;
  return reduce_partials(tensor);
}

bool is_replicated(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor.numel() == 1;
  const auto& placements = spec_of(tensor)->placements;
  return std::all_of(placements.begin(), placements.end(),
                     [](const auto& p) { return p.is_replicate(); });
}

// Applies `function` to every tensor of an argument or result.
template <class Function>
void for_each_tensor(c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = function(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = function(tensor);
    value = std::move(tensors);
  } else if (value.isList()) {  // Tensor?[]
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      c10::IValue element = list.get(i);
      for_each_tensor(element, function);
      list.set(i, element);
    }
    value = list;
  }
}

bool meets_plain(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return !is_dtensor(tensor) && tensor.dim() > 0;
  });
}

at::Tensor replicated_dtensor(const at::Tensor& local, const DeviceMesh& mesh) {
  const std::vector<Placement> placements(static_cast<size_t>(mesh.ndim()), Replicate{});
  auto spec = intern_spec({mesh, placements, local.sizes().vec(), local.strides().vec()});
  return make_dtensor(local, std::move(spec));
}

void check_one_mesh(const OperatorCall& call, const std::vector<at::Tensor>& tensors,
                    const DeviceMesh& mesh) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(!is_dtensor(tensor) || spec_of(tensor)->mesh == mesh, call.description(),
                      " has operands on ",
                      "different meshes; bring them to one mesh with .full_tensor() and "
                      "fsdp::distribute_tensor (rank ",
                      mesh.rank(), ")");
  }
}

bool may_run_replicated(const OperatorCall& call) {
  return call.traits().written.empty() && !call.traits().draws_random_numbers;
}

}  // namespace

void add_with_in_place(RuleTable& table, const std::string& name, Rule rule) {
  table[name] = rule;
  auto in_place = name;
  in_place.insert(std::min(name.find('.'), name.size()), "_");
  table[in_place] = rule;
}

Rule special_rule_of(const c10::OperatorName& name) {
  if (name.name.rfind("aten::", 0) != 0) return nullptr;
  const std::string base = name.name.substr(6);
  if (Rule exact = find(base + "." + name.overload_name)) return exact;
  return find(base);
}

Rule rule_of(const c10::OperatorName& name) {
  const Rule special = special_rule_of(name);
  return special != nullptr ? special : no_rule;
}

void no_rule(OperatorCall& call) {
  for (size_t i = 0; i < call.argument_count(); ++i) for_each_tensor(call.argument(i), settled);
  const auto tensors = call.tensors();
  const bool runs =
      may_run_replicated(call) && std::all_of(tensors.begin(), tensors.end(), is_replicated);
  TORCH_CHECK_NOT_IMPLEMENTED(
      runs, "No sharding rule for ", call.description(), ". ",
      meets_plain(tensors)
          ? "Plain tensors compute with the whole value, fsdp::DTensor(t).full_tensor() "
            "(collective; registry entries of a sharded module and their views are replaced by "
            "theirs, results computed from them are not)."
          : "Work on the whole value with fsdp::DTensor(t).full_tensor() or "
            ".redistribute({Replicate()}) (both collective), or on this rank's part with "
            ".to_local(), and wrap the result with fsdp::from_local or "
            "fsdp::distribute_tensor.");
  const auto dtensor = std::find_if(tensors.begin(), tensors.end(), is_dtensor);
  const DTensorSpecPtr spec = spec_of(*dtensor);
  check_one_mesh(call, tensors, spec->mesh);
  for (size_t i = 0; i < call.argument_count(); ++i) {
    for_each_tensor(call.argument(i),
                    [](const at::Tensor& t) { return is_dtensor(t) ? local_of(t) : t; });
  }
  auto results = call.run();
  for (auto& result : results) {
    for_each_tensor(
        result, [&spec](const at::Tensor& local) { return replicated_dtensor(local, spec->mesh); });
  }
  call.finish(std::move(results));
}

void decompose_rule(OperatorCall& call) { call.decompose(); }

}  // namespace fsdp::internal
