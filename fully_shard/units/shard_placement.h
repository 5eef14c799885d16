// How the parameters of a unit are sharded, and what is gathered of them. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/module_tree.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

int64_t ranks_that_shard(const DeviceMesh& mesh);

// Sets the cut of every parameter that no unit has yet, over `ranks` ranks, as
// options.shard_placement_fn says, which is asked once for each: Shard(0) where it says
// nothing. An Owned{} stays as it is. Throws ValueError for what does not fit the
// parameter or the ranks.
void place_parameters(ManagedModules& managed, int64_t ranks, const FullyShardOptions& options,
                      const ErrorContext& context);

// Gives every parameter that no unit has yet the codec that options.gather_codec_fn says,
// which is asked once for each. Throws ValueError for one without functions, and where it
// can not encode the parameter, or in no fewer bytes than the members have; also for such
// gradient_codecs. REQUIRES: placed.
void choose_codecs(ManagedModules& managed, const FullyShardOptions& options,
                   const ErrorContext& context);

// Gives each parameter that is placed Owned{} an owner (planned_owners.h). `owned_bytes`:
// what each coordinate was given so by the units before, to which it is added.
void plan_owners(ManagedModules& managed, int64_t ranks, std::vector<int64_t>& owned_bytes);

template <class Answer>
using ParameterFn = std::function<Answer(const std::string& fqn, const at::Tensor&)>;
// Answers as `function`, and asks it once per parameter. None for none. Keeps no
// parameter alive. REQUIRES: parameters live as long as it is called.
template <class Answer>
ParameterFn<Answer> asking_once(ParameterFn<Answer> function) {
  if (!function) return {};
  auto answers = std::make_shared<std::map<const c10::TensorImpl*, Answer>>();
  return [function = std::move(function), answers = std::move(answers)](const std::string& fqn,
                                                                        const at::Tensor& tensor) {
    const auto known = answers->find(tensor.unsafeGetTensorImpl());
    if (known != answers->end()) return known->second;
    return (*answers)[tensor.unsafeGetTensorImpl()] = function(fqn, tensor);
  };
}

}  // namespace fsdp::internal
