#include "tests/training_programs/ranks_that_differ.h"

#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/default_generator.h"
#include "tests/support/errors.h"
#include "tests/support/late_use.h"

#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <functional>
#include <iostream>
#include <memory>
#include <ostream>
#include <utility>

namespace fsdp::testing {
namespace {

using Shape = std::vector<int64_t>;

// Two layers of one size, the second of which need not be used.
struct SecondMayBeUnused : torch::nn::Module {
  SecondMayBeUnused() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x, bool use_second) {
    const auto y = torch::tanh(first(x));
    return use_second ? second(y) : y;
  }
  torch::nn::Linear first{4, 4}, second{4, 4};
};

std::shared_ptr<SecondMayBeUnused> make_layers(uint64_t seed = 1) {
  return drawn_from_seed(seed, [] { return std::make_shared<SecondMayBeUnused>(); });
}

DeviceMesh mesh_of(const ProgramRank& rank, const Shape& shape) {
  return init_device_mesh(rank.device().type(), shape);
}

at::Tensor rows_of(const ProgramRank& rank) {
  const auto values = torch::linspace(-1, 1 + static_cast<double>(rank.rank()), 12);
  return values.view({3, 4}).to(rank.device());
}

void keep_whether_told(ProgramRank& rank, const std::string& message,
                       const std::vector<std::string>& expected) {
  for (const auto& part : expected) {
    const bool is_told = message.find(part) != std::string::npos;
    if (!is_told) std::cerr << "\"" << part << "\" is not in: " << message << "\n";
    rank.keep(torch::full({1}, is_told ? 1.0 : 0.0));
  }
}

// Steps in which the second layer, of the first one's unit, is used by no rank, by the
// last one, and by all.
TrainingProgram used_by_some(const Shape& shape) {
  return [=](ProgramRank& rank) {
    const auto model = make_layers();
    fully_shard(*model, mesh_of(rank, shape));
    torch::optim::SGD optimizer(model->parameters(), 1e-1);
    const auto last = rank.mesh().size() - 1;
    const auto x = rows_of(rank);
    for (const bool use_second : {false, rank.rank() == last, true}) {
      rank.steps(1, [&] {
        optimizer.zero_grad();
        model->forward(x, use_second).pow(2).sum().backward();
        rank.keep_gradients(*model);
        optimizer.step();
      });
    }
    rank.keep_parameters(*model);
  };
}

// Two backwards, of which the first keeps its sums over the shards: the second layer is
// used in neither, in the first, in the second.
TrainingProgram used_before_the_replicas_add_up() {
  return [](ProgramRank& rank) {
    const auto model = make_layers();
    auto root = fully_shard(*model, mesh_of(rank, {2, 2}));
    const auto x = rows_of(rank);
    for (const int use_in : {-1, 0, 1}) {
      rank.steps(1, [&] {
        for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
        for (const int backward : {0, 1}) {
          root.set_requires_all_reduce(backward == 1);
          model->forward(x, use_in == backward).pow(2).sum().backward();
        }
        rank.keep_gradients(*model);
      });
    }
  };
}

TrainingProgram late_on_one_rank(const Shape& shape, bool last_stays_in_its_replica) {
  return [=](ProgramRank& rank) {
    const auto model = make_layers();
    const auto mesh = mesh_of(rank, shape);
    auto first = fully_shard(*model->first, mesh);
    fully_shard(*model->second, mesh);
    if (last_stays_in_its_replica) first.set_requires_all_reduce(false);
    const auto x = rows_of(rank).requires_grad_();
    for (const bool late : {false, rank.rank() == 1, false}) {
      rank.steps(1, [&] {
        for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
        const auto use = [model] { return (model->second->weight * 3).sum(); };
        model->forward(late_use(x, use, late), true).sum().backward();
        rank.keep_gradients(*model->second);
      });
    }
  };
}

// As many collectives of as many bytes on both ranks: others would never end on a device.
TrainingProgram units_in_another_order() {
  return [](ProgramRank& rank) {
    const auto model = make_layers();
    fully_shard(*model->first, rank.mesh());
    fully_shard(*model->second, rank.mesh());
    const auto message = message_of([&] {
      auto& one = rank.rank() == 0 ? model->first : model->second;
      one(rows_of(rank)).sum().backward();
    });
    keep_whether_told(rank, message,
                      {"out of order", "all-gather of unit '(root)' (number 0)",
                       "all-gather of unit '(root)' (number 1)", "rank 0", "rank 1"});
  };
}

TrainingProgram start_values_of_its_own(const Shape& shape) {
  return [=](ProgramRank& rank) {
    const auto seed = rank.rank() + 1 < rank.mesh().size() ? 1 : 2;
    const auto model = make_layers(static_cast<uint64_t>(seed));
    fully_shard(*model, mesh_of(rank, shape));
    const auto message = message_of([&] { model->forward(rows_of(rank), true).sum().backward(); });
    keep_whether_told(rank, message, {"differ"});
    if (shape.size() == 1)
      keep_whether_told(rank, message, {"parameter 'first.weight'", "started with other values"});
  };
}

// Of the ranks that `skips` names.
TrainingProgram a_skipped_step(const Shape& shape, const std::function<bool(int64_t rank)>& skips,
                               const std::string& told) {
  return [=](ProgramRank& rank) {
    const auto model = make_layers();
    fully_shard(*model, mesh_of(rank, shape));
    torch::optim::SGD optimizer(model->parameters(), 1e-1);
    const auto backward = [&] { model->forward(rows_of(rank), true).sum().backward(); };
    backward();
    optimizer.step();
    optimizer.zero_grad();
    backward();
    if (!skips(rank.rank())) optimizer.step();
    optimizer.zero_grad();
    keep_whether_told(rank, message_of(backward), {told});
    for (const auto& parameter : model->parameters())
      rank.keep(torch::full({1}, parameter.grad().defined() ? 1.0 : 0.0));
  };
}

}  // namespace

void PrintTo(const ProgramOfRanks& program, std::ostream* out) { *out << program.name; }

std::vector<ProgramOfRanks> gradients_that_differ() {
  return {{"UsedBySomeOfTwo", 2, used_by_some({2})},
          {"UsedBySomeOfThree", 3, used_by_some({3})},
          {"UsedBySomeReplicas", 4, used_by_some({2, 2})},
          {"UsedBeforeTheReplicasAddUp", 4, used_before_the_replicas_add_up()},
          {"LateOnOneOfTwo", 2, late_on_one_rank({2}, false)},
          {"LateOnOneOfTwoReplicas", 4, late_on_one_rank({2, 2}, false)},
          {"LateThoughTheLastUnitStaysInItsReplica", 4, late_on_one_rank({2, 2}, true)}};
}

std::vector<ProgramOfRanks> mistakes_of_ranks() {
  const auto is_last_of_two = [](int64_t rank) { return rank == 1; };
  const auto is_in_last_replica = [](int64_t rank) { return rank >= 2; };
  return {{"StartValuesOfItsOwn", 2, start_values_of_its_own({2})},
          {"StartValuesOfItsOwnAmongThree", 3, start_values_of_its_own({3})},
          {"StartValuesOfItsOwnInAReplica", 4, start_values_of_its_own({2, 2})},
          {"ASkippedStep", 2,
           a_skipped_step({2}, is_last_of_two, "not all ranks wrote the shards of unit")},
          {"AReplicaThatSkipsAStep", 4,
           a_skipped_step({2, 2}, is_in_last_replica, "not all replicas wrote the shards")},
          // The last one: its group can not be used any more.
          {"UnitsInAnotherOrder", 2, units_in_another_order()}};
}

}  // namespace fsdp::testing
