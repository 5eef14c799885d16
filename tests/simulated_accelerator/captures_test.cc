// What a graph that is being captured refuses, and what its end finds.
#include "tests/simulated_accelerator/generators.h"
#include "tests/simulated_accelerator/run.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const at::TensorOptions kOnDevice(kDevice);

void wait(const c10::Stream& waiter, const c10::Stream& other) {
  c10::Event event(kDeviceType);
  event.record(other);
  event.block(waiter);
}

// What `work` throws and what the end of its graph finds.
std::vector<std::string> faults_of(const std::function<void()>& work) {
  std::vector<std::string> faults;
  run_in({.schedule = kLate}, [&] {
    begin_capture(kDevice);
    try {
      work();
    } catch (const c10::Error& error) {
      faults.emplace_back(error.what_without_backtrace());
    }
    for (const auto& fault : end_capture(kDevice)) faults.push_back(fault);
  });
  return faults;
}

TEST(Captures, TakeWorkOfTheStreamAndOfThoseThatForkAndJoin) {
  EXPECT_THAT(faults_of([] {
                const auto x = at::ones({4}, kOnDevice), y = x + x;
                const auto side = open_stream(kDevice);
                wait(side, current_stream(kDevice));
                {
                  const c10::StreamGuard on_side(side);
                  y.mul_(x);
                }
                wait(current_stream(kDevice), side);
                y.add_(1);
              }),
              IsEmpty());
}

TEST(Captures, FindAStreamThatDidNotFork) {
  EXPECT_THAT(faults_of([] {
                const c10::StreamGuard on_side(open_stream(kDevice));
                at::ones({4}, kOnDevice);
              }),
              ElementsAre("allocate (stream 1) is on a stream that is not captured",
                          HasSubstr("(stream 1) is on a stream that is not captured")));
}

TEST(Captures, FindAStreamThatNothingWaitsFor) {
  EXPECT_THAT(faults_of([] {
                const auto side = open_stream(kDevice);
                wait(side, current_stream(kDevice));
                const c10::StreamGuard on_side(side);
                at::ones({4}, kOnDevice);
              }),
              ElementsAre(HasSubstr("(stream 1) was not waited for")));
}

TEST(Captures, RefuseHostsThatWaitOrQueryAndStatesOfGenerators) {
  EXPECT_THAT(faults_of([] { at::ones({}, kOnDevice).item(); }),
              ElementsAre("item can not be part of a graph, which is being captured on device 0"));
  EXPECT_THAT(faults_of([] { current_stream(kDevice).query(); }),
              ElementsAre(HasSubstr("a query can not be part of a graph")));
  EXPECT_THAT(faults_of([] { default_generator(0).get_state(); }),
              ElementsAre(HasSubstr("the state of a generator can not be part of a graph")));
  EXPECT_THAT(faults_of([] { at::dropout(at::ones({4}, kOnDevice), 0.5, true); }), IsEmpty());
}

}  // namespace
}  // namespace fsdp::testing::simulated
