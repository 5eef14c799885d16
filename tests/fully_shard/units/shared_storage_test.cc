// Parameters that are slices of one storage: disjoint ones are copied apart, overlapping
// ones are refused.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// What a loader does that reads one file of weights: every parameter and buffer becomes a
// slice of it. (cuDNN leaves the weights of an RNN so.)
void slice_one_storage(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> tensors = module.parameters();
  for (const auto& buffer : module.buffers()) {
    if (buffer.is_floating_point()) tensors.push_back(buffer);
  }
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const auto whole = torch::cat(flat);
  int64_t offset = 0;
  for (auto& tensor : tensors) {
    tensor.set_data(whole.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

class SlicesOfOneStorage : public Worlds {};

template <class Module, class Run>
void expect_same_steps(const Module& plain, Module sliced, const Run& run) {
  EXPECT_TRUE(run(sliced).equal(run(plain)));
  run(sliced).sum().backward();
  run(plain).sum().backward();
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(full_gradient(sliced->parameters()[i]).allclose(plain->parameters()[i].grad()));
  }
  torch::optim::SGD(sliced->parameters(), 0.1).step();
  torch::optim::SGD(plain->parameters(), 0.1).step();
  EXPECT_TRUE(run(sliced).allclose(run(plain)));
}

template <class Module, class Run>
void expect_trains_as_unsharded(const DeviceMesh& mesh, const Module& plain, Module sliced,
                                const Run& run) {
  slice_one_storage(*sliced);
  fully_shard(sliced, mesh);
  expect_same_steps(plain, sliced, run);
}

TEST_P(SlicesOfOneStorage, OfARecurrentNetworkTrainAsUnsharded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] {
      torch::nn::LSTM lstm(torch::nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true));
      set_start_values(*lstm);
      return lstm;
    };
    expect_trains_as_unsharded(mesh, build(), build(), [](torch::nn::LSTM lstm) {
      return std::get<0>(lstm(torch::ones({5, 2, 3})));
    });
  });
}

// Running statistics stay where they are, beside what was copied away.
TEST_P(SlicesOfOneStorage, WithBuffersBetweenThemTrainAsUnsharded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] {
      torch::nn::Sequential net(torch::nn::Conv2d(2, 4, 3), torch::nn::BatchNorm2d(4),
                                torch::nn::Conv2d(4, 2, 1));
      set_start_values(*net);
      return net;
    };
    expect_trains_as_unsharded(mesh, build(), build(), [](torch::nn::Sequential net) {
      return net->forward(torch::arange(98).to(torch::kFloat).reshape({1, 2, 7, 7}));
    });
  });
}

TEST_P(SlicesOfOneStorage, ThatAreViewsOfABaseNobodyElseHas) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto shared = std::make_shared<torch::nn::Module>();
    {
      const auto flat = torch::arange(12).to(torch::kFloat);
      shared->register_parameter("a", flat.slice(0, 0, 8).view({4, 2}));
      shared->register_parameter("b", flat.slice(0, 8, 12));
    }
    fully_shard(*shared, mesh);
    EXPECT_TRUE(
        full_value(shared->parameters()[0]).equal(torch::arange(8).to(torch::kFloat).view({4, 2})));
    EXPECT_TRUE(full_value(shared->parameters()[1]).equal(torch::arange(8, 12).to(torch::kFloat)));
  });
}

// A loader's buffer of the whole model, of which units are made one by one.
class SlicesOfTheWholeModel : public Worlds {
 protected:
  void expect_trains(const std::function<void(Pair model, const DeviceMesh& mesh)>& shard) const {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      Pair plain, sliced;
      slice_one_storage(*sliced);
      const auto handle = sliced->first->weight;
      shard(sliced, mesh);
      EXPECT_TRUE(handle.is_same(sliced->first->weight));
      expect_same_steps(plain, sliced, [](Pair pair) {
        return pair->forward(torch::ones({2, 4}));
      });
    });
  }
};

TEST_P(SlicesOfTheWholeModel, TrainAsUnshardedOnceTheyAreSeparated) {
  expect_trains([](Pair model, const DeviceMesh& mesh) {
    separate_storages(model);
    sharded(model, mesh);
  });
}

TEST_P(SlicesOfTheWholeModel, TrainAsUnshardedUnderAPolicyThatSeesTheModel) {
  expect_trains([](Pair model, const DeviceMesh& mesh) {
    auto_shard(model, by_type<torch::nn::Linear>(), mesh);
    EXPECT_EQ(fsdp_modules(*model).size(), 3);
  });
}

INSTANTIATE_WORLDS(SlicesOfOneStorage, 1, 2);
INSTANTIATE_WORLDS(SlicesOfTheWholeModel, 1, 2);

TEST(SeparateStorages, CopiesNothingThatHasMemoryOfItsOwn) {
  Pair model;
  const void* const before = model->first->weight.data_ptr();
  separate_storages(model);
  EXPECT_EQ(model->first->weight.data_ptr(), before);
  slice_one_storage(*model);
  const auto* const sliced = model->first->weight.storage().unsafeGetStorageImpl();
  separate_storages(*model);
  for (const auto& parameter : model->parameters()) {
    EXPECT_NE(parameter.storage().unsafeGetStorageImpl(), sliced);
    EXPECT_TRUE(parameter.requires_grad());
  }
}

TEST(SeparateStorages, RefusesWhatSharesElementsOrIsUsedElsewhereAndChangesNothing) {
  Pair model;
  slice_one_storage(*model);
  const auto* const storage = model->first->weight.storage().unsafeGetStorageImpl();
  const auto expect_refused = [&](const std::string& text) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { separate_storages(model); }),
                AllOf(HasSubstr("separate_storages: "), HasSubstr("parameter 'first.weight'"),
                      HasSubstr(text)));
    EXPECT_EQ(model->second->weight.storage().unsafeGetStorageImpl(), storage);
  };
  {
    const auto view = model->first->weight.detach().t();
    expect_refused("something else uses the memory");
  }
  model->register_buffer("first_row", model->first->weight.detach()[0]);
  expect_refused("and buffer 'first_row' share memory");
  EXPECT_THAT(message_of<c10::ValueError>([] { separate_storages(std::shared_ptr<PairImpl>()); }),
              HasSubstr("the module is null"));
}

TEST(OverlappingSlices, AreRefusedWithBothNames) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    const auto whole = torch::ones({30});
    model->first->weight.set_data(whole.slice(0, 0, 16).view({4, 4}));
    model->second->weight.set_data(whole.slice(0, 14, 30).view({4, 4}));
    EXPECT_THAT(message_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("'second.weight'"),
                      HasSubstr("share memory")));
  });
}

// Whether what has the rest of the storage has a part of this, too, can not be seen.
TEST(SlicesBeyondTheModule, AreRefusedWithTheWayOut) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    slice_one_storage(*model);
    EXPECT_THAT(message_of([&] { fully_shard(model->first, mesh); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("outside of this module"),
                      HasSubstr("call fsdp::separate_storages(model)")));
  });
}

}  // namespace
}  // namespace fsdp::testing
