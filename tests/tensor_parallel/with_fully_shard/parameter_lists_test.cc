// Model code that computes with registry entries, as that of a ParameterList does, beside
// what tensor-parallel members give: cut over "tp", sharded over "dp".
#include "fully_shard/fully_shard.h"
#include "tests/support/thread_ranks.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <functional>
#include <utility>

namespace fsdp::testing {
namespace {

// Of the elements of a list there are no other handles.
struct TailImpl : torch::nn::Module {
  TailImpl() {
    for (const auto& element : {torch::randn({6}), torch::randn({5, 6}), torch::randn({5})})
      list->append(torch::Tensor(element).requires_grad_());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto entries = list->named_parameters(/*recurse=*/false);
    return torch::tanh(x + entries["0"]).matmul(entries["1"].t()) * entries["2"];
  }
  // With what is computed from the elements.
  torch::Tensor forward_of_results(const torch::Tensor& x) {
    const auto entries = list->named_parameters(/*recurse=*/false);
    return torch::tanh(x + entries["0"] * 2).matmul((entries["1"] + 1).t()) *
           entries["2"].abs().mean();
  }
  torch::nn::ParameterList list = register_module("list", torch::nn::ParameterList());
};
TORCH_MODULE(Tail);

struct WithListImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return tail(linear(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 6));
  Tail tail = register_module("tail", Tail());
};
TORCH_MODULE(WithList);

struct WithListPair {
  WithList plain, sharded;
  at::Tensor input = drawn_tensor(2, {3, 4});

  void backward() {
    plain->forward(input).pow(3).sum().backward();
    sharded->forward(input).pow(3).sum().backward();
    expect_same_gradients(*sharded, *plain, kClose);
  }
  void expect_same_outputs() {
    EXPECT_LE(distance(full_tensor(sharded->forward(input)), plain->forward(input)), kClose);
  }
};

// With the list in the Linear's unit, and in one of its own that has no tensor-parallel
// member; on one data rank, which reduces nothing, and on two.
void on_pairs_with_lists(const ParallelPlan& plan, const std::function<void(WithListPair&)>& body) {
  for (const auto& [dp, has_own_unit] : {std::pair{1, false}, {1, true}, {2, false}, {2, true}}) {
    run_ranks(2 * dp, [&, dp = dp, has_own_unit = has_own_unit](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {dp, 2}, {"dp", "tp"});
      const auto make = [] { return WithList(); };
      WithListPair pair{drawn(1, make), drawn(1, make)};
      parallelize_module(pair.sharded, mesh["tp"], plan);
      if (has_own_unit) fully_shard(pair.sharded->tail, mesh["dp"]);
      fully_shard(pair.sharded, mesh["dp"]);
      body(pair);
    });
  }
}

const ParallelPlan kCopied = {{"linear", ReplicateParallel{}}};
const ParallelPlan kLinearOnly = {{"linear", ColwiseParallel{}}};
const ParallelPlan kListToo = {{"linear", ColwiseParallel{}},
                               {"tail.list.0", ShardParameter{Shard{0}}},
                               {"tail.list.1", ShardParameter{Shard{1}}},
                               {"tail.list.2", ReplicateParallel{}}};

TEST(ShardedEntries, TrainBesideWhatIsParallel) {
  for (const auto& plan : {kCopied, kLinearOnly, kListToo})
    on_pairs_with_lists(plan, [](WithListPair& pair) {
      pair.backward();
      for (const auto& parameter : pair.plain->parameters())
        EXPECT_TRUE(parameter.grad().defined());
    });
}

TEST(ShardedEntries, EvaluateBesideWhatIsParallel) {
  for (const auto& plan : {kCopied, kLinearOnly, kListToo}) {
    on_pairs_with_lists(plan, [](WithListPair& pair) {
      {
        const torch::NoGradGuard no_grad;
        pair.expect_same_outputs();
      }
      const torch::InferenceMode inference;
      pair.expect_same_outputs();
    });
  }
}

TEST(ShardedEntries, GiveResultsThatAreWholeBesideWhatIsParallel) {
  for (const auto& plan : {kCopied, kLinearOnly, kListToo}) {
    on_pairs_with_lists(plan, [](WithListPair& pair) {
      const torch::NoGradGuard no_grad;
      const auto output = [&pair](WithList& model) {
        return full_tensor(model->tail->forward_of_results(model->linear(pair.input)));
      };
      EXPECT_LE(distance(output(pair.sharded), output(pair.plain)), kClose);
    });
  }
}

TEST(ShardedEntries, TrainBesidePlainTensorsThatAreWrittenOrRecorded) {
  for (const auto& plan : {kCopied, kLinearOnly, kListToo}) {
    on_pairs_with_lists(plan, [](WithListPair& pair) {
      for (auto* const model : {&pair.plain, &pair.sharded}) {
        const auto entries = (*model)->tail->list->parameters();
        auto written = at::ones({3, 6}), recorded = at::ones({3, 6}).requires_grad_();
        written.addcmul_((*model)->linear->forward(pair.input), entries[0]);
        written.pow(2).sum().backward();
        (recorded * entries[0]).matmul(entries[1].t()).pow(2).sum().backward();
        EXPECT_TRUE(recorded.grad().defined());
      }
      expect_same_gradients(*pair.sharded, *pair.plain, kClose);
    });
  }
}

// A view of the member, which is computed of its parts where it lies across its cut.
TEST(ShardedEntries, HaveTheValuesOfOneDeviceInSlices) {
  const auto slices = [](WithList& model) {
    const auto entries = model->tail->list->parameters();
    return at::cat({entries[0].narrow(0, 1, 4), entries[1].narrow(0, 1, 3).sum(0),
                    entries[1].narrow(1, 2, 3).sum(1), entries[2].narrow(0, 0, 3)});
  };
  for (const auto& plan : {kCopied, kLinearOnly, kListToo}) {
    on_pairs_with_lists(plan, [&](WithListPair& pair) {
      const auto expect_same = [&] {
        EXPECT_LE(distance(full_tensor(slices(pair.sharded)), slices(pair.plain)), kClose);
      };
      {
        const torch::NoGradGuard no_grad;
        expect_same();
      }
      const torch::InferenceMode inference;
      expect_same();
    });
  }
}

TEST(ShardedEntries, ThatAreFrozenTakePartInTraining) {
  for (const auto& plan : {kCopied, kLinearOnly, kListToo}) {
    on_pairs_with_lists(plan, [](WithListPair& pair) {
      for (auto& model : {pair.plain, pair.sharded}) {
        for (auto& entry : model->tail->list->parameters()) entry.requires_grad_(false);
      }
      pair.backward();
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
