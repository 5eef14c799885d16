// What a checkpoint cannot hold is refused before anything is written, by its name.
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/state_dict.h"
#include "dtensor/dtensor.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A save of `state` throws a ValueError whose text matches, and leaves nothing.
template <class Matcher>
void expect_not_saved(const State& state, const Matcher& matcher) {
  TemporaryFolder folder(memory_folder());
  const std::string path = folder / "saved";
  expect_error<c10::ValueError>([&] { save(state, path); }, AllOf(matcher, HasSubstr(path)));
  expect_error<c10::ValueError>([&] { async_save(state, path).wait(); }, matcher);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RefusedByName, TensorsWithoutValuesInMemory) {
  expect_not_saved({.tensors = {{"w", at::Tensor()}}}, HasSubstr("'w' is an undefined tensor"));
  expect_not_saved({.tensors = {{"w", torch::eye(3).to_sparse()}}},
                   HasSubstr("'w' is of layout Sparse; checkpoints hold strided tensors"));
  expect_not_saved({.tensors = {{"w", torch::empty({3}, torch::kMeta)}}},
                   HasSubstr("'w' is on the meta device"));
}

TEST(RefusedByName, NamesAndTextsThatAreNotUtf8) {
  const std::string odd = "w\xff";
  expect_not_saved({.tensors = {{odd, torch::ones({1})}}},
                   HasSubstr("the name \"w\xEF\xBF\xBD\" is not UTF-8"));
  expect_not_saved({.values = {{odd, 1}}}, HasSubstr("is not UTF-8"));
  expect_not_saved({.per_rank = {{odd, 1}}}, HasSubstr("is not UTF-8"));
  expect_not_saved({.values = {{"note", odd}}}, HasSubstr("'note' holds a string that is not"));
  expect_not_saved({.tensors = {{"__metadata__", torch::ones({1})}}},
                   HasSubstr("'__metadata__' is one that safetensors files keep"));
  torch::nn::Linear model(1, 1);
  model->register_buffer(odd, torch::ones({1}));
  expect_not_saved({.model = model}, HasSubstr("is not UTF-8"));
}

TEST(RefusedByName, EveryRankIsToldOfAPathThatIsNone) {
  run_ranks(2, [](int64_t) {
    for (const char* path : {"", "/"}) {
      expect_error<c10::ValueError>([&] { save({}, path); },
                                    HasSubstr("is no path that a checkpoint can have"));
    }
    expect_error<c10::ValueError>([] { load({}, ""); }, HasSubstr("the path is empty"));
  });
}

TEST(RefusedByName, TargetsThatCannotBeFilled) {
  TemporaryFolder folder;
  save({.tensors = {{"w", torch::ones({3, 3})}}}, folder / "saved");
  const auto load_into = [&](const at::Tensor& w) {
    return message_of<c10::ValueError>([&] { load({.tensors = {{"w", w}}}, folder / "saved"); });
  };
  EXPECT_THAT(load_into({}), HasSubstr("'w' is an undefined tensor"));
  EXPECT_THAT(load_into(torch::eye(3).to_sparse()), HasSubstr("'w' is of layout Sparse"));
  EXPECT_THAT(load_into(torch::empty({3, 3}, torch::kMeta)), HasSubstr("on the meta device"));
}

TEST(RefusedByName, MessagesSayThePathOnceAndNoEmptyLists) {
  TemporaryFolder folder;
  const auto count_of = [](const std::string& text, const std::string& part) {
    int count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
      ++count;
    return count;
  };
  const std::string path = folder / "saved";
  torch::nn::Linear small(torch::nn::LinearOptions(2, 2).bias(false)), model(2, 2);
  const std::string nothing = message_of([&] { load({.model = model}, path); });
  save({.model = small}, path);
  const std::string exists = message_of([&] { save({.model = small}, path); });
  const std::string missing = message_of([&] { load({.model = model}, path); });
  const std::string no_item = message_of([&] {
    load({.tensors = {{"w", torch::ones({1})}}}, path);
  });
  for (const auto& text : {nothing, exists, missing, no_item})
    EXPECT_EQ(count_of(text, path), 1) << text;
  EXPECT_THAT(missing, AllOf(HasSubstr("missing in the file: bias; LoadOptions::strict"),
                             Not(HasSubstr("in the file only"))));
}

TEST(RefusedByName, DictsThatCannotBeSetAreRefusedByAllRanksBeforeAnythingChanges) {
  on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Linear model(2, 2);
    const auto before = model->weight.detach().clone();
    StateDict dict;
    if (rank == 0) {
      dict.insert("weight", torch::ones({2, 2}));
      dict.insert("bias", at::Tensor());
    }
    const auto set = [&] {
      set_model_state_dict(*model, dict, {.full_state_dict = true, .broadcast_from_rank0 = true});
    };
    expect_error<c10::ValueError>(set, HasSubstr("'bias' is an undefined tensor"));
    if (rank == 0) dict["bias"] = from_local(torch::ones({1}), mesh, {Shard{0}});
    expect_error<c10::ValueError>(set, HasSubstr("broadcast_from_rank0 sends whole tensors"));
    StateDict distributed;
    distributed.insert("weight", torch::ones({2, 2}));
    distributed.insert("bias", from_local(torch::ones({1}), mesh, {Shard{0}}));
    expect_error<c10::ValueError>([&] { set_model_state_dict(*model, distributed); },
                                  HasSubstr("'bias' is distributed in the dict and plain"));
    EXPECT_TRUE(torch::equal(model->weight, before));
  });
}

}  // namespace
}  // namespace fsdp::testing
