// A module is what it was after fully_shard: its type, its children, its names; and one
// mesh makes one set of process groups.
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

std::vector<std::string> names_of(const torch::nn::Module& module) {
  auto names = module.named_parameters().keys();
  for (const auto& name : module.named_buffers().keys()) names.push_back(name);
  for (const auto& name : module.named_modules().keys()) names.push_back(name);
  return names;
}

// The same weights on every rank.
Decoder make_decoder(int64_t blocks) {
  Decoder model{nullptr};
  build_seeded([&] {
    model = Decoder(4, blocks);
    return Model{model.ptr(), {}};
  });
  return model;
}

class UnmodifiedModules : public Worlds {};

TEST_P(UnmodifiedModules, KeepTheirTypeTheirChildrenAndTheirNames) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6),
                                torch::nn::Linear(6, 2));
    const auto names = names_of(*model);
    const auto children = model->children();
    fully_shard(model[0], mesh);
    fully_shard(model, mesh);
    EXPECT_EQ(names_of(*model), names);
    EXPECT_EQ(model->children(), children);
    EXPECT_EQ(model[0].get(), children[0].get());
    EXPECT_NE(model[2]->as<torch::nn::LinearImpl>(), nullptr);
    EXPECT_EQ(model[1]->as<torch::nn::LinearImpl>(), nullptr);
    EXPECT_EQ(model->at<torch::nn::LinearImpl>(2).options.out_features(), 2);
  });
}

TEST_P(UnmodifiedModules, HaveThePlainNamesWhereBlocksAreCheckpointed) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = make_decoder(2), model = make_decoder(2);
    shard_decoder(*model, mesh);
    auto x = model->embedding(torch::arange(3));
    for (auto& block : model->blocks)
      x = checkpoint([&](const at::Tensor& input) { return block->forward(input); }, x);
    x.sum().backward();
    EXPECT_EQ(names_of(*model), names_of(*plain));
  });
}

TEST_P(UnmodifiedModules, OfOneMeshShareItsProcessGroups) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto first = make_decoder(1), second = make_decoder(1);
    shard_decoder(*first, mesh);
    const auto reduce = mesh.side_group(0, "reduce");
    shard_decoder(*second, mesh);
    EXPECT_EQ(mesh.side_group(0, "reduce"), reduce);
    for (const auto& model : {first, second}) {
      for (const auto& parameter : model->parameters())
        EXPECT_EQ(DTensor(parameter).device_mesh().group(0), mesh.group(0));
    }
  });
}

INSTANTIATE_WORLDS(UnmodifiedModules, 1, 2);

}  // namespace
}  // namespace fsdp::testing
