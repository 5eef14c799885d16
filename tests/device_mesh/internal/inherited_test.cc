// Who sees what a scope refers to.
#include "device_mesh/internal/inherited.h"

#include <ATen/ThreadLocalState.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/headeronly/version.h>

#include <optional>
#include <string_view>
#include <thread>
#include <utility>

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

// As a profiler does, which pushes its state where it starts and pops it where it stops.
struct ProfilerState final : c10::DebugInfoBase {};
const auto kProfiler = c10::DebugInfoKind::PROFILER_STATE;

TEST(Inherited, OutlivesAProfilerThatStartedBeforeIt) {
  int value = 0;
  const auto state = std::make_shared<ProfilerState>();
  c10::ThreadLocalDebugInfo::_push(kProfiler, state);
  const InheritedScope scope(Inherited::kCommListener, &value);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::get(kProfiler), state.get());
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(kProfiler), state);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::get(kProfiler), nullptr);
  EXPECT_EQ(listener(), &value);
}

TEST(Inherited, LeavesAProfilerThatStartedWithinIt) {
  int value = 0;
  const auto state = std::make_shared<ProfilerState>();
  {
    const InheritedScope scope(Inherited::kCommListener, &value);
    c10::ThreadLocalDebugInfo::_push(kProfiler, state);
    const InheritedScope inner(Inherited::kUnitObserver, &value);
  }
  EXPECT_EQ(listener(), nullptr);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::get(kProfiler), state.get());
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(kProfiler), state);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

TEST(Inherited, KeepsTheOrderOfWhatOthersPush) {
  int value = 0;
  const auto lower = std::make_shared<ProfilerState>(), upper = std::make_shared<ProfilerState>();
  for (const auto& [first, second] : {std::pair(kProfiler, c10::DebugInfoKind::PARAM_COMMS_INFO),
                                      std::pair(c10::DebugInfoKind::PARAM_COMMS_INFO, kProfiler)}) {
    c10::ThreadLocalDebugInfo::_push(first, lower);
    c10::ThreadLocalDebugInfo::_push(second, upper);
    { const InheritedScope scope(Inherited::kCommListener, &value); }
    EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(second), upper);
    EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(first), lower);
  }
}

TEST(Inherited, OfAnotherKindMayEndLater) {
  int value = 0, other = 0;
  std::optional<InheritedScope> first, second;
  first.emplace(Inherited::kCommListener, &value);
  second.emplace(Inherited::kUnitObserver, &other);
  first.reset();
  EXPECT_EQ(listener(), nullptr);
  EXPECT_EQ(observer(), &other);
}

// Of the kind that is ours, too.
TEST(Inherited, IsHiddenByWhatOthersPushLater) {
  int value = 0;
  const auto state = std::make_shared<ProfilerState>();
  const InheritedScope scope(Inherited::kCommListener, &value);
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::INFERENCE_CONTEXT, state);
  EXPECT_EQ(listener(), nullptr);
  { const InheritedScope hidden(Inherited::kUnitObserver, &value); }
  const InheritedScope outlives(Inherited::kUnitObserver, &value);
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::INFERENCE_CONTEXT), state);
  EXPECT_EQ(listener(), &value);
  EXPECT_EQ(observer(), &value);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
constexpr c10::DebugInfoKind kUnknown{200};
#else
constexpr std::string_view kUnknownName = "unknown";
constexpr c10::DebugInfoKind kUnknown{&kUnknownName};
#endif

TEST(Inherited, KeepsInfosOfKindsThatAreNotKnown) {
  int value = 0;
  const auto state = std::make_shared<ProfilerState>();
  c10::ThreadLocalDebugInfo::_push(kUnknown, state);
  { const InheritedScope scope(Inherited::kCommListener, &value); }
  EXPECT_EQ(c10::ThreadLocalDebugInfo::_pop(kUnknown), state);
}

}  // namespace
}  // namespace fsdp::internal
