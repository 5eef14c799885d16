// Tensors that do not fit what is loaded: another shape, or a name that is missing.
#include "checkpoint/checkpoint.h"
#include "checkpoint/state_dict.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct TwoTables : torch::nn::Module {
  explicit TwoTables(int64_t words) {
    register_module("embed", torch::nn::Embedding(words, 3));
    register_module("head", torch::nn::Linear(3, words));
    register_parameter("gain", torch::ones({2}));
  }
};

TEST(Misfits, AnotherVocabularySizeIsToldWithAllThatDoesNotFit) {
  TemporaryFolder folder;
  TwoTables saved(10), wanted(12);
  save({.model = saved}, folder / "saved");
  const auto all = AllOf(HasSubstr("'embed.weight' has shape [12, 3] here and [10, 3]"),
                         HasSubstr("'head.weight' has shape [12, 3]"),
                         HasSubstr("'head.bias' has shape [12]"), Not(HasSubstr("gain")));
  EXPECT_THAT(message_of<c10::ValueError>([&] { load({.model = wanted}, folder / "saved"); }), all);
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { load({.model = wanted}, folder / "saved/model/model.safetensors"); }),
              all);
  const auto dict = get_model_state_dict(saved);
  EXPECT_THAT(message_of<c10::ValueError>([&] { set_model_state_dict(wanted, dict); }), all);
}

TEST(Misfits, NamesThatAreMissingStandAloneWhereNothingIsUnexpected) {
  TemporaryFolder folder;
  auto a = torch::ones({1}), b = torch::ones({1});
  save({.tensors = {{"a", a}}}, folder / "saved");
  const auto text = message_of([&] { load({.tensors = {{"a", a}, {"b", b}}}, folder / "saved"); });
  EXPECT_THAT(text, AllOf(HasSubstr("missing in the file: b; "), Not(HasSubstr("only"))));
}

}  // namespace
}  // namespace fsdp::testing
