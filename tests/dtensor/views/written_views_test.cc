// What is written through a view of a DTensor reaches the DTensor, as on one device, and
// its gradients are those of one device: views that keep the cut, and views across it.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/random_placements.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace fsdp {
namespace {

using at::indexing::Slice;
using testing::expect_as_plain;
using testing::on_meshes;
using testing::Problem;
using testing::waves;
using testing::whole;
using Tensors = std::vector<at::Tensor>;

// Writes to `y`, of shape {5, 4}; `t` are further tensors of its shape.
using Write = std::function<void(const at::Tensor& y, const Tensors& t)>;

void expect_written_as_plain(const Write& write) {
  expect_as_plain(
      [&] {
        return Problem{{waves({5, 4}), waves({5, 4}, 0.3), waves({5, 4}, 0.2)},
                       [&](const Tensors& t) {
                         const at::Tensor y = t[0].mul(t[1]).mul(t[2]);
                         write(y, t);
                         return y.mul(t[1]).sin();
                       }};
      },
      /*count=*/8);
}

TEST(WrittenViews, OfOneIndexHaveTheGradientsOfOneDevice) {
  expect_written_as_plain([](const auto& y, const auto&) { y.select(1, 0).zero_(); });
  expect_written_as_plain([](const auto& y, const auto&) { y.select(0, 1).mul_(2); });
  expect_written_as_plain([](const auto& y, const auto&) { y.select(0, 4).fill_(0.5); });
  expect_written_as_plain([](const auto& y, const auto&) { y[2][1].mul_(3); });
  expect_written_as_plain(
      [](const auto& y, const auto&) { y.select(1, 0).add_(y.select(1, 1).mul(2)); });
  expect_written_as_plain([](const auto& y, const auto& t) {
    at::Tensor(y).index_put_({Slice(), 0}, t[0].select(1, 3).mul(t[2].select(1, 1)));
  });
}

TEST(WrittenViews, OfRangesHaveTheGradientsOfOneDevice) {
  expect_written_as_plain([](const auto& y, const auto& t) {
    y.slice(1, 1, 3).mul_(t[1].slice(1, 0, 2).mul(t[2].slice(1, 2, 4)));
  });
  expect_written_as_plain([](const auto& y, const auto&) { y.narrow(0, 1, 2).add_(1); });
  expect_written_as_plain([](const auto& y, const auto&) { y.slice(0, 0, 5, 2).neg_(); });
  expect_written_as_plain([](const auto& y, const auto&) { y.view(-1).narrow(0, 3, 4).zero_(); });
  expect_written_as_plain([](const auto& y, const auto&) { y.narrow(1, 0, 3).tanh_(); });
}

TEST(WrittenViews, OfOtherShapesHaveTheGradientsOfOneDevice) {
  expect_written_as_plain([](const auto& y, const auto&) { y.t().select(0, 2).exp_(); });
  expect_written_as_plain([](const auto& y, const auto&) {
    y.unsqueeze(1).permute({1, 2, 0}).squeeze(0).mul_(0.5);
  });
  expect_written_as_plain([](const auto& y, const auto&) { y.diagonal().zero_(); });
  expect_written_as_plain([](const auto& y, const auto&) {
    y.view({5, 2, 2}).select(2, 1).relu_();
  });
}

TEST(WrittenViews, OfBuffersThatAreFilledInLoopsHaveTheGradientsOfOneDevice) {
  expect_as_plain(
      [] {
        return Problem{{waves({5, 4}), waves({5, 4}, 0.3)}, [](const Tensors& t) {
                         const at::Tensor from = t[0].mul(t[1]);
                         const at::Tensor buffer = at::zeros_like(from);
                         for (int64_t i = 0; i < 5; ++i)
                           buffer.select(0, i).copy_(from.select(0, 4 - i).tanh());
                         return buffer.mul(t[1]);
                       }};
      },
      /*count=*/8);
}

// Two views are two gathered copies: each write takes what others wrote meanwhile, and
// writes nothing but what its view shows.
TEST(WrittenViews, AcrossTheCutDoNotUndoEachOther) {
  on_meshes([](const DeviceMesh& mesh) {
    for (const auto& list : testing::lists_for(mesh, 2)) {
      const at::Tensor plain = waves({5, 4});
      const at::Tensor t = testing::placed(plain, mesh, list);
      const auto write = [](const at::Tensor& base) {
        const at::Tensor first = base.select(0, 0), second = base.select(0, 1);
        const at::Tensor column = base.select(1, 1);
        first.zero_();
        second.mul_(2);
        base.add_(1);
        second.mul_(3);
        column.narrow(0, 1, 3).add_(first.select(0, 2));
        at::_foreach_mul_({base.select(0, 2), base.select(0, 3)}, 5);
      };
      write(t);
      write(plain);
      EXPECT_TRUE(whole(t).allclose(plain)) << to_string(mesh);
    }
  });
}

TEST(WrittenViews, ThatAreGatheredShowWhatTheirBaseBecame) {
  on_meshes([](const DeviceMesh& mesh) {
    for (const auto& list : testing::lists_for(mesh, 2)) {
      const auto read = [](const at::Tensor& base) {
        const at::Tensor row = base.select(0, 1), column = base.select(1, 3);
        base.mul_(3);
        const at::Tensor first = row.add(1);
        base.select(0, 1).zero_();
        return at::cat({first, row.add(2), column.sub(1)});
      };
      const at::Tensor plain = waves({5, 4});
      const at::Tensor found = read(testing::placed(plain, mesh, list));
      EXPECT_TRUE(whole(found).allclose(read(plain))) << to_string(mesh);
    }
  });
}

TEST(WrittenViews, ReachTheirBaseInInferenceMode) {
  on_meshes([](const DeviceMesh& mesh) {
    const c10::InferenceMode inference;
    for (const auto& list : testing::lists_for(mesh, 2)) {
      const at::Tensor plain = waves({5, 4});
      const at::Tensor t = testing::placed(plain, mesh, list);
      for (const at::Tensor& each : {t, plain}) {
        each.select(0, 1).fill_(7);
        each.select(1, 2).mul_(2);
      }
      EXPECT_TRUE(whole(t).allclose(plain)) << to_string(mesh);
    }
  });
}

// Replaying views costs; it is for DTensors alone.
TEST(WrittenViews, OfPlainTensorsAreRecordedAsEver) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const at::Tensor t = distribute_tensor(waves({4, 6}), mesh, {Shard{1}});
    t.set_requires_grad(true).mul(2).select(1, 0).zero_();
    EXPECT_FALSE(c10::AutogradState::get_tls_state().get_view_replay_enabled());
  });
}

}  // namespace
}  // namespace fsdp
