// Parameters of every dtype, also side by side in one unit, train with the unsharded
// numbers.
#include "tests/fully_shard/support/parity.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class Dtypes : public Worlds {};

// Sums of small whole numbers: no rounding in any of the types.
struct Scaled : torch::nn::Module {
  explicit Scaled(const std::vector<at::ScalarType>& dtypes) {
    for (const auto dtype : dtypes) {
      weights.push_back(register_parameter(
          c10::str("weight", weights.size()), torch::arange(1, 16).view({5, 3}).to(dtype),
          /*requires_grad=*/c10::isFloatingType(dtype) || c10::isComplexType(dtype)));
    }
  }
  Tensor forward(int64_t factor) const {
    auto loss = torch::zeros({}, torch::kDouble);
    for (const auto& weight : weights) {
      const auto product = weight * factor;
      const auto real = product.is_complex() ? torch::real(product) : product;
      loss = loss + real.to(torch::kDouble).sum();
    }
    return loss;
  }
  std::vector<Tensor> weights;
};

void expect_mean_of_factors(const Scaled& model, int64_t world) {
  const auto mean = static_cast<double>(world + 1) / 2;  // of 1 + rank
  for (const auto& parameter : model.parameters()) {
    EXPECT_TRUE(is_dtensor(parameter));
    if (!parameter.requires_grad()) {
      EXPECT_FALSE(parameter.grad().defined()) << parameter.scalar_type();
      continue;
    }
    const auto gradient = full_gradient(parameter);
    EXPECT_EQ(gradient.scalar_type(), parameter.scalar_type());
    EXPECT_TRUE(torch::allclose(gradient, torch::full({5, 3}, mean).to(gradient.scalar_type())))
        << parameter.scalar_type() << ": " << gradient;
  }
}

const std::vector<at::ScalarType>& dtypes() {
  static const std::vector<at::ScalarType> all = {
      torch::kFloat,         torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kComplexFloat,
      torch::kComplexDouble, torch::kLong,   torch::kInt,  torch::kBool};
  return all;
}

TEST_P(Dtypes, EachAloneTrains) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (const auto dtype : dtypes()) {
      SCOPED_TRACE(dtype);
      if (dtype == torch::kBool) continue;  // its product is of another type
      const auto model = std::make_shared<Scaled>(std::vector{dtype});
      fully_shard(model, mesh);
      const auto loss = model->forward(1 + rank);
      EXPECT_EQ(loss.item<double>(), 120.0 * static_cast<double>(1 + rank));
      if (loss.requires_grad()) loss.backward();
      expect_mean_of_factors(*model, world());
    }
  });
}

TEST_P(Dtypes, AllInOneUnitTrain) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto model = std::make_shared<Scaled>(dtypes());
    fully_shard(model, mesh);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      model->forward(1 + rank).backward();
      expect_mean_of_factors(*model, world());
    }
    EXPECT_TRUE(torch::equal(full_value(model->parameters()[6]),
                             torch::arange(1, 16).view({5, 3}).to(torch::kLong)));
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

INSTANTIATE_WORLDS(Dtypes, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
