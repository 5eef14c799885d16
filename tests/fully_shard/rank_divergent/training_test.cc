// Where ranks share memory each of them may use other units in a step, in another order
// and number: every unit that some rank uses gets the mean of all ranks' gradients.
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/no_sync_guard.h"
#include "tests/fully_shard/rank_divergent/experts.h"
#include "tests/support/errors.h"
#include "tests/support/slowdown.h"
#include "tests/support/worlds.h"

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Used = std::vector<int64_t>;

class RankDivergentTraining : public Worlds {
 protected:
  // A step in which rank r runs batches(r).
  std::vector<RanksStep> steps(const std::function<RanksStep(int64_t rank)>& batches) const {
    std::vector<RanksStep> result;
    for (int64_t rank = 0; rank < world(); ++rank) result.push_back(batches(rank));
    return result;
  }
};

TEST_P(RankDivergentTraining, ExpertsOfEachRanksOwn) {
  on_ranks([&](const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    for (int64_t number = 0; number < 3; ++number) {
      twins.step(steps([&](int64_t rank) {
        return RanksStep{{expert_input(rank, number), Used{(rank + number) % ExpertsImpl::kCount}}};
      }));
    }
    twins.expect_equal_forward({expert_input(0, 7), Used{3, 2, 1, 0}});
  });
}

TEST_P(RankDivergentTraining, UnitsInAnotherOrderOnEachRank) {
  on_ranks([&](const DeviceMesh& mesh) {
    for (const auto& options : {FullyShardOptions{}, {.reshard_after_forward = false}}) {
      ExpertTwins twins(mesh, options);
      for (int64_t number = 0; number < 3; ++number) {
        twins.step(steps([&](int64_t rank) {
          Used used = {0, 1, 2, 3};
          std::rotate(used.begin(), used.begin() + rank, used.end());
          return RanksStep{{expert_input(rank, number), used}};
        }));
      }
    }
  });
}

// It touches everything, so that its backward runs, and brings zeros.
TEST_P(RankDivergentTraining, ARankWithoutSamples) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    for (int64_t number = 0; number < 3; ++number) {
      twins.plain_backward(steps([&](int64_t each) {
        if (each == number % world()) return RanksStep{};
        return RanksStep{{expert_input(each, number), Used{each, 0}}};
      }));
      if (rank == number % world()) {
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (const auto& layer : {twins.model->router, twins.model->head})
          loss = loss + 0 * (layer->weight.sum() + layer->bias.sum());
        loss.backward();
      } else {
        twins.backward({expert_input(rank, number), Used{rank, 0}});
      }
      twins.expect_equal_gradients();
      twins.optimizer_steps();
    }
  });
}

TEST_P(RankDivergentTraining, AnotherNumberOfMicroBatchesOnEachRank) {
  on_ranks([&](const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    for (int64_t number = 0; number < 3; ++number) {
      twins.step(steps([&](int64_t rank) {
        RanksStep batches;
        for (int64_t batch = 0; batch <= (rank + number) % world(); ++batch)
          batches.push_back({expert_input(rank, batch), Used{batch % 4, rank}});
        return batches;
      }));
    }
  });
}

// The others wait for rank 0 where it does not reduce anything: it must not wait for them
// before.
TEST_P(RankDivergentTraining, ABarrierBetweenMicroBatches) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    const auto batches = [](int64_t each) {
      RanksStep some = {{expert_input(each, 0), Used{0, 1}}};
      if (each == 0) some.push_back({expert_input(each, 1), Used{2, 1}});
      return some;
    };
    twins.plain_backward(steps(batches));
    const auto own = batches(rank);
    for (size_t i = 0; i < own.size(); ++i) {
      const bool is_last = i + 1 == own.size();
      if (is_last) internal::collectives_of(mesh, 0).barrier("the user's own barrier");
      twins.unit().set_is_last_backward(is_last);
      twins.backward(own[i]);
    }
    twins.expect_equal_gradients();
  });
}

TEST_P(RankDivergentTraining, WithoutSynchronisationOnSomeRanks) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    const auto batches = [](int64_t each) {
      return RanksStep{{expert_input(each, 0), Used{0, each}}, {expert_input(each, 1), Used{1}}};
    };
    twins.plain_backward(steps(batches));
    const auto own = batches(rank);
    {
      const NoSyncGuard no_sync(twins.unit());
      twins.backward(own[0]);
    }
    twins.backward(own[1]);
    twins.expect_equal_gradients();
  });
}

// The order is the same on all ranks, whatever each has used.
TEST_P(RankDivergentTraining, HooksOfSumsRunInOneOrder) {
  std::mutex mutex;
  std::vector<std::string> of_ranks(static_cast<size_t>(world()));
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    std::string seen;
    for (const auto& item : twins.model->named_children()) {
      get_fsdp_module(*item.value())
          .set_all_reduce_hook(
              [&seen, name = item.key()](const at::Tensor&) { seen += name + " "; });
    }
    twins.backward({expert_input(rank, 0), Used{rank, 3 - rank, (rank + 1) % 4}});
    const std::lock_guard lock(mutex);
    of_ranks[static_cast<size_t>(rank)] = seen;
  });
  for (const auto& each : of_ranks) EXPECT_EQ(each, of_ranks.front());
  EXPECT_THAT(of_ranks.front(),
              AllOf(HasSubstr("head"), HasSubstr("expert0"), HasSubstr("expert1")));
}

// What is on the way is bounded, and by no clock, where the ranks use their units in one
// order.
TEST_P(RankDivergentTraining, PeaksDoNotDependOnTiming) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    std::vector<int64_t> peaks;
    for (int64_t number = 0; number < 4; ++number) {
      reset_peak(mesh);
      if (rank == number) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      twins.step(steps([&](int64_t each) {
        return RanksStep{{expert_input(each, number), Used{0, 1 + each % 2, 3}}};
      }));
      peaks.push_back(counters(mesh).peak_bytes);
    }
    for (const auto peak : peaks) EXPECT_EQ(peak, peaks.front());
  });
}

struct ThrowsBackward : torch::autograd::Function<ThrowsBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("of the user");
  }
};

// All ranks lose the step, and none waits or goes on with a part of the gradients.
TEST_P(RankDivergentTraining, ABackwardThatThrowsOnOneRankThrowsOnAll) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    for (int64_t number = 0; number < 3; ++number) {
      const bool is_mine = rank == number % world();
      const auto message = message_of([&] {
        auto hidden = torch::tanh(twins.model->router(expert_input(rank, number)));
        if (is_mine) hidden = ThrowsBackward::apply(hidden);
        twins.model->head(hidden).sum().backward();
      });
      EXPECT_THAT(message, HasSubstr(is_mine ? "of the user" : "has thrown"));
      EXPECT_THAT(
          message,
          HasSubstr(is_mine ? "" : "the backward of rank " + std::to_string(number % world())));
      for (const auto& entry : twins.model->parameters()) EXPECT_FALSE(entry.grad().defined());
      twins.step(steps([&](int64_t each) {
        return RanksStep{{expert_input(each, number), Used{each}}};
      }));
    }
  });
}

TEST_P(RankDivergentTraining, ABackwardThatThrowsOnAllRanksLeavesNothing) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    twins.unit().set_is_last_backward(false);
    twins.backward({expert_input(rank, 5), Used{rank}});
    const auto message = message_of([&] {
      auto hidden = torch::tanh(twins.model->router(expert_input(rank, 1)));
      twins.model->head(ThrowsBackward::apply(hidden)).sum().backward();
    });
    EXPECT_THAT(message, HasSubstr("of the user"));
    twins.step(steps([&](int64_t each) { return RanksStep{{expert_input(each, 0), Used{each}}}; }));
  });
}

// Of a model that has gone nothing is left for the next one on the process group.
TEST_P(RankDivergentTraining, AnotherModelAfterABackwardThatThrew) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (int64_t number = 0; number < 3; ++number) {
      ExpertTwins twins(mesh);
      twins.step(steps([&](int64_t each) {
        return RanksStep{{expert_input(each, number), Used{each}}};
      }));
      auto hidden = torch::tanh(twins.model->router(expert_input(rank, number)));
      hidden = twins.model->experts[0](ThrowsBackward::apply(hidden));
      EXPECT_THAT(message_of([&] { twins.model->head(hidden).sum().backward(); }),
                  HasSubstr("of the user"));
    }
  });
}

// A rank that runs no backward at all: it waits elsewhere for the others, and they for
// it.
TEST_P(RankDivergentTraining, ARankThatRunsNoBackwardIsNamed) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    ExpertTwins twins(mesh);
    const auto begin = std::chrono::steady_clock::now();
    const auto message = message_of([&] {
      if (rank != 1) twins.backward({expert_input(rank, 0), Used{rank}});
      internal::collectives_of(mesh, 0).barrier("the user's own barrier");
    });
    EXPECT_THAT(message,
                AllOf(HasSubstr("reduce-scatter of unit 'head'"), HasSubstr("own barrier")));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSlowdown * std::chrono::seconds(10));
  });
}

INSTANTIATE_WORLDS(RankDivergentTraining, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
