// C++ numbers beside DTensors, which are converted without LibTorch's help beside floats
// (dtensor/kernels/fast_pointwise.cc): the bits of the plain results.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using testing::on_worlds;
using testing::whole;

using Limits = std::numeric_limits<double>;

// Of either sign, beyond and below what a float can say, between two floats, and whole
// ones that no double has.
std::vector<at::Scalar> numbers() {
  std::vector<at::Scalar> numbers;
  for (const double each : {0.0, -0.0, 0.1, -3.25, 1 / 3.0, 1e-46, 1e-40, 1e300, -1e300, 16777217.0,
                            Limits::infinity(), Limits::quiet_NaN()})
    numbers.emplace_back(each);
  for (const int64_t each : {int64_t{0}, int64_t{-7}, int64_t{16777217}, int64_t{9007199791611905},
                             std::numeric_limits<int64_t>::max()})
    numbers.emplace_back(each);
  numbers.emplace_back(true);
  return numbers;
}

struct Operator {
  std::string name;
  std::function<at::Tensor(const at::Tensor&, const at::Scalar&)> result;
};

// Factors of alpha are powers of two: whether it is multiplied by itself or in one with
// the addition depends on where an element lies.
std::vector<Operator> operators() {
  using at::Scalar;
  using at::Tensor;
  return {
      {"mul", [](const Tensor& t, const Scalar& n) { return t.mul(n); }},
      {"div", [](const Tensor& t, const Scalar& n) { return t.div(n); }},
      {"mul_", [](const Tensor& t, const Scalar& n) { return t.clone().mul_(n); }},
      {"div_", [](const Tensor& t, const Scalar& n) { return t.clone().div_(n); }},
      {"add_", [](const Tensor& t, const Scalar& n) { return t.clone().add_(n); }},
      {"add_ twice", [](const Tensor& t, const Scalar& n) { return t.clone().add_(n, 2); }},
      {"two numbers",
       [](const Tensor& t, const Scalar& n) { return t.clone().mul_(n).mul(0.3).add_(n, -2); }},
  };
}

// What it throws, where it throws, and its bits otherwise: NaNs with their signs, too.
std::string outcome(const std::function<at::Tensor()>& body) {
  try {
    const at::Tensor result = whole(body()).contiguous();
    std::string bits(result.nbytes(), '\0');
    std::memcpy(bits.data(), result.const_data_ptr(), bits.size());
    return std::string(toString(result.scalar_type())) + bits;
  } catch (const std::exception&) {
    return "throws";
  }
}

TEST(NumberOperands, HaveTheBitsOfLibTorch) {
  on_worlds([](const DeviceMesh& mesh) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kInt, at::kBool}) {
      const at::Tensor plain = at::arange(-6, 7, at::kFloat).mul(0.37).to(dtype);
      const at::Tensor dtensor = distribute_tensor(plain, mesh, {Shard{0}});
      for (const auto& op : operators()) {
        for (const auto& number : numbers()) {
          EXPECT_EQ(outcome([&] { return op.result(dtensor, number); }),
                    outcome([&] { return op.result(plain, number); }))
              << op.name << " of " << dtype << " and " << number;
        }
      }
    }
  });
}

TEST(NumberOperands, OfTensorsWithoutDimensions) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::scalar_tensor(0.3, at::kFloat);
    const at::Tensor dtensor = distribute_tensor(plain, mesh, {Replicate{}});
    for (const auto& op : operators()) {
      for (const auto& number : numbers()) {
        EXPECT_EQ(outcome([&] { return op.result(dtensor, number); }),
                  outcome([&] { return op.result(plain, number); }))
            << op.name << " of no dimensions and " << number;
      }
    }
  });
}

// The first number of a thread may be met in any mode, and the later ones out of it.
TEST(NumberOperands, OutliveInferenceMode) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(5, at::kFloat);
    {
      const c10::InferenceMode inference;
      const at::Tensor dtensor = distribute_tensor(plain, mesh, {Shard{0}});
      EXPECT_TRUE(whole(dtensor.mul(3)).equal(plain.mul(3)));
    }
    const at::Tensor dtensor = distribute_tensor(plain, mesh, {Shard{0}});
    EXPECT_TRUE(whole(dtensor.mul(0.5)).equal(plain.mul(0.5)));
  });
}

// Complex numbers make complex results, which is LibTorch's affair.
TEST(NumberOperands, MayBeComplex) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(5, at::kFloat);
    const at::Tensor dtensor = distribute_tensor(plain, mesh, {Shard{0}});
    const at::Scalar number = c10::complex<double>(0.5, 2);
    EXPECT_TRUE(whole(dtensor.mul(number)).equal(plain.mul(number)));
    EXPECT_THROW(dtensor.mul_(number), c10::Error);
  });
}

}  // namespace
}  // namespace fsdp
