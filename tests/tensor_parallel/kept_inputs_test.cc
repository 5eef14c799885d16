// What operators with a style keep of their input: never the values of another batch.
#include "tensor_parallel/communication_log.h"
#include "tests/support/worlds.h"
#include "tests/tensor_parallel/beside_one_device.h"

#include <functional>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

class KeptInputs : public Worlds {
 protected:
  // What `body` gives with a Linear on one device, and with one that is cut.
  void expect_same(const ParallelStyle& style,
                   const std::function<at::Tensor(Linear&)>& body) const {
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const auto make = [] { return Linear(6, 6); };
      auto plain = drawn(1, make), parallel = drawn(1, make);
      parallelize_module(parallel, mesh, {{"", style}});
      const at::Tensor wanted = body(plain), found = full_tensor(body(parallel));
      EXPECT_LE(distance(found.detach(), wanted.detach()), kClose);
    });
  }
};

// A buffer that is written in a loop, where nothing counts writes.
TEST_P(KeptInputs, AreNoneInInferenceMode) {
  for (const ParallelStyle& style : {ParallelStyle(RowwiseParallel{}), {ColwiseParallel{}}}) {
    expect_same(style, [](Linear& linear) {
      const torch::InferenceMode inference;
      const at::Tensor h = torch::ones({2, 6}, torch::kFloat64);
      for (int step = 0; step < 3; ++step) h.copy_(full_tensor(linear->forward(h)).tanh());
      return h;
    });
  }
}

// Nor of DTensors there, such as the cut output of another operator.
TEST_P(KeptInputs, AreNoneOfDTensorsInInferenceMode) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto make = [] { return torch::nn::Sequential(Linear(6, 6), Linear(6, 6)); };
    auto plain = drawn(1, make), parallel = drawn(1, make);
    parallelize_module(parallel, mesh, {{"*", ColwiseParallel{}}});
    const torch::InferenceMode inference;
    const auto run = [](torch::nn::Sequential& model) {
      at::Tensor h = model[0]->as<Linear>()->forward(torch::ones({2, 6}, torch::kFloat64));
      std::vector<at::Tensor> results;
      for (int step = 0; step < 3; ++step) {
        results.push_back(full_tensor(model[1]->as<Linear>()->forward(h)));
        h.mul_(2);
      }
      return torch::stack(results);
    };
    EXPECT_LE(distance(run(parallel), run(plain)), kClose);
  });
}

using Fill = std::function<void(at::Tensor& buffer, double value)>;

void by_pointer(at::Tensor& buffer, double value) {
  std::fill_n(buffer.mutable_data_ptr<double>(), buffer.numel(), value);
}
void by_data(at::Tensor& buffer, double value) { buffer.data().fill_(value); }
void by_set_data(at::Tensor& buffer, double value) {
  buffer.set_data(torch::full({2, 6}, value, torch::kFloat64));
}

// One buffer for all batches, filled behind autograd's back.
TEST_P(KeptInputs, AreNotThoseOfTheBatchBefore) {
  for (const Fill& fill : {Fill(by_pointer), Fill(by_data), Fill(by_set_data)}) {
    for (const bool records : {false, true}) {
      for (const ParallelStyle& style : {ParallelStyle(RowwiseParallel{}), {ColwiseParallel{}}}) {
        expect_same(style, [&](Linear& linear) {
          at::Tensor buffer = torch::zeros({2, 6}, torch::kFloat64);
          if (records) buffer.requires_grad_();
          std::vector<at::Tensor> results;
          for (const double value : {1.0, -2.0, 0.5}) {
            fill(buffer, value);
            results.push_back(full_tensor(linear->forward(buffer)).detach());
          }
          return torch::stack(results);
        });
      }
    }
  }
}

INSTANTIATE_WORLDS(KeptInputs, 2, 3);

// One input that two modules read, each on a mesh of its own.
TEST(KeptInputsOfMeshes, AreOfOneMesh) {
  run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"a", "b"});
    const auto make = [] { return Linear(6, 6); };
    auto plain = drawn(1, make), one = drawn(1, make), other = drawn(1, make);
    parallelize_module(one, mesh["a"], {{"", ColwiseParallel{}}});
    parallelize_module(other, mesh["b"], {{"", ColwiseParallel{}}});
    const at::Tensor x = drawn_tensor(2, {2, 6}).requires_grad_();
    const at::Tensor wanted = plain->forward(x).detach();
    EXPECT_LE(distance(full_tensor(one->forward(x)).detach(), wanted), kClose);
    EXPECT_LE(distance(full_tensor(other->forward(x)).detach(), wanted), kClose);
  });
}

}  // namespace
}  // namespace fsdp::testing
