// The owner of a DTensor hears before its values are read and before they are written.
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <functional>
#include <sstream>

namespace fsdp {
namespace {

class CountingOwner final : public internal::DTensorOwner {
 public:
  void before_read(const at::Tensor& dtensor) override {
    EXPECT_TRUE(is_dtensor(dtensor));
    ++reads;
  }
  void before_write(const at::Tensor& dtensor) override {
    EXPECT_TRUE(is_dtensor(dtensor));
    ++writes;
  }
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }

  int reads = 0;
  int writes = 0;
};

// What the owner of a DTensor hears while something runs, on two ranks.
class Ear {
 public:
  Ear()
      : owner_(c10::make_intrusive<CountingOwner>()),
        plain_(distribute_tensor(at::ones({5, 2}), init_device_mesh(c10::kCPU, {2}), {Shard{0}})),
        owned_(internal::make_dtensor(plain_.to_local(), internal::spec_of(plain_), owner_)) {}

  const at::Tensor& owned() const { return owned_; }
  const at::Tensor& without_owner() const { return plain_; }
  const CountingOwner* owner() const { return owner_.get(); }

  int reads_in(const std::function<void()>& body) const { return listen(body).reads; }
  int writes_in(const std::function<void()>& body) const { return listen(body).writes; }

 private:
  const CountingOwner& listen(const std::function<void()>& body) const {
    owner_->reads = owner_->writes = 0;
    torch::NoGradGuard no_grad;
    body();
    return *owner_;
  }

  c10::intrusive_ptr<CountingOwner> owner_;
  DTensor plain_;
  at::Tensor owned_;
};

TEST(DTensorOwner, HearsOfEveryWrite) {
  testing::run_ranks(2, [](int64_t) {
    const Ear ear;
    const at::Tensor t = ear.owned();
    EXPECT_EQ(ear.writes_in([&] { t.mul_(2); }), 1);
    EXPECT_EQ(ear.writes_in([&] { t.copy_(at::ones({5, 2})); }), 1);
    EXPECT_EQ(ear.writes_in([&] { t.set_(at::ones({5, 2})); }), 1);
    EXPECT_EQ(ear.writes_in([&] { t.detach().zero_(); }), 1);
    EXPECT_EQ(ear.writes_in([&] { t.unsqueeze(0).fill_(3); }), 1);
    EXPECT_EQ(ear.writes_in([&] { t.normal_(); }), 1);
    EXPECT_EQ(ear.writes_in([&] { at::_foreach_add_({t, t}, 1); }), 2);
    EXPECT_EQ(ear.writes_in([&] {
      auto out = t;
      at::mul_out(out, t, t);
    }),
              1);
    EXPECT_EQ(ear.writes_in([&] { t.add(1).mul_(2); }), 0);
    EXPECT_EQ(ear.writes_in([&] { t.sum().item<float>(); }), 0);
    EXPECT_EQ(ear.writes_in([&] { DTensor(t).full_tensor(); }), 0);
  });
}

TEST(DTensorOwner, HearsOfEveryReadOnceAndNotOfWhatOnlyWrites) {
  testing::run_ranks(2, [](int64_t) {
    const Ear ear;
    const at::Tensor t = ear.owned();
    const at::Tensor other = ear.without_owner().clone();
    EXPECT_EQ(ear.reads_in([&] { t.add(1); }), 1);
    EXPECT_EQ(ear.reads_in([&] { t.mul(t); }), 2);
    EXPECT_EQ(ear.reads_in([&] { other.add_(t); }), 1);
    EXPECT_EQ(ear.reads_in([&] { other.copy_(t); }), 1);
    EXPECT_EQ(ear.reads_in([&] { at::_foreach_add({t, other}, 1); }), 1);
    EXPECT_EQ(ear.reads_in([&] { at::_foreach_add_({other, other}, {t, t}); }), 2);
    EXPECT_EQ(ear.reads_in([&] { t.sum().item<float>(); }), 1);
    EXPECT_EQ(ear.reads_in([&] { t.equal(other); }), 1);
    EXPECT_EQ(ear.reads_in([&] { t.fill_(1); }), 0);
    EXPECT_EQ(ear.reads_in([&] { other.fill_(1); }), 0);
  });
}

TEST(DTensorOwner, HearsOfReadsThatAreNoOperators) {
  testing::run_ranks(2, [](int64_t) {
    const Ear ear;
    const DTensor t(ear.owned());
    EXPECT_EQ(ear.reads_in([&] { t.to_local(); }), 1);
    EXPECT_EQ(ear.reads_in([&] { t.full_tensor(); }), 1);
    EXPECT_EQ(ear.reads_in([&] { t.redistribute({Replicate{}}); }), 1);
    EXPECT_EQ(ear.reads_in([&] { std::ostringstream() << t; }), 1);
    EXPECT_EQ(ear.reads_in([&] { static_cast<void>(t.sizes()); }), 0);
    EXPECT_EQ(ear.reads_in([&] { internal::local_of(t).sizes(); }), 0);
  });
}

TEST(DTensorOwner, IsSharedByAliasesAndNotByCopies) {
  testing::run_ranks(2, [](int64_t) {
    const Ear ear;
    EXPECT_EQ(internal::owner_of(ear.owned().detach()), ear.owner());
    EXPECT_EQ(internal::owner_of(ear.owned().clone()), nullptr);
  });
}

}  // namespace
}  // namespace fsdp
