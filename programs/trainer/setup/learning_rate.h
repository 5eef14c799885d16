// The learning rate of each step: a linear warm-up, and then as given or half a cosine
// down to a tenth (Loshchilov and Hutter, "SGDR", 2017). One of LibTorch's schedulers, so
// that a checkpoint keeps it.
//
//   LearningRate rate(optimizer, {.warmup = 100, .decay = Decay::kCosine, .steps = 1000});
//   rate.step();  // before each step
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

namespace programs {

enum class Decay { kNone, kCosine };

struct LearningRateOptions {
  int64_t warmup = 0;  // steps
  Decay decay = Decay::kNone;
  int64_t steps = 1;  // of the whole run
};

// Of the learning rate of the optimizer, in step `done` + 1.
inline double share_of_learning_rate(const LearningRateOptions& options, int64_t done) {
  constexpr double kLeast = 0.1;
  const double risen = static_cast<double>(done + 1) / static_cast<double>(options.warmup + 1);
  if (done < options.warmup) return risen;
  if (options.decay == Decay::kNone) return 1;
  const auto falling = std::max<int64_t>(options.steps - options.warmup, 1);
  const double fallen = static_cast<double>(done - options.warmup) / static_cast<double>(falling);
  const double cosine = std::cos(std::numbers::pi * std::min(fallen, 1.0));
  return kLeast + (1 - kLeast) * (1 + cosine) / 2;
}

class LearningRate final : public torch::optim::LRScheduler {
 public:
  LearningRate(torch::optim::Optimizer& optimizer, LearningRateOptions options)
      : LRScheduler(optimizer), options_(options), whole_(get_current_lrs()) {}

  double now() const { return get_current_lrs().front(); }

 private:
  std::vector<double> get_lrs() override {
    auto rates = whole_;
    for (auto& rate : rates) rate *= share_of_learning_rate(options_, step_count_);
    return rates;
  }

  LearningRateOptions options_;
  std::vector<double> whole_;  // of each group
};

}  // namespace programs
