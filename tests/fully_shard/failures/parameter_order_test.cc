// The parameters of a unit lie in its row as they were registered, so ranks must register
// them alike.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <memory>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class ParameterOrder : public Worlds {};

struct Two : torch::nn::Module {
  explicit Two(bool swapped) {
    for (const char* name : {swapped ? "b" : "a", swapped ? "a" : "b"})
      register_parameter(name, torch::full({4}, 0.5));
  }
  torch::Tensor forward() { return (named_parameters()["a"] - 2 * named_parameters()["b"]).sum(); }
};

// Names, shapes and values are the same; only the places are not.
TEST_P(ParameterOrder, ThatDiffersIsAnErrorOnEveryRankAtTheFirstGather) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model = std::make_shared<Two>(rank == mesh.size() - 1);
    fully_shard(model, mesh);
    EXPECT_THAT(message_of([&] { model->forward(); }),
                AllOf(AnyOf(HasSubstr("parameter 'a'"), HasSubstr("parameter 'b'")),
                      HasSubstr("another place among the unit's parameters")));
  });
}

TEST_P(ParameterOrder, OfModulesThatDiffersIsAnErrorToo) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model = std::make_shared<torch::nn::Module>();
    const auto one = std::make_shared<Two>(false), two = std::make_shared<Two>(false);
    model->register_module(rank == 0 ? "one" : "two", one);
    model->register_module(rank == 0 ? "two" : "one", two);
    fully_shard(model, mesh);
    EXPECT_THAT(message_of([&] { one->forward(); }), HasSubstr("another place"));
  });
}

INSTANTIATE_WORLDS(ParameterOrder, 2, 3);

}  // namespace
}  // namespace fsdp::testing
