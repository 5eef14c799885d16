// DTensors whose memory is not row-major floats: other strides, memory formats, complex
// numbers, other dtypes; and operators under thread-local modes.
#include "dtensor/dtensor.h"
#include "tests/dtensor/compare_with_plain.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace fsdp {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_worlds;
using testing::whole;

// Every redistribution of `plain`, beside it.
void on_transitions(const at::Tensor& plain, const std::function<void(const at::Tensor&)>& body) {
  on_worlds([&](const DeviceMesh& mesh) {
    for (const Placement& from :
         {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
      const DTensor made = distribute_tensor(plain, mesh, {from});
      for (const Placement& to :
           {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
        SCOPED_TRACE(to_string(from) + " to " + to_string(to) + " of " + to_string(mesh));
        body(made.redistribute({to}));
      }
    }
  });
}

TEST(Layouts, TransposedAndChannelsLast) {
  const at::Tensor transposed = at::arange(30, at::kFloat).view({6, 5}).t();
  const at::Tensor channels_last =
      at::arange(120, at::kFloat).view({5, 3, 4, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  for (const at::Tensor& plain : {transposed, channels_last}) {
    on_transitions(plain, [&plain](const at::Tensor& t) {
      EXPECT_TRUE(whole(t).equal(plain));
      EXPECT_EQ(t.strides(), plain.strides());
      for (const at::Tensor& result : {t.mul(2), t.clone(), at::zeros_like(t), t.to(at::kDouble)}) {
        EXPECT_EQ(result.strides(), plain.strides());
      }
      EXPECT_TRUE(whole(t.mul(2).add_(t)).equal(plain.mul(2).add_(plain)));
      EXPECT_TRUE(whole(t.contiguous()).equal(plain));
      EXPECT_TRUE(t.contiguous().is_contiguous());
      EXPECT_TRUE(whole(t.transpose(0, 1)).equal(plain.transpose(0, 1)));
    });
  }
  // What the strides allow, the memory allows: redistribution keeps the order of
  // dimensions.
  on_transitions(transposed, [&](const at::Tensor& t) {
    const auto placement = DTensor(t).placements()[0];
    if (placement.is_shard(0)) return;
    EXPECT_TRUE(whole(t.t().view({-1})).equal(transposed.t().view({-1})));
  });
}

TEST(Layouts, ConversionsBetweenMemoryFormats) {
  const at::Tensor plain = at::arange(120, at::kFloat).view({5, 3, 4, 2});
  on_worlds([&](const DeviceMesh& mesh) {
    const at::Tensor t = distribute_tensor(plain, mesh, {Shard{0}});
    const auto format = at::MemoryFormat::ChannelsLast;
    EXPECT_EQ(t.contiguous(format).strides(), plain.contiguous(format).strides());
    EXPECT_EQ(at::empty_like(t, {}, format).strides(), at::empty_like(plain, {}, format).strides());
    EXPECT_EQ(t.to(at::kHalf, false, true, format).strides(),
              plain.to(at::kHalf, false, true, format).strides());
    EXPECT_TRUE(whole(t.contiguous(format)).equal(plain));
  });
}

TEST(Layouts, CopiesOfViewsHaveNoGaps) {
  const at::Tensor plain = at::arange(24, at::kFloat).view({6, 4});
  on_worlds([&](const DeviceMesh& mesh) {
    const at::Tensor t = distribute_tensor(plain, mesh, {Shard{0}});
    const at::Tensor view = t.narrow(1, 1, 2);
    const at::Tensor expected = plain.narrow(1, 1, 2);
    for (const at::Tensor& copy :
         {view.clone(), view.mul(1), view.add(view.mul(0)), view.to(at::kDouble).to(at::kFloat)}) {
      EXPECT_TRUE(copy.is_contiguous());
      EXPECT_TRUE(whole(copy.view({-1})).equal(expected.reshape({-1})));
    }
    const at::Tensor wide = t.unsqueeze(2).expand({6, 4, 3});
    EXPECT_TRUE(wide.mul(2).is_contiguous());
    EXPECT_TRUE(whole(wide).equal(plain.unsqueeze(2).expand({6, 4, 3})));
    EXPECT_TRUE(DTensor(wide).redistribute({Replicate{}}).is_contiguous());
  });
}

TEST(Layouts, ComplexNumbers) {
  const at::Tensor real = at::arange(15, at::kFloat).view({5, 3});
  const at::Tensor plain = at::complex(real, real.sub(7).mul(0.5));
  on_transitions(plain, [&plain](const at::Tensor& t) {
    EXPECT_TRUE(whole(t).equal(plain));
    EXPECT_TRUE(whole(t.mul(t).add(1)).allclose(plain.mul(plain).add(1)));
    EXPECT_TRUE(whole(t.abs()).allclose(plain.abs()));
    EXPECT_TRUE(whole(at::real(t)).equal(at::real(plain)));
    EXPECT_TRUE(whole(at::imag(t)).equal(at::imag(plain)));
    EXPECT_TRUE(whole(t.conj()).equal(plain.conj().resolve_conj()));
    EXPECT_TRUE(whole(t.conj().mul(t)).allclose(plain.conj().mul(plain)));
    EXPECT_TRUE(whole(t.sum(0)).allclose(plain.sum(0)));
    EXPECT_TRUE(whole(at::view_as_complex(at::view_as_real(t))).equal(plain));
    const at::Tensor written = t.clone();
    at::view_as_real(written).select(2, 1).zero_();
    EXPECT_TRUE(whole(at::imag(written)).eq(0).all().item<bool>());
  });
  testing::run_ranks(2, [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const DTensor terms = from_local(plain, mesh, {Partial{Partial::Op::kProduct}});
    EXPECT_THAT(error_of([&] { terms.full_tensor(); }), HasSubstr("complex numbers"));
    EXPECT_TRUE(from_local(plain, mesh, {Partial{}}).full_tensor().equal(plain.mul(2)));
  });
}

TEST(Layouts, EveryCommonDtypeMoves) {
  for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte,
                          at::kChar, at::kBool}) {
    const at::Tensor plain = at::arange(15).remainder(3).view({5, 3}).to(type);
    on_transitions(plain, [&](const at::Tensor& t) {
      SCOPED_TRACE(toString(type));
      EXPECT_TRUE(whole(t).equal(plain));
      EXPECT_TRUE(whole(t.to(at::kFloat).mul(2)).equal(plain.to(at::kFloat).mul(2)));
    });
  }
}

TEST(Layouts, PrintingIsLocal) {
  testing::run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const DTensor t = distribute_tensor(at::arange(3, at::kFloat), mesh, {Shard{0}});
    if (rank == 0) return;
    std::ostringstream out;
    out << t;
    EXPECT_THAT(out.str(), HasSubstr("shape [3] placed (Shard(0)) on DeviceMesh((2)"));
    EXPECT_THAT(out.str(), HasSubstr("this rank's part:\n 2"));
  });
}

TEST(Modes, AutocastLeavesArithmeticAlone) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(15, at::kFloat).view({5, 3});
    const at::Tensor sharded = distribute_tensor(plain, mesh, {Shard{0}});
    const at::Tensor replicated = distribute_tensor(plain, mesh, {Replicate{}});
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    EXPECT_TRUE(whole(sharded.mul(2).add_(sharded)).equal(plain.mul(2).add_(plain)));
    EXPECT_TRUE(whole(at::cat({sharded, sharded.to(at::kBFloat16)}, 1))
                    .equal(at::cat({plain, plain.to(at::kBFloat16)}, 1)));
    EXPECT_EQ(at::mm(replicated, replicated.t()).scalar_type(),
              at::mm(plain, plain.t()).scalar_type());
    EXPECT_TRUE(whole(at::mm(replicated, replicated.t())).equal(at::mm(plain, plain.t())));
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  });
}

TEST(Modes, InferenceTensorsMixWithOthers) {
  on_worlds([](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(20, at::kFloat).view({5, 4});
    const at::Tensor outside = distribute_tensor(plain, mesh, {Shard{0}});
    at::Tensor inside;
    {
      c10::InferenceMode inference;
      inside = distribute_tensor(plain, mesh, {Shard{0}});
      EXPECT_TRUE(inside.is_inference());
      inside.add_(outside).lerp_(outside, 0.5);
      outside.mul_(2);
      EXPECT_TRUE(whole(inside.narrow(1, 0, 2).clone()).equal(plain.mul(1.5).narrow(1, 0, 2)));
      EXPECT_TRUE(DTensor(inside).redistribute({Shard{1}}).is_inference());
    }
    EXPECT_TRUE(whole(inside.add(outside)).equal(plain.mul(3.5)));
    EXPECT_THAT(error_of([&] { inside.add_(1); }), HasSubstr("Inplace update to inference tensor"));
  });
}

}  // namespace
}  // namespace fsdp
