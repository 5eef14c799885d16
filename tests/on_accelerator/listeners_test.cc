// Listeners of a thread hear of the backwards that it starts, which run on threads of
// autograd's on a device: what they hear of on the CPU.
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/units/unit_events.h"
#include "tensor_parallel/communication_log.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int64_t kListeningRanks = 2;

// What rank 0 heard, on a mesh of the CPU or of devices.
using Heard = std::vector<std::string>;
using Listening = std::function<Heard(const DeviceMesh& mesh)>;

Heard heard_on(c10::DeviceType type, const Listening& listening) {
  Heard heard;
  const auto body = [&](int64_t rank) {
    auto own = listening(init_device_mesh(type, {kListeningRanks}));
    if (rank == 0) heard = std::move(own);
  };
  if (type == c10::kCPU) {
    run_ranks(kListeningRanks, body);
  } else {
    simulated::run_in({}, [&] {
      simulated::run_ranks_on_devices(kListeningRanks, std::make_shared<simulated::World>(), body);
    });
  }
  return heard;
}

void expect_the_same(const Listening& listening) {
  simulated::install();
  const auto expected = heard_on(c10::kCPU, listening);
  EXPECT_FALSE(expected.empty());
  EXPECT_EQ(heard_on(simulated::kDeviceType, listening), expected);
}

TEST(ListenersOnDevices, CommunicationLogsHaveTheCollectivesOfBackward) {
  expect_the_same([](const DeviceMesh& mesh) {
    const auto full = torch::arange(12, torch::kFloat).view({4, 3}).to(local_device(mesh));
    auto weight = distribute_tensor(full, mesh, {Shard{0}});
    weight.requires_grad_();
    const CommunicationLog log;
    weight.redistribute({Replicate{}}).pow(2).sum().backward();
    Heard heard;
    for (const auto& each : log.entries()) heard.push_back(to_string(each));
    return heard;
  });
}

class GradientLog final : public internal::UnitObserver {
 public:
  Heard heard;

  void touched(const internal::Unit&, internal::Pass) override {}
  void gradient_arrived(const internal::Unit&) override { heard.emplace_back("gradient"); }
  void unshard_issued(const internal::Unit&) override {}
  void unsharded_explicitly(const internal::Unit&) override {}
  void resharded_explicitly(const internal::Unit&) override {}
  void entry_written(const internal::Unit&) override {}
  void member_written(const internal::Unit&) override {}
  void backward_ended() override { heard.emplace_back("end"); }
  void backward_aborted() override { heard.emplace_back("abort"); }
};

TEST(ListenersOnDevices, ObserversOfUnitsHearOfGradientsAndTheEndOfBackward) {
  expect_the_same([](const DeviceMesh& mesh) {
    torch::nn::Linear layer(4, 4);
    for (auto& parameter : layer->parameters()) parameter.detach().fill_(0.5);
    fully_shard(layer, mesh);
    GradientLog log;
    const internal::ObserveUnits observe(log);
    layer(torch::ones({2, 4}, local_device(mesh))).sum().backward();
    return log.heard;
  });
}

}  // namespace
}  // namespace fsdp::testing
