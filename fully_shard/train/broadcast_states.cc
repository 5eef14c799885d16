#include "fully_shard/broadcast_states.h"

#include "device_mesh/module_ref.h"
#include "device_mesh/on_mesh/claims.h"
#include "dtensor/dtensor.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/transport/tensor_broadcast.h"
#include "fully_shard/units/module_tree.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using States = std::vector<internal::BroadcastTensor>;

constexpr int64_t kBucketBytes = int64_t{250} << 20;

States states_of(torch::nn::Module& module) {
  States states;
  std::unordered_set<const c10::TensorImpl*> seen;
  const internal::ModuleTree tree({&module});
  for (size_t i = 0; i < tree.size(); ++i) {
    const auto add = [&](const char* kind, const std::string& key, const at::Tensor& tensor) {
      if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second)
        states.push_back({c10::str(kind, " '", tree.path_of(i, key), "'"), tensor});
    };
    internal::for_each_registered(tree.module(i), [&](const auto& key, const auto& tensor) {
      add("parameter", key, tensor);
    });
    for (const auto& item : tree.module(i).named_buffers(/*recurse=*/false))
      add("buffer", item.key(), item.value());
  }
  return states;
}

void check_state(const internal::BroadcastTensor& state, const DeviceMesh& mesh) {
  const auto& tensor = state.tensor;
  const auto where = c10::str("broadcast_states: ", state.name);
  const auto here = c10::str(" (rank ", mesh.rank(), ")");
  TORCH_CHECK_VALUE(!is_dtensor(tensor) && !internal::find_managed_tensor(tensor).group, where,
                    " is sharded already, so no rank has all its values; call it before "
                    "fully_shard",
                    here);
  TORCH_CHECK_VALUE(!tensor.is_meta(), where, " is on the meta device; materialise it first", here);
  TORCH_CHECK_VALUE(tensor.device().type() == mesh.device_type(), where, " is on ", tensor.device(),
                    ", but the mesh is of device type ",
                    c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true), here);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && !tensor.is_quantized(), where,
                    " has layout ", tensor.layout(), " and dtype ", tensor.scalar_type(),
                    "; allowed: strided, not quantized", here);
  TORCH_CHECK_VALUE(!tensor.is_inference(), where, " was made in inference mode; clone it", here);
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, where, " of shape ",
                    tensor.sizes(), " and strides ", tensor.strides(),
                    " has elements that share memory (expand); call contiguous() first", here);
}

internal::Claims claims_of(const States& states, const DeviceMesh& mesh, int64_t src) {
  internal::Claims claims("broadcast_states");
  try {
    TORCH_CHECK_VALUE(src >= 0 && src < mesh.size(), "broadcast_states: src is ", src,
                      "; expected 0 to ", mesh.size() - 1, ", a rank's place in ", to_string(mesh),
                      " (rank ", mesh.rank(), ")");
    for (const auto& state : states) check_state(state, mesh);
  } catch (const c10::ValueError& error) {
    claims.refuse(error.what_without_backtrace());
    return claims;
  }
  auto text = c10::str("src = ", src);
  for (const auto& [name, tensor] : states)
    text += c10::str("\n", name, " of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type());
  claims.add("src, parameters and buffers", text);
  return claims;
}

}  // namespace

void broadcast_states(ModuleRef module, const DeviceMesh& mesh, int64_t src) {
  const c10::NoGradGuard no_grad;
  const auto states = states_of(internal::given_module("broadcast_states", module));
  claims_of(states, mesh, src)
      .check(mesh, "all ranks must give one src and have the same parameters and buffers");
  internal::broadcast_tensors(states, mesh, src, kBucketBytes);
}

}  // namespace fsdp
