// The tensors of state dicts in memory: as they are distributed, whole, or one rank's
// parts.
#pragma once

#include "checkpoint/plan/whole_values.h"
#include "checkpoint/ranks/world.h"
#include "checkpoint/state_dict.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Throws ValueError, naming `call`, for options that exclude each other.
void check_get_options(const StateDictOptions& options, const std::string& call);
void check_set_options(const StateDictOptions& options, const std::string& call);

// `tensor` as `options` want it. Full: a DTensor is the next of `whole`, and the call
// collective; in host memory only where this rank `gets_values`, else undefined.
at::Tensor dict_value(const at::Tensor& tensor, const StateDictOptions& options, bool gets_values,
                      WholeValues& whole);

// This rank's part of `value` for `target`, which it fits: distributed, whole, or with
// `local` that part. Collective over the mesh where it is distributed otherwise. Throws
// ValueError, naming `name`, where the meshes differ.
at::Tensor part_for(const std::string& name, const at::Tensor& target, const at::Tensor& value,
                    bool local);
// Throws ValueError, naming `name`, where part_for() would. Local.
void check_comes_to(const std::string& name, const at::Tensor& target, const at::Tensor& value);
// A new tensor of the dtype of `value`, distributed as `like`, that holds `value`.
at::Tensor distributed_like(const std::string& name, const at::Tensor& like,
                            const at::Tensor& value, bool local);

// Rank 0's `value`, on `device`; the others pass what it is. Collective over `world`.
at::Tensor broadcast_value(const World& world, const at::Tensor& value, c10::ScalarType dtype,
                           const std::vector<int64_t>& shape, c10::Device device);

}  // namespace fsdp::internal::checkpoint
