// The states of an optimizer's parameters, read in its order.
#pragma once

#include "checkpoint/optimizer/archive_fields.h"
#include "checkpoint/optimizer/parameter_names.h"
#include "checkpoint/plan/state_items.h"
#include "checkpoint/plan/whole_values.h"
#include "checkpoint/ranks/world.h"
#include "checkpoint/state_dict.h"

#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class OptimizerStates {
 public:
  OptimizerStates(const torch::optim::Optimizer& optimizer,
                  const std::vector<OptimizerGroup>& groups);

  // By parameter, as `options` want them. Full: collective over the meshes.
  std::map<std::string, Fields> get(const StateDictOptions& options, const World& world) const;
  // The parameters that lie on a mesh of one rank, in a larger world.
  std::vector<std::string> of_one_rank(const World& world) const;

 private:
  struct State {
    std::string name;
    const void* unit;
    bool is_of_one_rank;
    Fields fields;
  };
  std::vector<NamedTensor> distributed() const;

  std::vector<State> states_;
};

}  // namespace fsdp::internal::checkpoint
