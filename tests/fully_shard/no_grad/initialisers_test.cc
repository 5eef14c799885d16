// What torch::nn::init does to registry entries beyond elementwise operators.
#include "device_mesh/process_group.h"
#include "tests/fully_shard/support/parity.h"
#include "tests/support/full_value.h"
#include "tests/support/process_ranks.h"
#include "tests/support/worlds.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

namespace fsdp::testing {
namespace {

class EntryInitialisation : public Worlds {
 protected:
  // `body` gets the entry of a sharded 5x3 matrix and the plain tensor it was.
  void on_ranks(const std::function<void(const torch::Tensor&, const torch::Tensor&)>& body) const {
    Worlds::on_ranks([&](const DeviceMesh& mesh) {
      torch::NoGradGuard no_grad;
      const auto module = std::make_shared<torch::nn::Module>();
      const auto plain = torch::arange(15.0).view({5, 3}).sin();
      module->register_parameter("weight", plain.clone());
      fully_shard(*module, mesh);
      body(module->parameters()[0], plain);
    });
  }
};

TEST_P(EntryInitialisation, EyeIsThePlainOne) {
  on_ranks([](const torch::Tensor& entry, const torch::Tensor&) {
    torch::nn::init::eye_(entry);
    EXPECT_TRUE(DTensor(entry).full_tensor().equal(torch::eye(5, 3)));
  });
}

TEST_P(EntryInitialisation, WritesAtIndicesAreThePlainOnesAsForSparse) {
  on_ranks([](const torch::Tensor& entry, const torch::Tensor& plain) {
    const auto rows = torch::tensor({4, 0, 2}), column = torch::tensor(1);
    entry.index_put_({rows, column}, torch::zeros({3}));
    auto expected = plain.clone();
    expected.index_put_({rows, column}, torch::zeros({3}));
    EXPECT_TRUE(is_dtensor(entry));
    EXPECT_TRUE(DTensor(entry).full_tensor().equal(expected));
  });
}

TEST_P(EntryInitialisation, BernoulliDrawsWhatItDrawsOnOneRank) {
  on_ranks([](const torch::Tensor& entry, const torch::Tensor& plain) {
    auto own = at::detail::createCPUGenerator(7), other = at::detail::createCPUGenerator(7);
    const auto drawn = at::bernoulli(entry.sigmoid(), own);
    EXPECT_TRUE(is_dtensor(drawn));
    EXPECT_TRUE(DTensor(drawn).full_tensor().equal(at::bernoulli(plain.sigmoid(), other)));
  });
}

// It takes no generator, so ranks need default generators of their own: processes.
const ChildCase kIsSparse("initialises_sparsely", [] {
  init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
  const auto sparse = [](const torch::Tensor& tensor) {
    torch::manual_seed(5);
    torch::nn::init::sparse_(tensor, /*sparsity=*/0.4, /*std=*/0.5);
  };
  const auto expected = torch::ones({5, 3});
  sparse(expected);
  int failures = (expected == 0).sum().item<int64_t>() == 6 ? 0 : 1;
  for (const bool by_member : {false, true}) {
    const auto module = std::make_shared<torch::nn::Module>();
    const auto member = module->register_parameter("weight", torch::ones({5, 3}));
    fully_shard(*module, init_device_mesh(torch::kCPU, {launch_environment().world_size}));
    const auto entry = module->parameters()[0];
    sparse(by_member ? member : entry);
    if (is_dtensor(entry) && full_value(entry).equal(expected) &&
        member.detach().clone().equal(expected))
      continue;
    std::printf("wrong by the %s\n", by_member ? "member" : "entry");
    ++failures;
  }
  destroy_process_group();
  return failures;
});

TEST(EntryInitialisationInProcesses, SparseIsThePlainOneByEntryAndByMember) {
  for (const auto& end : run_processes("initialises_sparsely", 2, std::chrono::seconds(60)))
    EXPECT_EQ(end.exit_code, 0) << end.output;
}

INSTANTIATE_WORLDS(EntryInitialisation, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
