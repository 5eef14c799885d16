// Makes parameter groups: ordinary parameters become shards, members and registry
// entries; and gives those values that fully_shard met on the meta device.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/policies.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal {

struct NewParam {
  std::string name;
  at::Tensor tensor;
  Shard cut = {};
};

// Shards `params` (distinct, valid) over the mesh of `info`: changes their tensors in
// place into members, on the mesh's device. Returns what the registry is to hold, in the
// same order; the group lives as long as one of these, or a member. Of `precision`:
// param_dtype, reduce_dtype and cast_forward_inputs. Local.
std::vector<at::Tensor> build_group(GroupInfo info, const std::vector<NewParam>& params,
                                    const MixedPrecisionPolicy& precision);

// Puts the shards on `device`. Parameter by parameter, value_of(tensor) is the whole
// value of what the parameter was on the meta device, on any device; undefined: zeros, to
// be written. Nothing where there are values; where value_of throws, nothing changed.
// Local.
void materialize(FSDPParamGroup& group, c10::Device device,
                 const std::function<at::Tensor(const at::Tensor&)>& value_of);

// A new storage for the member of parameter `index`: empty, or the shard itself where
// nothing is ever sent. Local.
void make_member(FSDPParamGroup& group, int64_t index);

}  // namespace fsdp::internal
