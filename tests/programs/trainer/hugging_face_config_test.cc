// What a config.json of Hugging Face's says, and what is refused by the name of its
// field.
#include "programs/trainer/hugging_face/hugging_face_config.h"

#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace programs {
namespace {

using fsdp::testing::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kSizes = R"("model_type": "llama", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64)";

TransformerConfig config_of(const std::string& fields) {
  const fsdp::testing::TemporaryFolder folder;
  std::ofstream(folder / "config.json") << "{" + fields + "}";
  return hugging_face_config(folder.path());
}

std::string why_refused(const std::string& fields) {
  return message_of([&] { config_of(fields); });
}

TEST(HuggingFaceConfig, FieldsThatAreAbsentOrNullHaveTheirDefaults) {
  for (const std::string more :
       {"", R"(, "num_key_value_heads": null, "head_dim": null, "rope_scaling": null,
                 "sliding_window": null, "tie_word_embeddings": null, "rms_norm_eps": null)"}) {
    const auto config = config_of(kSizes + more);
    EXPECT_EQ(config.vocab, 40);
    EXPECT_EQ(config.width, 16);
    EXPECT_EQ(config.mlp_width, 24);
    EXPECT_EQ(config.blocks, 3);
    EXPECT_EQ(config.heads, 4);
    EXPECT_EQ(config.kv_heads, 4);
    EXPECT_EQ(config.head_width, 4);
    EXPECT_EQ(config.max_tokens, 64);
    EXPECT_EQ(config.rotary_base, 10000);
    EXPECT_FALSE(config.rotary_scaling.has_value());
    EXPECT_FALSE(config.tied_head);
  }
}

TEST(HuggingFaceConfig, FieldsThatAreThereCount) {
  const auto config =
      config_of(kSizes + R"(, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 0.25,
    "sliding_window": 32, "tie_word_embeddings": true, "rope_theta": 500.0, "rope_scaling":
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
     "original_max_position_embeddings": 16})");
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_width, 6);
  EXPECT_EQ(config.norm_epsilon, 0.25);
  EXPECT_EQ(config.max_tokens, 32);
  EXPECT_EQ(config.rotary_base, 500);
  ASSERT_TRUE(config.rotary_scaling.has_value());
  EXPECT_EQ(config.rotary_scaling->factor, 4);
  EXPECT_EQ(config.rotary_scaling->low, 1.5);
  EXPECT_EQ(config.rotary_scaling->high, 3);
  EXPECT_EQ(config.rotary_scaling->original_max_tokens, 16);
  EXPECT_TRUE(config.tied_head);
}

TEST(HuggingFaceConfig, WhatWouldBeComputedOtherwiseIsRefusedByName) {
  EXPECT_THAT(why_refused(R"("vocab_size": 40)"),
              AllOf(HasSubstr("config.json"), HasSubstr("no field 'model_type'")));
  EXPECT_THAT(why_refused(R"("model_type": "llama")"), HasSubstr("no field '"));
  EXPECT_THAT(why_refused(kSizes + R"(, "logit_scale": 0.5)"),
              HasSubstr("field 'logit_scale' (0.5) is not known"));
  EXPECT_THAT(why_refused(kSizes + R"(, "partial_rotary_factor": 0.5)"),
              HasSubstr("partial_rotary_factor is 0.5, allowed is 1.0"));
  EXPECT_THAT(why_refused(kSizes + R"(, "hidden_act": "gelu")"),
              HasSubstr("hidden_act is \"gelu\", allowed is \"silu\""));
  EXPECT_THAT(why_refused(kSizes + R"(, "num_key_value_heads": "two")"),
              HasSubstr("field 'num_key_value_heads' is \"two\", which is of another type"));
  EXPECT_THAT(why_refused(kSizes + R"(, "rope_scaling": {"rope_type": "yarn"})"),
              HasSubstr("rope_type is \"yarn\", allowed are default and llama3"));
}

}  // namespace
}  // namespace programs
