// Indexing and views of DTensors: along whole dimensions as on plain tensors, along cut
// ones an error.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

using at::indexing::None;
using at::indexing::Slice;
using testing::expect_same;
using testing::on_worlds;
using testing::whole;
using Tensors = std::vector<at::Tensor>;

TEST(Indexing, OfColumns) {
  const at::Tensor columns = at::tensor({3, 0, 0}, at::kLong);
  expect_same({
      {"select",
       [](const auto& t) {
         return Tensors{t.select(1, 2), t.index({Slice(), 1}), t.index({"...", -1})};
       }},
      {"slice",
       [](const auto& t) {
         return Tensors{t.narrow(1, 1, 2), t.index({Slice(), Slice(0, 4, 2)})};
       }},
      {"index_select", [&](const auto& t) { return Tensors{t.index_select(1, columns)}; }},
      {"index",
       [&](const auto& t) {
         return Tensors{t.index({Slice(), columns})};
       }},
      {"index by a table",
       [&](const auto& t) {
         return Tensors{t.index({Slice(), columns.view({3, 1}).expand({3, 2})})};
       }},
      {"gather",
       [](const auto& t) {
         const auto picked = at::tensor({3, 0, 0}, at::kLong).expand({t.size(0), 3});
         return Tensors{t.gather(1, picked), t.gather(1, std::get<1>(t.topk(2, 1)))};
       }},
      {"scatter",
       [](const auto& t) {
         const auto picked = at::tensor({3, 0}, at::kLong).expand({t.size(0), 2});
         const auto source = t.narrow(1, 1, 2).clone();
         return Tensors{t.scatter(1, picked, source), t.scatter(1, picked, 7),
                        t.scatter_add(1, picked, source)};
       }},
      {"split", [](const auto& t) { return t.split(3, 1); }},
      {"split with sizes",
       [](const auto& t) {
         return t.split_with_sizes({1, 3}, 1);
       }},
      {"chunk", [](const auto& t) { return t.chunk(2, 1); }},
      {"unbind", [](const auto& t) { return t.unbind(1); }},
      {"unfold", [](const auto& t) { return Tensors{t.unfold(1, 2, 1)}; }},
      {"of a difference", [](const auto& t) { return Tensors{t.diff(1, 1)}; }},
  });
}

TEST(Indexing, OfRows) {
  const at::Tensor rows = at::tensor({1, 1, 0, 1}, at::kLong);
  expect_same({
      {"select",
       [](const auto& t) {
         return Tensors{t.select(0, 1), t[0], t.index({-1})};
       }},
      {"slice", [](const auto& t) { return Tensors{t.narrow(0, 1, 1)}; }},
      {"index_select", [&](const auto& t) { return Tensors{t.index_select(0, rows)}; }},
      {"index", [&](const auto& t) { return Tensors{t.index({rows})}; }},
      {"unbind", [](const auto& t) { return t.unbind(0); }},
  });
}

TEST(Indexing, WritesColumns) {
  expect_same({
      {"scatter in place",
       [](const auto& t) {
         const auto picked = at::tensor({3, 0}, at::kLong).expand({t.size(0), 2});
         const auto written = at::zeros_like(t);
         written.scatter_(1, picked, t.narrow(1, 1, 2).clone());
         written.scatter_add_(1, picked, t.narrow(1, 0, 2).clone());
         return Tensors{written};
       }},
      {"at indices",
       [](const auto& t) {
         const auto columns = at::tensor({3, 0}, at::kLong);
         at::Tensor written = at::zeros_like(t);
         written.index_add_(1, columns, t.narrow(1, 0, 2).clone(), 0.5);
         written.index_fill_(1, at::tensor({1}, at::kLong), 2);
         written.index_copy_(1, at::tensor({2}, at::kLong), t.narrow(1, 1, 1).clone());
         written.index_put_({Slice(), at::tensor({3}, at::kLong)}, t.narrow(1, 1, 1));
         return Tensors{written};
       }},
  });
}

// What every rank needs whole to compute is written as a whole, and each keeps its part.
TEST(Indexing, WritesAlongCutDimensions) {
  expect_same({
      {"cumsum_", [](const auto& t) { return Tensors{t.clone().add(0.5).abs().cumsum_(0)}; }},
      {"tril_", [](const auto& t) { return Tensors{t.clone().abs().tril_(1)}; }},
      {"index_fill_",
       [](const auto& t) {
         return Tensors{t.clone().abs().index_fill_(0, at::tensor({1}, at::kLong), 3)};
       }},
      {"renorm_, which has no rule",
       [](const auto& t) { return Tensors{t.clone().abs().renorm_(2, 0, 1)}; }},
      {"cumsum into a tensor",
       [](const auto& t) {
         at::Tensor written = at::zeros_like(t);
         at::cumsum_out(written, t, 0);
         return Tensors{written};
       }},
  });
}

TEST(Indexing, OfBothDimensionsAndNewOnes) {
  expect_same({
      {"new",
       [](const auto& t) {
         return Tensors{t.index({None}), t.index({Slice(), None}), t.unsqueeze(-1)};
       }},
      {"permute",
       [](const auto& t) {
         return Tensors{t.t(), t.unsqueeze(1).permute({2, 1, 0}), t.movedim(0, 1)};
       }},
      {"everything",
       [](const auto& t) {
         return Tensors{t.index({Slice(), Slice()}), t.narrow(0, 0, t.size(0))};
       }},
      {"diagonal",
       [](const auto& t) {
         return Tensors{t.unsqueeze(0).expand({1, -1, -1}).unsqueeze(3).diagonal(0, 0, 3)};
       }},
      {"split of a new dimension",
       [](const auto& t) {
         return t.unsqueeze(2).expand({-1, -1, 4}).split(2, 2);
       }},
  });
  const at::Tensor both = at::tensor({0, 1}, at::kLong);
  on_worlds([&](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(60, at::kFloat).view({5, 2, 3, 2});
    const at::Tensor t = distribute_tensor(plain, mesh, {Shard{0}});
    EXPECT_TRUE(whole(t.index({Slice(), both, both})).equal(plain.index({Slice(), both, both})));
    EXPECT_TRUE(whole(t.index({Slice(), both, Slice(), both}))
                    .equal(plain.index({Slice(), both, Slice(), both})));
  });
}

TEST(Indexing, WritesThroughViewsReachTheTensor) {
  const at::Tensor columns = at::tensor({3, 0}, at::kLong);
  on_worlds([&](const DeviceMesh& mesh) {
    for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})}) {
      const at::Tensor plain = at::arange(20, at::kFloat).view({5, 4});
      const at::Tensor t = distribute_tensor(plain, mesh, {placement});
      for (at::Tensor x : {t, plain}) {
        x.select(1, 0).fill_(7);
        x.index_put_({Slice(), 2}, x.select(1, 1));
        x.index_put_({Slice(), Slice(1, 3)}, 5);
        x.split(2, 1)[1].mul_(2);
        x.index_fill_(1, columns, -1);
        x.index_add_(1, columns, x.narrow(1, 0, 2).clone(), 0.5);
        x.index_copy_(1, columns, x.narrow(1, 1, 2).clone());
        x.unbind(1)[3].add_(1);
      }
      EXPECT_TRUE(whole(t).equal(plain));
    }
  });
}

}  // namespace
}  // namespace fsdp
