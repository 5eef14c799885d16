// The states of an optimizer's parameters, read in its order.
#pragma once

#include "checkpoint/internal/archive_fields.h"
#include "checkpoint/internal/parameter_names.h"
#include "checkpoint/internal/state_items.h"
#include "checkpoint/internal/whole_values.h"
#include "checkpoint/internal/world.h"
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
