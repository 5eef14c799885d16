// Every collective call of the public API on one rank against every other one on another:
// an error on both, soon, that names both.
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "device_mesh/all_reduce.h"
#include "device_mesh/collectives/watched_rank.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/broadcast_states.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/deferred_init.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/grad_scaler.h"
#include "fully_shard/summon_full_params.h"
#include "tensor_parallel/parallelize_module.h"
#include "tests/support/errors.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/put_on_meta.h"
#include "tests/support/start_values.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using Milliseconds = std::chrono::milliseconds;

torch::nn::Sequential two_layers(int64_t width) {
  return torch::nn::Sequential(make_linear(width, width), make_linear(width, width));
}

// Units that one call touches each.
std::shared_ptr<torch::nn::Module> named_units(const std::vector<std::string>& names,
                                               const DeviceMesh& mesh) {
  auto root = std::make_shared<torch::nn::Module>();
  for (const auto& name : names) fully_shard(root->register_module(name, make_linear(7, 7)), mesh);
  fully_shard(root, mesh);
  return root;
}

// On the meta device, for materialize().
torch::nn::Sequential without_values(const DeviceMesh& mesh) {
  auto layers = two_layers(9);
  put_on_meta(*layers);
  fully_shard(layers, mesh);
  return layers;
}

// A momentum for every parameter, of which none was gathered yet.
void give_state(torch::optim::SGD& optimizer, const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(torch::zeros_like(parameter.detach()));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
}

// What a rank has at hand when it makes a call.
struct Scene {
  explicit Scene(std::string saved, int64_t world = 2)
      : mesh(init_device_mesh(c10::kCPU, {world})),
        model(two_layers(4)),
        kept(two_layers(6)),
        plain(two_layers(3)),
        parallel(two_layers(8)),
        other(two_layers(5)),
        named(named_units({"applied", "visited", "ahead", "pointed"}, mesh)),
        meta(without_values(mesh)),
        rows(distribute_tensor(torch::ones({5, 3}), mesh, {Shard{0}})),
        folder(std::move(saved)) {
    for (auto& layer : *model) fully_shard(layer.ptr(), mesh);
    fully_shard(model, mesh);
    fully_shard(other, mesh);
    fully_shard(kept, mesh, {.reshard_after_forward = ReshardAfterForward(false)});
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(),
                                                    torch::optim::SGDOptions(0.1).momentum(0.9));
    give_state(*optimizer, model->parameters());
    model->forward(torch::ones({2, 4})).sum().backward();
    loss = kept->forward(torch::ones({2, 6})).sum();  // its next collective is a reduction
    if (world == 4) blocks = init_device_mesh(c10::kCPU, {2, 2, 1}, {"a", "b", "c"});
  }
  torch::nn::Module& unit(const std::string& name) const { return *named->named_children()[name]; }

  DeviceMesh mesh;
  std::optional<DeviceMesh> blocks;
  torch::nn::Sequential model, kept, plain, parallel, other;
  std::shared_ptr<torch::nn::Module> named;
  torch::nn::Sequential meta;
  std::unique_ptr<torch::optim::SGD> optimizer;
  DTensor rows;
  torch::Tensor loss;
  std::string folder;
};

struct Call {
  std::string name;
  std::string announced;  // part of what it is called in errors
  std::function<void(Scene&)> run;
};

std::vector<Call> calls_of_models() {
  return {
      {"touch", "all-gather of unit '0'",
       [](Scene& s) {
         s.model[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 4}));
       }},
      {"unshard", "all-gather of unit '(root)'",
       [](Scene& s) { get_fsdp_module(*s.other).unshard(); }},
      {"backward", "reduce-scatter of unit", [](Scene& s) { s.loss.backward(); }},
      {"SummonFullParams", "all-gather of unit '1'",
       [](Scene& s) { const SummonFullParams full(*s.model[1]); }},
      {"clip_grad_norm_", "clip_grad_norm_",
       [](Scene& s) { static_cast<void>(clip_grad_norm_(s.model->parameters(), 1)); }},
      {"GradScaler::step", "agreement of GradScaler",
       [](Scene& s) { GradScaler(s.mesh).step(*s.optimizer); }},
      {"apply_unsharded", "all-gather of unit 'applied'",
       [](Scene& s) { apply_unsharded(s.unit("applied"), [](torch::nn::Module&) {}); }},
      {"for_each_full_param", "all-gather of unit 'visited'",
       [](Scene& s) {
         for_each_full_param(s.unit("visited"), [](const std::string&, const at::Tensor&) {});
       }},
      {"unshard_async", "all-gather of unit 'ahead'",
       [](Scene& s) { get_fsdp_module(s.unit("ahead")).unshard_async().wait(); }},
      {"Unsharded", "all-gather of unit 'pointed'",
       [](Scene& s) {
         const Unsharded pointed(s.unit("pointed").as<torch::nn::Linear>()->weight);
       }},
      {"materialize", "all-gather of unit '(root)'",
       [](Scene& s) {
         materialize(*s.meta, [](torch::nn::Module& module) {
           const torch::NoGradGuard no_grad;
           for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(1);
         });
       }},
  };
}

std::vector<Call> calls_of_meshes() {
  return {
      {"barrier", "the barrier", [](Scene& s) { barrier(s.mesh); }},
      {"all_reduce", "all_reduce (sum)",
       [](Scene& s) { static_cast<void>(all_reduce(1.5, s.mesh)); }},
      {"init_device_mesh", "init_device_mesh of shape [2, 1]",
       [](Scene&) {
         static_cast<void>(init_device_mesh(c10::kCPU, {2, 1}));
       }},
      {"full_tensor", "redistribute of [5, 3]",
       [](Scene& s) { static_cast<void>(s.rows.full_tensor()); }},
      {"redistribute", "redistribute of [5, 3]",
       [](Scene& s) { static_cast<void>(s.rows.redistribute({Shard{1}})); }},
      {"norm", "for aten::norm", [](Scene& s) { static_cast<void>(s.rows.norm().item<double>()); }},
      {"equal", "for aten::equal", [](Scene& s) { static_cast<void>(s.rows.equal(s.rows)); }},
      {"side_group", "making of the group for tests",
       [](Scene& s) { static_cast<void>(s.mesh.side_group(0, "tests")); }},
      {"from_local", "agreement of from_local",
       [](Scene& s) {
         static_cast<void>(from_local(torch::ones({2, 2}), s.mesh, {Shard{0}}, {.check = true}));
       }},
      {"broadcast_states", "agreement of broadcast_states",
       [](Scene& s) { broadcast_states(*s.plain, s.mesh); }},
      {"parallelize_module", "of parallelize_module",
       [](Scene& s) {
         parallelize_module(s.parallel, s.mesh, {{"0", ColwiseParallel()}});
       }},
  };
}

std::vector<Call> calls_of_checkpoints() {
  return {
      {"save", "save /", [](Scene& s) { save({.model = s.model}, s.folder + "/new"); }},
      {"async_save", "save /",
       [](Scene& s) { async_save({.model = s.model}, s.folder + "/ahead").wait(); }},
      {"load", "the load /",
       [](Scene& s) { static_cast<void>(load({.model = s.model}, s.folder + "/saved")); }},
      {"get_model_state_dict", "all-gather of '0.weight' to '0.bias'",
       [](Scene& s) {
         static_cast<void>(get_model_state_dict(*s.model, {.full_state_dict = true}));
       }},
      {"set_model_state_dict", "set_model_state_dict",
       [](Scene& s) {
         static_cast<void>(set_model_state_dict(
             *s.model, StateDict(), {.full_state_dict = true, .broadcast_from_rank0 = true}));
       }},
      {"get_optimizer_state_dict", "all-gather of '0.weight.momentum_buffer'",
       [](Scene& s) {
         static_cast<void>(
             get_optimizer_state_dict(*s.model, *s.optimizer, {.full_state_dict = true}));
       }},
      {"set_optimizer_state_dict", "set_optimizer_state_dict",
       [](Scene& s) {
         static_cast<void>(
             set_optimizer_state_dict(*s.model, *s.optimizer, OptimizerStateDict(),
                                      {.full_state_dict = true, .broadcast_from_rank0 = true}));
       }},
  };
}

std::vector<Call> every_call() {
  auto calls = calls_of_models();
  for (const auto& more : {calls_of_meshes(), calls_of_checkpoints()})
    calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

class EveryPair : public ::testing::Test {
 protected:
  void SetUp() override {
    internal::set_wait_patience(Milliseconds(100), Milliseconds(20));
    run_ranks(2, [&](int64_t) {
      Scene scene(folder_.path());
      save({.model = scene.model}, folder_.path() + "/saved");
    });
  }
  void TearDown() override { internal::set_wait_patience(Milliseconds(400), Milliseconds(100)); }

  const WithEnvironment over_gloo_{"FSDP_PEER_MEMORY", "off"};  // where a touch is collective
  TemporaryFolder folder_{memory_folder()};
};

TEST_F(EveryPair, OfCollectiveCallsOnTwoRanksIsAnErrorOnBothThatNamesBoth) {
  const auto calls = every_call();
  const size_t stride = is_night() ? 1 : 4;  // before a landing one pair of four, with every call
  for (size_t first = 0; first < calls.size(); ++first) {
    for (size_t second = first + 1; second < calls.size(); second += stride) {
      const Call* const made[] = {&calls[first], &calls[second]};
      run_ranks(2, [&](int64_t rank) {
        Scene scene(folder_.path());
        const auto begin = std::chrono::steady_clock::now();
        const auto error = message_of<c10::Error>([&] { made[rank]->run(scene); });
        const auto pair = made[0]->name + " against " + made[1]->name;
        for (const auto* call : made)
          EXPECT_THAT(error, HasSubstr(call->announced)) << pair << ", rank " << rank;
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5)) << pair;
      });
    }
  }
}

// Among three a reduction goes on in a thread of its own, for which backward waits.
TEST_F(EveryPair, ATouchOnOneRankAgainstTheBackwardOfTwoIsAnErrorOnAll) {
  run_ranks(3, [&](int64_t rank) {
    Scene scene(folder_.path(), 3);
    const auto calls = every_call();
    const auto& touch = calls[0];
    const auto& backward = calls[2];
    const auto error = message_of<c10::Error>([&] { (rank == 0 ? touch : backward).run(scene); });
    for (const auto& call : {touch, backward})
      EXPECT_THAT(error, HasSubstr(call.announced)) << "rank " << rank;
  });
}

// A mesh, or neighbours, that are made of some ranks of another one.
TEST_F(EveryPair, OfMeshesThatAreMadeAndATouchIsAnErrorOnBothThatNamesBoth) {
  const std::vector<Call> calls = {
      {"touch", "all-gather of unit '0'", every_call()[0].run},
      {"flatten", "flatten to 'b_c'",
       [](Scene& s) {
         static_cast<void>(s.blocks->flatten({"b", "c"}));
       }},
      {"set_reshard_after_forward", "2 neighbours",
       [](Scene& s) {
         get_fsdp_module(*s.model).set_reshard_after_forward(ReshardAfterForward::to_world(2));
       }},
  };
  for (size_t first = 0; first < calls.size(); ++first) {
    for (size_t second = first + 1; second < calls.size(); ++second) {
      const Call* const made[] = {&calls[first], &calls[second]};
      run_ranks(4, [&](int64_t rank) {
        Scene scene(folder_.path(), 4);
        const auto begin = std::chrono::steady_clock::now();
        const auto error = message_of<c10::Error>([&] { made[rank % 2]->run(scene); });
        for (const auto* call : made)
          EXPECT_THAT(error, HasSubstr(call->announced)) << "rank " << rank;
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
      });
    }
  }
}

TEST_F(EveryPair, OfOneCallWithTensorsOfOneSizeAndOtherShapesIsAnErrorOnBoth) {
  run_ranks(2, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto wide = distribute_tensor(torch::ones({2, 8}), mesh, {Shard{0}});
    const auto square = distribute_tensor(torch::ones({4, 4}), mesh, {Shard{0}});
    const auto error = message_of<c10::Error>(
        [&] { static_cast<void>((rank == 0 ? wide : square).full_tensor()); });
    EXPECT_THAT(error, ::testing::AllOf(HasSubstr("redistribute of [2, 8]"),
                                        HasSubstr("redistribute of [4, 4]")));
  });
}

// Two models of one class, a step taken.
struct Twins {
  explicit Twins(const DeviceMesh& mesh) {
    for (auto model : {first, second}) {
      fully_shard(model, mesh);
      model->forward(torch::ones({2, 4})).sum().backward();
    }
  }
  torch::nn::Sequential first = two_layers(4), second = two_layers(4);
};

// A DTensor of one model on rank 0, another of its shape on rank 1.
struct OneEach {
  std::function<at::Tensor(const Twins&, int64_t rank)> own;
  std::string name_on_0, name_on_1;
};

std::vector<OneEach> dtensors_of_one_shape() {
  return {{[](const Twins& t, int64_t rank) { return t.first->parameters()[2 * rank]; },
           "(parameter '0.weight' of unit '(root)' (number 0)",
           "(parameter '1.weight' of unit '(root)' (number 0)"},
          {[](const Twins& t, int64_t rank) {
             return (rank == 0 ? t.first : t.second)->parameters()[0];
           },
           "(parameter '0.weight' of unit '(root)' (number 0)",
           "(parameter '0.weight' of unit '(root)' (number 1)"},
          {[](const Twins& t, int64_t rank) { return t.first->parameters()[1 + 2 * rank].grad(); },
           "(the gradient of parameter '0.bias'", "(the gradient of parameter '1.bias'"},
          {[](const Twins& t, int64_t rank) {
             const auto bias = t.first->parameters()[1];
             return rank == 0 ? bias : bias.grad();
           },
           "(parameter '0.bias'", "(the gradient of parameter '0.bias'"}};
}

// Made whole in another order on each rank, as a loop over Optimizer::state() may do it,
// whose order is that of addresses.
TEST_F(EveryPair, OfOneCallWithDTensorsOfOneShapeIsAnErrorOnBothThatNamesBoth) {
  using Read = std::function<void(const at::Tensor&)>;
  const std::vector<Read> reads = {
      [](const at::Tensor& t) { static_cast<void>(DTensor(t).full_tensor()); },
      [](const at::Tensor& t) { static_cast<void>(DTensor(t.view({-1})).full_tensor()); },
      [](const at::Tensor& t) { static_cast<void>(DTensor(t).redistribute({Replicate()})); }};
  for (const auto& [own, name_on_0, name_on_1] : dtensors_of_one_shape()) {
    for (const auto& read : reads) {
      run_ranks(2, [&](int64_t rank) {
        const Twins twins(init_device_mesh(c10::kCPU, {2}));
        const torch::NoGradGuard no_grad;
        EXPECT_THAT(message_of<c10::Error>([&] { read(own(twins, rank).detach()); }),
                    ::testing::AllOf(HasSubstr(name_on_0), HasSubstr(name_on_1)));
      });
    }
  }
}

TEST_F(EveryPair, OfOneCallWithTensorParallelParametersOfOneShapeIsAnErrorOnBoth) {
  run_ranks(2, [&](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    auto model = two_layers(4);
    parallelize_module(model, mesh, {{"*", ColwiseParallel()}});
    const auto weight = model->parameters()[2 * rank].detach();
    EXPECT_THAT(message_of<c10::Error>([&] { static_cast<void>(DTensor(weight).full_tensor()); }),
                ::testing::AllOf(HasSubstr("(parameter '0.weight' of tensor-parallel"),
                                 HasSubstr("(parameter '1.weight' of tensor-parallel")));
  });
}

TEST_F(EveryPair, RanksThatClipDifferentModelsAreToldWhatEachClips) {
  run_ranks(2, [&](int64_t rank) {
    Scene scene(folder_.path());
    const auto parameters = scene.model->parameters();
    const std::vector<torch::Tensor> first(parameters.begin(), parameters.begin() + 2);
    const auto before = internal::local_of(parameters[0].grad()).clone();
    for (const double max_norm : {1e-3, 1e-4}) {
      const auto error = message_of<c10::Error>(
          [&] { static_cast<void>(clip_grad_norm_(rank == 0 ? parameters : first, max_norm)); });
      EXPECT_THAT(error, ::testing::AllOf(HasSubstr("rank 0 has 4 parameters of 40 elements"),
                                          HasSubstr("rank 1 has 2 parameters of 20 elements")));
    }
    EXPECT_THAT(message_of<c10::Error>([&] {
                  static_cast<void>(clip_grad_norm_(parameters, 1 + static_cast<double>(rank)));
                }),
                HasSubstr("max_norm"));
    // Nothing was scaled, and what is right still is.
    EXPECT_TRUE(torch::equal(internal::local_of(parameters[0].grad()), before));
    EXPECT_NO_THROW(static_cast<void>(clip_grad_norm_(parameters, 1)));
  });
}

}  // namespace
}  // namespace fsdp::testing
