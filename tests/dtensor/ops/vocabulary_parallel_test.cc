// A model whose vocabulary is cut: rows of the embedding, columns of the logits. Nothing
// of the vocabulary's size moves.
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_as_plain;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::on_worlds;
using testing::Problem;
using testing::waves;
using testing::whole;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kVocabulary = 7;

// The bytes of each collective that `body` causes on this rank.
std::vector<int64_t> bytes_sent_by(const DeviceMesh& mesh, const std::function<void()>& body) {
  const auto log = internal::collectives_of(mesh, 0).log();
  const auto before = log->recent_operations().size();
  body();
  const auto operations = log->recent_operations();
  std::vector<int64_t> bytes;
  for (size_t i = before; i < operations.size(); ++i) bytes.push_back(operations[i].bytes);
  return bytes;
}

at::Tensor tokens() { return at::tensor({3, 0, 6, 3, 2}, at::kLong); }

TEST(CutClasses, LossesWithClassWeightsAndIgnoredTargets) {
  for (const int64_t reduction : {0, 1, 2}) {
    for (const int64_t ignored : {-100, 3}) {
      expect_as_plain([=] {
        const at::Tensor weights = waves({kVocabulary}, 0.3).abs();
        return Problem{{waves({5, kVocabulary})}, [=](const Tensors& t) {
                         return at::cross_entropy_loss(t[0], tokens(), weights, reduction, ignored);
                       }};
      });
    }
  }
}

// Forward: (maximum, sum) per row. Backward: a number per row.
TEST(CutClasses, LossesMoveNothingOfTheVocabularysSize) {
  testing::run_ranks(3, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    at::Tensor logits = distribute_tensor(waves({5, kVocabulary}), mesh, {Shard{1}});
    logits.requires_grad_();
    at::Tensor loss;
    EXPECT_THAT(bytes_sent_by(mesh, [&] { loss = at::cross_entropy_loss(logits, tokens()); }),
                ElementsAre(2 * 5 * 8));
    EXPECT_THAT(bytes_sent_by(mesh, [&] { loss.backward(); }), ElementsAre(5 * 8));
    EXPECT_EQ(DTensor(logits.grad()).placements(), std::vector<Placement>{Shard{1}});
  });
}

TEST(CutClasses, LookUpInATableOfCutRowsMovesNothing) {
  testing::run_ranks(3, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const at::Tensor table = distribute_tensor(waves({kVocabulary, 2}), mesh, {Shard{0}});
    at::Tensor rows;
    EXPECT_THAT(bytes_sent_by(mesh, [&] { rows = at::embedding(table, tokens()); }), IsEmpty());
    EXPECT_EQ(DTensor(rows).placements(), std::vector<Placement>{Partial{}});
    EXPECT_TRUE(whole(rows).equal(at::embedding(waves({kVocabulary, 2}), tokens())));
  });
}

// As on one device: -inf may fill what one rank has of a row, or all of it.
TEST(CutClasses, SoftmaxOfRowsWithInfinities) {
  const double lowest = -std::numeric_limits<double>::infinity();
  at::Tensor values = waves({4, kVocabulary});
  values.select(0, 0).narrow(0, 0, 4).fill_(lowest);
  values.select(0, 1).fill_(lowest);
  values[2][6] = -lowest;
  values[3][1] = std::numeric_limits<double>::quiet_NaN();
  on_worlds([&](const DeviceMesh& mesh) {
    const at::Tensor cut = distribute_tensor(values, mesh, {Shard{1}});
    EXPECT_TRUE(whole(cut.softmax(1)).allclose(values.softmax(1), 1e-12, 1e-12, true));
    EXPECT_TRUE(whole(cut.log_softmax(1)).allclose(values.log_softmax(1), 1e-12, 1e-12, true));
  });
}

TEST(CutClasses, SixteenBitsAreSummedInThirtyTwo) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor values = waves({5, 600}).to(at::kBFloat16);
    at::Tensor cut = distribute_tensor(values, mesh, {Shard{1}});
    const at::Tensor wide = cut.softmax(1, at::kFloat);
    EXPECT_EQ(wide.scalar_type(), at::kFloat);
    EXPECT_TRUE(whole(wide).allclose(values.softmax(1, at::kFloat), 1e-5));
    EXPECT_EQ(cut.log_softmax(1).scalar_type(), at::kBFloat16);
    EXPECT_TRUE(whole(cut.log_softmax(1)).allclose(values.log_softmax(1), 1e-2));
    cut.requires_grad_();
    at::Tensor plain = values.clone().requires_grad_();
    cut.softmax(1).square().sum().backward();
    plain.softmax(1).square().sum().backward();
    EXPECT_EQ(cut.grad().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(whole(cut.grad()).allclose(plain.grad(), 5e-2, 1e-5));
  });
}

TEST(CutClasses, IndicesThatNoRankHasAreRefusedOnAllRanks) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor table = distribute_tensor(waves({kVocabulary, 2}), mesh, {Shard{0}});
    const at::Tensor logits = distribute_tensor(waves({5, kVocabulary}), mesh, {Shard{1}});
    const at::Tensor wrong = at::tensor({3, 0, 7, 3, 2}, at::kLong);
    const auto look_up = error_of([&] { at::embedding(table, wrong); });
    const auto count = error_of([&] { at::cross_entropy_loss(logits, wrong); });
    if (mesh.size() == 1) return;  // LibTorch's own errors
    EXPECT_THAT(look_up, HasSubstr("index 7 is out of range: allowed are 0 to 6"));
    EXPECT_THAT(count, HasSubstr("target 7 is out of range: allowed are 0 to 6"));
  });
}

}  // namespace
}  // namespace fsdp
