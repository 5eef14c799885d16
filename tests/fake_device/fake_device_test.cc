// Shapes, dtypes and strides of the fake device beside the CPU's, and its memory.
#include "fake_device/fake_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

const c10::Device kFake(kFakeDevice, 0);

class FakeDevice : public ::testing::Test {
 protected:
  FakeDevice() { install_fake_device(); }
};

using Operators = std::vector<std::pair<std::string, std::function<Tensor(const Tensor&)>>>;

// Of [4, 6] floats.
Operators operators() {
  namespace F = torch::nn::functional;
  return {
      {"add", [](const Tensor& x) { return x + 1; }},
      {"promote", [](const Tensor& x) { return x.to(torch::kBFloat16) + x; }},
      {"broadcast", [](const Tensor& x) { return x.unsqueeze(1) * x; }},
      {"compare", [](const Tensor& x) { return x > 0; }},
      {"where", [](const Tensor& x) { return torch::where(x > 0, x, x.new_zeros({})); }},
      {"floor_divide", [](const Tensor& x) { return torch::floor_divide(x.to(torch::kLong), 2); }},
      {"isnan", [](const Tensor& x) { return torch::isnan(x); }},
      {"logical_or", [](const Tensor& x) { return torch::logical_or(x > 0, x < 1); }},
      {"matmul", [](const Tensor& x) { return x.matmul(x.t()); }},
      {"transpose", [](const Tensor& x) { return x.t(); }},
      {"narrow", [](const Tensor& x) { return x.narrow(1, 2, 3); }},
      {"reshape",
       [](const Tensor& x) {
         return x.t().reshape({3, 8});
       }},
      {"sum", [](const Tensor& x) { return x.sum(1); }},
      {"softmax", [](const Tensor& x) { return x.softmax(-1); }},
      {"cat",
       [](const Tensor& x) {
         return torch::cat({x, x}, 1);
       }},
      {"chunk", [](const Tensor& x) { return x.chunk(4, 1)[2]; }},
      {"index_select",
       [](const Tensor& x) {
         return x.index_select(0, torch::zeros({7}, x.options().dtype(torch::kLong)));
       }},
      {"gather",
       [](const Tensor& x) {
         return x.gather(1, torch::zeros({4, 2}, x.options().dtype(torch::kLong)));
       }},
      {"layer_norm", [](const Tensor& x) { return torch::layer_norm(x, {6}); }},
      {"rms_norm", [](const Tensor& x) { return torch::rms_norm(x, {6}); }},
      {"gelu", [](const Tensor& x) { return torch::gelu(x); }},
      {"dropout", [](const Tensor& x) { return torch::dropout(x, 0.5, true); }},
      {"norm", [](const Tensor& x) { return x.norm(); }},
      {"sqrt", [](const Tensor& x) { return x.sum().sqrt(); }},
      {"dot", [](const Tensor& x) { return x[0].dot(x[1]); }},
      {"flip", [](const Tensor& x) { return x.flip({0}); }},
      {"topk", [](const Tensor& x) { return std::get<1>(x.topk(2)); }},
      {"foreach",
       [](const Tensor& x) {
         return torch::_foreach_mul({x, x}, 2.0)[1];
       }},
      {"in place", [](const Tensor& x) { return x.clone().add_(1).mul_(x); }},
      {"to CPU and back", [](const Tensor& x) { return x.to(torch::kCPU).to(x.device()); }},
      {"cross_entropy",
       [](const Tensor& x) {
         return torch::cross_entropy_loss(x, torch::zeros({4}, x.options().dtype(torch::kLong)));
       }},
      {"attention",
       [](const Tensor& x) {
         const auto heads = x.view({1, 2, 2, 6});
         return torch::scaled_dot_product_attention(heads, heads, heads, {}, 0, true);
       }},
  };
}

TEST_F(FakeDevice, HasTheShapesOfTheCpu) {
  for (const auto& [name, apply] : operators()) {
    SCOPED_TRACE(name);
    const auto expected = apply(torch::ones({4, 6}));
    const auto result = apply(torch::ones({4, 6}, kFake));
    EXPECT_EQ(result.device(), kFake);
    EXPECT_EQ(result.sizes(), expected.sizes());
    EXPECT_EQ(result.strides(), expected.strides());
    EXPECT_EQ(result.scalar_type(), expected.scalar_type());
  }
}

TEST_F(FakeDevice, HasGradientsOfTheShapesOfTheCpu) {
  for (const auto& [name, apply] : operators()) {
    SCOPED_TRACE(name);
    auto x = torch::ones({4, 6}, torch::TensorOptions(kFake).requires_grad(true));
    const auto result = apply(x);
    if (!result.requires_grad()) continue;
    result.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_EQ(x.grad().scalar_type(), x.scalar_type());
  }
}

TEST_F(FakeDevice, KeepsViewsApartFromCopies) {
  const auto x = torch::ones({4, 6}, kFake);
  const auto before = fake_memory().now;
  EXPECT_TRUE(x.t().is_alias_of(x));
  EXPECT_TRUE(x.view({24}).is_alias_of(x));
  EXPECT_EQ(fake_memory().now, before);
  EXPECT_NE(x.clone().data_ptr(), x.data_ptr());
}

TEST_F(FakeDevice, CountsBytesThatLiveAndTheirPeak) {
  const auto start = fake_memory().now;
  {
    const auto large = torch::empty({1 << 20, 1 << 20}, kFake);  // 4 TiB
    EXPECT_EQ(fake_memory().now - start, int64_t{4} << 40);
  }
  EXPECT_EQ(fake_memory().now, start);
  EXPECT_GE(fake_memory().peak - start, int64_t{4} << 40);
  reset_fake_peak();
  EXPECT_EQ(fake_memory().peak, start);
  auto tensor = torch::empty({3}, torch::TensorOptions(kFake).dtype(torch::kDouble));
  EXPECT_EQ(fake_memory().now - start, 24);
  tensor.resize_({5});
  EXPECT_EQ(fake_memory().now - start, 40);
}

TEST_F(FakeDevice, GivesOnesWhereTheHostAsks) {
  const auto x = torch::zeros({2}, kFake);
  EXPECT_EQ(x.sum().item<double>(), 1);
  EXPECT_TRUE((x > 0).any().item<bool>());
  EXPECT_TRUE(x.cpu().equal(torch::ones({2})));
}

TEST_F(FakeDevice, CountsProductsOfMatrices) {
  const auto a = torch::empty({2, 3, 5}, kFake), b = torch::empty({2, 5, 7}, kFake);
  auto before = fake_flops();
  torch::bmm(a, b);
  EXPECT_EQ(fake_flops() - before, 2 * 2 * 3 * 5 * 7);
  before = fake_flops();
  torch::linear(a, torch::empty({11, 5}, kFake), torch::empty({11}, kFake));
  EXPECT_EQ(fake_flops() - before, 2 * 6 * 5 * 11);
  before = fake_flops();
  torch::addr(torch::empty({3, 4}, kFake), torch::empty({3}, kFake), torch::empty({4}, kFake));
  EXPECT_EQ(fake_flops() - before, 2 * 3 * 4);
  before = fake_flops();
  a.add(a).mul_(2);
  EXPECT_EQ(fake_flops(), before);
}

TEST_F(FakeDevice, FusedAttentionKeepsNoScores) {
  const auto held = [](FakeAttention attention) {
    set_fake_attention(attention);
    const auto x = torch::empty({1, 2, 256, 8}, torch::TensorOptions(kFake).requires_grad(true));
    const auto before = fake_memory().now;
    const auto y = torch::scaled_dot_product_attention(x, x, x);
    return fake_memory().now - before;
  };
  const int64_t scores = 2 * 256 * 256 * 4;
  EXPECT_LT(held(FakeAttention::kFused), scores / 4);
  EXPECT_GT(held(FakeAttention::kComposed), scores);
  set_fake_attention(FakeAttention::kFused);
}

TEST_F(FakeDevice, MakesWhatIsMadeWithinAScopeAndDrawsNothing) {
  const auto state = at::globalContext().defaultGenerator(c10::kCPU).get_state();
  const auto linear = [] {
    const OnFakeDevice here;
    return torch::nn::Linear(4, 3);
  }();
  EXPECT_EQ(linear->weight.device(), kFake);
  EXPECT_EQ(linear->bias.device(), kFake);
  EXPECT_TRUE(at::globalContext().defaultGenerator(c10::kCPU).get_state().equal(state));
  EXPECT_TRUE(torch::empty({1}).is_cpu());
}

TEST_F(FakeDevice, NamesAnOperatorWhoseShapesItDoesNotKnow) {
  try {
    torch::nonzero(torch::ones({3}, kFake));
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("fake device: aten::nonzero has no meta kernel"));
  }
}

}  // namespace
}  // namespace fsdp::testing
