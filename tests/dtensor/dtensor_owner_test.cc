// The owner of a DTensor hears of every write before it happens, and of nothing else.
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <functional>

namespace fsdp {
namespace {

class CountingOwner final : public internal::DTensorOwner {
 public:
  void before_write(const at::Tensor& dtensor) override {
    EXPECT_TRUE(is_dtensor(dtensor));
    ++writes;
  }
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }

  int writes = 0;
};

TEST(DTensorOwner, HearsOfWritesOnly) {
  testing::run_ranks(2, [](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto owner = c10::make_intrusive<CountingOwner>();
    const auto made = distribute_tensor(at::ones({5, 2}), mesh, {Shard{0}});
    const at::Tensor t = internal::make_dtensor(made.to_local(), internal::spec_of(made), owner);
    const auto writes_of = [&](const std::function<void()>& body) {
      owner->writes = 0;
      torch::NoGradGuard no_grad;
      body();
      return owner->writes;
    };
    EXPECT_EQ(writes_of([&] { t.mul_(2); }), 1);
    EXPECT_EQ(writes_of([&] { t.copy_(at::ones({5, 2})); }), 1);
    EXPECT_EQ(writes_of([&] { t.set_(at::ones({5, 2})); }), 1);
    EXPECT_EQ(writes_of([&] { t.detach().zero_(); }), 1);
    EXPECT_EQ(writes_of([&] { t.unsqueeze(0).fill_(3); }), 1);
    EXPECT_EQ(writes_of([&] { t.normal_(); }), 1);
    EXPECT_EQ(writes_of([&] { at::_foreach_add_({t, t}, 1); }), 2);
    EXPECT_EQ(writes_of([&] {
                auto out = t;
                at::mul_out(out, t, t);
              }),
              1);
    EXPECT_EQ(writes_of([&] { t.add(1).mul_(2); }), 0);
    EXPECT_EQ(writes_of([&] { t.sum().item<float>(); }), 0);
    EXPECT_EQ(writes_of([&] { DTensor(t).full_tensor(); }), 0);
    EXPECT_EQ(internal::owner_of(t.detach()), owner.get());
    EXPECT_EQ(internal::owner_of(t.clone()), nullptr);
  });
}

}  // namespace
}  // namespace fsdp
