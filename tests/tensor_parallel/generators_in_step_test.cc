// parallelize_module brings the ranks' default generators in step.
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/thread_generators.h"
#include "tests/support/process_ranks.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"
#include "tests/tensor_parallel/dropping_transformer.h"
#include "tests/tensor_parallel/transformer_plan.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

namespace fsdp::testing {
namespace {

at::Tensor default_state() {
  return internal::generator_state(at::detail::getDefaultCPUGenerator());
}

// What every rank of the mesh has, row by row.
at::Tensor of_all_ranks(const at::Tensor& own, const DeviceMesh& mesh) {
  return from_local(own.unsqueeze(0), mesh, {Shard{0}}).full_tensor();
}

int check(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "not so: %s\n", what);
  return holds ? 0 : 1;
}

// Every rank is seeded otherwise; then a model with dropout is that of one device.
const ChildCase kSeededOtherwise("tensor_parallel_ranks_seeded_otherwise", [] {
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
  const auto tp = mesh["tp"];
  const auto make = [] { return DroppingTransformer(); };
  auto plain = drawn(1, make), parallel = drawn(1, make);
  torch::manual_seed(static_cast<uint64_t>(100 + mesh.rank()));
  parallelize_module(parallel, tp, dropping_plan(/*cut_sequence=*/false));
  const at::Tensor state = default_state();
  const at::Tensor tokens = torch::arange(12).view({2, 6});
  const at::Tensor mask = torch::dropout(torch::ones({200}), 0.5, true);
  const at::Tensor found =
      full_tensor(transformer_loss(parallel->forward(tokens), tokens).detach());

  torch::manual_seed(static_cast<uint64_t>(100 + 2 * mesh.local_rank(0)));
  int failures = check(state.equal(default_state()), "the state is that of tp coordinate 0");
  failures += check(mask.equal(torch::dropout(torch::ones({200}), 0.5, true)),
                    "a plain mask is that of one device");
  const at::Tensor wanted = transformer_loss(plain->forward(tokens), tokens).detach();
  failures += check(distance(found, wanted) <= kClose, "the loss is that of one device");

  const at::Tensor over_tp = of_all_ranks(mask, tp), over_dp = of_all_ranks(mask, mesh["dp"]);
  failures += check(over_tp[0].equal(over_tp[1]), "masks are equal over tp");
  failures += check(!over_dp[0].equal(over_dp[1]), "masks differ over dp");
  destroy_process_group();
  return failures;
});

TEST(GeneratorsInStep, OfProcessesAreThatOfTheFirst) {
  const auto ends =
      run_processes("tensor_parallel_ranks_seeded_otherwise", 4, std::chrono::seconds(60));
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

at::Tensor sum_of_draws(int64_t count) {
  at::Tensor sum = torch::zeros({}, torch::kFloat64);
  for (int64_t i = 0; i < count; ++i) sum += torch::rand({});
  return sum;
}

// Threads share the generator, and others may be drawing from it.
TEST(GeneratorsInStep, OfThreadsIsLeftAlone) {
  std::array<std::vector<torch::nn::Linear>, 2> models;  // by rank; equal
  for (int i = 0; i < 30; ++i) {
    for (auto& of_rank : models)
      of_rank.push_back(drawn(1, [] { return torch::nn::Linear(2, 2); }));
  }
  torch::manual_seed(5);
  std::atomic<bool> are_parallel{false};
  int64_t draws = 0;
  at::Tensor found = torch::zeros({}, torch::kFloat64);
  std::thread drawer([&] {
    for (; !are_parallel; ++draws) found += torch::rand({});
  });
  run_ranks(2, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    for (auto& model : models[static_cast<size_t>(rank)])
      parallelize_module(model, mesh, {{"", ColwiseParallel{}}});
  });
  are_parallel = true;
  drawer.join();
  torch::manual_seed(5);
  EXPECT_TRUE(found.equal(sum_of_draws(draws)));
}

}  // namespace
}  // namespace fsdp::testing
