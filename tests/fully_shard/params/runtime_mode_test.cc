#include "fully_shard/params/runtime_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::internal {
namespace {

struct Mode {
  bool gradients = c10::GradMode::is_enabled();
  bool inference = c10::InferenceMode::is_enabled();
  bool below_autograd = c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);

  bool operator==(const Mode&) const = default;
};

// Ordinary tensors without gradients inside, and what was before afterwards.
void expect_ordinary_inside() {
  const Mode before;
  {
    const RuntimeMode runtime_mode;
    EXPECT_EQ(Mode(), (Mode{.gradients = false, .inference = false, .below_autograd = false}));
    EXPECT_FALSE(at::ones({2}).is_inference());
  }
  EXPECT_EQ(Mode(), before);
}

TEST(RuntimeModeTest, IsOrdinaryInEveryModeOfTheUsersCode) {
  expect_ordinary_inside();
  {
    const c10::NoGradGuard no_grad;
    expect_ordinary_inside();
  }
  {
    const c10::InferenceMode inference;
    expect_ordinary_inside();
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    expect_ordinary_inside();
    const c10::NoGradGuard no_grad;
    expect_ordinary_inside();
  }
}

}  // namespace
}  // namespace fsdp::internal
