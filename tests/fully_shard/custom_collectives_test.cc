// A user's own collectives in the place of a unit's, the ready-made ones, and an
// optimizer's event.
#include "fully_shard/custom_collectives.h"

#include "tests/fully_shard/support/pair.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::Tensor;

class CustomCollectives : public Worlds {};
class CustomCollectivesBetweenRanks : public Worlds {};

Tensor rows_of_rank(int64_t rank) {
  return torch::full({2, 3}, 0.3 * static_cast<double>(rank + 1));
}

void train_once(Pair& model, int64_t rank) {
  model->zero_grad();
  model(rows_of_rank(rank)).pow(2).sum().backward();
}

std::vector<Tensor> full_gradients(const Pair& model) {
  std::vector<Tensor> gradients;
  for (const auto& parameter : model->parameters())
    gradients.push_back(full_gradient(parameter).clone());
  return gradients;
}

// Notes the sizes and dtype of every call, and lets `other` do it.
struct Call {
  int64_t output, input;
  at::ScalarType dtype;
};
Communicate noting(std::vector<Call>& calls, Communicate other) {
  return [&calls, other = std::move(other)](const Tensor& output, const Tensor& input) {
    EXPECT_FALSE(torch::GradMode::is_enabled());
    EXPECT_EQ(output.scalar_type(), input.scalar_type());
    calls.push_back({output.numel(), input.numel(), input.scalar_type()});
    return other(output, input);
  };
}

// One unit has functions of its own, the other none.
TEST_P(CustomCollectives, CarryTheirUnitsBytesAndNoOthers) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(3, 4, 2), mesh);
    train_once(model, rank);
    const auto expected = full_gradients(model);
    std::vector<Call> gathers, reductions;
    auto unit = get_fsdp_module(*model->first);
    unit.set_custom_all_gather(noting(gathers, all_gather_over(mesh)));
    unit.set_custom_reduce_scatter(noting(reductions, reduce_scatter_over(mesh)));
    const auto traffic = traffic_of(mesh, [&] { train_once(model, rank); });
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::allclose(full_gradients(model)[i], expected[i])) << i;
    if (world() == 1) {
      EXPECT_TRUE(gathers.empty() && reductions.empty()) << "nobody to send to";
      return;
    }
    EXPECT_EQ(traffic.reduce_scatters, 2) << "counted as ever";
    ASSERT_EQ(gathers.size(), static_cast<size_t>(traffic.all_gathers - 1)) << "but the other's";
    EXPECT_EQ(gathers[0].dtype, at::kByte);
    EXPECT_EQ(gathers[0].output, world() * gathers[0].input);
    ASSERT_EQ(reductions.size(), 1U);
    EXPECT_EQ(reductions[0].dtype, at::kFloat);
    EXPECT_EQ(reductions[0].input, world() * reductions[0].output);
    unit.set_custom_all_gather({});
    unit.set_custom_reduce_scatter({});
    train_once(model, rank);
    EXPECT_EQ(reductions.size(), 1U) << "empty: the mesh's groups again";
  });
}

TEST_P(CustomCollectivesBetweenRanks, WhatAReduceScatterWritesIsWhatTheGradientsAre) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(3, 4, 2), mesh);
    train_once(model, rank);
    const auto expected = full_gradients(model);
    const auto sums = reduce_scatter_over(mesh);
    get_fsdp_module(*model->second)
        .set_custom_reduce_scatter([&](const Tensor& output, const Tensor& input) {
          sums(output, input)->wait();
          output.mul_(3);
          return c10::intrusive_ptr<c10d::Work>();  // at once
        });
    train_once(model, rank);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::allclose(full_gradients(model)[i], (i < 2 ? 1 : 3) * expected[i])) << i;
  });
}

TEST_P(CustomCollectivesBetweenRanks, WhatTheyThrowIsToldAsTheUnitsFailedCollective) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(3, 4, 2), mesh);
    get_fsdp_module(*model->first)
        .set_custom_all_gather([](const Tensor&, const Tensor&) -> c10::intrusive_ptr<c10d::Work> {
          throw std::runtime_error("from the user's function");
        });
    EXPECT_THAT(
        message_of([&] { train_once(model, rank); }),
        AllOf(HasSubstr("all-gather of unit 'first'"), HasSubstr("from the user's function"),
              HasSubstr("rank " + std::to_string(rank))));
  });
}

TEST_P(CustomCollectives, ACompressingOneSendsItsDtypeAndGradientsKeepTheirs) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(3, 4, 2), mesh);
    train_once(model, rank);
    const auto expected = full_gradients(model);
    std::vector<Call> calls;
    const auto narrow = compressed_reduce_scatter(mesh, at::kBFloat16);
    for (auto& unit : fsdp_modules(*model)) unit.set_custom_reduce_scatter(noting(calls, narrow));
    train_once(model, rank);
    bool any_rounded = false;
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto gradient = full_gradients(model)[i];
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(torch::allclose(gradient, expected[i], 0.02, 0.01)) << i;
      any_rounded |= !gradient.equal(expected[i]);
    }
    EXPECT_EQ(any_rounded, world() > 1);
  });
}

// Half and bf16 rows are as they should be already: two casts would round twice.
TEST_P(CustomCollectivesBetweenRanks, ACompressingOneLeavesRowsOfItsDtypeAsTheyAre) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto narrow = compressed_reduce_scatter(mesh, at::kHalf);
    const auto input = torch::ones({4 * world()}, at::kHalf);
    const auto output = torch::zeros({4}, at::kHalf);
    narrow(output, input)->wait();
    EXPECT_TRUE(output.equal(torch::full({4}, world(), at::kHalf)));
    const auto wide = torch::zeros({4});
    narrow(wide, torch::full({4 * world()}, 1e-9))->wait();
    EXPECT_TRUE(wide.equal(torch::zeros({4}))) << "too small for fp16: it was sent as that";
    EXPECT_THAT(message_of([&] { compressed_reduce_scatter(mesh, at::kFloat); }),
                AllOf(HasSubstr("dtype is Float"), HasSubstr("Half, BFloat16")));
  });
}

// The CPU has no events. With these it has some, which tell the thread of each wait.
class CpuEvents final : public c10::impl::NoOpDeviceGuardImpl<c10::kCPU> {
 public:
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override { at_wait(); }

  inline static thread_local std::function<void()> at_wait = [] {};
};

const c10::impl::DeviceGuardImplInterface* cpu_events() {
  static const auto* const events = new CpuEvents();  // a thread may look at it to the end
  return events;
}

class OptimizersEvent : public Worlds {
 protected:
  OptimizersEvent() : before_(c10::impl::getDeviceGuardImpl(c10::kCPU)) { install(cpu_events()); }
  ~OptimizersEvent() override { install(before_); }

 private:
  static void install(const c10::impl::DeviceGuardImplInterface* events) {
    const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCPU, events);
  }

  const c10::impl::DeviceGuardImplInterface* before_;
};

TEST_P(OptimizersEvent, IsWaitedForOnceBeforeTheNextGatherIsIssued) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(3, 4, 2), mesh);
    train_once(model, rank);
    std::vector<int64_t> gathers_at_wait;
    CpuEvents::at_wait = [&] { gathers_at_wait.push_back(counters(mesh).all_gathers); };
    const auto event = std::make_shared<c10::Event>(c10::kCPU);
    event->record(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU, 0)));
    get_fsdp_module(*model).set_post_optim_event(event);
    EXPECT_THAT(gathers_at_wait, IsEmpty());
    const auto before = counters(mesh).all_gathers;
    train_once(model, rank);
    EXPECT_THAT(gathers_at_wait, ElementsAre(before));
    EXPECT_GT(counters(mesh).all_gathers, before);
    train_once(model, rank);
    EXPECT_THAT(gathers_at_wait, ElementsAre(before));
    CpuEvents::at_wait = [] {};
  });
}

TEST_P(CustomCollectives, AnOptimizersEventIsLetGoByTheGatherThatWaitedForIt) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(Pair(3, 4, 2), mesh);
    const auto event = std::make_shared<c10::Event>(c10::kCPU);
    get_fsdp_module(*model).set_post_optim_event(event);
    EXPECT_EQ(event.use_count(), 2);
    train_once(model, rank);
    EXPECT_EQ(event.use_count(), world() == 1 ? 2 : 1);
    get_fsdp_module(*model).set_post_optim_event(nullptr);
    EXPECT_EQ(event.use_count(), 1);
    const auto other = std::make_shared<c10::Event>(c10::kMeta);
    EXPECT_THAT(message_of([&] { get_fsdp_module(*model->first).set_post_optim_event(other); }),
                AllOf(HasSubstr("set_post_optim_event"), HasSubstr("meta"), HasSubstr("cpu")));
  });
}

// What left, in order, of the blocks: "g2" is a gather of block 2, "r2" its reduction.
std::string order_of_backward(MeasuredDecoder& decoder, const DeviceMesh& mesh) {
  std::string order;
  const auto gather = all_gather_over(mesh), reduce = reduce_scatter_over(mesh);
  const auto telling = [&order](const std::string& what, const Communicate& other) {
    return [&order, what, other](const Tensor& output, const Tensor& input) {
      order += what;
      return other(output, input);
    };
  };
  decoder.forward();
  for (int64_t i = 0; i < kBlocks; ++i) {
    decoder.block(i).set_custom_all_gather(telling("g" + std::to_string(i), gather));
    decoder.block(i).set_custom_reduce_scatter(telling("r" + std::to_string(i), reduce));
  }
  const auto backward = decoder.backward();
  EXPECT_EQ(backward.all_gathers, kBlocks);
  EXPECT_EQ(backward.prefetched, kBlocks) << "before the touches, either way";
  EXPECT_EQ(backward.unused, 0);
  for (int64_t i = 0; i < kBlocks; ++i) {
    decoder.block(i).set_custom_all_gather({});
    decoder.block(i).set_custom_reduce_scatter({});
  }
  decoder.update();
  return order;
}

TEST_P(CustomCollectivesBetweenRanks, BackwardPrefetchPostGathersAfterTheGradientsLeft) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    EXPECT_EQ(order_of_backward(decoder, mesh), "g3g2r3g1r2g0r1r0");
    decoder.root().set_backward_prefetch(BackwardPrefetch::kPost);
    EXPECT_EQ(order_of_backward(decoder, mesh), "g3r3g2r2g1r1g0r0");
    decoder.root().set_backward_prefetch(BackwardPrefetch::kPre);
    EXPECT_EQ(order_of_backward(decoder, mesh), "g3g2r3g1r2g0r1r0");
  });
}

INSTANTIATE_WORLDS(CustomCollectives, 1, 2, 3);
INSTANTIATE_WORLDS(OptimizersEvent, 2, 3);
INSTANTIATE_WORLDS(CustomCollectivesBetweenRanks, 2, 3);

}  // namespace
}  // namespace fsdp::testing
