// An optimizer's state as named tensors, state.<parameter>.<field>, and its options as
// JSON; and the way back.
//
// Tensor fields are saved as they lie; int, double and bool fields as tensors without
// dimensions; lists of tensors as <field>.0, <field>.1, ... State that the file lacks is
// erased: it is made anew at the parameter's next step, as for a parameter never used.
#pragma once

#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/format/json.h"
#include "checkpoint/optimizer/optimizer_fields.h"
#include "checkpoint/optimizer/parameter_groups.h"
#include "checkpoint/plan/state_items.h"

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct OptimizerTensors {
  std::vector<NamedTensor> tensors;
  // {"class": "...", "scalars": [...], "lists": {name: length}, "groups": [...]}, and,
  // where scalars are no tensors, "values": {name: scalar}.
  Json details;
};
// Throws ValueError, naming `what` and the position, for a parameter that is none of
// `model`'s.
OptimizerTensors tensors_of(const torch::optim::Optimizer& optimizer, const ModelTensors& model,
                            const std::string& what);

// What load does with an optimizer: the destinations first, and once they are filled, all
// at once into the optimizer.
class OptimizerLoad {
 public:
  struct Wanted {
    std::string stored_name;
    std::string name;
    at::Tensor target;
  };
  // Throws ValueError for an optimizer of another class than the saved one (unless
  // options.strict is false and their options are the same), and where options do not
  // fit.
  OptimizerLoad(torch::optim::Optimizer& optimizer, const ModelTensors& model,
                const Catalog& catalog, const Json& details, const LoadOptions& options);

  const std::vector<Wanted>& wanted() const { return wanted_; }
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& unexpected() const { return unexpected_; }
  // The tensors of wanted() have been filled.
  void apply();

 private:
  void check_class() const;
  void find_stored_fields(const Catalog& catalog);
  void plan_parameter(const OptimizerParameter& parameter, const std::string& saved_name,
                      const Catalog& catalog);
  Fields options_of_group(size_t index, const OptimizerGroup& group,
                          const std::vector<std::string>& saved_names) const;

  struct StoredField {
    std::string field;
    int64_t index = -1;  // in a list
    std::string name;    // of the tensor
  };

  torch::optim::Optimizer& optimizer_;
  const StatePlacement placement_;
  const Json& details_;
  const bool strict_;
  std::map<std::string, std::vector<StoredField>> stored_;  // by parameter
  std::map<std::string, Fields> given_;                     // by parameter: scalars and empty lists
  SavedGroups saved_groups_;
  std::vector<Wanted> wanted_;
  std::vector<std::string> missing_, unexpected_;
  OptimizerFields fields_;
  std::set<const void*> without_state_;
};

}  // namespace fsdp::internal::checkpoint
