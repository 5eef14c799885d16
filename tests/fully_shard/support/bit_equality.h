// One program, run unsharded and sharded with the same parameters: its results must agree
// bit for bit, or it is refused.
//
//   {"linear", shapes({{4, 3}, {4}}), [](const Tensors& w, Random& random) -> Tensors {
//      auto loss = torch::linear(random({2, 3}), w[0], w[1]).sum();
//      loss.backward();
//      return {loss};
//    }}
#pragma once

#include "fully_shard/fully_shard.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace fsdp::testing {

using Tensors = std::vector<torch::Tensor>;

// Data that is the same on every rank and in every run, whatever other threads draw.
class Random {
 public:
  torch::Tensor operator()(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
    return at::randn(shape, generator_, dtype);
  }
  torch::Tensor indices(int64_t high, at::IntArrayRef shape) {
    return at::randint(high, shape, generator_);
  }

 private:
  at::Generator generator_ = at::detail::createCPUGenerator(5);
};

// Parameter i is "cell<i>.weight" and a unit of its own. Floating ones require gradients.
struct Case {
  std::string name;
  std::function<Tensors(Random&)> parameters;
  std::function<Tensors(const Tensors& w, Random&)> program;
};
std::ostream& operator<<(std::ostream& out, const Case& c);

// What the program must be refused with: every text occurs in the message.
struct Refusal {
  std::string name;
  std::function<Tensors(Random&)> parameters;
  std::function<void(const Tensors& w, Random&)> program;
  std::vector<std::string> texts;
};
std::ostream& operator<<(std::ostream& out, const Refusal& refusal);

// Float parameters of these shapes.
std::function<Tensors(Random&)> shapes(std::vector<std::vector<int64_t>> all);
// The names of gtest parameters.
std::string test_name(const std::string& case_name);

// Parameters as submodules "cell<i>", so that each can be a unit.
struct Cells : torch::nn::Module {
  explicit Cells(const Tensors& parameters);
  // Every cell as a unit, then the rest.
  void shard(const DeviceMesh& mesh);
  Tensors members() const;
  Tensors entries() const { return parameters(); }

  struct Cell : torch::nn::Module {
    explicit Cell(const torch::Tensor& parameter);
    torch::Tensor weight;
  };
  std::vector<std::shared_ptr<Cell>> cells;
};

// The values and strides of both agree in every bit.
::testing::AssertionResult same_bits(const torch::Tensor& actual, const torch::Tensor& expected);

// Runs on thread ranks, emptying and poisoning every group after every operator; compares
// what the program returns, the parameters' gradients and their values afterwards. All
// ranks use the same data.
void expect_bit_equal(const Case& c, int64_t world);
// The program throws on every rank, and leaves the parameters as they were.
void expect_refused(const Refusal& refusal, int64_t world);

// Switches the mode on that empties and poisons after every operator.
class EvictAfterEveryOperator {
 public:
  EvictAfterEveryOperator();
  ~EvictAfterEveryOperator();
  EvictAfterEveryOperator(const EvictAfterEveryOperator&) = delete;
};

}  // namespace fsdp::testing
