// Every refusal of the DTensor layer, with its message.
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "dtensor/tensor/dtensor_spec.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/dtensor/partial_values.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/serialize.h>

#include <functional>
#include <sstream>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::known_dtensor;

class SilentOwner final : public internal::DTensorOwner {
 public:
  void before_write(const at::Tensor&) override {}
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }
};

class DTensorErrors : public ::testing::Test {
 protected:
  // On both ranks of a world of two: a tensor of shape {4, 2} cut along dimension 0, and
  // what the test says of it.
  static void on_two_ranks(const std::function<void(const DeviceMesh&, const at::Tensor&)>& body) {
    testing::run_ranks(2, [&](int64_t) {
      const auto mesh = init_device_mesh(c10::kCPU, {2});
      body(mesh, known_dtensor(mesh, {Shard{0}}, {4, 2}, 1).dtensor);
    });
  }
};

// multinomial draws from the whole, the same on all ranks that draw alike.
TEST_F(DTensorErrors, MultinomialOfACutTensorHasWholeRows) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    const at::Tensor certain = at::zeros_like(t).select(1, 1).unsqueeze(1);
    const at::Tensor drawn = at::multinomial(at::cat({certain, at::ones_like(certain)}, 1), 1);
    EXPECT_TRUE(DTensor(drawn).full_tensor().equal(at::ones({4, 1}, at::kLong)));
  });
}

TEST_F(DTensorErrors, OperatorWithoutRule) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    const auto error = error_of([&] { at::geometric(t, 0.5); });
    EXPECT_THAT(error, HasSubstr("No sharding rule for aten::geometric"));
    EXPECT_THAT(error, HasSubstr("Shard(0)"));
    EXPECT_THAT(error, HasSubstr(".to_local()"));
    EXPECT_THAT(error, HasSubstr(".full_tensor()"));
  });
}

TEST_F(DTensorErrors, RawStorage) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    for (const auto& access : std::vector<std::function<void()>>{
             [&] { t.data_ptr<float>(); }, [&] { t.const_data_ptr<float>(); }, [&] { t.storage(); },
             [&] { t.accessor<float, 2>(); }, [&] { std::ostringstream() << at::Tensor(t); }}) {
      EXPECT_THAT(error_of(access), HasSubstr("A DTensor has no storage of its own"));
    }
  });
}

TEST_F(DTensorErrors, Serialization) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    std::ostringstream out;
    EXPECT_THAT(error_of([&] { torch::save(t, out); }),
                HasSubstr("A DTensor has no storage of its own"));
    EXPECT_THAT(error_of([&] { torch::pickle_save(t); }),
                HasSubstr("A DTensor has no storage of its own"));
    torch::save(DTensor(t).to_local(), out);
  });
}

TEST_F(DTensorErrors, SetData) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    EXPECT_THAT(error_of([&] { t.set_data(at::ones({4, 2})); }), HasSubstr("belongs to its mesh"));
    EXPECT_TRUE(is_dtensor(t));
    t.set_data(t.to(at::kDouble));
    EXPECT_EQ(DTensor(t).to_local().scalar_type(), at::kDouble);
  });
}

TEST_F(DTensorErrors, NotADTensor) {
  EXPECT_THAT(error_of([] { DTensor(at::ones({2})); }), HasSubstr("not distributed"));
  EXPECT_THAT(error_of([] { DTensor{at::Tensor()}; }), HasSubstr("undefined"));
}

TEST_F(DTensorErrors, DistributeTensor) {
  on_two_ranks([](const DeviceMesh& mesh, const at::Tensor& t) {
    const at::Tensor plain = at::ones({4, 2});
    EXPECT_THAT(error_of([&] { distribute_tensor(plain, mesh, {Partial{}}); }),
                HasSubstr("Partial(sum)"));
    EXPECT_THAT(error_of([&] { distribute_tensor(plain, mesh, {Shard{2}}); }),
                HasSubstr("Shard(2) is out of range"));
    EXPECT_THAT(error_of([&] {
                  distribute_tensor(plain, mesh, {Shard{0}, Replicate{}});
                }),
                HasSubstr("got 2"));
    EXPECT_THAT(error_of([&] { distribute_tensor(t, mesh, {Shard{0}}); }),
                HasSubstr("distributed already"));
    EXPECT_THAT(error_of([&] { distribute_tensor({}, mesh, {Shard{0}}); }), HasSubstr("undefined"));
    EXPECT_THAT(error_of([&] { distribute_tensor(at::ones({2}, at::kMeta), mesh, {Shard{0}}); }),
                HasSubstr("meta"));
  });
}

TEST_F(DTensorErrors, FromLocal) {
  on_two_ranks([](const DeviceMesh& mesh, const at::Tensor& t) {
    const at::Tensor local = at::ones({2, 2});
    const FromLocalOptions uneven{.shape = std::vector<int64_t>{7, 2}};
    EXPECT_THAT(error_of([&] { from_local(local, mesh, {Shard{0}}, uneven); }),
                HasSubstr("does not fit"));
    EXPECT_THAT(error_of([&] { from_local(t, mesh, {Shard{0}}); }), HasSubstr("it is a DTensor"));
    EXPECT_THAT(error_of([&] { from_local({}, mesh, {Shard{0}}); }), HasSubstr("undefined"));
    EXPECT_THAT(error_of([&] { from_local(local, mesh, {Shard{5}}); }), HasSubstr("out of range"));
    const FromLocalOptions bad_stride{.shape = std::vector<int64_t>{4, 2},
                                      .stride = std::vector<int64_t>{1}};
    EXPECT_THAT(error_of([&] { from_local(local, mesh, {Shard{0}}, bad_stride); }),
                HasSubstr("stride"));
    const at::Tensor ragged = at::ones({2 + mesh.rank(), 2});
    EXPECT_THAT(error_of([&] { from_local(ragged, mesh, {Shard{0}}, {.check = true}); }),
                HasSubstr("from_local: the ranks differ in the tensor: rank 0 has "));
    const FromLocalOptions wrong_here{.shape = std::vector<int64_t>{mesh.rank() == 0 ? 4 : 9, 2},
                                      .check = true};
    EXPECT_THAT(error_of([&] { from_local(local, mesh, {Shard{0}}, wrong_here); }),
                HasSubstr("from_local"));
  });
}

TEST_F(DTensorErrors, Redistribute) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    EXPECT_THAT(error_of([&] { DTensor(t).redistribute({Shard{3}}); }), HasSubstr("out of range"));
    EXPECT_THAT(error_of([&] { DTensor(t).redistribute({}); }),
                HasSubstr("expected one per mesh dimension"));
  });
}

TEST_F(DTensorErrors, PartialsThatDoNotCommute) {
  testing::run_ranks(4, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2});
    const std::vector<Placement> mixed{Partial{}, Partial{Partial::Op::kMax}};
    EXPECT_THAT(error_of([&] { from_local(at::ones({2}), mesh, mixed); }),
                HasSubstr("do not commute"));
  });
}

TEST_F(DTensorErrors, Pointwise) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    const at::Tensor plain = at::ones({4, 2});
    EXPECT_THAT(error_of([&] { t.narrow(1, 0, 1).add_(t); }), HasSubstr("does not fit"));
    const auto other_mesh = init_device_mesh(c10::kCPU, {2, 1});
    const at::Tensor elsewhere = distribute_tensor(plain, other_mesh, {Shard{0}, Replicate{}});
    EXPECT_THAT(error_of([&] { t.add(elsewhere); }), HasSubstr("different meshes"));
    EXPECT_THAT(error_of([&] { t.copy_(elsewhere); }), HasSubstr("the meshes differ"));
    EXPECT_THAT(error_of([&] { at::equal(t, elsewhere); }), HasSubstr("the meshes differ"));
  });
}

TEST_F(DTensorErrors, Copies) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    EXPECT_THAT(error_of([&] {
                  t.copy_(at::ones({2, 2}));
                }),
                HasSubstr("must have the global shape"));
    EXPECT_THAT(error_of([&] {
                  t.set_(at::ones({2, 2}));
                }),
                HasSubstr("must have the global shape"));
    EXPECT_THAT(error_of([&] { at::ones({4, 2}).copy_(t); }), HasSubstr(".full_tensor()"));
    EXPECT_THAT(error_of([&] { t.to(at::kMeta); }), HasSubstr("stays on its mesh's device type"));
    EXPECT_THAT(error_of([&] { at::zeros_like(t, at::kMeta); }),
                HasSubstr("stays on its mesh's device type"));
  });
}

TEST_F(DTensorErrors, WhatIsWrittenAlongCutDimensions) {
  on_two_ranks([](const DeviceMesh&, const at::Tensor& t) {
    EXPECT_THAT(error_of([&] { t.resize_({2, 2}); }), HasSubstr("changes the shape"));
    const at::Tensor entry = internal::make_dtensor(DTensor(t).to_local(), internal::spec_of(t),
                                                    c10::make_intrusive<SilentOwner>());
    EXPECT_THAT(error_of([&] { entry.t_(); }), HasSubstr("shape of a sharded parameter"));
    EXPECT_THAT(error_of([&] { at::cumsum_out(const_cast<at::Tensor&>(t), at::ones({3}), 0); }),
                HasSubstr("keeps its shape"));
    EXPECT_THAT(error_of([&] { t.as_strided({2}, {1}); }), HasSubstr("no memory to stride over"));
    EXPECT_THAT(error_of([&] { t.item(); }), HasSubstr("cannot be converted to Scalar"));
    EXPECT_THAT(error_of([&] { t.to(at::kInt).mean(); }), HasSubstr("floating"));
  });
}

}  // namespace
}  // namespace fsdp
