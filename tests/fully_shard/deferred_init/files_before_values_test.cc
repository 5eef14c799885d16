// Files that are loaded into a model whose tensors have no values yet: an error that says
// what to do, whatever was on the way, and nothing is changed by it.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Different from the start values that a new Pair has.
std::string file_of_a_model() {
  Pair model;
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(0.25);
  std::stringstream file;
  torch::save(model, file);
  return file.str();
}

void load(Pair& model, const std::string& bytes) {
  std::stringstream file(bytes);
  torch::load(model, file);
}

class FilesBeforeValues : public Worlds {};

TEST_P(FilesBeforeValues, InsideOfDeferredInit) {
  const auto bytes = file_of_a_model();
  on_ranks([&](int64_t, const DeviceMesh&) {
    EXPECT_THAT(message_of([&] {
                  deferred_init([&] {
                    Pair model;
                    load(model, bytes);
                    return model;
                  });
                }),
                AllOf(HasSubstr("deferred_init"), HasSubstr("torch::load"),
                      HasSubstr("fsdp::materialize(model)")));
  });
}

TEST_P(FilesBeforeValues, OrReplacedDataBeforeFullyShard) {
  const auto bytes = file_of_a_model();
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = deferred_init([] { return Pair(); });
    const auto says_what_to_do =
        AllOf(HasSubstr("no values yet"), HasSubstr("fsdp::materialize(model)"));
    EXPECT_THAT(message_of([&] { load(model, bytes); }), says_what_to_do);
    EXPECT_THAT(message_of([&] {
                  model->first->weight.set_data(torch::ones({4, 4}));
                }),
                says_what_to_do);
    EXPECT_THAT(message_of([&] {
                  torch::ones({4, 4}).set_data(model->first->weight);
                }),
                says_what_to_do);
    fully_shard(model, mesh);
    materialize(*model);
    load(model, bytes);
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(torch::full({4, 4}, 0.25)));
  });
}

TEST_P(FilesBeforeValues, AfterFullyShardByParameter) {
  const auto bytes = file_of_a_model();
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = deferred_init([] { return Pair(); });
    fully_shard(model, mesh);
    EXPECT_THAT(message_of([&] { load(model, bytes); }),
                AllOf(HasSubstr("'first.weight"), HasSubstr("fsdp::materialize(model)")));
    materialize(*model);
    load(model, bytes);
    EXPECT_TRUE(full_value(model->parameters()[2]).equal(torch::full({4, 4}, 0.25)));
  });
}

INSTANTIATE_WORLDS(FilesBeforeValues, 1, 2);

}  // namespace
}  // namespace fsdp::testing
