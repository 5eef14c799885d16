// An optimizer's state and options in memory, by the names of the parameters: LibTorch's
// optimizers and those written with its serialization macros.
//
//   auto state = fsdp::get_optimizer_state_dict(*model, optimizer, {.full_state_dict = true});
//   fsdp::set_optimizer_state_dict(*sharded_model, sharded_optimizer, state,
//                                  {.full_state_dict = true});
//
//   auto by_id = fsdp::rekey(state, fsdp::KeyType::kId, *model, optimizer);   // for unsharded code
//   fsdp::StateDict flat = fsdp::flatten(state);   // "state.first.weight.exp_avg", ...
#pragma once

#include "checkpoint/state_dict.h"
#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

namespace fsdp {

struct OptimizerStateDict {
  using Fields = std::map<std::string, c10::IValue>;
  struct Group {
    std::vector<std::string> params;
    Fields options;
  };
  // By parameter, and by field: tensors, numbers, lists of tensors. A parameter without
  // state has no entry, and a tied one has one, by its first name.
  std::map<std::string, Fields> state;
  std::vector<Group> param_groups;
  // Of a full dict: parameters that lie on a mesh of one rank, such as an expert's, whose
  // state is each rank's own and was not gathered. Every rank has that of its own.
  std::vector<std::string> uncollected = {};
};

// Tensors of a parameter's shape are as `options` want the parameter, others as they are.
// As distributed or local: shares memory; local. Full: copies; collective over the
// meshes. Throws ValueError for a parameter that `module` does not name.
[[nodiscard]] FSDP_API OptimizerStateDict get_optimizer_state_dict(
    ConstModuleRef module, const torch::optim::Optimizer& optimizer, StateDictOptions options = {});

// Copies. State that the dict lacks is erased, as for a parameter never used; a group
// takes the options of the dict's group that has its parameters. Parameters that the dict
// lacks are `missing`, and its others `unexpected`; both throw with `strict`, as do
// parameters of one group with different options. State of another class of optimizer
// throws ValueError. Throws before it changes anything. Collective over the meshes of
// more than one rank that the optimizer's parameters lie on; with broadcast_from_rank0
// over the default group. What one rank cannot set, no rank sets.
FSDP_API LoadResult set_optimizer_state_dict(ConstModuleRef module,
                                             torch::optim::Optimizer& optimizer,
                                             const OptimizerStateDict& dict,
                                             StateDictOptions options = {});

// For torch::load(optimizer, file), which leaves every rank the whole state: of each
// tensor that is plain and has the shape of its sharded parameter the rank keeps its
// part, as load({.optimizer = optimizer}, file) takes it at once. Other state stays.
// Every rank must have the same values. Local.
FSDP_API void shard_full_optimizer_state(torch::optim::Optimizer& optimizer);

// How parameters are called: by name, or by their number ("0", "1", ...) over the
// optimizer's groups, as torch.optim's state_dict() does.
enum class KeyType { kName, kId };

// The same state under other keys; `dict` itself where they are such already. A tied
// parameter has one number, even where the optimizer lists it twice, as it does made of
// model->parameters(). Parameters that the optimizer does not have are dropped. Local.
// Throws ValueError for keys of both kinds, and for names and numbers that are nobody's
// here.
[[nodiscard]] FSDP_API OptimizerStateDict rekey(const OptimizerStateDict& dict, KeyType to,
                                                ConstModuleRef module,
                                                const torch::optim::Optimizer& optimizer);

// Tensors alone, under the flattened names of torch.distributed.checkpoint:
// "state.<parameter>.<field>" and "param_groups.<parameter>.<option>", numbers as tensors
// without dimensions. Local. Throws ValueError for options that are no numbers, and for a
// parameter in two groups whose options differ.
[[nodiscard]] FSDP_API StateDict flatten(const OptimizerStateDict& dict);
// The way back, for the groups and types of options that `optimizer` has. Throws
// ValueError for names that are not of its parameters or that lack an option.
[[nodiscard]] FSDP_API OptimizerStateDict unflatten(const StateDict& flat, ConstModuleRef module,
                                                    const torch::optim::Optimizer& optimizer);

}  // namespace fsdp
