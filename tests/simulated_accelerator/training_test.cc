// Models that train on the device as they do on CPU, bit for bit, in every schedule.
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/move_module.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/small_models.h"

#include <ATen/DeviceAccelerator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <stdexcept>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

using ::testing::IsEmpty;

void expect_equal(const Results& actual, const Results& expected, const Schedule& schedule) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(actual[i].equal(expected[i])) << "result " << i << ", " << to_string(schedule);
  }
}

// Counters after each step.
class StepCounters {
 public:
  void note(int) { counters_.push_back(counters_now(kDevice)); }
  int64_t launches_of_last_step() const {
    return last().launches.total - before_last().launches.total;
  }
  int64_t host_syncs_of_last_step() const {
    return last().host_syncs.total - before_last().host_syncs.total;
  }

 private:
  const Counters& last() const { return counters_.back(); }
  const Counters& before_last() const { return counters_.at(counters_.size() - 2); }

  std::vector<Counters> counters_;
};

// What CPU computes is computed with as many threads as on the device.
class Training : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { install(); }
};

// Growth of the numbers of launches is to be seen.
constexpr int64_t kLaunchesOfPlainMlp = 39;
constexpr int64_t kLaunchesOfTokenModel = 119;

void expect_clean(const Report& report, const Schedule& schedule) {
  EXPECT_THAT(report.unordered, IsEmpty()) << to_string(schedule);
  EXPECT_THAT(report.failures, IsEmpty()) << to_string(schedule);
  EXPECT_THAT(report.devices[0].run_on_true_values.by_name, IsEmpty()) << to_string(schedule);
}

TEST_F(Training, OfAPlainMlpHasTheBitsOfCpuAndNoHostSync) {
  const auto expected = train_plain_mlp(c10::kCPU, {});
  for (const auto& schedule : schedules(1)) {
    StepCounters steps;
    Results results;
    const auto report = run_in({.schedule = schedule}, [&] {
      results = train_plain_mlp(kDevice, [&](int step) { steps.note(step); });
    });
    expect_equal(results, expected, schedule);
    expect_clean(report, schedule);
    EXPECT_EQ(steps.host_syncs_of_last_step(), 0) << to_string(schedule);
    EXPECT_EQ(steps.launches_of_last_step(), kLaunchesOfPlainMlp) << to_string(schedule);
    EXPECT_EQ(report.devices[0].record_streams, 0) << to_string(schedule);
  }
}

TEST_F(Training, WithEmbeddingNormDropoutAndAdamWHasTheBitsOfCpuAndNoHostSync) {
  const auto expected = train_token_model(c10::kCPU, {}, {});
  for (const auto& schedule : schedules(1)) {
    StepCounters steps;
    Results results;
    const auto report = run_in({.schedule = schedule}, [&] {
      results = train_token_model(kDevice, {}, [&](int step) { steps.note(step); });
    });
    expect_equal(results, expected, schedule);
    expect_clean(report, schedule);
    EXPECT_EQ(steps.host_syncs_of_last_step(), 0) << to_string(schedule);
    EXPECT_EQ(steps.launches_of_last_step(), kLaunchesOfTokenModel) << to_string(schedule);
    EXPECT_GT(report.devices[0].reused_blocks, 0) << to_string(schedule);
    // Backward runs on autograd's thread for the device.
    EXPECT_EQ(report.devices[0].launching_threads.size(), 2) << to_string(schedule);
  }
}

TEST_F(Training, WithABranchOnASecondStreamHasTheBitsOfCpu) {
  const auto expected = train_token_model(c10::kCPU, {}, {});
  for (const auto& schedule : schedules(2)) {
    Results results;
    const auto report = run_in({.schedule = schedule}, [&] {
      results = train_token_model(kDevice, open_stream(kDevice), {});
    });
    expect_equal(results, expected, schedule);
    expect_clean(report, schedule);
    EXPECT_GT(report.devices[0].record_streams, 0) << to_string(schedule);
  }
}

struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("fails on purpose");
  }
};

// A backward that throws half-way, and at once a good step, many times.
Results train_between_failures(c10::Device device) {
  torch::manual_seed(1);
  PlainMlp model;
  move_to(model, device);
  torch::optim::SGD optimizer(model.parameters(), 0.01);
  const auto x = torch::linspace(-1, 1, 6 * 12).view({6, 12}).to(device);
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto hidden = model.second(Fails::apply(torch::relu(model.first(x))));
    EXPECT_THROW(model.last(hidden).sum().backward(), std::runtime_error);
    optimizer.zero_grad();
    model.forward(x).pow(2).sum().backward();
    optimizer.step();
  }
  Results results;
  for (const auto& parameter : model.parameters()) results.push_back(parameter.detach().cpu());
  return results;
}

TEST_F(Training, GoesOnAfterABackwardThatThrows) {
  const auto expected = train_between_failures(c10::kCPU);
  for (const auto& schedule : schedules(1)) {
    Results results;
    const auto report =
        run_in({.schedule = schedule}, [&] { results = train_between_failures(kDevice); });
    expect_equal(results, expected, schedule);
    expect_clean(report, schedule);
  }
}

TEST(Device, IsTheAcceleratorOfTheProcess) {
  run_in({}, [] {
    EXPECT_EQ(at::accelerator::getAccelerator(), kDeviceType);
    EXPECT_EQ(at::accelerator::deviceCount(), kDevices);
  });
}

}  // namespace
}  // namespace fsdp::testing::simulated
