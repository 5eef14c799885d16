// Writes to members that differ between ranks are errors by name, never a mixture.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/constant_layer.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

class MemberWrites : public Worlds {};

TEST_P(MemberWrites, ThatDifferAreNamedOnEveryRank) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    {
      torch::NoGradGuard no_grad;
      layer->weight.mul_(1 + static_cast<double>(rank));
    }
    EXPECT_THAT(message_of([&] { layer(torch::ones({1, 6})); }), HasSubstr("'weight'"));
  });
}

TEST_P(MemberWrites, ThatDifferAreNamedAfterAReshardToo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    {
      torch::NoGradGuard no_grad;
      layer->bias.add_(static_cast<double>(rank));
    }
    get_fsdp_module(*layer).reshard();
    EXPECT_THAT(message_of([&] {
                  torch::NoGradGuard no_grad;
                  layer(torch::ones({1, 6}));
                }),
                HasSubstr("'bias'"));
  });
}

TEST_P(MemberWrites, RowsThatAnEmbeddingRenormalisesByThisRanksDataAreNamed) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(12, 5).max_norm(0.5));
    {
      torch::NoGradGuard no_grad;
      embedding->weight.fill_(1.0);
    }
    fully_shard(embedding, mesh);
    const auto rows = rank == 0 ? torch::tensor({3, 9, 11, 4}) : torch::tensor({1, 2, 0, 4});
    EXPECT_THAT(message_of([&] {
                  embedding(rows).sum().backward();
                  embedding(rows);
                }),
                HasSubstr("'weight'"));
  });
}

TEST_P(MemberWrites, ThatAgreeAreKept) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = constant_layer(6);
    fully_shard(layer, mesh);
    {
      torch::NoGradGuard no_grad;
      layer->weight.mul_(3);
    }
    EXPECT_NO_THROW(layer(torch::ones({1, 6})).sum().backward());
    EXPECT_TRUE(torch::equal(full_value(layer->parameters()[0]), torch::full({6, 6}, 1.5)));
  });
}

INSTANTIATE_WORLDS(MemberWrites, 2, 3);

}  // namespace
}  // namespace fsdp::testing
