// The sharded side of a random program: the model with fully_shard applied as the program
// says, and its optimizer.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/random_programs/custom_calls.h"
#include "tests/fully_shard/random_programs/random_model.h"
#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/fully_shard/random_programs/repeated_step.h"
#include "tests/fully_shard/random_programs/residency_oracle.h"
#include "tests/fully_shard/random_programs/unsharded_program.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::testing {

// What becomes of a model before it is sharded.
using Prepare = std::function<void(const RandomModel& model)>;

class ShardedProgram {
 public:
  // Collective.
  ShardedProgram(const Program& program, const DeviceMesh& mesh, const Prepare& prepare);

  const RandomModel& model() const { return model_; }
  // Deferred: it was sharded on the meta device.
  bool started_without_values() const { return started_without_values_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  at::Tensor member(int id) const { return model_.tensors.at(id).member; }
  at::Tensor entry(int id) const { return model_.tensors.at(id).entry(); }
  bool is_sharded(int id) const { return unit_of_tensor_.count(id) > 0; }
  // Those whose gradients are reduced, or would be on one rank, with what
  // their units ask for.
  std::map<int, UnitSpec> sharded_tensors() const;
  // How the last backward reduced it, in which `arrived` got gradients on some rank.
  // Nothing for tensors that are local to a rank.
  std::optional<Reduction> reduction_of(int id, const std::set<int>& arrived) const;

  // Of the unit of node `node_id`; of all units when negative.
  void set_sync(int node_id, bool synchronize);
  void set_all_reduce(int node_id, bool all_reduce);
  // Unshards or reshards the unit of the action's target, if it has one.
  void by_hand(const Action& action);
  void reshard_all();
  void zero_pending_gradients();

  // What oracles need to know of the units, by position.
  std::vector<ResidencyOracle::ObservedUnit> observed_units() const;
  PrefetchRule prefetch_rule() const;
  void set_oracle(ResidencyOracle* oracle) { oracle_ = oracle; }
  void set_requires_grad(int id, bool requires_grad);

 private:
  struct ShardedUnit {
    std::vector<const Node*> nodes;
    FSDPModule module;
    CustomCalls calls = {};
    bool synchronize = true, all_reduce = true;
    int parent = -1;  // by position
  };

  void shard(const Node& node);
  void shard_together(const std::vector<const Node*>& nodes);
  void adopt(const Node& node, size_t unit, FullyShardOptions& options);
  void set_options(ShardedUnit& unit) const;
  std::optional<Placement> placement_of(const at::Tensor& tensor) const;
  void set_prefetch_lists();
  ShardedUnit* unit_of(int node_id);
  // The unit of node `node_id`, or all when negative.
  void for_units(int node_id, const std::function<void(ShardedUnit&, int position)>& visit);
  int root_of(size_t unit) const;  // by position
  std::vector<FSDPModule> modules_of(const std::vector<int>& node_ids);

  const Program& program_;
  DeviceMesh mesh_;
  RandomModel model_;
  std::vector<ShardedUnit> units_;
  std::map<int, size_t> unit_of_tensor_;
  ResidencyOracle* oracle_ = nullptr;  // is told what no event tells
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  bool started_without_values_;
};

}  // namespace fsdp::testing
