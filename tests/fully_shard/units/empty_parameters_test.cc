// Parameters without elements, whose shards are empty on some ranks and not on others.
#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <sstream>

namespace fsdp::testing {
namespace {

class EmptyParameters : public Worlds {};

struct Empties : torch::nn::Module {
  torch::Tensor forward() {
    return (some * 2).sum() + three.sum() + four.pow(2).sum() + none.sum();
  }
  torch::Tensor three = register_parameter("three", torch::ones({3, 0}));
  torch::Tensor four = register_parameter("four", torch::ones({4, 0}));
  torch::Tensor none = register_parameter("none", torch::ones({0, 4}));
  torch::Tensor some = register_parameter("some", torch::ones({4, 2}));
};

TEST_P(EmptyParameters, TrainAndAreWrittenLikeAnyOther) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = std::make_shared<Empties>();
    fully_shard(model, mesh);
    torch::optim::AdamW optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      model->forward().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    torch::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) {
      auto& entry = item.value();
      const auto plain = torch::zeros(entry.sizes());
      EXPECT_NO_THROW(entry.copy_(plain)) << item.key();
      EXPECT_TRUE(torch::equal(full_value(entry), plain)) << item.key();
      EXPECT_NO_THROW(entry.normal_()) << item.key();
      EXPECT_NO_THROW(entry.mul_(2)) << item.key();
      EXPECT_EQ(full_value(entry).sizes(), plain.sizes()) << item.key();
    }
  });
}

TEST_P(EmptyParameters, LoadFromAPlainFile) {
  std::stringstream file;
  {
    auto plain = std::make_shared<Empties>();
    torch::NoGradGuard no_grad;
    plain->some.fill_(7);
    torch::save(plain, file);
  }
  const auto bytes = file.str();
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = std::make_shared<Empties>();
    fully_shard(model, mesh);
    std::stringstream mine(bytes);
    EXPECT_NO_THROW(torch::load(model, mine));
    EXPECT_TRUE(torch::equal(full_value(model->parameters()[3]), torch::full({4, 2}, 7.0)));
    EXPECT_EQ(full_value(model->parameters()[0]).sizes(), (std::vector<int64_t>{3, 0}));
  });
}

TEST_P(EmptyParameters, ChangeTheirDtype) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = std::make_shared<Empties>();
    fully_shard(model, mesh);
    EXPECT_NO_THROW(model->to(torch::kDouble));
    model->forward().backward();
    EXPECT_EQ(full_gradient(model->parameters()[3]).scalar_type(), torch::kDouble);
  });
}

INSTANTIATE_WORLDS(EmptyParameters, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
