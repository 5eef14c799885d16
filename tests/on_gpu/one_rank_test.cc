// A world of one rank over NCCL: what is moved to the device, offloaded, clipped and
// drawn there.
#include "device_mesh/process_group.h"
#include "dtensor/manual_seed.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/support/pair.h"
#include "tests/on_gpu/gpu.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

// A world of one rank, whose group is of NCCL.
void run_over_nccl(const std::function<void()>& body) {
  run_ranks_over("nccl", 1, [&body](int64_t) { body(); });
}

TEST(OneRankOnCuda, AModuleOnTheCpuMovesToTheCurrentDeviceInPlace) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    const auto device = local_device(mesh);
    auto layer = make_linear(4, 4), plain = make_linear(4, 4);
    const auto weight = layer->weight, scale = layer->register_buffer("scale", torch::ones({2}));
    fully_shard(layer, mesh);
    EXPECT_TRUE(layer->weight.is_same(weight));
    EXPECT_EQ(weight.device(), device);
    EXPECT_EQ(DTensor(layer->parameters()[0]).to_local().device(), device);
    EXPECT_EQ(scale.device(), device);
    EXPECT_TRUE(layer->named_buffers()["scale"].is_same(scale));
    EXPECT_TRUE(full_value(layer->parameters()[0]).cpu().equal(plain->weight));
  });
}

TEST(OneRankOnCuda, ASharedBufferMovesOnceAndStaysShared) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    Pair model;
    const auto scale = model->first->register_buffer("scale", torch::ones({2}));
    model->second->register_buffer("scale", scale);
    fully_shard(model, mesh);
    EXPECT_EQ(scale.device(), local_device(mesh));
    EXPECT_TRUE(model->first->named_buffers()["scale"].is_same(scale));
    EXPECT_TRUE(model->second->named_buffers()["scale"].is_same(scale));
  });
}

TEST(OneRankOnCuda, IgnoredParametersStayWhereTheyAre) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    Pair model;
    fully_shard(model, mesh, {.ignored_params = {model->first->weight}});
    EXPECT_TRUE(model->first->weight.is_cpu());
    EXPECT_EQ(model->first->bias.device(), local_device(mesh));
  });
}

// With a dtype of their own, members of one rank are gathered, too. The optimizer's
// stream is busy when the step is issued, so a gather that did not wait would find old
// values.
TEST(OneRankOnCuda, TheNextGatherWaitsForTheOptimizersEventOnTheDevice) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    const auto device = local_device(mesh);
    auto layer = make_linear(4, 4);
    auto unit = fully_shard(layer, mesh, {.mp_policy = {.param_dtype = torch::kBFloat16}});
    const torch::NoGradGuard no_grad;
    const auto x = torch::ones({1, 4}, device);
    auto busy = torch::full({8192, 8192}, 1e-4, device);
    layer(x);
    const c10::impl::VirtualGuardImpl guard(torch::kCUDA);
    const auto computes = guard.getStream(device);
    guard.synchronizeStream(computes);
    const auto optimizes = guard.getNewStream(device);
    const auto event = std::make_shared<c10::Event>(torch::kCUDA);
    guard.exchangeStream(optimizes);
    for (int i = 0; i < 50; ++i) busy = busy.mm(busy);
    for (auto& parameter : layer->parameters()) parameter.fill_(2);
    event->record(optimizes);
    guard.exchangeStream(computes);
    unit.set_post_optim_event(event);
    const auto y = layer(x);
    EXPECT_FALSE(guard.queryStream(optimizes)) << "the host waited";
    EXPECT_TRUE(y.cpu().to(torch::kFloat).equal(torch::full({1, 4}, 10.0F)));
    guard.synchronizeStream(optimizes);
  });
}

TEST(OneRankOnCuda, AModuleThatIsThereIsNotMoved) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    auto layer = make_linear(4, 4);
    const auto scale = layer->register_buffer("scale", torch::ones({2}));
    layer->to(torch::kCUDA);
    const auto* const memory = scale.const_data_ptr();
    fully_shard(layer, init_device_mesh(torch::kCUDA, {1}));
    EXPECT_EQ(scale.const_data_ptr(), memory);
  });
}

TEST(OneRankOnCuda, ForwardBringsInputsToTheDevice) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    torch::nn::Embedding table(4, 4);
    set_start_values(*table);
    const auto expected = table(torch::arange(4)).detach();
    fully_shard(table, mesh);
    const auto output = forward(table, torch::arange(4));
    EXPECT_EQ(output.device(), local_device(mesh));
    EXPECT_TRUE(output.cpu().equal(expected));
  });
}

TEST(OneRankOnCuda, ParametersOnTwoDevicesAreRefusedByName) {
  SKIP_UNLESS_CUDA_DEVICES(2);
  run_over_nccl([] {
    auto layer = make_linear(4, 4);
    layer->weight.set_data(layer->weight.to(torch::Device(torch::kCUDA, 0)));
    layer->bias.set_data(layer->bias.to(torch::Device(torch::kCUDA, 1)));
    expect_error<c10::ValueError>(
        [&] { fully_shard(layer, init_device_mesh(torch::kCUDA, {1})); },
        AllOf(HasSubstr("'bias'"), HasSubstr("cuda:1"), HasSubstr("one device")));
  });
}

TEST(OneRankOnCuda, TheDefaultMeshIsOfThatDevice) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] { EXPECT_EQ(default_mesh().device_type(), torch::kCUDA); });
}

const FullyShardOptions kOffloaded{.offload_policy = {.offload_to_cpu = true}};

TEST(OneRankOnCuda, OffloadedShardsGradientsAndStateAreOnTheCpu) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh, kOffloaded);
    torch::optim::AdamW optimizer(layer->parameters(), 0.1);
    const auto entry = layer->parameters()[0];
    EXPECT_TRUE(DTensor(entry).to_local().is_pinned());
    layer(torch::ones({2, 4}, local_device(mesh))).sum().backward();
    EXPECT_EQ(layer->weight.device(), local_device(mesh));
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    EXPECT_TRUE(DTensor(entry.grad()).to_local().is_cpu());
    optimizer.step();
    const auto& state = *optimizer.state().at(entry.unsafeGetTensorImpl());
    EXPECT_TRUE(static_cast<const torch::optim::AdamWParamState&>(state).exp_avg().is_cpu());
  });
}

TEST(OneRankOnCuda, OffloadedGradientsOfTwoBackwardsAddUp) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh, kOffloaded);
    for (int i = 0; i < 2; ++i) layer(torch::ones({2, 4}, local_device(mesh))).sum().backward();
    EXPECT_TRUE(full_gradient(layer->parameters()[1]).equal(torch::full({4}, 4.0)));
  });
}

TEST(OneRankOnCuda, OffloadedParametersThatAreMovedAreNamed) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    auto layer = make_linear(4, 4);
    fully_shard(layer, init_device_mesh(torch::kCUDA, {1}), kOffloaded);
    expect_error<c10::ValueError>([&] { layer->to(torch::kCUDA); },
                                  AllOf(HasSubstr("'weight'"), HasSubstr("device")));
  });
}

TEST(OneRankOnCuda, ParametersOnTheCpuMoveToThoseOfTheirUnitOnTheDevice) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    Pair model;
    model->first->to(torch::kCUDA);
    fully_shard(model, mesh);
    for (const auto& parameter : model->parameters())
      EXPECT_EQ(DTensor(parameter).to_local().device(), local_device(mesh));
  });
}

TEST(OneRankOnCuda, SixUnitsNeedTheMemoryOfTwo) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    constexpr int64_t kWidth = 1024, kUnitBytes = kWidth * (kWidth + 1) * 4;
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    torch::nn::Sequential model;
    for (int i = 0; i < 6; ++i) model->push_back(Linear(kWidth, kWidth));
    for (const auto& layer : model->children()) fully_shard(*layer, mesh);
    fully_shard(model, mesh);
    const auto x = torch::ones({1, kWidth}, local_device(mesh));
    const torch::NoGradGuard no_grad;
    model->forward(x);
    auto* const allocator = c10::getDeviceAllocator(torch::kCUDA);
    const auto of_all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto bytes = [&] {
      return allocator->getDeviceStats(local_device(mesh).index()).allocated_bytes[of_all];
    };
    allocator->resetPeakStats(local_device(mesh).index());
    const auto before = bytes().current;
    model->forward(x);
    EXPECT_LE(bytes().peak - before, 2 * 2 * kUnitBytes);  // each as rows and as parameters
  });
}

TEST(OneRankOnCuda, ClippingDoesNotMakeTheHostWait) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    const auto backward_and_clip = [&] {
      layer(torch::ones({2, 4}, local_device(mesh))).sum().backward();
      clip_grad_norm_(layer->parameters(), 1.0);
    };
    backward_and_clip();  // what is done once may wait
    const c10::impl::VirtualGuardImpl device(torch::kCUDA);
    auto busy = torch::ones({8192, 8192}, local_device(mesh));
    for (int i = 0; i < 50; ++i) busy = busy.mm(busy);
    backward_and_clip();
    EXPECT_FALSE(device.queryStream(device.getStream(local_device(mesh))));
  });
}

// Two steps beside a plain model, then a copy on the CPU.
void expect_training_of_a_plain_model(const DeviceMesh& mesh,
                                      const FullyShardOptions& options = {}) {
  const auto device = local_device(mesh);
  Linear plain = make_linear(8, 8), layer = make_linear(8, 8);
  plain->to(device);
  layer->to(device);
  fully_shard(layer, mesh, options);
  torch::optim::AdamW plain_optimizer(plain->parameters(), 0.1);
  torch::optim::AdamW optimizer(layer->parameters(), 0.1);
  const auto x = torch::linspace(-1, 1, 16, device).view({2, 8});
  for (int step = 0; step < 2; ++step) {
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
    plain(x).pow(2).sum().backward();
    layer(x).pow(2).sum().backward();
    plain_optimizer.step();
    optimizer.step();
  }
  EXPECT_TRUE(torch::allclose(full_value(layer->parameters()[0]).to(device), plain->weight));
  const SummonFullParams full(layer,
                              {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
  EXPECT_TRUE(layer->parameters()[0].is_cpu());
}

TEST(OneRankOnCuda, OneRankTrainsAsThePlainModel) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    expect_training_of_a_plain_model(mesh);
    expect_training_of_a_plain_model(mesh, kOffloaded);
  });
}

// The statistics of a LayerNorm are float there, beside weights in 16 bits.
TEST(OneRankOnCuda, ALayerNormInHalfPrecisionTrains) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    fully_shard(norm, mesh, {.mp_policy = {.param_dtype = torch::kBFloat16}});
    torch::nn::LayerNorm plain(torch::nn::LayerNormOptions({8}));
    plain->to(local_device(mesh), torch::kBFloat16);
    const auto x = torch::linspace(-1, 1, 16, local_device(mesh)).view({2, 8});
    norm(x).pow(2).sum().backward();
    plain(x.to(torch::kBFloat16)).pow(2).sum().backward();
    EXPECT_TRUE(full_gradient(norm->parameters()[0]).equal(plain->weight.grad().to(at::kFloat)));
  });
}

// Dropout's kernel takes no generator; a region that runs again does so on a thread of
// autograd's.
TEST(OneRankOnCuda, RandomNumbersUnderManualSeedAreThoseOfASeededDevice) {
  SKIP_UNLESS_CUDA_DEVICES(1);
  run_over_nccl([] {
    const auto mesh = init_device_mesh(torch::kCUDA, {1});
    const auto on_device = torch::TensorOptions(torch::kCUDA);
    const auto draw = [&] {
      const auto x = torch::ones({40, 50}, on_device).requires_grad_();
      const auto y = checkpoint(
          [](const torch::Tensor& in) {
            return torch::dropout(in, 0.5, true) * torch::rand_like(in);
          },
          x);
      y.sum().backward();
      return std::vector<torch::Tensor>{y.detach(), x.grad(), torch::rand({20}, on_device),
                                        torch::rand({20})};
    };
    torch::manual_seed(3);
    const auto wanted = draw();
    const auto state = at::globalContext().defaultGenerator(torch::kCUDA).get_state();
    manual_seed(3, mesh);
    const auto found = draw();
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(found[i].equal(wanted[i])) << i;
    EXPECT_TRUE(at::globalContext().defaultGenerator(torch::kCUDA).get_state().equal(state));
  });
}

}  // namespace
}  // namespace fsdp::testing
