// Who sees what a scope refers to.
#include "device_mesh/internal/inherited.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

namespace fsdp::internal {
namespace {

void* listener() { return inherited(Inherited::kCommListener); }
void* observer() { return inherited(Inherited::kUnitObserver); }

TEST(Inherited, IsThatOfTheInnermostScopeOfItsKind) {
  int outer = 0, inner = 0, other = 0;
  EXPECT_EQ(listener(), nullptr);
  const InheritedScope first(Inherited::kCommListener, &outer);
  const InheritedScope second(Inherited::kUnitObserver, &other);
  {
    const InheritedScope third(Inherited::kCommListener, &inner);
    EXPECT_EQ(listener(), &inner);
    EXPECT_EQ(observer(), &other);
  }
  EXPECT_EQ(listener(), &outer);
  EXPECT_EQ(observer(), &other);
}

TEST(Inherited, IsSeenByThreadsWithTheStateOfTheFirstUntilTheScopeEnds) {
  int value = 0;
  std::optional<InheritedScope> scope;
  scope.emplace(Inherited::kCommListener, &value);
  const at::ThreadLocalState state;  // as autograd hands it to its threads
  std::thread([&] {
    EXPECT_EQ(listener(), nullptr);
    const at::ThreadLocalStateGuard guard(state);
    EXPECT_EQ(listener(), &value);
  }).join();
  scope.reset();
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    EXPECT_EQ(listener(), nullptr);
  }).join();
}

}  // namespace
}  // namespace fsdp::internal
