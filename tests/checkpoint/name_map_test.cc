#include "checkpoint/name_map.h"

#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "tests/checkpoint/small_model.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const NameMap kLlama = {{"embedding", "model.embed_tokens"},
                        {"block*", "model.layers.*"},
                        {"block*.attention.*", "model.layers.*.self_attn.*_proj"},
                        {"block*.attention.output", "model.layers.*.self_attn.o_proj"},
                        {"norm", "model.norm"},
                        {"head.weight", "lm_head.weight"}};

TEST(NameMap, KeepsWhatStarsStandForAndWhatIsBelow) {
  EXPECT_EQ(kLlama("embedding.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(kLlama("block12.attention.query.bias"), "model.layers.12.self_attn.query_proj.bias");
  EXPECT_EQ(kLlama("block0.mlp.up.weight"), "model.layers.0.mlp.up.weight");
  EXPECT_EQ(kLlama("head.weight"), "lm_head.weight");
}

TEST(NameMap, LaterEntriesWin) {
  EXPECT_EQ(kLlama("block1.attention.output.weight"), "model.layers.1.self_attn.o_proj.weight");
}

TEST(NameMap, LeavesAloneWhatNoEntryMeans) {
  for (const char* name : {"head.bias", "embeddings.weight", "norms", "a.block0", ""})
    EXPECT_EQ(kLlama(name), name);
}

TEST(NameMap, ReversedGivesTheModelsNames) {
  const auto own = kLlama.reversed();
  for (const char* name : {"embedding.weight", "block12.attention.query.bias", "norm.weight",
                           "block1.attention.output.weight", "block0.mlp.up.weight"})
    EXPECT_EQ(own(kLlama(name)), name);
}

TEST(NameMap, AnEmptyPatternIsTheWholeModel) {
  const NameMap below = {{"", "module"}, {"head", "classifier"}};
  EXPECT_EQ(below("norm.weight"), "module.norm.weight");
  EXPECT_EQ(below("head.weight"), "classifier.weight");
  EXPECT_EQ(below.reversed()("module.norm.weight"), "norm.weight");
  EXPECT_EQ(below.reversed()("module"), "");
}

TEST(NameMap, SeveralStarsInOneName) {
  const NameMap names = {{"layer*_*", "stages.*.blocks.*"}};
  EXPECT_EQ(names("layer3_14.weight"), "stages.3.blocks.14.weight");
  EXPECT_EQ(names.reversed()("stages.3.blocks.14.weight"), "layer3_14.weight");
}

// A star of a plan's pattern is a part of a name as any other.
TEST(NameMap, RenamesThePatternsOfPlans) {
  const auto own = kLlama.reversed();
  EXPECT_EQ(own("model.layers.*.self_attn.o_proj"), "block*.attention.output");
  EXPECT_EQ(own("model.layers.1*.self_attn.query_proj"), "block1*.attention.query");
}

TEST(NameMap, EntriesWithMoreStarsOnOneSideAreRefused) {
  EXPECT_THAT(message_of([] {
                NameMap({{"a", "b"}, {"block*", "layers"}});
              }),
              AllOf(HasSubstr("{\"block*\", \"layers\"}"), HasSubstr("1 '*'"), HasSubstr("0 on")));
}

TEST(NameMap, ChecksWhatIsLeftOver) {
  const NameMap names = {{"a", "x"}, {"b", "x"}, {"c", "d"}, {"nobody", "somebody"}};
  const auto error = message_of([&] { names.check({"a.weight", "b.weight", "c.bias", "d.bias"}); });
  EXPECT_THAT(error, AllOf(HasSubstr("entries that mean nothing: {\"nobody\", \"somebody\"}"),
                           HasSubstr("a.weight and b.weight become x.weight"),
                           HasSubstr("c.bias and d.bias become d.bias"), Not(HasSubstr("{\"a\""))));
  const NameMap one_way = {{"a*", "x*"}, {"b*", "xb*"}};
  EXPECT_THAT(message_of([&] {
                one_way.check({"ab.weight", "b.weight"});
              }),
              HasSubstr("ab.weight and b.weight become xb.weight"));
  EXPECT_THAT(message_of([&] {
                one_way.check({"ab.weight", "bc.weight"});
              }),
              HasSubstr("ab.weight becomes xb.weight, and that b.weight"));
  kLlama.check({"embedding.weight", "block0.mlp.up.weight", "block0.attention.query.weight",
                "block0.attention.output.weight", "norm.weight", "head.weight"});
}

TEST(NameMap, ServesSaveLoadAndConvert) {
  const TemporaryFolder folder;
  const NameMap names = {{"", "model"}, {"first", "model.layers.0"}, {"last", "lm_head"}};
  SmallModel from, to, converted;
  save({.model = from}, folder / "saved", {.layout = Layout::kFull, .name_in_file = names});
  load({.model = to}, folder / "saved", {.name_in_file = names});
  convert_checkpoint(folder / "saved", folder / "own", {.name_in_file = names.reversed()});
  load({.model = converted}, folder / "own");
  const auto wanted = full_values(*from);
  for (auto* model : {&to, &converted}) {
    auto values = full_values(**model);
    for (const auto& item : wanted)
      EXPECT_TRUE(torch::equal(values[item.key()], item.value())) << item.key();
  }
}

}  // namespace
}  // namespace fsdp::testing
