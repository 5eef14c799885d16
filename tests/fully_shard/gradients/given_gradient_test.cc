// A .grad that the user set: only a DTensor laid out as its parameter can be added to.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class GivenGradient : public Worlds {};

struct Fixture {
  explicit Fixture(const DeviceMesh& mesh) {
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
    }
    fully_shard(layer, mesh);
  }
  void backward() { layer(torch::ones({1, 7})).sum().backward(); }
  torch::Tensor entry() { return layer->parameters()[0]; }
  torch::nn::Linear layer{7, 11};
};

void expect_named_and_clean_afterwards(Fixture& model, const DeviceMesh& mesh) {
  EXPECT_THAT(message_of([&] { model.backward(); }),
              AllOf(HasSubstr("'weight'"), HasSubstr("zeros_like")));
  model.layer->zero_grad();
  model.entry().mutable_grad().reset();
  model.backward();
  EXPECT_TRUE(torch::equal(full_gradient(model.entry()), torch::ones({11, 7})));
  EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  EXPECT_EQ(counters(mesh).staging_bytes, 0);
}

TEST_P(GivenGradient, OfPlainZerosIsAnErrorByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Fixture model(mesh);
    model.entry().mutable_grad() = torch::zeros({11, 7});
    expect_named_and_clean_afterwards(model, mesh);
  });
}

TEST_P(GivenGradient, ThatIsReplicatedIsAnErrorByName) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Fixture model(mesh);
    model.entry().mutable_grad() = distribute_tensor(torch::zeros({11, 7}), mesh, {Replicate()});
    expect_named_and_clean_afterwards(model, mesh);
  });
}

TEST_P(GivenGradient, OfZerosLikeTheParameterIsAddedTo) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Fixture model(mesh);
    {
      torch::NoGradGuard no_grad;
      model.entry().mutable_grad() = torch::zeros_like(model.entry()).fill_(2);
    }
    model.backward();
    EXPECT_TRUE(torch::equal(full_gradient(model.entry()), torch::full({11, 7}, 3.0)));
  });
}

INSTANTIATE_WORLDS(GivenGradient, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
