// Single tensors on a device that is neither the CPU nor CUDA: whose data they take, and
// what random operators draw from.
#include "device_mesh/device_mesh.h"
#include "device_mesh/internal/accelerator.h"
#include "dtensor/manual_seed.h"
#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/errors.h"
#include "tests/training_programs/batch_norm.h"

#include <ATen/ops/native_dropout.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <functional>
#include <memory>
#include <tuple>

namespace fsdp::testing {
namespace {

using simulated::kDeviceType;
using simulated::World;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

class TensorsOnAccelerator : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { simulated::install(); }

  static void on_rank(const std::function<void(const DeviceMesh& mesh)>& body) {
    simulated::run_in({.schedule = simulated::kLate}, [&] {
      simulated::run_ranks_on_devices(2, std::make_shared<World>(),
                                      [&](int64_t) { body(init_device_mesh(kDeviceType, {2})); });
    });
  }
};

TEST_F(TensorsOnAccelerator, HaveDispatchKeysOfTheirs) {
  EXPECT_THAT(internal::accelerator_keys(c10::DispatchKey::Dense),
              AllOf(Contains(c10::DispatchKey::CUDA), Contains(c10::DispatchKey::PrivateUse1),
                    Not(Contains(c10::DispatchKey::CPU))));
  EXPECT_THAT(internal::accelerator_keys(c10::DispatchKey::AutogradFunctionality),
              AllOf(Contains(c10::DispatchKey::AutogradCUDA),
                    Contains(c10::DispatchKey::AutogradPrivateUse1)));
}

TEST_F(TensorsOnAccelerator, DoNotTakeTheDataOfADTensor) {
  on_rank([](const DeviceMesh& mesh) {
    torch::nn::Linear layer(4, 4);
    fully_shard(*layer, mesh);
    auto plain = torch::zeros({4, 4}, local_device(mesh));
    EXPECT_THAT(
        message_of<c10::ValueError>([&] { plain.set_data(layer->parameters()[0].detach()); }),
        HasSubstr("set_data on a plain tensor of shape [4, 4] from a DTensor"));
  });
}

// native_dropout takes no generator, so the thread's is lent to it.
TEST_F(TensorsOnAccelerator, AreDrawnFromTheThreadsGenerator) {
  on_rank([](const DeviceMesh& mesh) {
    const auto device = local_device(mesh);
    const auto draw = [&] {
      return std::get<0>(at::native_dropout(torch::ones({64}, device), 0.5, true)).cpu();
    };
    manual_seed(5, mesh);
    const auto first = draw(), second = draw();
    manual_seed(5, mesh);
    EXPECT_TRUE(draw().equal(first));
    EXPECT_TRUE(draw().equal(second));
    EXPECT_FALSE(first.equal(second));
  });
}

TEST_F(TensorsOnAccelerator, BatchNormOfACutBatchHasTheBitsOfCpu) {
  const auto expected = run_on_cpu(normalize_a_cut_batch, 2);
  const auto run = run_on_devices(normalize_a_cut_batch, 2, simulated::kLate);
  EXPECT_EQ(run.error, "");
  EXPECT_EQ(differing_values(run, expected), "");
}

}  // namespace
}  // namespace fsdp::testing
