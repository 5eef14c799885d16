// Tensors that lie in all ways, at random owners and back.
#include "optim/internal/owner_exchange.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/worlds.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fsdp::internal {
namespace {

using ::testing::AllOf;
using testing::expect_error;
using ::testing::HasSubstr;

struct Drawn {
  std::vector<int64_t> shape;
  std::vector<Placement> placements;
  std::vector<int64_t> owner;
};

// Blocks and atoms only where they divide what is there: of the first cut of a dimension.
Placement drawn_placement(std::mt19937& random, const std::vector<int64_t>& shape,
                          std::vector<bool>& is_cut) {
  const auto dim = random() % (shape.size() + 1);
  if (dim == shape.size()) return Replicate{};
  const auto size = shape[dim];
  Shard cut{.dim = static_cast<int64_t>(dim)};
  if (!is_cut[dim] && random() % 2 == 0) cut.unit = size % 2 == 0 ? 2 : 1;
  if (!is_cut[dim] && random() % 3 == 0 && size % (cut.unit * 3) == 0) cut.outer = 3;
  is_cut[dim] = true;
  return cut;
}

Drawn drawn(std::mt19937& random, const std::vector<int64_t>& mesh_shape) {
  Drawn tensor;
  for (size_t i = 0, dims = 1 + random() % 3; i < dims; ++i)
    tensor.shape.push_back(static_cast<int64_t>(random() % 13));
  std::vector<bool> is_cut(tensor.shape.size(), false);
  for (const int64_t size : mesh_shape) {
    tensor.placements.push_back(drawn_placement(random, tensor.shape, is_cut));
    tensor.owner.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(size)));
  }
  return tensor;
}

at::Tensor value_of(const Drawn& tensor, int64_t number) {
  return at::arange(c10::multiply_integers(tensor.shape), at::kFloat)
      .add(1000 * number)
      .view(tensor.shape);
}

void try_on(const DeviceMesh& mesh, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Drawn> tensors;
  for (size_t i = 0, count = 1 + random() % 6; i < count; ++i)
    tensors.push_back(drawn(random, mesh.shape()));
  std::vector<OwnedTensor> owned;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto dtensor = distribute_tensor(value_of(tensors[i], static_cast<int64_t>(i)), mesh,
                                           tensors[i].placements);
    owned.push_back({spec_of(dtensor).layout(), tensors[i].owner, at::kFloat});
    parts.push_back(dtensor.to_local().contiguous());
  }
  OwnerExchange exchange(mesh, owned, "test");
  exchange.start(parts);
  auto wholes = exchange.wait();
  for (size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_EQ(exchange.is_owner(i), mesh.coordinate() == tensors[i].owner);
    ASSERT_EQ(wholes[i].defined(), exchange.is_owner(i)) << "seed " << seed << ", tensor " << i;
    if (!exchange.is_owner(i)) continue;
    EXPECT_TRUE(at::equal(wholes[i], value_of(tensors[i], static_cast<int64_t>(i))))
        << "seed " << seed << ", tensor " << i << " at its owner";
    wholes[i] = wholes[i].neg();
  }
  exchange.start_back(std::move(wholes));
  const auto back = exchange.wait_back();
  for (size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(at::equal(back[i], parts[i].neg())) << "seed " << seed << ", tensor " << i;
}

TEST(OwnerExchange, BringsWholesToOwnersAndPartsBack) {
  const std::vector<std::vector<int64_t>> meshes = {{1}, {2}, {3}, {4}, {2, 2}, {1, 3}, {2, 1, 2}};
  for (const auto& shape : meshes) {
    testing::run_ranks(c10::multiply_integers(shape), [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, shape);
      for (uint32_t seed = 0; seed < 40; ++seed) try_on(mesh, seed);
    });
  }
}

TEST(OwnerExchange, ExchangesNothingButWhatOwnersLack) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto rows = distribute_tensor(at::arange(12, at::kFloat).view({3, 4}), mesh, {Shard{0}});
    OwnerExchange exchange(mesh, {{spec_of(rows).layout(), {1}, at::kFloat}}, "test");
    exchange.start({rows.to_local().contiguous()});
    auto wholes = exchange.wait();
    EXPECT_EQ(exchange.received_bytes(), rank == 1 ? 2 * 4 * 4 : 0);
    exchange.start_back(std::move(wholes));
    exchange.wait_back();
    EXPECT_EQ(exchange.received_bytes(), 2 * 4 * 4);  // the other one got its rows back
    EXPECT_EQ(exchange.issued(), 2);
  });
}

TEST(OwnerExchange, OfOtherPlansIsAnErrorOnAllRanks) {
  testing::on_ranks_of(2, [](int64_t rank, const DeviceMesh& mesh) {
    const auto rows = distribute_tensor(at::arange(12, at::kFloat).view({3, 4}), mesh, {Shard{0}});
    OwnerExchange exchange(mesh, {{spec_of(rows).layout(), {rank}, at::kFloat}}, "step");
    expect_error<c10::Error>(
        [&] {
          exchange.start({rows.to_local().contiguous()});
          exchange.wait();
        },
        AllOf(HasSubstr("out of order"), HasSubstr("exchange to owners: step of 1 tensors")));
  });
}

}  // namespace
}  // namespace fsdp::internal
