// Compares a sharded model with the unsharded one, each rank on its own data.
#pragma once

#include "fully_shard/fully_shard.h"

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {

struct Data {
  torch::Tensor x, image, sequence, volume, index;
};

// The same on every call with one seed, whatever other threads do.
Data make_data(uint64_t seed);
// Of what expected_gradients() gives rank `rank` in step `step`.
uint64_t data_seed(uint64_t step, int64_t rank);

// A freshly built model and its loss.
struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(const Data&)> loss;
};
using BuildModel = std::function<Model()>;

// Builds with values of its own, the same on every rank. Ranks that are threads share the
// default generator with whatever else draws.
Model build_seeded(const BuildModel& build);

// The gradients of `model` on `data`, one per parameter; undefined where autograd gave
// none.
std::vector<torch::Tensor> gradients_of(const Model& model, const Data& data);

// What sharded gradients must equal: the mean over the ranks' data of the unsharded
// gradients, with the bound of the rounding of a sum in another order. Undefined where no
// rank has a gradient.
struct ExpectedGradients {
  std::vector<torch::Tensor> mean, bound;
};
ExpectedGradients expected_gradients(const Model& model, int64_t world, uint64_t step);

// Bit-equal for up to two ranks; within the bound for more. Collective.
void expect_gradients(const torch::nn::Module& sharded, const ExpectedGradients& expected,
                      int64_t world, const std::string& what);

// Two steps with an SGD update between on `world` thread ranks, sharded against
// unsharded; `shard` applies fully_shard.
using ShardModel = std::function<void(torch::nn::Module&, const DeviceMesh&)>;
void expect_parity(int64_t world, const BuildModel& build, const ShardModel& shard,
                   const std::string& what);

// fully_shard on the module itself only.
void shard_whole(torch::nn::Module& module, const DeviceMesh& mesh);
// On every child, then on the module.
void shard_children(torch::nn::Module& module, const DeviceMesh& mesh);

}  // namespace fsdp::testing
