#include "checkpoint/plan/dict_values.h"

#include "checkpoint/ranks/tensor_values.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fsdp::internal::checkpoint {
namespace {

void check_form(const StateDictOptions& options, const std::string& call) {
  TORCH_CHECK_VALUE(!options.local || !options.full_state_dict, call,
                    ": StateDictOptions::local and full_state_dict exclude each other");
  TORCH_CHECK_VALUE(!options.full_state_dict || torch::autograd::get_current_graph_task_id() == -1,
                    call, ": full_state_dict inside a backward, whose collectives would meet it");
}

at::Tensor copy_of(const at::Tensor& whole, bool on_host) {
  return on_host ? whole.to(c10::kCPU, whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                 : whole.clone(c10::MemoryFormat::Contiguous);
}

at::Tensor distributed_value(const at::Tensor& tensor, bool on_host) {
  if (!on_host || tensor.device().is_cpu()) return tensor.detach();
  const at::Tensor host = local_value(tensor).cpu();
  return is_dtensor(tensor) ? make_dtensor(host, spec_of(tensor)) : host;
}

}  // namespace

void check_get_options(const StateDictOptions& options, const std::string& call) {
  check_form(options, call);
  TORCH_CHECK_VALUE(!options.broadcast_from_rank0, call,
                    ": StateDictOptions::broadcast_from_rank0 is for setting");
}

void check_set_options(const StateDictOptions& options, const std::string& call) {
  check_form(options, call);
  TORCH_CHECK_VALUE(
      !options.broadcast_from_rank0 || options.full_state_dict, call,
      ": StateDictOptions::broadcast_from_rank0 needs full_state_dict: it sends whole values");
}

at::Tensor dict_value(const at::Tensor& tensor, const StateDictOptions& options, bool gets_values,
                      WholeValues& whole_values) {
  const c10::NoGradGuard no_grad;
  if (options.local) {
    const at::Tensor part = local_value(tensor);
    return options.cpu_offload ? part.cpu() : part;
  }
  if (!options.full_state_dict) return distributed_value(tensor, options.cpu_offload);
  const at::Tensor whole = is_dtensor(tensor) ? whole_values.next() : tensor.detach();
  if (options.cpu_offload && !gets_values) return {};
  return copy_of(whole, options.cpu_offload);
}

void check_comes_to(const std::string& name, const at::Tensor& target, const at::Tensor& value) {
  if (!is_dtensor(value)) return;
  TORCH_CHECK_VALUE(is_dtensor(target), "'", name,
                    "' is distributed in the dict and plain in the model");
  const auto& from = spec_of(value).mesh();
  const auto& to = spec_of(target).mesh();
  TORCH_CHECK_VALUE(from == to, "'", name, "' lies on ", to_string(from), " in the dict and on ",
                    to_string(to), " in the model");
}

at::Tensor part_for(const std::string& name, const at::Tensor& target, const at::Tensor& value,
                    bool local) {
  const c10::NoGradGuard no_grad;
  if (!is_dtensor(value)) {
    return local || !is_dtensor(target) ? value : local_part(value.detach(), spec_of(target));
  }
  check_comes_to(name, target, value);
  return redistribute_local(local_value(value), spec_of(value), spec_of(target).placements());
}

at::Tensor distributed_like(const std::string& name, const at::Tensor& like,
                            const at::Tensor& value, bool local) {
  const c10::NoGradGuard no_grad;
  const at::Tensor part = part_for(name, like, value, local).detach();
  at::Tensor copy = at::empty(part.sizes(), part.options().device(like.device()));
  copy.copy_(part);
  return is_dtensor(like) ? make_dtensor(copy, spec_of(like)) : copy;
}

at::Tensor broadcast_value(const World& world, const at::Tensor& value, c10::ScalarType dtype,
                           const std::vector<int64_t>& shape, c10::Device device) {
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions(dtype).device(device);
  at::Tensor sent = world.rank == 0
                        ? value.detach().resolve_conj().resolve_neg().to(options).contiguous()
                        : at::empty(shape, options);
  if (world.group) {
    world.collectives(device.type()).broadcast({.tensor = sent, .what = "set_state_dict"});
  }
  return sent;
}

}  // namespace fsdp::internal::checkpoint
