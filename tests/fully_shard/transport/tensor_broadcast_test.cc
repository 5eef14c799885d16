#include "fully_shard/transport/tensor_broadcast.h"

#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>

namespace fsdp::internal {
namespace {

// Tensors of many kinds, 141 bytes in all, whose elements tell the rank that made them.
std::vector<BroadcastTensor> made_by(int64_t rank) {
  const auto numbers = [rank](int64_t numel) { return torch::arange(numel) + 51 * rank; };
  const auto reals = numbers(3).to(torch::kFloat);
  return {{"floats", numbers(12).to(torch::kFloat).view({3, 4})},
          {"none", torch::empty({0, 2})},
          {"transposed", numbers(6).to(torch::kDouble).view({2, 3}).t()},
          {"bools", numbers(5).remainder(2).to(torch::kBool)},
          {"number", numbers(1).squeeze(0)},
          {"conjugate", torch::complex(reals, reals).conj()},
          {"column", numbers(8).to(torch::kHalf).view({4, 2}).select(1, 0)}};
}

struct Sizes {
  std::vector<int64_t> mesh;
  int64_t bucket_bytes;
};

class TensorBroadcast : public ::testing::TestWithParam<Sizes> {};

TEST_P(TensorBroadcast, GivesEveryRankTheBitsOfTheSource) {
  const auto& shape = GetParam().mesh;
  const auto ranks =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
  testing::run_ranks(ranks, [&](int64_t rank) {
    const torch::NoGradGuard no_grad;
    const auto mesh = init_device_mesh(torch::kCPU, shape);
    for (int64_t src = 0; src < ranks; ++src) {
      const auto tensors = made_by(rank), expected = made_by(src);
      broadcast_tensors(tensors, mesh, src, GetParam().bucket_bytes);
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(torch::equal(tensors[i].tensor, expected[i].tensor))
            << tensors[i].name << " from " << src;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, TensorBroadcast,
                         ::testing::Values(Sizes{{1}, 7}, Sizes{{2}, 7}, Sizes{{2}, 1000},
                                           Sizes{{3}, 64}, Sizes{{2, 2}, 7}, Sizes{{2, 2}, 1000},
                                           Sizes{{1, 2}, 7}, Sizes{{3, 1}, 64},
                                           Sizes{{2, 1, 2}, 64}));

TEST(TensorBroadcastOfPart, LeavesTheElementsBesideItAlone) {
  testing::run_ranks(2, [](int64_t rank) {
    const torch::NoGradGuard no_grad;
    const auto whole = torch::full({4, 2}, static_cast<double>(rank));
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    broadcast_tensors({{"column", whole.select(1, 0)}}, mesh, /*src=*/1, /*bucket_bytes=*/8);
    EXPECT_TRUE(torch::equal(whole.select(1, 0), torch::ones({4})));
    EXPECT_TRUE(torch::equal(whole.select(1, 1), torch::full({4}, static_cast<double>(rank))));
  });
}

}  // namespace
}  // namespace fsdp::internal
