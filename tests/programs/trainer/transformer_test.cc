#include "programs/trainer/model/transformer.h"

#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace programs {
namespace {

using ::testing::HasSubstr;

TransformerConfig small(bool tied_head) {
  return {.vocab = 19,
          .width = 16,
          .blocks = 2,
          .heads = 4,
          .kv_heads = 2,
          .max_tokens = 12,
          .head_width = 6,
          .qkv_bias = true,
          .tied_head = tied_head};
}

torch::Tensor generate_again(Transformer& model, torch::Tensor text, int64_t n, int64_t most) {
  const torch::NoGradGuard no_grad;
  for (int64_t i = 0; i < n; ++i) {
    const auto given = text.narrow(0, 0, std::min(text.size(0), most));
    const auto next = model->forward(given.unsqueeze(0))[0][-1].argmax();
    text = torch::cat({text, next.unsqueeze(0)});
  }
  return text;
}

TEST(Transformer, GeneratesAsIfEachTokenComputedAllBeforeAgain) {
  for (const bool tied_head : {false, true}) {
    torch::manual_seed(3);
    Transformer model(small(tied_head));
    {  // so that all tokens before count, not the last one alone
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(parameter.dim() > 1 ? 20 : 1);
    }
    const auto prompt = torch::tensor({5, 1, 7}, torch::kLong);
    EXPECT_TRUE(torch::equal(model->generate(prompt, 9, 0), generate_again(model, prompt, 9, 12)));
  }
}

TEST(Transformer, GoesOnFromTheLastHalfWhereItIsFull) {
  Transformer model(small(false));
  const auto prompt = torch::randint(19, {10}, torch::kLong);
  const auto text = model->generate(prompt, 20, 0);
  EXPECT_EQ(text.size(0), 30);
  // The 13th token was the last that all before it were looked at for.
  const torch::NoGradGuard no_grad;
  const auto half = text.narrow(0, 13 - 6, 6);
  EXPECT_EQ(model->forward(half.unsqueeze(0))[0][-1].argmax().item<int64_t>(),
            text[13].item<int64_t>());
  EXPECT_EQ(model->generate(torch::randint(19, {40}, torch::kLong), 2, 0.5).size(0), 42);
}

TEST(Transformer, ATiedHeadIsTheEmbedding) {
  EXPECT_EQ(Transformer(small(true))->named_parameters().find("head.weight"), nullptr);
  EXPECT_NE(Transformer(small(false))->named_parameters().find("head.weight"), nullptr);
}

TEST(Transformer, RefusesSizesThatDoNotFit) {
  const auto refusal = [](TransformerConfig config) {
    return fsdp::testing::message_of([&] { Transformer{config}; });
  };
  EXPECT_THAT(refusal({.width = 20, .heads = 4}), HasSubstr("multiple of 2 * heads = 8, got 20"));
  EXPECT_THAT(refusal({.head_width = 5}), HasSubstr("head_width must be even, got 5"));
  EXPECT_THAT(refusal({.heads = 4, .kv_heads = 3}), HasSubstr("must divide heads = 4, got 3"));
}

}  // namespace
}  // namespace programs
