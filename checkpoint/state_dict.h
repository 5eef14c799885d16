// A model's values in memory, by name, in the vocabulary of
// torch.distributed.checkpoint.state_dict.
//
//   fsdp::StateDict values = fsdp::get_model_state_dict(*model);              // as distributed
//   fsdp::StateDict whole =
//       fsdp::get_model_state_dict(*model, {.full_state_dict = true, .cpu_offload = true});
//   fsdp::set_model_state_dict(*sharded_model, whole,
//                              {.full_state_dict = true, .broadcast_from_rank0 = true});
//
// Parameters and buffers; a tied one under each of its names. Where a call is collective,
// what is wrong on one rank is thrown by all.
#pragma once

#include "checkpoint/checkpoint.h"
#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <string>

namespace fsdp {

using StateDict = torch::OrderedDict<std::string, at::Tensor>;

// Without full_state_dict and local: values as they are distributed.
struct StateDictOptions {
  bool full_state_dict = false;  // whole values, on every rank
  // get: values in host memory. With full_state_dict rank 0 alone gets them, the others
  // an empty dict.
  bool cpu_offload = false;
  bool ignore_frozen_params = false;  // parameters without requires_grad are left out
  // set, with full_state_dict: rank 0's dict counts, the others' are empty. One tensor at
  // a time is sent, so a rank needs its shards and the largest tensor.
  bool broadcast_from_rank0 = false;
  bool local = false;  // plain tensors, this rank's parts; for the same number of ranks
  bool strict = true;  // set: names missing in the dict or unknown to the model throw
};

// As distributed or local: shares memory with the model; local. Full: copies, gathered
// unit by unit; collective over the meshes. Throws ValueError for options that exclude
// each other, and for whole values inside a backward.
[[nodiscard]] FSDP_API StateDict get_model_state_dict(ConstModuleRef module,
                                                      StateDictOptions options = {});

// Copies values in. A value may be distributed as the parameter, or otherwise on its
// mesh, or whole: then this rank takes its part. Conversions of dtype that lose something
// throw ValueError, as do other shapes, and different values under the names of one
// tensor of the model: all of it before anything changes. Collective over the meshes of
// more than one rank that the targets lie on; with broadcast_from_rank0 over the default
// group. What cannot be planned on one rank, no rank sets; a failure while writing says
// that the model is partly overwritten.
FSDP_API LoadResult set_model_state_dict(ModuleRef module, const StateDict& values,
                                         StateDictOptions options = {});

}  // namespace fsdp
